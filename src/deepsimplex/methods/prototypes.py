"""Points that stand for classes: anchors (CAC), prototypes (GCPL), reciprocal points (RPL, ARPL).

An anchor or a prototype is what its class is close to; a reciprocal point is what its class is
not, so there the farthest point names the class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.methods.base import (
    ABOVE_0,
    Batch,
    Encoder,
    Method,
    Passes,
    Stage,
    check_choices,
    check_numbers,
    check_score,
    one_stage,
    through_head,
)
from deepsimplex.methods.means import class_means, pair_distances
from deepsimplex.methods.softmax import logit_class_scores
from deepsimplex.simplex import length, wide

SPREAD = 0.1
"""Standard deviation of learned points at the start."""


def point_distances(features: Tensor, points: Tensor) -> Tensor:
    """‖f_i − p_j‖², subtracted first; features (n, d), points (C, d) → (n, C)."""
    return pair_distances(features, points).square()


def own(by_class: Tensor, labels: Tensor) -> Tensor:
    """Each row's entry at its label: (n, C), (n,) → (n,)."""
    return by_class.gather(1, labels[:, None])[:, 0]


# Class Anchor Clustering


@dataclass(frozen=True)
class CACSettings:
    anchor: float = 10.0  # α: class j is sent to α·e_j
    weight: float = 0.1  # λ of the anchor term

    def __post_init__(self) -> None:
        check_numbers(self, anchor=ABOVE_0, weight=0)


def anchor_loss(logits: Tensor, labels: Tensor, anchors: Tensor, weight: float) -> Tensor:
    """mean log(1 + Σ_{j≠y} e^{d_y − d_j}) + λ mean d_y, d_j = ‖z − a_j‖ (not squared).

    The first term is cross-entropy on −d; logits (n, C), anchors (C, C) → ().
    """
    distances = length(point_distances(logits, anchors))
    return F.cross_entropy(-distances, labels) + weight * own(distances, labels).mean()


def rejection(distances: Tensor) -> Tensor:
    """γ_j = d_j (1 − softmin(d)_j), (n, C) → (n, C); γ and d are least at the same j.

    For the nearest j, where softmin may round to 1, what it lacks is summed from the others.
    """
    nearest = F.one_hot(distances.argmin(1), distances.shape[1]).bool()
    others = (-distances).masked_fill(nearest, -math.inf).logsumexp(1, keepdim=True)
    lacks = (others - (-distances).logsumexp(1, keepdim=True)).exp()
    return distances * torch.where(nearest, lacks, 1 - (-distances).softmax(1))


class CAC(Method):
    """Logits are drawn to anchors α·e_j, and scored around the means they came to.

    After training, the mean logits of each class's correctly classified training images take the
    anchors' place. (The authors add those of the flipped images; a flipped digit is no digit.)
    Scores −min_j γ_j and −min_j d_j. α and λ are the authors'; they train in two steps of rate and
    keep the epoch with the least anchor loss on a validation split, here the recipe's last counts.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: CACSettings) -> None:
        super().__init__()
        self.settings, self.classes = settings, classes
        self.scores = ("rejection", "distance")
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)
        self.register_buffer("centres", settings.anchor * torch.eye(classes))

    centres: Tensor

    def forward(self, images: Tensor) -> Tensor:
        return through_head(self.head, self.encoder(images))

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs, finish=self.settle)

    def loss(self, batch: Batch) -> Tensor:
        logits = wide(self(batch.images))
        return anchor_loss(logits, batch.labels, self.anchors(logits), self.settings.weight)

    def anchors(self, like: Tensor) -> Tensor:
        """α·I, (C, C)."""
        eye = torch.eye(self.classes, dtype=like.dtype, device=like.device)
        return self.settings.anchor * eye

    def settle(self, passes: Passes) -> None:
        """Centres: a class's mean logits over its correctly classified images, if it has any."""
        anchors = self.anchors(self.centres.double())

        def correct(logits: Tensor, labels: Tensor) -> Tensor:
            return point_distances(logits, anchors).argmin(1) == labels

        self.centres.copy_(class_means(passes, self, self.classes, correct, otherwise=anchors))

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """−γ_j or −d_j, in float64."""
        check_score(self, score)
        logits = outputs.double()
        distances = length(point_distances(logits, self.centres.to(logits)))
        return -distances if score == "distance" else -rejection(distances)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)


# Prototypes


@dataclass(frozen=True)
class GCPLSettings:
    temperature: float = 1.0
    weight: float = 0.1  # λ of the prototype term

    def __post_init__(self) -> None:
        check_numbers(self, temperature=ABOVE_0, weight=0)


