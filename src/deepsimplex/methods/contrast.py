"""DSC beside a contrast between two views of each image.

Eq. 7 keeps of an image only what tells the known classes apart; what would tell an unknown one is
thrown away. A contrast between views, that of SimCLR (Chen et al., ICML 2020) or of SupCon (Khosla
et al., NeurIPS 2020), keeps more in the features, and detection gains by it (Winkens et al., 2020;
Tack et al., 2020) [K]. One view is the recipe's, the other is cut out, scaled and coloured anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex import losses
from deepsimplex.methods.base import (
    Batch,
    Encoder,
    Method,
    Stage,
    check_choices,
    check_numbers,
    one_stage,
    through_head,
)
from deepsimplex.methods.dsc import DSC, DSCSettings
from deepsimplex.methods.networks import check_pictures

WIDTH = 128
"""Of the projection that the contrast sees."""
AREA, ASPECT = (0.3, 1.0), 4 / 3
JITTER, COLOURED, GREYED = 0.4, 0.8, 0.2
"""Change of brightness, contrast and colour; how often; how often grey altogether."""


@dataclass(frozen=True)
class ContrastSettings:
    """`alike`: what an image is drawn to, its other view or all images of its class."""

    alike: Literal["view", "class"] = "view"
    weight: float = 1.0
    temperature: float = 0.2

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, weight=0, temperature=1e-12)


class Contrast(Method):
    """Outputs and scores are DSC's with eq. 7."""

    def __init__(self, encoder: Encoder, classes: int, settings: ContrastSettings) -> None:
        super().__init__()
        check_pictures(encoder.shape, "dsc-contrast")
        self.settings = settings
        self.inner = DSC(encoder, classes, DSCSettings(loss="softmax"))
        self.projection = nn.Sequential(
            nn.Linear(encoder.features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )
        self.scores = self.inner.scores

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]
        return self.inner.encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        """Eq. 7 on both views plus the contrast between them."""
        features = self.encoder(torch.cat([batch.images, another_view(batch.images)]))
        labels = batch.labels.repeat(2)
        outputs = through_head(self.inner.head, features)
        known = losses.softmax_loss(self.inner.simplex, outputs, labels, 1.0, check=False)
        places = through_head(self.projection, features)
        own = torch.arange(len(batch.labels), device=labels.device).repeat(2)
        alike = labels if self.settings.alike == "class" else own
        term = contrast(places, alike, self.settings.temperature)
        return known + self.settings.weight * term

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        return self.inner.class_scores(outputs, score)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.inner.knownness(outputs, score)


def contrast(places: Tensor, alike: Tensor, temperature: float) -> Tensor:
    """mean_i mean_{j ∈ P(i)} −log( e^{z_i·z_j/T} / Σ_{k≠i} e^{z_i·z_k/T} ), z of length 1.

    P(i): the others with i's value of `alike`; each must have one. (n, d), (n,) → ().
    """
    unit = F.normalize(places.float(), dim=1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    logits = (unit @ unit.T / temperature).masked_fill(itself, -math.inf)
    log_share = (logits - logits.logsumexp(1, keepdim=True)).masked_fill(itself, 0.0)
    positive = ((alike[:, None] == alike) & ~itself).to(unit.dtype)
    return -((log_share * positive).sum(1) / positive.sum(1)).mean()


def another_view(images: Tensor) -> Tensor:
    """Cut out, scaled back, mirrored, coloured at random, each image its own way; (n, c, h, w)."""
    x = _cut_out(images.float())
    if images.shape[1] == 3:
        x = _coloured(x)
    if images.dtype == torch.uint8:
        return x.round().clamp(0, 255).to(torch.uint8)
    return x.to(images.dtype)


def _cut_out(x: Tensor) -> Tensor:
    n = len(x)
    low, high = AREA
    area, shape, across, down = torch.rand(4, n, device=x.device)
    side = (low + (high - low) * area).sqrt()
    stretch = torch.exp((shape - 0.5) * math.log(ASPECT))
    wide, tall = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    mirrored = torch.randint(0, 2, (n,), device=x.device) * 2 - 1
    zero = torch.zeros_like(wide)
    rows = (
        torch.stack([wide * mirrored, zero, (2 * across - 1) * (1 - wide)]),
        torch.stack([zero, tall, (2 * down - 1) * (1 - tall)]),
    )
    grid = F.affine_grid(torch.stack(rows).permute(2, 0, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _coloured(x: Tensor) -> Tensor:
    n = len(x)

    def grey(of: Tensor) -> Tensor:
        red, green, blue = of.unbind(1)
        return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]

    def some(share: float) -> Tensor:
        return torch.rand(n, 1, 1, 1, device=x.device) < share

    factors = 1 + JITTER * (2 * torch.rand(3, n, 1, 1, 1, device=x.device) - 1)
    moved = x * factors[0]
    mean = grey(moved).mean((2, 3), keepdim=True)
    moved = mean + factors[1] * (moved - mean)
    moved = grey(moved) + factors[2] * (moved - grey(moved))
    x = torch.where(some(COLOURED), moved, x)
    return torch.where(some(GREYED), grey(x).expand_as(x), x)
