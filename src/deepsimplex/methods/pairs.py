"""Losses over the pairs and triplets of a batch.

Contrastive and triplet losses train an embedding alone: it predicts by the nearest class mean.
Marginal and range loss stand beside cross-entropy. All see P×K batches (P classes, K images of
each) and work on the whole n×n matrix of distances, O(n²d), with masks: no shape depends on a
label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.methods.base import (
    Batch,
    Encoder,
    Method,
    Passes,
    Stage,
    check_choices,
    check_numbers,
    check_score,
    check_whole,
    one_stage,
    through_head,
)
from deepsimplex.methods.means import class_means, pair_distances
from deepsimplex.methods.softmax import LinearLogits
from deepsimplex.simplex import wide

PER_CLASS = 4
"""Images of a class in a batch, K, or more where classes are few (Hermans et al.: 4)."""


@dataclass(frozen=True)
class PairSettings:
    """The margin is one of unit vectors' distances, at most 2; of their squares for semihard."""

    loss: Literal["contrastive", "hard", "semihard"] = "hard"
    margin: float = 0.5

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, margin=0)


@dataclass(frozen=True)
class MarginalSettings:
    threshold: float = 1.2  # θ, of the squared distance
    margin: float = 0.3  # ξ
    weight: float = 1.0  # λ

    def __post_init__(self) -> None:
        check_numbers(self, threshold=0, margin=0, weight=0)


@dataclass(frozen=True)
class RangeSettings:
    """The published α = 5e-5, β = 1e-4, M = 2e4 [K] with squared lengths in units of M, but for α.

    Published it would be 1: ten classes of unit features then pay 10 for their ranges and 2 for
    lying in one point, where they go (CIFAR-10 training images at 8×8, all of three rates).
    """

    count: int = 2  # k
    margin: float = 1.0  # M, of the squared distance
    intra: float = 0.02  # α
    inter: float = 2.0  # β

    def __post_init__(self) -> None:
        check_numbers(self, margin=0, intra=0, inter=0)
        check_whole(self, count=1)


