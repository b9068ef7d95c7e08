"""Images: cut out of the resident set in one kernel, and laid out for the first convolution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _patches(
    x, out, pixels, h, w, sn, sc, sh, sw,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, WIDTH)
    tap, channel = k // CHANNELS, k % CHANNELS
    n, at = pixel // (h * w), pixel % (h * w)
    row = (at // w)[:, None] + (tap // 3 - 1)[None, :]
    column = (at % w)[:, None] + (tap % 3 - 1)[None, :]
    ok = (pixel < pixels)[:, None] & (k < 9 * CHANNELS)[None, :]
    ok &= (row >= 0) & (row < h) & (column >= 0) & (column < w)
    start = n[:, None].to(tl.int64) * sn + channel[None, :] * sc + row * sh + column * sw
    v = tl.load(x + start, ok, other=0.0)
    to = out + pixel[:, None].to(tl.int64) * WIDTH + k[None, :]
    tl.store(to, v.to(out.dtype.element_ty), (pixel < pixels)[:, None])


def patches(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The 3×3 surroundings of every pixel, zeros outside: (n, c, h, w) → (n, h, w, K).

    Tap by tap, channels inside; K is 9c rounded up to a power of two, filled with zeros.
    """
    n, channels, h, w = x.shape
    width = triton.next_power_of_2(9 * channels)
    out = torch.empty(n, h, w, width, device=x.device, dtype=dtype)
    pixels = n * h * w
    block = 128
    grid = (triton.cdiv(pixels, block),)
    _patches[grid](x, out, pixels, h, w, *x.stride(), CHANNELS=channels, WIDTH=width, BLOCK=block)
    return out


@triton.jit
def _cut(
    images, rows, top, left, mirror, out, channels, h, w, pad, sn, sc, sh, sw,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels * h * w
    channel, pixel = at % channels, at // channels
    y, x = pixel // w, pixel % w
    x = tl.where(tl.load(mirror + sample) != 0, w - 1 - x, x)
    row = y + tl.load(top + sample) - pad
    column = x + tl.load(left + sample) - pad
    ok = inside & (row >= 0) & (row < h) & (column >= 0) & (column < w)
    start = images + tl.load(rows + sample) * sn
    v = tl.load(start + channel * sc + row * sh + column * sw, ok, other=0)
    tl.store(out + sample.to(tl.int64) * channels * h * w + at, v, inside)


def cut(
    images: Tensor, rows: Tensor, top: Tensor, left: Tensor, mirror: Tensor, pad: int
) -> Tensor:
    """images[rows], padded, cut at (top, left) and mirrored where asked; channels-last."""
    _, channels, h, w = images.shape
    out = torch.empty(
        (len(rows), channels, h, w),
        device=images.device,
        dtype=images.dtype,
        memory_format=torch.channels_last,
    )
    block = 1024
    grid = (len(rows), triton.cdiv(channels * h * w, block))
    _cut[grid](
        images, rows, top, left, mirror, out, channels, h, w, pad, *images.stride(), BLOCK=block
    )
    return out
