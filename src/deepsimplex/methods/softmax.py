"""The baseline: a linear head and cross-entropy, scored by its logits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
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
from deepsimplex.simplex import wide

LOGIT_SCORES = ("max_logit", "max_probability", "energy", "neg_entropy")


@dataclass(frozen=True)
class SoftmaxSettings:
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, label_smoothing=0)
        if self.label_smoothing >= 1:
            raise DeepSimplexError(
                "label_smoothing below 1", repr(self.label_smoothing), "change it"
            )


class LinearLogits(Method):
    """A linear head z = W f + b, scored by its logits; a subclass says what is descended.

    Scores max logit, max probability, energy logΣe^z and −entropy, or some of them.
    """

    def __init__(
        self, encoder: Encoder, classes: int, scores: tuple[str, ...] = LOGIT_SCORES
    ) -> None:
        super().__init__()
        self.scores = scores
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """What training descends: ()."""

    def forward(self, images: Tensor) -> Tensor:
        return through_head(self.head, self.encoder(images))

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return logit_class_scores(outputs, score)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return logit_knownness(outputs, score)


class Softmax(LinearLogits):
    """L = −log p_y."""

    def __init__(self, encoder: Encoder, classes: int, settings: SoftmaxSettings) -> None:
        super().__init__(encoder, classes)
        self.settings = settings

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy on the knowns; a background batch is not used."""
        logits = wide(self(batch.images))
        return F.cross_entropy(logits, batch.labels, label_smoothing=self.settings.label_smoothing)


def logit_class_scores(logits: Tensor, score: str, temperature: float = 1.0) -> Tensor:
    """z, or log softmax(z/T) (float64: float32 saturates into ties); (n, C) → (n, C)."""
    probable = score == "max_probability"
    return (logits.double() / temperature).log_softmax(1) if probable else logits


def logit_knownness(logits: Tensor, score: str) -> Tensor:
    """max z, max log p, logΣe^z or Σ p log p; (n, C) → (n,)."""
    if score == "energy":
        return logits.double().logsumexp(1)
    if score == "neg_entropy":
        log_p = logits.double().log_softmax(1)
        return (log_p.exp() * log_p).sum(1)
    return logit_class_scores(logits, score).amax(1)
