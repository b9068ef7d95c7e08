"""Augmentation on the device, a whole batch at a time; named, so that a recipe can say it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsimplex.errors import DeepSimplexError

AUGMENTS = ("none", "crop", "flip", "crop+flip")


def check_augment(name: str, shape: tuple[int, ...]) -> None:
    if name not in AUGMENTS:
        raise DeepSimplexError(f"augment among {', '.join(AUGMENTS)}", repr(name), "choose one")
    if name != "none" and len(shape) != 3:
        raise DeepSimplexError(
            f"images for augment {name!r}", "feature vectors", "use augment='none'"
        )


def augment(images: Tensor, name: str) -> Tensor:
    """images (n, c, h, w) → the same shape and dtype; randomness from the device's generator."""
    if name == "none":
        return images
    if "crop" in name:
        images = random_crop(images, pad=max(1, images.shape[-1] // 8))
    if "flip" in name:
        images = random_flip(images)
    return images


def random_crop(images: Tensor, pad: int) -> Tensor:
    """Pad by zeros, cut a window of the old size at a place of each image's own."""
    n, c, h, w = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    top, left = torch.randint(0, 2 * pad + 1, (2, n, 1), device=images.device)
    rows = (top + torch.arange(h, device=images.device)).view(n, 1, h, 1)
    columns = (left + torch.arange(w, device=images.device)).view(n, 1, 1, w)
    flat = (rows * (w + 2 * pad) + columns).expand(n, c, h, w).reshape(n, c, h * w)
    return padded.flatten(2).gather(2, flat).view(n, c, h, w)


def random_flip(images: Tensor) -> Tensor:
    """Mirror each image left to right with probability ½."""
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(3), images)
