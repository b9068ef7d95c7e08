"""BatchNorm in training, residual, leaky ReLU and dropped maps, in two kernels each way.

The plain twin is layers.norm_act. A map is read as rows of channels (n·h·w, c): channels-last.
PyTorch takes 13 passes over memory and runs its reductions at a sixth of the memory's speed;
this takes 8.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most programs that share a column of channels: every program of a second pass sums the
# results of a first pass again.
PROGRAMS = 128
WARPS = 8


@triton.jit
def _total(partial, which, programs, channels, c, inside, BLOCK_P: tl.constexpr):
    p = tl.arange(0, BLOCK_P)
    at = (p[:, None] * 2 + which) * channels + c[None, :]
    return tl.sum(tl.load(partial + at, (p < programs)[:, None] & inside[None, :], other=0.0), 0)


@triton.jit(do_not_specialize=["programs"])
def _moments(
    x,
    partial,
    rows,
    channels,
    share,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program's Σ(x − x₀) and Σ(x − x₀)², x₀ the first row: a shift near the mean."""
    program = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    origin = tl.load(x + c, inside, other=0.0).to(tl.float32)
    first = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    start = program * share
    for m0 in tl.range(start, start + share, BLOCK_M, num_stages=STAGES):
        m = m0 + tl.arange(0, BLOCK_M)
        ok = (m < rows)[:, None] & inside[None, :]
        v = tl.load(x + m[:, None].to(tl.int64) * channels + c[None, :], ok, other=0.0)
        v = tl.where(ok, v.to(tl.float32) - origin[None, :], 0.0)
        first += v
        second += v * v
    at = partial + program * 2 * channels + c
    tl.store(at, tl.sum(first, 0), inside)
    tl.store(at + channels, tl.sum(second, 0), inside)


