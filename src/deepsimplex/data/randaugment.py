"""RandAugment on the device: one random operation an image, a whole batch at a time.

There are two sets of operations and ranges under the name (Cubuk et al., 2020), and they are far
apart: `mild` is torchvision's, `strong` the one that the strongest published softmax baselines of
open-set recognition were trained with (Vaze et al., 2022; ranges of the pytorch-randaugment
package), where a small magnitude already means one bit a channel or a shift by more than half the
image. Every image takes every path and keeps one result, so that no shape depends on a draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = (
    "identity", "shear x", "shear y", "translate x", "translate y", "rotate",
    "brightness", "colour", "contrast", "sharpness",
    "posterise", "solarise", "autocontrast", "equalise", "invert", "solarise add", "cutout",
)  # fmt: skip
BINS = 30
GREY = 125.0, 123.0, 114.0  # what a cut-out square shows


@dataclass(frozen=True)
class Policy:
    """Which operations are drawn, OPERATIONS[first:last], and how strong each is."""

    first: int
    last: int
    shear: float
    shift: float  # of the side
    turn: float  # degrees
    less: float  # factor of brightness, colour, contrast, sharpness where the sign is −
    more: float  # and where it is +
    bits: int
    limit: float  # pixels from here on are inverted by "solarise"
    add: float = 0.0  # "solarise add": this much brighter, then inverted from 128 on
    square: float = 0.0  # side of "cutout", of the side


def mild(magnitude: int) -> Policy:
    share = magnitude / BINS
    factors = 1 - 0.9 * share, 1 + 0.9 * share
    bits, limit = 8 - round(share * 4), 255.0 * (1 - share)
    last = OPERATIONS.index("invert")
    return Policy(0, last, 0.3 * share, 150 / 331 * share, 30 * share, *factors, bits, limit)


def strong(magnitude: int) -> Policy:
    """Pixels are those of 32-pixel images: a shift of 100·M/30, a square of 40·M/30."""
    share = magnitude / BINS
    factor = 0.1 + 1.8 * share
    bits, limit = max(1, int(4 * share)), 256 * share
    return Policy(
        1, len(OPERATIONS), 0.3 * share, 100 / 32 * share, 30 * share, factor, factor, bits, limit,
        add=110 * share, square=40 / 32 * share,
    )  # fmt: skip


def randaugment(images: Tensor, policy: Policy) -> Tensor:
    """images (n, c, h, w) uint8 → the same, each through one operation of its own."""
    n, device = len(images), images.device
    which = torch.randint(policy.first, policy.last, (n,), device=device)
    sign = torch.randint(0, 2, (n,), device=device) * 2.0 - 1.0
    place = torch.rand(n, 2, device=device) if policy.square else None
    return apply(images, which, sign, policy, place)


def apply(
    images: Tensor, which: Tensor, sign: Tensor, policy: Policy, place: Tensor | None = None
) -> Tensor:
    """Operation `which` (n,) with its sign (n,) ±1 on each image; squares cut at `place` (n, 2)."""
    x = images.float()
    result = warped(x, which, sign, policy)
    result = blended(result, which, policy.less + (sign + 1) * (policy.more - policy.less) / 2)
    step = 2.0 ** (8 - policy.bits)
    result = _where(which, "posterise", (result / step).floor() * step, result)
    result = _where(which, "solarise", _inverted(result, policy.limit), result)
    result = _where(which, "autocontrast", stretched(x), result)
    result = _where(which, "equalise", equalised(images), result)
    if policy.square:
        assert place is not None
        result = _where(which, "invert", 255 - x, result)
        brighter = (x + policy.add).floor().clamp(max=255)
        result = _where(which, "solarise add", _inverted(brighter, 128), result)
        result = _where(which, "cutout", without_square(x, place, policy.square), result)
    return result.round().clamp(0, 255).to(torch.uint8)


def _inverted(x: Tensor, limit: float) -> Tensor:
    return torch.where(x >= limit, 255 - x, x)


def warped(x: Tensor, which: Tensor, sign: Tensor, policy: Policy) -> Tensor:
    """Sheared, shifted or turned; nearest pixel, zeros outside.

    The matrix takes a target pixel's place, from −1 to 1, to the source's. All turn and shear about
    the centre.
    """
    n, _, h, w = x.shape
    zero, one = torch.zeros_like(sign), torch.ones_like(sign)

    def at(name: str, value: Tensor, otherwise: Tensor) -> Tensor:
        return torch.where(which == OPERATIONS.index(name), value, otherwise)

    angle = at("rotate", sign * math.radians(policy.turn), zero)
    cosine, sine = angle.cos(), angle.sin()
    ratio = h / w
    across = at("shear x", sign * policy.shear * ratio, -sine * ratio)
    down = at("shear y", sign * policy.shear / ratio, sine / ratio)
    # A shift of p pixels is 2p/side in these units.
    right = at("translate x", sign * 2 * policy.shift, zero)
    below = at("translate y", sign * 2 * policy.shift, zero)
    rows = torch.stack([cosine * one, across, right]), torch.stack([down, cosine * one, below])
    matrix = torch.stack(rows).permute(2, 0, 1)
    grid = F.affine_grid(matrix, [n, 1, h, w], align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def without_square(x: Tensor, place: Tensor, share: float) -> Tensor:
    """A grey square of `share` of the side about `place`, (n, 2) from 0 to 1 across and down."""
    _, c, h, w = x.shape
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for axis, size in ((0, w), (1, h)):
        begin = (place[:, axis] * size - share * size / 2).clamp_min(0).floor()[:, None]
        at = torch.arange(size, device=x.device)
        row = (at >= begin) & (at <= begin + share * size)
        inside = inside & (row[:, None, None, :] if axis == 0 else row[:, None, :, None])
    grey = GREY if c == 3 else (sum(GREY) / 3,) * c
    return torch.stack([torch.where(inside[:, 0], grey[k], x[:, k]) for k in range(c)], dim=1)


def blended(x: Tensor, which: Tensor, factor: Tensor) -> Tensor:
    """d + f·(x − d), with d black, grey, the mean grey or a blurred image."""
    grey = _grey(x)
    blurred = _blur(x)
    base = _where(which, "colour", grey.expand_as(x), torch.zeros_like(x))
    mean = grey.mean((1, 2, 3), keepdim=True).round()
    base = _where(which, "contrast", mean.expand_as(x), base)
    base = _where(which, "sharpness", blurred, base)
    first, last = OPERATIONS.index("brightness"), OPERATIONS.index("sharpness")
    mine = ((which >= first) & (which <= last)).view(-1, 1, 1, 1)
    moved = (base + factor.view(-1, 1, 1, 1) * (x - base)).clamp(0, 255)
    return torch.where(mine, moved, x)


def stretched(x: Tensor) -> Tensor:
    """Each channel stretched to 0…255; a flat one is left as it is."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    flat = high == low
    scale = 255 / torch.where(flat, torch.ones_like(high), high - low)
    return torch.where(flat, x, (x - low) * scale)


