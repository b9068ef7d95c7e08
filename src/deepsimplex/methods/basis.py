"""Fixed centroids at the basis vectors of R^C, after Do et al. (CVPR 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

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
from deepsimplex.simplex import length, wide


@dataclass(frozen=True)
class BasisSettings:
    away: float = 1 / 3  # weight of the mean distance to the other centroids [K]

    def __post_init__(self) -> None:
        check_numbers(self, away=0)


def basis_loss(features: Tensor, labels: Tensor, away: float = 1 / 3) -> Tensor:
    """mean_i ‖f_i − e_y‖ − away/(C−1) Σ_{j≠y} ‖f_i − e_j‖; unit f (n, C), labels (n,) → ().

    Do et al. (2019), whose away is 1/3 and who sum over i [K]. Every row is compared with all C
    basis vectors, where eq. 4 asks for its own centre alone. The order is the same, O(nC) and O(nd)
    with d = C−1, and neither has a table of centres: ‖f − e_j‖² = 2 − 2f_j. On two cores it takes
    1.3 times eq. 4's time at 10 classes and 7.9 times at 10 000 (results/bench-loss-cpu.json). The
    own distance, which goes to 0, where that cancels, is subtracted coordinate by coordinate.
    """
    target = F.one_hot(labels, features.shape[1])
    own = length((features - target).square().sum(1))
    others = (length(2 - 2 * features) * (1 - target)).sum(1)
    return (own - away / (features.shape[1] - 1) * others).mean()


class Basis(Method):
    """f = (Wx + b)/‖Wx + b‖ in R^C; score −‖f − e_j‖, the same order as the cosine f_j."""

    def __init__(self, encoder: Encoder, classes: int, settings: BasisSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = ("distance",)
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(wide(through_head(self.head, self.encoder(images))), dim=1)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        """On the knowns; a background batch is not used."""
        return basis_loss(self(batch.images), batch.labels, self.settings.away)

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """−√(2 − 2f_j), in float64 and at unit length there: float32 ties near a centroid."""
        check_score(self, score)
        return -length(2 - 2 * F.normalize(outputs.double(), dim=1))

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)
