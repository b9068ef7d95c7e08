"""Softmax with a running centre for each class, to which its features are drawn.

Center loss is Wen et al., ECCV 2016; contrastive-center loss Qi and Su, ICIP 2017, arXiv
1707.07391 [K]. Centres are no parameters: weight decay would drag them to the origin. They are
buffers, moved by Wen et al.'s rule. Qi and Su descend their own loss in the centres too, which
pushes rival centres away without bound and moves own ones the slower the more classes there are;
here both rows have the one rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import (
    ABOVE_0,
    Batch,
    Encoder,
    Stage,
    check_choices,
    check_numbers,
    one_stage,
    through_head,
)
from deepsimplex.methods.softmax import LinearLogits
from deepsimplex.simplex import wide


@dataclass(frozen=True)
class CentreSettings:
    term: Literal["center", "contrastive"] = "center"
    weight: float = 0.1  # λ, the middle of the paper's 0.01 … 1 on MNIST; 0.003 on faces
    rate: float = 0.5  # α, of the centres
    delta: float = 1.0  # δ of the contrastive term

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, weight=0, rate=0, delta=ABOVE_0)
        if self.rate > 1:
            raise DeepSimplexError("rate of 1 or less", repr(self.rate), "change it")

    def unread(self) -> tuple[str, ...]:
        """Fields that the loss does not look at."""
        return ("delta",) if self.term == "center" else ()


class Centred(LinearLogits):
    """L = CE + λ · term(f, c_y); f is the head's input, scores are softmax's."""

    def __init__(self, encoder: Encoder, classes: int, settings: CentreSettings) -> None:
        super().__init__(encoder, classes)
        self.settings = settings
        self.register_buffer("centres", torch.zeros(classes, encoder.features))

    centres: Tensor

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        """Against the centres as they were before this batch, which then moves them."""
        features = self.encoder(batch.images)
        logits, features = wide(through_head(self.head, features)), wide(features)
        with torch.autocast(features.device.type, enabled=False):
            centres, settings = self.centres.to(features.dtype), self.settings
            if settings.term == "center":
                term = center_term(features, batch.labels, centres)
            else:
                term = contrastive_term(features, batch.labels, centres, settings.delta)
            after = moved(centres, features.detach(), batch.labels, settings.rate)
            self.centres.copy_(after)
            return F.cross_entropy(logits, batch.labels) + settings.weight * term


def center_term(features: Tensor, labels: Tensor, centres: Tensor) -> Tensor:
    """½ mean_i ‖f_i − c_{y_i}‖²; (n, d), (n,), (C, d) → ()."""
    return _own(features, labels, centres).mean() / 2


def contrastive_term(features: Tensor, labels: Tensor, centres: Tensor, delta: float) -> Tensor:
    """½ mean_i ‖f_i − c_{y_i}‖² / (Σ_{j≠y_i} ‖f_i − c_j‖² + δ): a mean of ratios, the paper's sum.

    Σ_j ‖f − c_j‖² = C‖f − c̄‖² + Σ_j ‖c_j − c̄‖², so nothing of shape (n, C, d) is made.
    """
    own, middle = _own(features, labels, centres), centres.mean(0)
    spread = (centres - middle).square().sum()
    every = len(centres) * (features - middle).square().sum(1) + spread
    return (own / ((every - own).clamp_min(0) + delta)).mean() / 2


def moved(centres: Tensor, features: Tensor, labels: Tensor, rate: float) -> Tensor:
    """c_j + α Σ_{i: y_i=j} (f_i − c_j) / (1 + n_j); (C, d), (n, d), (n,) → (C, d)."""
    members = is_own(labels, len(centres)).to(features.dtype)
    steps = members.T @ (features - centres[labels])
    return centres + rate * steps / (1 + members.sum(0))[:, None]


def is_own(labels: Tensor, classes: int) -> Tensor:
    """Whether j = y_i: (n,) → (n, C)."""
    return labels[:, None] == torch.arange(classes, device=labels.device)


def _own(features: Tensor, labels: Tensor, centres: Tensor) -> Tensor:
    """‖f_i − c_{y_i}‖²; (n,)."""
    return (features - centres[labels]).square().sum(1)