def equalised(images: Tensor) -> Tensor:
    """Each channel's histogram made flat, as Pillow does it.

    step = (pixels − count of the highest value present) // 255; value v becomes
    (step // 2 + pixels below v) // step; a channel whose step is 0 is left as it is.
    """
    n, c, h, w = images.shape
    flat = images.reshape(n * c, h * w).long()
    counts = torch.zeros(n * c, 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    levels = torch.arange(256, device=images.device)
    highest = (levels * (counts > 0)).amax(1, keepdim=True)
    step = (h * w - counts.gather(1, highest)) // 255
    below = counts.cumsum(1) - counts
    table = ((step // 2 + below) // step.clamp_min(1)).clamp(0, 255)
    table = torch.where(step == 0, levels, table)
    return table.gather(1, flat).view(n, c, h, w).float()


def _where(which: Tensor, name: str, value: Tensor, otherwise: Tensor) -> Tensor:
    mine = (which == OPERATIONS.index(name)).view(-1, 1, 1, 1)
    return torch.where(mine, value, otherwise)


def _grey(x: Tensor) -> Tensor:
    """Luma of RGB; a single channel is its own grey. (n, c, h, w) → (n, 1, h, w)."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor()[:, None]


def _blur(x: Tensor) -> Tensor:
    """3×3 mean with a centre of weight 5 of 13; the border stays."""
    c = x.shape[1]
    around = F.conv2d(x, torch.ones(c, 1, 3, 3, device=x.device), groups=c)  # whole numbers: exact
    inner = (around + 4 * x[:, :, 1:-1, 1:-1]) / 13
    result = x.clone()
    result[:, :, 1:-1, 1:-1] = inner.round()
    return result
