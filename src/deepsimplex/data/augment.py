"""Augmentation on the device, a whole batch at a time; named, so that a recipe can say it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsimplex.data.randaugment import Policy, mild, randaugment, strong
from deepsimplex.errors import DeepSimplexError
from deepsimplex.layers import has_triton

AUGMENTS = (
    "none", "crop", "flip", "crop+flip", "rand", "rand+crop", "rand+flip", "rand+crop+flip",
    "strong", "strong+crop", "strong+flip", "strong+crop+flip",
)  # fmt: skip
"""Window of the padded image, mirror, one random operation (randaugment.py) before them."""


POLICIES = {"rand": mild(6), "strong": strong(6)}
"""Six of RandAugment's 30 is what the strongest softmax baseline uses on CIFAR, with `strong`."""


def check_augment(name: str, shape: tuple[int, ...], pixels: bool = True) -> None:
    if name not in AUGMENTS:
        raise DeepSimplexError(f"augment among {', '.join(AUGMENTS)}", repr(name), "choose one")
    if name != "none" and len(shape) != 3:
        raise DeepSimplexError(
            f"images for augment {name!r}", "feature vectors", "use augment='none'"
        )
    if _policy(name) and not pixels:
        raise DeepSimplexError(f"uint8 pixels for augment {name!r}", "floats", "give pixels")


def augment(images: Tensor, rows: Tensor, name: str) -> Tensor:
    """images[rows] augmented, (N, c, h, w) → (n, c, h, w); the device's generator is drawn from."""
    if name == "none":
        return images[rows]
    n, pad = len(rows), max(1, images.shape[-1] // 8) if "crop" in name else 0
    if pad:
        top, left = torch.randint(0, 2 * pad + 1, (2, n), device=images.device)
    else:
        top = left = torch.zeros(n, dtype=torch.int64, device=images.device)
    if "flip" in name:
        mirror = torch.rand(n, device=images.device) < 0.5
    else:
        mirror = torch.zeros(n, dtype=torch.bool, device=images.device)
    policy = _policy(name)
    if policy is not None:
        images, rows = randaugment(images[rows], policy), torch.arange(n, device=images.device)
    if images.is_cuda and has_triton():
        from deepsimplex.kernels.images import cut

        return cut(images, rows, top, left, mirror, pad)
    return mirrored(windows(images[rows], top, left, pad), mirror)


@dataclass(frozen=True)
class Views:
    """Which views of an image are scored together, by their mean output."""

    mirror: bool = False  # it and its mirror image
    shift: int = 0  # it, and moved by so many pixels over black in eight directions

    @property
    def count(self) -> int:
        return (2 if self.mirror else 1) * (9 if self.shift else 1)

    def of(self, images: Tensor) -> Iterator[Tensor]:
        """images (n, c, h, w), as they are first; vectors have one view."""
        if images.ndim != 4:
            yield images
            return
        if not self.shift:
            moved: Iterator[Tensor] = iter([images])
        else:
            (h, w), pad = images.shape[-2:], self.shift
            padded, steps = F.pad(images, (pad, pad, pad, pad)), (pad, 0, 2 * pad)
            moved = (padded[..., a : a + h, b : b + w] for a in steps for b in steps)
        for view in moved:
            yield view
            if self.mirror:
                yield view.flip(-1)


ONE = Views()


def _policy(name: str) -> Policy | None:
    return POLICIES.get(name.partition("+")[0])


def windows(images: Tensor, top: Tensor, left: Tensor, pad: int) -> Tensor:
    """Pad by zeros, cut a window of the old size at a place of each image's own."""
    if pad == 0:
        return images
    n, c, h, w = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    rows = (top[:, None] + torch.arange(h, device=images.device)).view(n, 1, h, 1)
    columns = (left[:, None] + torch.arange(w, device=images.device)).view(n, 1, 1, w)
    flat = (rows * (w + 2 * pad) + columns).expand(n, c, h, w).reshape(n, c, h * w)
    return padded.flatten(2).gather(2, flat).view(n, c, h, w)


def mirrored(images: Tensor, mirror: Tensor) -> Tensor:
    """Each image left to right where `mirror` (n,) says so."""
    return torch.where(mirror.view(-1, 1, 1, 1), images.flip(3), images)
