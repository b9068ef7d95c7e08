"""Pieces of a network that PyTorch does in several passes over memory and a GPU can do in fewer.

Each is a plain expression; in training on a GPU, where Triton is there and the data is
channels-last, the same value comes from a fused kernel (kernels/).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm_act(
    norm: nn.BatchNorm2d,
    x: Tensor,
    slope: float,
    residual: Tensor | None = None,
    drop: float = 0.0,
) -> Tensor:
    """drop₂(leaky(norm(x) + residual)), (n, c, h, w) → the same.

    Slope 0 is ReLU, slope 1 no activation; in training, whole maps are dropped with probability
    `drop`.
    """
    if norm.training and _fused(x) and _plain_norm(norm) and drop * (residual is not None) == 0:
        from deepsimplex.kernels.norm import NormAct

        kept, gain = None, 1.0
        if drop:
            kept, gain = x.new_empty(x.shape[:2], dtype=torch.float32), 1 / (1 - drop)
            kept.bernoulli_(1 - drop)
        running = norm.running_mean, norm.running_var, norm.num_batches_tracked
        numbers = norm.momentum, norm.eps, slope, gain, _beside is not None
        out: Tensor = NormAct.apply(x, norm.weight, norm.bias, residual, kept, running, *numbers)
        return out
    y: Tensor = norm(x)
    if residual is not None:
        y = y + residual
    if slope != 1:
        y = F.relu(y) if slope == 0 else F.leaky_relu(y, slope)
    return F.dropout2d(y, drop, norm.training) if drop else y


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """conv(x); inside `beside`, the gradient of its weight is left to the other stream."""
    if _beside is None or not (x.is_cuda and x.dtype == conv.weight.dtype) or conv.bias is not None:
        out: Tensor = conv(x)
        return out
    _beside.uses[conv.weight.data_ptr()] += 1
    numbers = conv.stride, conv.padding, conv.dilation, conv.groups
    result: Tensor = _Convolution.apply(x, conv.weight, *numbers)
    return result


class _Convolution(torch.autograd.Function):
    """A convolution whose two gradients are computed side by side."""

    @staticmethod
    def forward(ctx: Any, x, weight, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.numbers = stride, padding, dilation, groups
        return F.conv2d(x, weight, None, *ctx.numbers)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.numbers

        def gradient(of_x: bool) -> Tensor:
            found = torch.ops.aten.convolution_backward(
                dy, x, weight, [0], stride, padding, dilation, False, [0, 0], groups,
                [of_x, not of_x, False],
            )  # fmt: skip
            return found[0 if of_x else 1]

        dweight = None
        # Gradients of a weight that is used twice are added up over here.
        if _beside is None or _beside.uses[weight.data_ptr()] > 1:
            dweight = gradient(False) if ctx.needs_input_grad[1] else None
        elif ctx.needs_input_grad[1]:
            here = torch.cuda.current_stream(x.device)
            _beside.stream.wait_stream(here)
            with torch.cuda.stream(_beside.stream):
                dweight = gradient(False)
            _beside.kept += [x, dy]
        dx = gradient(True) if ctx.needs_input_grad[0] else None
        return dx, dweight, None, None, None, None


class _Beside:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.kept: list[Tensor] = []  # read over there: not to be freed over here
        self.uses: Counter[int] = Counter()  # of each weight, by address


_beside: _Beside | None = None


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Gradients of weights on `stream`, beside the chain of layers that needs none of them.

    Forward and backward both inside; on leaving, this stream waits for the other.
    """
    global _beside
    if stream is None:
        yield
        return
    before, _beside = _beside, _Beside(stream)
    try:
        yield
        if _beside.kept:  # a stream without captured work must not enter a capture
            torch.cuda.current_stream(stream.device).wait_stream(stream)
    finally:
        _beside = before


def used_elsewhere(weight: Tensor) -> None:
    """Say that a loss reads a convolution's weight itself, so that its gradients meet over here."""
    if _beside is not None:
        _beside.uses[weight.data_ptr()] += 1


def stem(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """conv(images), for the first convolution: three channels or fewer, no gradient to images.

    cuDNN fills so few channels up to eight; as one matrix product over 3×3 surroundings the
    same sums take a third of the time.
    """
    small = conv.kernel_size == (3, 3) and conv.stride == (1, 1) and conv.in_channels <= 3
    if not (conv.training and images.is_cuda and has_triton() and small) or images.requires_grad:
        out: Tensor = conv(images)
        return out
    from deepsimplex.kernels.images import patches

    cast = torch.is_autocast_enabled("cuda")
    around = patches(images, torch.get_autocast_dtype("cuda") if cast else images.dtype)
    weight = conv.weight.permute(0, 2, 3, 1).flatten(1)
    weight = F.pad(weight, (0, around.shape[3] - weight.shape[1]))
    return F.linear(around, weight).permute(0, 3, 1, 2)


_plain = False


def has_triton() -> bool:
    return _found() and not _plain


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Do without fused kernels, to measure and test them."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


@functools.cache
def _found() -> bool:
    """Triton, and GPUs of the kind the kernels were written for (Ampere and later)."""
    return (
        importlib.util.find_spec("triton") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 0)
    )


def _fused(x: Tensor) -> bool:
    return (
        x.is_cuda
        and has_triton()
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.numel() > x.shape[1]
    )


def _plain_norm(norm: nn.BatchNorm2d) -> bool:
    return norm.affine and norm.track_running_stats and norm.momentum is not None