def pair_masks(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which pairs i ≠ j share a class, and which do not: (n,) → (n, n), (n, n)."""
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return same & ~itself, ~same


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values under the mask; 0 under an empty one."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp_min(1)


def contrastive_loss(features: Tensor, labels: Tensor, margin: float) -> Tensor:
    """½ mean D² over pairs of one class + ½ mean [m − D]₊² over pairs of two; (n, d), (n,) → ().

    Hadsell et al. (2006). Each kind has its own mean: pull and push weigh the same however many
    classes a batch holds.
    """
    same, other = pair_masks(labels)
    d = pair_distances(features, features)
    pull = masked_mean(d.square(), same)
    return 0.5 * (pull + masked_mean((margin - d).clamp_min(0).square(), other))


def alongside(labels: Tensor, count: int) -> Tensor:
    """Which images fall into one part of the batch, of `count` images a class; (n,) → (n, n).

    As many parts as the smallest class fills; what is over is dealt out, so that no image is alone.
    """
    same = labels[:, None] == labels
    rank = same.tril(-1).sum(1)  # of its class, in the batch's order
    part = rank % (same.sum(1).amin() // count).clamp_min(1)
    return part[:, None] == part


def hard_triplet_loss(
    features: Tensor, labels: Tensor, margin: float, count: int = PER_CLASS
) -> Tensor:
    """mean_a [max_p D(a,p) − min_n D(a,n) + m]₊ over anchors with both; (n, d), (n,) → ().

    Batch-hard (Hermans et al., 2017): the farthest image of the class, the nearest of another,
    among `count` images of each class; a batch that has twice as many falls into parts. Few classes
    would fill it with fifty of each, and the hardest of so many are outliers that teach nothing
    (CIFAR-10 right 31.4 % after 20 epochs of ResNet-18, at commit 52c6c4f). Where a net cannot yet
    part the classes the loss is least in one point, at m.
    """
    same, other = (mask & alongside(labels, count) for mask in pair_masks(labels))
    d = pair_distances(features, features)
    farthest = torch.where(same, d, -math.inf).amax(1)
    nearest = torch.where(other, d, math.inf).amin(1)
    return masked_mean((farthest - nearest + margin).clamp_min(0), same.any(1) & other.any(1))


def semihard_triplet_loss(features: Tensor, labels: Tensor, margin: float) -> Tensor:
    """mean over pairs (a,p) of one class of [D²(a,p) − D²(a,n) + m]₊; (n, d), (n,) → ().

    FaceNet (Schroff et al., 2015): n is the nearest of another class that is farther than p;
    beyond the margin the term is 0 by itself. Where all are nearer than p, n is the farthest of
    them, the mildest of the broken triplets: nearer ones drag a young net into one point.
    """
    same, other = pair_masks(labels)
    d = pair_distances(features, features).square()
    negative = torch.where(other, d, math.inf).sort(1).values  # each row ends in ∞, its own place
    place = torch.searchsorted(negative.detach(), d.detach(), right=True)
    count = other.sum(1, keepdim=True)
    # One index answers both: the first beyond D(a,p), or the last there is.
    chosen = negative.gather(1, place.minimum((count - 1).clamp_min(0)))
    return masked_mean((d - chosen + margin).clamp_min(0), same & (count > 0))


def marginal_term(features: Tensor, labels: Tensor, settings: MarginalSettings) -> Tensor:
    """λ/(n²−n) Σ_{i≠j} [ξ − t_ij (θ − ‖f̂_i − f̂_j‖²)]₊, t = ±1; (n, d), (n,) → ().

    Deng, Zhou, Zafeiriou (2017); constants [K]. f̂ = f/‖f‖.
    """
    same, other = pair_masks(labels)
    unit = F.normalize(wide(features), dim=1)
    inside = settings.threshold - pair_distances(unit, unit).square()
    broken = (settings.margin - torch.where(same, inside, -inside)).clamp_min(0)
    return settings.weight * masked_mean(broken, same | other)


def range_term(features: Tensor, labels: Tensor, settings: RangeSettings) -> Tensor:
    """α Σ_c k/Σ_t D_ct⁻¹ + β [M − min ‖μ_a − μ_b‖²]₊ over a batch's classes; (n, d), (n,) → ().

    Zhang et al. (2017) [K]. D_c1 … D_ck are the k largest squared distances within class c, or
    all where there are fewer; μ_c its mean in the batch. Taken of f/‖f‖: the published constants
    belong to the lengths of one net's features.
    """
    unit = F.normalize(wide(features), dim=1)
    own = (labels[:, None] == labels).to(unit.dtype)
    members = own.sum(1)
    harmonic = range_of_class(unit, labels, settings.count)
    intra = (harmonic / members).sum()  # every member brings its class's value
    with torch.autocast(unit.device.type, enabled=False):
        means = own @ unit / members[:, None]  # of each image's class
    between = torch.where(own > 0, math.inf, pair_distances(means, means).square()).amin()
    return settings.intra * intra + settings.inter * (settings.margin - between).clamp_min(0)


def range_of_class(features: Tensor, labels: Tensor, count: int) -> Tensor:
    """Harmonic mean of the k largest D² within each image's class; (n, d), (n,) → (n,).

    0 for a class of one image.
    """
    k = min(count, len(labels))
    same = labels[:, None] == labels
    d = pair_distances(features, features).square()
    # Each pair once. A class's k largest are among the k largest of its rows.
    pairs = torch.where(same.triu(1), d, -1.0).topk(k, 1).values  # (n, k)
    largest = torch.where(same[:, :, None], pairs, -1.0).flatten(1).topk(k, 1).values
    found = largest >= 0
    inverse = torch.where(found, 1 / largest.clamp_min(1e-12), 0).sum(1)
    return torch.where(found[:, 0], found.sum(1) / torch.where(found[:, 0], inverse, 1), 0)


LOSSES = {
    "contrastive": contrastive_loss,
    "hard": hard_triplet_loss,
    "semihard": semihard_triplet_loss,
}


class Pairs(Method):
    """Unit vectors trained by their distances; score −‖f − μ_j‖ to the nearest class mean.

    f = Wx + b at unit length, as wide as the backbone's x; for batch-hard triplets Wx + b is first
    brought to mean 0 and variance 1 by column over the batch. Without that it goes to one point and
    stays (CIFAR-10: right 16.7 %, AUROC 50.0 at commit 47b6258); a tenth of the rate, a soft margin
    and a semi-hard beginning did not keep short trainings from it. The means are not brought to
    unit length, so a cosine could decide otherwise, and there is one score.
    """

    means: Tensor

    def __init__(self, encoder: Encoder, classes: int, settings: PairSettings) -> None:
        super().__init__()
        self.settings, self.classes = settings, classes
        self.scores = ("distance",)
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, encoder.features)
        hard = settings.loss == "hard"
        self.norm = nn.BatchNorm1d(encoder.features, affine=False) if hard else nn.Identity()
        self.register_buffer("means", torch.zeros(classes, encoder.features))

    def forward(self, images: Tensor) -> Tensor:
        features = wide(through_head(self.head, self.encoder(images)))
        return F.normalize(self.norm(features), dim=1)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs, per_class=PER_CLASS, finish=self.finish)

    def loss(self, batch: Batch) -> Tensor:
        """The settings' loss on the knowns; a background batch is not used."""
        return LOSSES[self.settings.loss](self(batch.images), batch.labels, self.settings.margin)

    def finish(self, passes: Passes) -> None:
        self.means.copy_(class_means(passes, self, self.classes))

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        unit = F.normalize(outputs, dim=1)  # of image and mirror image, the mean is shorter
        return -pair_distances(unit, self.means.to(outputs.dtype))

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)


class WithPairs(LinearLogits):
    """Cross-entropy plus the marginal or the range term; scores of the softmax."""

    def __init__(
        self, encoder: Encoder, classes: int, settings: MarginalSettings | RangeSettings
    ) -> None:
        super().__init__(encoder, classes)
        self.settings = settings

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs, per_class=PER_CLASS)

    def loss(self, batch: Batch) -> Tensor:
        """−log p_y + term on the knowns; a background batch is not used."""
        features = self.encoder(batch.images)
        known = F.cross_entropy(wide(through_head(self.head, features)), batch.labels)
        if isinstance(self.settings, MarginalSettings):
            return known + marginal_term(features, batch.labels, self.settings)
        return known + range_term(features, batch.labels, self.settings)
