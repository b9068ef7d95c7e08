"""The simplex on the unit sphere, with mixtures of classes between its vertices.

The net is trained by directions alone: its features, brought to length 1, are drawn to vertices,
and those of a mixture of two images to the point between theirs. Nothing asks for a length, so
the length that the encoder's features have is its own word on how familiar an image is. A second
head, eq. 7, reads classes and length off those features without shaping them. Training by
directions, mixtures and smoothed labels, with a classifier beside it, is SpHOR (Bahavan,
Seneviratne, Halgamuge 2026), whose class directions are learnt; here they are the simplex.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex import losses
from deepsimplex.heads import LinearHead
from deepsimplex.methods.base import (
    Batch,
    Encoder,
    Method,
    Stage,
    check_numbers,
    check_score,
    one_stage,
    through_head,
)
from deepsimplex.simplex import Simplex, dot_products


@dataclass(frozen=True)
class SimplexSphereSettings:
    temperature: float = 0.1
    label_smoothing: float = 0.1
    mixture: float = 1.0  # weight of the mixed images' loss
    round: bool = True
    apart: bool = True
    background_weight: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, temperature=1e-12, label_smoothing=0, mixture=0)


class SimplexSphere(Method):
    scores = ("dot", "cosine")

    def __init__(self, encoder: Encoder, classes: int, settings: SimplexSphereSettings) -> None:
        super().__init__()
        self.settings = settings
        self.simplex = Simplex(classes, max(1, classes - 1), "regular")
        self.encoder = encoder
        self.aim: nn.Module = LinearHead(encoder.features, self.simplex.dim)
        self.head: nn.Module = LinearHead(encoder.features, self.simplex.dim)

    def forward(self, images: Tensor) -> Tensor:
        head = self.head if self.settings.apart else self.aim
        return through_head(head, self.encoder(images))

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        settings, n = self.settings, len(batch.labels)
        images = batch.images.float()
        wanted = F.one_hot(batch.labels.long(), self.simplex.classes).float()
        wanted = wanted + settings.label_smoothing * (1 / self.simplex.classes - wanted)
        if settings.mixture:
            share = torch.rand((), device=images.device)
            images = torch.cat([images, images.flip(0) + share * (images - images.flip(0))])
            wanted = torch.cat([wanted, wanted.flip(0) + share * (wanted - wanted.flip(0))])
        encoded = self.encoder(images)
        aimed = through_head(self.aim, encoded)
        with torch.autocast(images.device.type, enabled=False):
            if settings.round:
                aimed = F.normalize(aimed.float(), dim=1)
            logits = dot_products(self.simplex, aimed) / settings.temperature
            each = -(wanted * logits.log_softmax(1)).sum(1)
            total = each[:n].mean()
            if settings.mixture:
                total = total + settings.mixture * each[n:].mean()
        if settings.apart:
            read = through_head(self.head, encoded[:n].detach())
            total = total + losses.softmax_loss(self.simplex, read, batch.labels, 1.0, check=False)
        return total

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        dots = dot_products(self.simplex, outputs)
        if score == "dot":
            return dots
        return dots / outputs.norm(dim=1, keepdim=True).clamp_min(1e-30)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)
