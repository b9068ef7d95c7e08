"""Eq. 4 and its gradient in one pass over the features.

The plain twin is losses.simplex_loss, which reads the features twice and writes as much in
between. Here each feature is read once and its gradient written once: the gradient is ready
before the backward pass asks for it, which then only looks whether the upstream factor is 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepsimplex.errors import DeepSimplexError
from deepsimplex.simplex import Simplex, check_shapes, constants, split_constant

BLOCK = 4096
WARPS = 8
PROGRAMS = 1024  # of the kernel that scales, and most often has nothing to do


@triton.jit
def _vertex(y, vertices, fh, fl, kh, kl, oh, ol):
    """Own coordinate of v_y (−1 for v_1, which has none), then rest and own, high and low."""
    negative = y >= vertices
    base = tl.where(negative, y - vertices, y)
    first = base == 0
    sign = tl.where(negative, -1.0, 1.0)
    rest_high = tl.where(first, fh, kh) * sign
    rest_low = tl.where(first, fl, kl) * sign
    return (base - 1).to(tl.int32), rest_high, rest_low, oh * sign, ol * sign


@triton.jit
def _loss(
    features, labels, gradient, partial, total, rows, dim, span, vertices, share, scale,
    fh, fl, kh, kl, oh, ol,
    GRADIENT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ(f − v_y)²/n of a block of the flat (n, d) array, and 2(f − v_y)/n.

    Blocks do not stop at the end of a row: rows of C−1 numbers begin at odd addresses, and
    only flat blocks can be read 16 bytes at a time. WIDE: d ≥ BLOCK, so a block sees two rows
    at most, and their labels are scalars.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < total
    row = start // dim
    column = (start - row * dim).to(tl.int32) + tl.arange(0, BLOCK)
    if WIDE:
        y = tl.load(labels + row).to(tl.int64)
        own, rh, rl, wh, wl = _vertex(y, vertices, fh, fl, kh, kl, oh, ol)
        y = tl.load(labels + tl.minimum(row + 1, rows - 1)).to(tl.int64)
        own2, rh2, rl2, wh2, wl2 = _vertex(y, vertices, fh, fl, kh, kl, oh, ol)
        second = column >= dim
        column = tl.where(second, column - dim, column)
        own = tl.where(second, own2, own)
        rh, rl = tl.where(second, rh2, rh), tl.where(second, rl2, rl)
        wh, wl = tl.where(second, wh2, wh), tl.where(second, wl2, wl)
    else:
        down = column // dim
        column -= down * dim
        y = tl.load(labels + row + down, inside, other=0).to(tl.int64)
        own, rh, rl, wh, wl = _vertex(y, vertices, fh, fl, kh, kl, oh, ol)
    high = tl.where(column == own, wh, tl.where(column < span, rh, 0.0))
    low = tl.where(column == own, wl, tl.where(column < span, rl, 0.0))
    f = tl.load(features + at, inside, other=0.0).to(tl.float32)
    difference = tl.where(inside, (f - high) - low, 0.0)
    if GRADIENT:
        step = difference * scale
        tl.store(gradient + at, step.to(gradient.dtype.element_ty), inside)
    tl.store(partial + tl.program_id(0), tl.sum(difference * difference) * share)


@triton.jit
def _scale(gradient, upstream, total, BLOCK: tl.constexpr):
    """gradient ← upstream · gradient, nothing at all if that is 1."""
    factor = tl.load(upstream)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, total, step):
            at = start + tl.arange(0, BLOCK)
            g = tl.load(gradient + at, at < total, other=0.0).to(tl.float32) * factor
            tl.store(gradient + at, g.to(gradient.dtype.element_ty), at < total)


class _SimplexLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features, labels, simplex):
        n, dim = features.shape
        f, total = features.contiguous(), features.numel()
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(f) if wanted else f
        block = min(BLOCK, max(128, triton.next_power_of_2(total)))
        blocks = triton.cdiv(total, block)
        partial = torch.empty(blocks, device=f.device)
        first, kappa, eta = constants(simplex.vertices)
        parts = [x for value in (first, kappa, kappa + eta) for x in split_constant(value)]
        _loss[(blocks,)](
            f, labels, gradient, partial, total, n, dim, simplex.span, simplex.vertices,
            1 / n, 2 / n, *parts,
            GRADIENT=wanted, WIDE=dim >= block, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
        if wanted:
            ctx.save_for_backward(gradient)
        ctx.spent = False
        return partial.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream):
        if ctx.spent:  # the saved gradient may have been scaled in place
            raise DeepSimplexError(
                "one backward pass through the fused loss",
                "a second one",
                "compute the loss again",
            )
        ctx.spent = True
        (gradient,) = ctx.saved_tensors
        total = gradient.numel()
        grid = (min(PROGRAMS, triton.cdiv(total, BLOCK)),)
        _scale[grid](gradient, upstream, total, BLOCK=BLOCK, num_warps=WARPS)
        return gradient, None, None


def fused_simplex_loss(simplex: Simplex, features: Tensor, labels: Tensor) -> Tensor:
    """(1/n)Σ_i ‖f_i − v_{y_i}‖², eq. 4; features (n, d), labels (n,) → (), float32.

    Computed in float32; the gradient is rounded to the features' dtype before it meets the
    upstream factor, so in float16 a loss scale does not save what is below 6e-8. Values are not
    checked. One backward pass only.
    """
    check_shapes(simplex, features, labels)
    if features.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise DeepSimplexError(
            "features in float32, bfloat16 or float16",
            str(features.dtype),
            "convert them",
        )
    if len(features) == 0:
        raise DeepSimplexError("at least 1 sample", "an empty batch", "drop empty batches")
    return _SimplexLoss.apply(features, labels.contiguous(), simplex)