def prototype_loss(
    features: Tensor, labels: Tensor, points: Tensor, temperature: float, weight: float
) -> Tensor:
    """−mean log softmax_y(−D/T) + λ mean D_y / 2, D_j = ‖f − m_j‖² / d.

    Features (n, d), points (C, d) → ().
    """
    distances = point_distances(features, points) / features.shape[1]
    return (
        F.cross_entropy(-distances / temperature, labels)
        + weight * own(distances, labels).mean() / 2
    )


class GCPL(Method):
    """A learned prototype a class: distance-based cross-entropy and a pull to one's own.

    Of the two variants in use this is the one of ARPL's re-run: distances divided by d, λ = 0.1,
    prototypes from 0.1·N(0, I). (The authors' own: no division, λ = 0.001, prototypes from 0;
    its logits explode at d = 128.) Scores max_j softmax(−D/T)_j, which that re-run takes, and
    −min_j D_j. The cross-entropy sends features past their prototype, away from the others; only
    with λ near 1 or more do they stop there, and the distance tells knowns from unknowns.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: GCPLSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = ("max_probability", "distance")
        self.encoder = encoder
        self.points = nn.Parameter(SPREAD * torch.randn(classes, encoder.features))

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        features, s = wide(self(batch.images)), self.settings
        return prototype_loss(features, batch.labels, self.points, s.temperature, s.weight)

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """−D_j, or log-probabilities."""
        check_score(self, score)
        closeness = -point_distances(outputs, self.points.to(outputs)) / outputs.shape[1]
        return logit_class_scores(closeness, score, self.settings.temperature)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)


# Reciprocal points


@dataclass(frozen=True)
class ReciprocalSettings:
    loss: Literal["rpl", "arpl"] = "arpl"
    temperature: float = 1.0  # 1/γ of RPL
    weight: float = 0.1  # λ of the term that bounds the distances

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, temperature=ABOVE_0, weight=0)


def reciprocal_logits(features: Tensor, points: Tensor) -> Tensor:
    """RPL: ‖f − P_j‖² / d, farther = more like class j; (n, d), (C, d) → (n, C)."""
    return point_distances(features, points) / features.shape[1]


def adversarial_logits(features: Tensor, points: Tensor) -> Tensor:
    """ARPL: ‖f − P_j‖² / d − f·P_j; (n, d), (C, d) → (n, C)."""
    return reciprocal_logits(features, points) - _dots(features, points)


def _dots(features: Tensor, points: Tensor) -> Tensor:
    """f_i·P_j, not as a matrix product, which autocast would round."""
    return (features[:, None] * points).sum(2)


def reciprocal_loss(
    features: Tensor,
    labels: Tensor,
    points: Tensor,
    radius: Tensor,
    temperature: float,
    weight: float,
) -> Tensor:
    """RPL: −mean log softmax_y(D/T) + λ mean (D_y − R)², D_j = ‖f − P_j‖² / d → ()."""
    distances = reciprocal_logits(features, points)
    bound = (own(distances, labels) - radius).square().mean()
    return F.cross_entropy(distances / temperature, labels) + weight * bound


def adversarial_loss(
    features: Tensor,
    labels: Tensor,
    points: Tensor,
    radius: Tensor,
    temperature: float,
    weight: float,
) -> Tensor:
    """ARPL: −mean log softmax_y(z/T) + λ mean [D_y − R + 1]₊, z_j = D_j − f·P_j → ()."""
    distances = reciprocal_logits(features, points)
    logits = distances - _dots(features, points)
    bound = F.relu(own(distances, labels) - radius + 1).mean()
    return F.cross_entropy(logits / temperature, labels) + weight * bound


class Reciprocal(Method):
    """A learned point a class, which the other classes lie around, and one learned radius R.

    Scores max_j z_j, not normalised, and max_j softmax(z/T)_j; z = D for RPL, whose paper has the
    first and whose authors' later code the second: on known classes of CIFAR-10 left out, the first
    is near chance (results/choose-rates.txt).
    """

    def __init__(self, encoder: Encoder, classes: int, settings: ReciprocalSettings) -> None:
        super().__init__()
        self.settings = settings
        names = "max_logit", "max_probability"
        self.scores = names[::-1] if settings.loss == "rpl" else names
        self.encoder = encoder
        self.points = nn.Parameter(SPREAD * torch.randn(classes, encoder.features))
        self.radius = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        features, s = wide(self(batch.images)), self.settings
        loss = reciprocal_loss if s.loss == "rpl" else adversarial_loss
        return loss(features, batch.labels, self.points, self.radius, s.temperature, s.weight)

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """z_j, or log-probabilities."""
        check_score(self, score)
        logits_of = reciprocal_logits if self.settings.loss == "rpl" else adversarial_logits
        logits = logits_of(outputs, self.points.to(outputs))
        return logit_class_scores(logits, score, self.settings.temperature)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)