@triton.jit(do_not_specialize=["programs"])
def _apply(
    x, y, residual, drop, weight, bias, partial, saved, running_mean, running_var, tracked,
    rows, channels, programs, share, area, momentum, eps, slope, gain,
    HAS_RESIDUAL: tl.constexpr, HAS_DROP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = gain·drop·leaky((x − mean)·rstd·weight + bias + residual); running statistics move."""
    program = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    first = _total(partial, 0, programs, channels, c, inside, BLOCK_P) / rows
    second = _total(partial, 1, programs, channels, c, inside, BLOCK_P) / rows
    mean = tl.load(x + c, inside, other=0.0).to(tl.float32) + first
    var = tl.maximum(second - first * first, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    w = tl.load(weight + c, inside, other=0.0)
    b = tl.load(bias + c, inside, other=0.0)
    if program == tl.num_programs(0) - 1:  # the last program has no rows, only the statistics
        tl.store(saved + c, mean, inside)
        tl.store(saved + channels + c, rstd, inside)
        old = tl.load(running_mean + c, inside, other=0.0)
        tl.store(running_mean + c, old + momentum * (mean - old), inside)
        old = tl.load(running_var + c, inside, other=0.0)
        unbiased = var * (rows / (rows - 1.0))
        tl.store(running_var + c, old + momentum * (unbiased - old), inside)
        if tl.program_id(1) == 0:
            tl.store(tracked, tl.load(tracked) + 1)
    else:
        start = program * share
        for m0 in tl.range(start, start + share, BLOCK_M, num_stages=STAGES):
            m = m0 + tl.arange(0, BLOCK_M)
            ok = (m < rows)[:, None] & inside[None, :]
            at = m[:, None].to(tl.int64) * channels + c[None, :]
            v = tl.load(x + at, ok, other=0.0).to(tl.float32)
            z = (v - mean[None, :]) * rstd[None, :] * w[None, :] + b[None, :]
            if HAS_RESIDUAL:
                z += tl.load(residual + at, ok, other=0.0).to(tl.float32)
            z = tl.where(z > 0, z, z * slope)
            if HAS_DROP:
                kept = tl.load(drop + (m // area)[:, None] * channels + c[None, :], ok, other=0.0)
                z *= gain * kept
            tl.store(y + at, z.to(y.dtype.element_ty), ok)


@triton.jit
def _slope_gradient(
    dy, v, y, drop, at, m, c, ok, mean, rstd, w, b, channels, area, slope, gain,
    HAS_RESIDUAL: tl.constexpr, HAS_DROP: tl.constexpr,
):  # fmt: skip
    """(∂L/∂z, x̂) for a tile: z is what goes into the leaky ReLU."""
    g = tl.load(dy + at, ok, other=0.0).to(tl.float32)
    unit = (v - mean[None, :]) * rstd[None, :]
    if HAS_DROP:
        g *= gain * tl.load(drop + (m // area)[:, None] * channels + c[None, :], ok, other=0.0)
    if HAS_RESIDUAL:  # z had a residual in it: the sign is the output's
        positive = tl.load(y + at, ok, other=0.0).to(tl.float32) > 0
    else:
        positive = unit * w[None, :] + b[None, :] > 0
    return tl.where(positive, g, g * slope), unit


@triton.jit(do_not_specialize=["programs"])
def _gradient_moments(
    dy, x, y, drop, weight, bias, saved, partial, rows, channels, share, area, slope, gain,
    HAS_RESIDUAL: tl.constexpr, HAS_DROP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program's Σ ∂L/∂z and Σ ∂L/∂z·x̂."""
    program = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mean = tl.load(saved + c, inside, other=0.0)
    rstd = tl.load(saved + channels + c, inside, other=0.0)
    w = tl.load(weight + c, inside, other=0.0)
    b = tl.load(bias + c, inside, other=0.0)
    first = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    start = program * share
    for m0 in tl.range(start, start + share, BLOCK_M, num_stages=STAGES):
        m = m0 + tl.arange(0, BLOCK_M)
        ok = (m < rows)[:, None] & inside[None, :]
        at = m[:, None].to(tl.int64) * channels + c[None, :]
        v = tl.load(x + at, ok, other=0.0).to(tl.float32)
        g, unit = _slope_gradient(
            dy, v, y, drop, at, m, c, ok, mean, rstd, w, b, channels, area, slope, gain,
            HAS_RESIDUAL, HAS_DROP,
        )  # fmt: skip
        first += g
        second += g * unit
    at = partial + program * 2 * channels + c
    tl.store(at, tl.sum(first, 0), inside)
    tl.store(at + channels, tl.sum(second, 0), inside)


@triton.jit(do_not_specialize=["programs"])
def _gradient_apply(
    dy, x, y, drop, weight, bias, saved, partial, dx, dresidual, dweight, dbias,
    rows, channels, programs, share, area, slope, gain,
    HAS_RESIDUAL: tl.constexpr, HAS_DROP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """∂L/∂x = weight·rstd·(g − mean(g) − x̂·mean(g·x̂)) with g = ∂L/∂z; and those of the rest."""
    program = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    mean = tl.load(saved + c, inside, other=0.0)
    rstd = tl.load(saved + channels + c, inside, other=0.0)
    w = tl.load(weight + c, inside, other=0.0)
    b = tl.load(bias + c, inside, other=0.0)
    first = _total(partial, 0, programs, channels, c, inside, BLOCK_P)
    second = _total(partial, 1, programs, channels, c, inside, BLOCK_P)
    if program == 0:
        tl.store(dbias + c, first, inside)
        tl.store(dweight + c, second, inside)
    first = first / rows
    second = second / rows
    scale = w * rstd
    start = program * share
    for m0 in tl.range(start, start + share, BLOCK_M, num_stages=STAGES):
        m = m0 + tl.arange(0, BLOCK_M)
        ok = (m < rows)[:, None] & inside[None, :]
        at = m[:, None].to(tl.int64) * channels + c[None, :]
        v = tl.load(x + at, ok, other=0.0).to(tl.float32)
        g, unit = _slope_gradient(
            dy, v, y, drop, at, m, c, ok, mean, rstd, w, b, channels, area, slope, gain,
            HAS_RESIDUAL, HAS_DROP,
        )  # fmt: skip
        d = scale[None, :] * (g - first[None, :] - unit * second[None, :])
        tl.store(dx + at, d.to(dx.dtype.element_ty), ok)
        if HAS_RESIDUAL:
            tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), ok)


