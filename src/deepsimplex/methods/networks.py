"""Generators, critics and decoders, once for every method that makes images.

They live in normalised units (methods.base.Normalise): what a generator returns goes into
`encoder.backbone` directly, and a real image is `encoder.normalise(image)` there. Any range of
pixels is then the same problem.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError

RANGE = 4.0
"""Largest deviation, in standard deviations, that a generator can paint."""


def check_pictures(shape: tuple[int, ...]) -> None:
    """Refuse what is no image of 8 pixels or more to the side."""
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise DeepSimplexError(
            "images of 8×8 or more for a method that paints some",
            f"samples of shape {shape}",
            "choose another method, or larger images",
        )


class Generator(nn.Module):
    """A code becomes an image: (n, latent) → (n, c, h, w) within ±RANGE.

    From about 4×4 by doublings, each a nearest-pixel upsampling and a convolution; DCGAN (Radford
    et al., 2016) has transposed convolutions instead, whose uneven overlap shows as a grid.
    """

    def __init__(self, latent: int, shape: tuple[int, ...], width: int = 64) -> None:
        super().__init__()
        channels, height, wide = shape
        doublings = max(1, min(4, (min(height, wide) // 8).bit_length()))
        self.shape, self.doublings = shape, doublings
        self.start = (-(-height // 2**doublings), -(-wide // 2**doublings))
        widths = [width * 2 ** min(k, 2) for k in range(doublings, -1, -1)]
        self.widest = widths[0]
        self.spread = nn.Linear(latent, widths[0] * self.start[0] * self.start[1], bias=False)
        self.first = nn.BatchNorm2d(widths[0])
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.paint = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, code: Tensor) -> Tensor:
        x = self.spread(code).view(len(code), self.widest, *self.start)
        x = F.relu(self.first(x))
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = F.relu(norm(convolution(x)))
        painted = self.paint(x)[:, :, : self.shape[1], : self.shape[2]]
        return RANGE * torch.tanh(painted / RANGE)


class Critic(nn.Module):
    """An image becomes numbers: (n, c, h, w) → (n, outputs); no norm, so images do not mix.

    The inner layers of a GAN's critic and of an image's encoder alike.
    """

    def __init__(self, shape: tuple[int, ...], outputs: int = 1, width: int = 64) -> None:
        super().__init__()
        channels, height, wide = shape
        halvings = max(1, min(4, (min(height, wide) // 8).bit_length()))
        widths = [channels, *(width * 2 ** min(k, 2) for k in range(halvings))]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in itertools.pairwise(widths)
        )
        for _ in range(halvings):
            height, wide = height // 2, wide // 2
        self.judge = nn.Linear(widths[-1] * height * wide, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for convolution in self.convolutions:
            x = F.leaky_relu(convolution(x), 0.2)
        out: Tensor = self.judge(x.flatten(1))
        return out


def steady(step: int, steps: int) -> float:
    """The schedule of a GAN: its rate, as published, stays."""
    return 1.0
