"""RandAugment on the device: one random operation an image, a whole batch at a time.

The operations and their ranges are those of torchvision's RandAugment (Cubuk et al., 2020): the
magnitude M of 30 sets how strong an operation is, its sign is drawn where it has one. Every
image takes every path and keeps one result, so that no shape depends on a draw.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATIONS = (
    "identity", "shear x", "shear y", "translate x", "translate y", "rotate",
    "brightness", "colour", "contrast", "sharpness",
    "posterise", "solarise", "autocontrast", "equalise",
)  # fmt: skip
BINS = 30


def randaugment(images: Tensor, magnitude: int) -> Tensor:
    """images (n, c, h, w) uint8 → the same, each through one operation of its own."""
    n, device = len(images), images.device
    which = torch.randint(0, len(OPERATIONS), (n,), device=device)
    sign = torch.randint(0, 2, (n,), device=device) * 2.0 - 1.0
    return apply(images, which, sign, magnitude)


def apply(images: Tensor, which: Tensor, sign: Tensor, magnitude: int) -> Tensor:
    """Operation `which` (n,) with its sign (n,) ±1 on each image."""
    share = magnitude / BINS
    x = images.float()
    result = warped(x, which, sign * share)
    result = blended(result, which, 1 + sign * 0.9 * share)
    bits = 8 - round(share * 4)
    step = 2.0 ** (8 - bits)
    result = _where(which, "posterise", (result / step).floor() * step, result)
    limit = 255.0 * (1 - share)
    result = _where(which, "solarise", torch.where(result >= limit, 255 - result, result), result)
    result = _where(which, "autocontrast", stretched(x), result)
    result = _where(which, "equalise", equalised(images), result)
    return result.round().clamp(0, 255).to(torch.uint8)


def warped(x: Tensor, which: Tensor, amount: Tensor) -> Tensor:
    """Shear by 0.3·a, shift by 150/331 of the side·a, turn by 30°·a; nearest pixel, zeros outside.

    The matrix takes a target pixel's place, from −1 to 1, to the source's.
    """
    n, _, h, w = x.shape
    zero, one = torch.zeros_like(amount), torch.ones_like(amount)

    def at(name: str, value: Tensor, otherwise: Tensor) -> Tensor:
        return torch.where(which == OPERATIONS.index(name), value, otherwise)

    angle = at("rotate", amount * math.pi / 6, zero)
    cosine, sine = angle.cos(), angle.sin()
    ratio = h / w
    across = at("shear x", amount * 0.3 * ratio, -sine * ratio)
    down = at("shear y", amount * 0.3 / ratio, sine / ratio)
    # A shift of p pixels is 2p/side in these units.
    right = at("translate x", amount * 2 * 150 / 331, zero)
    below = at("translate y", amount * 2 * 150 / 331, zero)
    rows = torch.stack([cosine * one, across, right]), torch.stack([down, cosine * one, below])
    matrix = torch.stack(rows).permute(2, 0, 1)
    grid = F.affine_grid(matrix, [n, 1, h, w], align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)


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
