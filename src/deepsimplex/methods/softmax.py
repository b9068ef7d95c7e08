"""The baseline: a linear head and cross-entropy, scored by its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import (
    Batch,
    Encoder,
    Method,
    Stage,
    Update,
    check_score,
    through_head,
)

LOGIT_SCORES = ("max_logit", "max_probability", "energy", "neg_entropy")


@dataclass(frozen=True)
class SoftmaxSettings:
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise DeepSimplexError(
                "label_smoothing from 0 to below 1", repr(self.label_smoothing), "change it"
            )


class Softmax(Method):
    """L = −log p_y; scores max logit, max probability, energy logΣe^z and −entropy."""

    def __init__(self, encoder: Encoder, classes: int, settings: SoftmaxSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = LOGIT_SCORES
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)

    def forward(self, images: Tensor) -> Tensor:
        return through_head(self.head, self.encoder(images))

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return (Stage("fit", (Update("fit", self.loss, tuple(self.parameters())),), epochs),)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy on the knowns; a background batch is not used."""
        logits = self(batch.images).float()
        return F.cross_entropy(logits, batch.labels, label_smoothing=self.settings.label_smoothing)

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return logit_class_scores(outputs, score)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return logit_knownness(outputs, score)


def logit_class_scores(logits: Tensor, score: str) -> Tensor:
    """Logits, or log-probabilities (float64: float32 saturates into ties); (n, C) → (n, C)."""
    return logits.double().log_softmax(1) if score == "max_probability" else logits


def logit_knownness(logits: Tensor, score: str) -> Tensor:
    """max z, max log p, logΣe^z or Σ p log p; (n, C) → (n,)."""
    if score == "energy":
        return logits.double().logsumexp(1)
    if score == "neg_entropy":
        log_p = logits.double().log_softmax(1)
        return (log_p.exp() * log_p).sum(1)
    return logit_class_scores(logits, score).amax(1)
