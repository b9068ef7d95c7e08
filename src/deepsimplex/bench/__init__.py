"""Ratios of speed, memory and error: training, loss, scores, AUROC, start-up.

Each `deepsimplex bench NAME` prints a table and writes results/bench-NAME.json. Variants take
turns, so that a busy moment of the machine hits all of them; a ratio is taken within a round, and
the median and the quartiles over the rounds are shown.
"""
