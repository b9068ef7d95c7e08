"""Pieces of a network that PyTorch does in several passes over memory and a GPU can do in fewer.

Each is a plain expression; in training on a GPU, where Triton is there and the data is
channels-last, the same value comes from a fused kernel (kernels.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator

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
        numbers = norm.momentum, norm.eps, slope, gain
        out: Tensor = NormAct.apply(x, norm.weight, norm.bias, residual, kept, running, *numbers)
        return out
    y: Tensor = norm(x)
    if residual is not None:
        y = y + residual
    if slope != 1:
        y = F.relu(y) if slope == 0 else F.leaky_relu(y, slope)
    return F.dropout2d(y, drop, norm.training) if drop else y


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
    return importlib.util.find_spec("triton") is not None


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
