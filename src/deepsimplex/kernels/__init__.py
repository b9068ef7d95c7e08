"""Triton kernels for what PyTorch does in many passes over memory: GPU only, imported on use.

Each has a plain twin that says what it computes, and tests that hold the two together. Sums are
taken in float32 in a fixed order, so the same input gives the same bits.
"""
