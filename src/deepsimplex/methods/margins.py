"""Softmax on the sphere: margins in the angle, and class weights that keep their distance.

Margins: SphereFace (Liu et al., CVPR 2017), CosFace (Wang et al., CVPR 2018), ArcFace (Deng et
al., CVPR 2019). Spread: RegularFace (Zhao et al., CVPR 2019) [K], minimum hyperspherical energy
(Liu et al., NeurIPS 2018), UniformFace (Duan et al., CVPR 2019) [K].

A margin narrows the target's logit in training alone; scores know no margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.layers import used_elsewhere
from deepsimplex.methods.base import (
    ABOVE_0,
    Batch,
    Encoder,
    Method,
    Stage,
    check_choices,
    check_numbers,
    check_score,
    check_whole,
    one_stage,
)
from deepsimplex.methods.centres import is_own, moved
from deepsimplex.methods.means import pair_distances
from deepsimplex.methods.softmax import LinearLogits
from deepsimplex.simplex import wide


@dataclass(frozen=True)
class MarginSettings:
    """CosFace takes the margin from the cosine, ArcFace adds it to the angle (radians).

    s = 64 is made for faces and saturates with few classes. By CosFace's bound with its margin,
    s (1 − m + 1/(C−1)) ≥ ln((C−1) P / (1−P)), 16 lets p_y reach P = 0.99 for C up to 300.
    """

    kind: Literal["cosine", "angle"] = "cosine"
    margin: float = 0.35  # m
    scale: float = 16.0  # s

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, margin=0, scale=ABOVE_0)
        if self.margin >= math.pi / 2:
            raise DeepSimplexError("margin below π/2", repr(self.margin), "change it")


class Margin(Method):
    """CE on s·cosθ_j with s(cosθ_y − m) or s·cos(θ_y + m) for the target; outputs are features.

    ArcFace's gradient is CosFace's, ∂/∂cosθ_y = s, as its authors' code has it. The true one, s
    sin(θ+m)/sinθ, is 0 at θ = π − m, and there it leaves a fresh net: all features opposite to all
    weights, which lie together (CIFAR-10: right 96.0 %, AUROC 64.0 at commit 47b6258).
    Scores: cosθ_j and the logit s·cosθ_j.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: MarginSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = ("cosine", "logit")
        self.encoder = encoder
        self.weight = class_weights(classes, encoder.features)

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        features, settings = wide(self(batch.images)), self.settings
        with torch.autocast(features.device.type, enabled=False):
            cosine = cosines(features, self.weight)
            own = cosine.gather(1, batch.labels[:, None])
            if settings.kind == "cosine":
                own = own - settings.margin
            else:
                own = own + (beyond(own, settings.margin) - own).detach()
            logits = torch.where(is_own(batch.labels, cosine.shape[1]), own, cosine)
            return F.cross_entropy(settings.scale * logits, batch.labels)

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        cosine = cosines(outputs, self.weight)
        return cosine if score == "cosine" else self.settings.scale * cosine

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)


@dataclass(frozen=True)
class SphereSettings:
    """SphereFace; with `uniform` above 0, UniformFace.

    λ = max(floor, start / (1 + decay · step)) eases the margin in, as the authors' script does, in
    1658 steps; a training of fewer than twice as many does so in its first half. (Eased in within a
    hundred steps, features shrink to 0 instead: CIFAR-10 right 27.8 % after 20 epochs of ResNet-18,
    at commit 52c6c4f.)
    """

    m: int = 4
    start: float = 1000.0
    decay: float = 0.12
    floor: float = 5.0
    uniform: float = 0.0  # weight of UniformFace's term
    rate: float = 0.5  # α, of its centres

    def __post_init__(self) -> None:
        check_whole(self, m=1)
        check_numbers(self, start=0, decay=0, floor=0, uniform=0, rate=0)
        if self.rate > 1:
            raise DeepSimplexError("rate of 1 or less", repr(self.rate), "change it")

    def unread(self) -> tuple[str, ...]:
        """Fields that the loss does not look at."""
        return () if self.uniform > 0 else ("rate",)


