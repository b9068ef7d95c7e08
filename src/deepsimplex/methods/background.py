"""Linear heads that are shown a background: images of no class, told to be nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import (
    ABOVE_0,
    Batch,
    Encoder,
    Method,
    Optimiser,
    Stage,
    Update,
    check_choices,
    check_numbers,
    check_score,
    check_whole,
    known_and_background,
    one_stage,
    part_of,
    through_head,
)
from deepsimplex.methods.softmax import LinearLogits, logit_knownness
from deepsimplex.simplex import wide

Weight = float | Literal["auto"]
"""Of the background's mean against the knowns'; "auto" is 1/C: it counts as one class more."""


@dataclass(frozen=True)
class EntropicSettings:
    """Entropic open-set; a ring makes it objectosphere, a bias and weight ½ outlier exposure.

    Weight, ring and radius are those of the authors' code, found for 2-D features on MNIST.
    """

    background_weight: Weight = "auto"
    ring: float = 0.0  # weight of objectosphere's term on ‖f‖; 0.0001 in its authors' code
    radius: float = 50.0  # least ‖f‖ of a known there; 10 … 50 and a ring to 0.01 for wide f
    bias: bool = False  # without one, f = 0 gives the uniform distribution

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, background_weight=0, ring=0, radius=0)

    def unread(self) -> tuple[str, ...]:
        """Fields that the loss does not look at."""
        return () if self.ring > 0 else ("radius",)


@dataclass(frozen=True)
class EnergySettings:
    """The authors' numbers for CIFAR-10; the margins [K].

    Margins are in units of logits. C equal logits z have the energy −z − log C, so from 10
    classes to C both move by log(10/C) only, 0.5 for 6 classes. What they ask for is a gap of
    18; should cross-entropy suffer by it (a net with short logits), bring them nearer.
    """

    weight: float = 0.1
    margin_in: float = -25.0  # energy that a known should stay below
    margin_out: float = -7.0  # energy that background should stay above
    share: float = 0.1  # of the epochs, for fine-tuning
    tuning_rate: float = 1e-3
    background_batch: int = 256  # in fine-tuning, instead of the recipe's

    def __post_init__(self) -> None:
        check_whole(self, background_batch=1)
        check_numbers(self, weight=0, share=0, tuning_rate=ABOVE_0, margin_in=None, margin_out=None)
        if self.share >= 1:
            raise DeepSimplexError("share below 1", repr(self.share), "leave epochs for stage 1")
        if self.margin_in > self.margin_out:
            raise DeepSimplexError(
                "margin_in of margin_out or less: knowns have the lower energy",
                f"{self.margin_in} and {self.margin_out}",
                "exchange them",
            )


@dataclass(frozen=True)
class BackgroundClassSettings:
    background_weight: Weight = "auto"

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, background_weight=0)


def to_uniform(logits: Tensor) -> Tensor:
    """−(1/C) Σ_j log p_j = log Σ_j e^{z_j} − mean_j z_j; (n, C) → (n,), least at equal logits."""
    return logits.logsumexp(1) - logits.mean(1)


def ring_terms(known: Tensor, background: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """[ξ − ‖f‖]₊² of knowns and ‖f‖² of background, from norms (n,), (K,)."""
    return (radius - known).clamp_min(0).square(), background.square()


def energy_hinges(
    known: Tensor, background: Tensor, margin_in: float, margin_out: float
) -> tuple[Tensor, Tensor]:
    """[E − m_in]₊² and [m_out − E]₊², E = −log Σ_j e^{z_j}; (n, C), (K, C) → (n,), (K,)."""
    inside = (-known.logsumexp(1) - margin_in).clamp_min(0).square()
    outside = (margin_out + background.logsumexp(1)).clamp_min(0).square()
    return inside, outside


def length(features: Tensor) -> Tensor:
    """‖f‖ with a gradient of 0 at 0; (n, d) → (n, 1)."""
    squared = features.square().sum(1, keepdim=True)
    some = squared > 0
    return torch.where(some, torch.where(some, squared, 1.0).sqrt(), 0.0)


class Entropic(Method):
    """L = mean(−log p_y) + b · mean −(1/C) Σ_j log p_j over background, b its weight.

    With a ring α the terms [ξ − ‖f‖]₊² and ‖f‖² join, times α (Dhamija et al. 2018). Outlier
    exposure (Hendrycks et al. 2019) is the same with b = ½ and a head with bias. Outputs are
    the logits and ‖f‖, (n, C+1).
    """

    def __init__(self, encoder: Encoder, classes: int, settings: EntropicSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores: tuple[str, ...] = ("max_probability", "max_logit", "energy")
        if settings.ring > 0:
            self.scores = ("probability_norm", "norm", *self.scores)
        self.encoder = encoder
        self.weight = _background_weight(settings.background_weight, classes)
        self.head = nn.Linear(encoder.features, classes, bias=settings.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder(images)
        logits = through_head(self.head, features)
        return torch.cat([logits, length(features.to(logits.dtype))], 1)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        known, background = _outputs(self, batch)
        inside = F.cross_entropy(known[:, :-1], batch.labels)
        outside = to_uniform(background[:, :-1]).mean()
        if self.settings.ring > 0:
            near, far = ring_terms(known[:, -1], background[:, -1], self.settings.radius)
            inside = inside + self.settings.ring * near.mean()
            outside = outside + self.settings.ring * far.mean()
        return inside + self.weight * outside

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return outputs[:, :-1]

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        """Of the logits; or log(max_j p_j · ‖f‖), which ranks as the product; or ‖f‖."""
        logits, norm = self.class_scores(outputs, score), outputs[:, -1]
        if score == "norm":
            return norm
        if score == "probability_norm":
            norm = norm.double().clamp_min(torch.finfo(torch.float64).tiny)
            return logit_knownness(logits, "max_probability") + norm.log()
        return logit_knownness(logits, score)


class EnergyTuned(LinearLogits):
    """Cross-entropy on the knowns, then some epochs of it with hinges on the energy.

    L = mean(−log p_y) + λ (mean [E − m_in]₊² + mean_background [m_out − E]₊²), at a small rate
    that falls by a cosine to a thousandth of itself (Liu et al. 2020). While it is tuned, the
    encoder's normalisation stays as it was trained.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: EnergySettings) -> None:
        super().__init__(encoder, classes, ("energy", "max_logit", "max_probability"))
        self.settings = settings

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        parameters = tuple(self.parameters())
        tuning = part_of(epochs, self.settings.share)
        slow = Optimiser(
            "sgd",
            self.settings.tuning_rate,
            nesterov=True,
            weight_decay=5e-4,
            schedule=lambda step, steps: 1e-3 + 0.4995 * (1 + math.cos(math.pi * step / steps)),
        )
        tune = Update("tune", self.tuning_loss, parameters, slow)
        return (
            Stage(
                "fit", (Update("fit", self.loss, parameters),), max(min(1, epochs), epochs - tuning)
            ),
            # Batch statistics of known and background together would be new to a trained net.
            Stage(
                "tune",
                (tune,),
                tuning,
                background_batch=self.settings.background_batch,
                frozen=(self.encoder,),
            ),
        )

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(wide(self(batch.images)), batch.labels)

    def tuning_loss(self, batch: Batch) -> Tensor:
        known, background = _outputs(self, batch)
        inside, outside = energy_hinges(
            known, background, self.settings.margin_in, self.settings.margin_out
        )
        hinges = inside.mean() + outside.mean()
        return F.cross_entropy(known, batch.labels) + self.settings.weight * hinges


