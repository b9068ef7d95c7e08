"""OpenMax: a softmax net whose logits give way to an unknown class far from the class means."""

from __future__ import annotations

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
    check_score,
    check_whole,
    one_stage,
    through_head,
)
from deepsimplex.methods.means import pair_distances
from deepsimplex.methods.weibull import (
    fit_means_and_tails,
    no_tails,
    openmax_logits,
    tail_probability,
    unknown_odds,
)
from deepsimplex.simplex import wide


@dataclass(frozen=True)
class OpenMaxSettings:
    """Tail and α are OSDN's; the plain Euclidean distance is that of Neal et al. 2018.

    OSDN's own is "eucos", Euclid/200 + 1 − cosine: 200 was chosen for 1000 classes' logits, and
    with few classes it leaves the cosine alone.
    """

    tail: int = 20  # farthest correct training samples of a class; a fifth of it at most
    alpha: int = 10  # largest logits that are re-weighted; C if there are fewer classes
    distance: Literal["euclid", "eucos"] = "euclid"

    def __post_init__(self) -> None:
        check_choices(self)
        check_whole(self, tail=2, alpha=0)


def euclid(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_i‖; (n, d), (n, d) → (n,)."""
    return (a - b).norm(dim=1)


def eucos(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_i‖/200 + 1 − cos(a_i, b_i); (n, d), (n, d) → (n,)."""
    return euclid(a, b) / 200 + 1 - F.cosine_similarity(a, b, dim=1)


def all_distances(rows: Tensor, means: Tensor, distance: str) -> Tensor:
    """From each row to every class mean; (n, d), (C, d) → (n, C)."""
    far = pair_distances(rows, means)
    if distance == "euclid":
        return far
    return far / 200 + 1 - F.normalize(rows, dim=1) @ F.normalize(means, dim=1).T


class OpenMax(Method):
    """L = −log p_y; then μ_j and a Weibull tail of ‖z − μ_j‖ for each class j.

    w_j = P(one of j's tail, its farthest correct samples, is nearer than this one). Scores:
    log-odds of 1 − P̂_0 where P̂ is OpenMax's, Neal's log Σ_j exp(z_j (1 − w_j)), and the largest
    logit. The class is the largest logit's for all of them.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: OpenMaxSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = ("openmax", "neal", "max_logit")
        self.classes = classes
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)
        self.register_buffer("means", torch.zeros(classes, classes))
        self.register_buffer("tails", no_tails(classes))

    means: Tensor
    tails: Tensor

    def forward(self, images: Tensor) -> Tensor:
        return through_head(self.head, self.encoder(images))

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs, finish=self.fit_tails)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(wide(self(batch.images)), batch.labels)

    def fit_tails(self, passes: Passes) -> None:
        distance = euclid if self.settings.distance == "euclid" else eucos
        means, tails = fit_means_and_tails(
            passes, self._activations, self.classes, distance, self.settings.tail
        )
        self.means.copy_(means)
        self.tails.copy_(tails)

    def _activations(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(images)
        return logits, logits

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return outputs

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        if score == "max_logit":
            return self.class_scores(outputs, score).amax(1)
        check_score(self, score)
        z = outputs.double()
        far = all_distances(z, self.means.double(), self.settings.distance)
        w = tail_probability(far, self.tails)
        if score == "neal":
            return (z * (1 - w)).logsumexp(1)
        return unknown_odds(openmax_logits(z, w, self.settings.alpha))