class Sphere(Method):
    """CE on ‖f‖cosθ_j with ‖f‖(λcosθ_y + ψ(θ_y)) / (1+λ) for the target; outputs are features.

    Features keep their length, and it tells how familiar an image is: scores are the logit
    ‖f‖cosθ_j and cosθ_j. UniformFace keeps running class centres and pushes them apart; its
    gradient reaches the features through the step that they make their centre take [K].
    """

    def __init__(self, encoder: Encoder, classes: int, settings: SphereSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = ("logit", "cosine")
        self.encoder = encoder
        self.weight = class_weights(classes, encoder.features)
        if settings.uniform > 0:
            self.register_buffer("centres", torch.zeros(classes, encoder.features))

    centres: Tensor

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        features, settings = wide(self(batch.images)), self.settings
        with torch.autocast(features.device.type, enabled=False):
            cosine = cosines(features, self.weight)
            own = cosine.gather(1, batch.labels[:, None])
            numbers = settings.start, settings.decay, settings.floor
            ease = annealing(batch.step * pace(batch.total, *numbers), *numbers)
            own = (ease * own + psi(own, settings.m)) / (1 + ease)
            cosine = torch.where(is_own(batch.labels, cosine.shape[1]), own, cosine)
            loss = F.cross_entropy(_norms(features) * cosine, batch.labels)
            if settings.uniform == 0:
                return loss
            before = self.centres.to(features.dtype)
            after = moved(before, features, batch.labels, settings.rate)
            self.centres.copy_(after.detach())
            return loss + settings.uniform * closeness(after)

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        cosine = cosines(outputs, self.weight)
        return cosine if score == "cosine" else _norms(outputs) * cosine

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)


@dataclass(frozen=True)
class SpreadSettings:
    """RegularFace's cosines with `regular`, else hyperspherical energies of order `power`."""

    regular: float = 0.0  # weight of the largest cosine between class weights
    output: float = 0.0  # weight of the energy of class weights
    hidden: float = 0.0  # weight of the mean energy of the layers below
    power: Literal[0, 1, 2] = 2
    half_space: bool = True  # below, w and −w are both there: they do the same work

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, regular=0, output=0, hidden=0)

    def unread(self) -> tuple[str, ...]:
        """Fields that the loss does not look at."""
        power = () if self.output or self.hidden else ("power",)
        return power if self.hidden else (*power, "half_space")


class Spread(LinearLogits):
    """CE + λ_r·regularity(W) + λ_o·E(W) + λ_h·mean_l E(W_l), W the head's weights, W_l those below.

    Scores are softmax's. A filter is a row of its layer's weights, flattened. Layers of one
    filter, or of filters of one weight, have no room to spread and are left out.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: SpreadSettings) -> None:
        super().__init__(encoder, classes)
        self.settings = settings

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        logits, settings = wide(self(batch.images)), self.settings
        with torch.autocast(logits.device.type, enabled=False):
            loss = F.cross_entropy(logits, batch.labels)
            if settings.regular:
                loss = loss + settings.regular * regularity(self.head.weight)
            if settings.output:
                loss = loss + settings.output * energy(self.head.weight, settings.power)
            layers = self.hidden() if settings.hidden else []
            if layers:
                each = [energy(w, settings.power, settings.half_space) for w in layers]
                loss = loss + settings.hidden * torch.stack(each).mean()
        return loss

    def hidden(self) -> list[Tensor]:
        """Weights of the encoder's layers, (filters, weights) each, in full precision."""
        found = []
        for layer in self.encoder.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                used_elsewhere(layer.weight)
                found.append(wide(layer.weight).flatten(1))
        return [weight for weight in found if min(weight.shape) > 1]


def class_weights(classes: int, features: int) -> nn.Parameter:
    """w_j without bias, (C, d), of length near 1; only their directions matter."""
    return nn.Parameter(torch.randn(classes, features) / math.sqrt(features))