class BackgroundClass(Method):
    """Cross-entropy over C+1 classes, the last of them, 0 here, the background.

    L = mean(−log p_y) + b · mean(−log p_0). Scores max_j z_j − z_0, which is
    log(max_j p_j / p_0), and the log-odds of 1 − p_0.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: BackgroundClassSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = ("over_background", "not_background", "max_logit")
        self.encoder = encoder
        self.weight = _background_weight(settings.background_weight, classes)
        self.head = nn.Linear(encoder.features, classes + 1)

    def forward(self, images: Tensor) -> Tensor:
        return through_head(self.head, self.encoder(images))

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        known, background = _outputs(self, batch)
        outside = background.logsumexp(1) - background[:, -1]
        return F.cross_entropy(known, batch.labels) + self.weight * outside.mean()

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return outputs[:, :-1]

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        logits = self.class_scores(outputs, score)
        if score == "over_background":
            return logits.double().amax(1) - outputs[:, -1]
        if score == "not_background":
            return logits.double().logsumexp(1) - outputs[:, -1]
        return logits.amax(1)


def _outputs(method: Method, batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs of knowns and background from one forward pass, not in half precision."""
    known, background = known_and_background(method, batch)
    if background is None:
        raise DeepSimplexError("a batch with background", "none", "give background images")
    return wide(known), wide(background)


def _background_weight(weight: Weight, classes: int) -> float:
    return 1 / classes if isinstance(weight, str) else weight