class NormAct(torch.autograd.Function):
    """Batch-norm in training mode, residual, leaky ReLU and dropped maps; channels-last."""

    @staticmethod
    def forward(
        ctx: Any, x, weight, bias, residual, drop, running, momentum, eps, slope, gain, alone
    ):
        rows, channels, area = _sizes(x)
        y = torch.empty_like(x)
        saved = torch.empty(2 * channels, device=x.device)
        grid, share, blocks = _plan(x, ahead=True)
        programs = grid[0]
        partial = torch.empty(2 * programs * channels, device=x.device)
        _moments[grid](x, partial, rows, channels, share, **blocks, num_warps=WARPS)
        grid, share, blocks = _plan(x, not alone)
        _apply[(grid[0] + 1, grid[1])](
            x, y, _or(residual, x), _or(drop, saved), weight, bias, partial, saved, *running,
            rows, channels, programs, share, area, momentum, eps, slope, gain,
            HAS_RESIDUAL=residual is not None, HAS_DROP=drop is not None,
            **blocks, BLOCK_P=PROGRAMS, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(x, y if residual is not None else None, weight, bias, drop, saved)
        ctx.factors, ctx.alone = (slope, gain), alone
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy):
        x, y, weight, bias, drop, saved = ctx.saved_tensors
        rows, channels, area = _sizes(x)
        dy = dy.contiguous(memory_format=torch.channels_last)
        grid, share, blocks = _plan(x, not ctx.alone)
        partial = torch.empty(2 * grid[0] * channels, device=x.device)
        dx = torch.empty_like(x)
        dresidual = None if y is None else torch.empty_like(x)
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        has = {"HAS_RESIDUAL": y is not None, "HAS_DROP": drop is not None}
        given = dy, x, _or(y, x), _or(drop, saved), weight, bias, saved, partial
        _gradient_moments[grid](
            *given, rows, channels, share, area, *ctx.factors, **has, **blocks, num_warps=WARPS
        )
        _gradient_apply[grid](
            *given, dx, _or(dresidual, x), dweight, dbias,
            rows, channels, grid[0], share, area, *ctx.factors,
            **has, **blocks, BLOCK_P=PROGRAMS, num_warps=WARPS,
        )  # fmt: skip
        return dx, dweight, dbias, dresidual, None, None, None, None, None, None, None


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for an argument that the kernel will not read."""
    return other if tensor is None else tensor


def _sizes(x: Tensor) -> tuple[int, int, int]:
    n, channels, h, w = x.shape
    return n * h * w, channels, h * w


def _plan(x: Tensor, ahead: bool) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Programs by (rows, channels), rows a program, and the tile; measured, benchmarks/NOTES.md.

    Large maps want loads in flight ahead of the arithmetic, and so do the first pass with its
    one load and kernels that share the GPU with others (fewer registers); small ones want
    larger tiles.
    """
    rows, channels, _ = _sizes(x)
    ahead = ahead or x.numel() >= 2**24
    block_c = min(64, triton.next_power_of_2(channels))
    columns = triton.cdiv(channels, block_c)
    block_m = (8192 if ahead else 16384) // block_c
    tiles = triton.cdiv(rows, block_m)
    share = triton.cdiv(tiles, max(1, PROGRAMS // columns)) * block_m
    stages = _stages(x, block_m * block_c) if ahead else 1
    blocks = {"BLOCK_M": block_m, "BLOCK_C": block_c, "STAGES": stages}
    return (triton.cdiv(rows, share), columns), share, blocks


def _stages(x: Tensor, tile: int) -> int:
    """Loads in flight, four at most, that the multiprocessor's shared memory has room for.

    The gradient of a dropped map loads the most: two tiles of maps and one of float32.
    """
    if not x.is_cuda:
        return 1
    room = _shared_memory(x.device.index or 0)
    return max(1, min(4, 1 + (room - 2048) // (tile * (2 * x.element_size() + 4))))


@functools.cache
def _shared_memory(index: int) -> int:
    """Bytes that a program may ask for."""
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(found["max_shared_mem"])