def cosines(features: Tensor, weight: Tensor) -> Tensor:
    """cosθ_ij = f_i·w_j / ‖f_i‖‖w_j‖; (n, d), (C, d) → (n, C)."""
    return _unit(features) @ _unit(weight.to(features.dtype)).T


def beyond(cosine: Tensor, margin: float) -> Tensor:
    """cos(θ + m) = cosθ cos m − sinθ sin m, and cosθ − m sin m where θ + m > π.

    Strictly decreasing in θ. sinθ is kept from 0, where its slope is infinite.
    """
    sine = ((1 - cosine) * (1 + cosine)).clamp_min(1e-7).sqrt()
    inside = cosine * math.cos(margin) - sine * math.sin(margin)
    return torch.where(cosine > -math.cos(margin), inside, cosine - margin * math.sin(margin))


def psi(cosine: Tensor, m: int) -> Tensor:
    """ψ(θ) = (−1)^k cos(mθ) − 2k for θ in [kπ/m, (k+1)π/m]; cos(mθ) is a polynomial of cosθ."""
    before, now = torch.ones_like(cosine), cosine
    k = torch.zeros_like(cosine)
    for i in range(1, m):
        before, now = now, 2 * cosine * now - before
        k = k + (cosine.detach() <= math.cos(i * math.pi / m))
    return (1 - 2 * (k % 2)) * now - 2 * k


def annealing(step: Tensor | int, start: float, decay: float, floor: float) -> Tensor:
    """λ = max(floor, start / (1 + decay · step)); () → ()."""
    return (start / (1 + decay * torch.as_tensor(step))).clamp_min(floor)


def pace(total: int | None, start: float, decay: float, floor: float) -> float:
    """How many steps of `annealing` to take at a time, so that half of `total` reach its floor.

    Where λ has no floor above 0, or does not fall, one.
    """
    if not total or floor <= 0 or decay <= 0:
        return 1.0
    return max(1.0, 2 * (start / floor - 1) / decay / total)


def regularity(weight: Tensor) -> Tensor:
    """(1/C) Σ_i max_{j≠i} cos(w_i, w_j), least −1/(C−1) at the simplex; (C, d) → ()."""
    cosine = cosines(weight, weight)
    return cosine.masked_fill(_diagonal(cosine), -2).amax(1).mean()


def energy(weight: Tensor, power: int, half_space: bool = False) -> Tensor:
    """mean_{i≠j} of −log r², 1/r or 1/r² for power 0, 1, 2; r = ‖ŵ_i − ŵ_j‖; (C, d) → ().

    r² = 2 − 2cosθ: differences of all pairs would not fit in memory. In half-space form every w
    has −w beside it. 1/r² is (C−1)/2C at the simplex. Against overflow r² is at least 1e-4; the
    authors' code has 1e-4 beside the norms instead.
    """
    directions = _unit(weight)
    if half_space:
        directions = torch.cat([directions, -directions])
    cosine = directions @ directions.T
    itself = _diagonal(cosine)
    squared = (2 - 2 * cosine).masked_fill(itself, 1).clamp_min(1e-4)
    each = -squared.log() if power == 0 else squared ** (-power / 2)
    count = len(directions)
    return each.masked_fill(itself, 0).sum() / (count * (count - 1))


def closeness(centres: Tensor) -> Tensor:
    """mean_{i≠j} 1 / (‖c_i − c_j‖ + 1), UniformFace's term; (C, d) → ()."""
    apart = pair_distances(centres, centres)
    each = (1 / (apart + 1)).masked_fill(_diagonal(apart), 0)
    return each.sum() / (len(centres) * (len(centres) - 1))


def _unit(vectors: Tensor) -> Tensor:
    return vectors / _norms(vectors).clamp_min(1e-6)


def _norms(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=1, keepdim=True)


def _diagonal(square: Tensor) -> Tensor:
    return torch.eye(len(square), dtype=torch.bool, device=square.device)
