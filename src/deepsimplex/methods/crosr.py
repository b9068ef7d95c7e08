"""CROSR: OpenMax on logits and what it takes to paint the image (Yoshihashi et al., CVPR 2019).

Their DHRNet has a lateral bottleneck at each of three stages, decoded from the top down. The
contract's encoder gives one feature vector, so here is a DHRNet of one level: 32 numbers beside
the logits. Lost are the details that only early layers still hold: reconstructions are blurred,
and an unknown that differs from the knowns in detail alone is farther out of sight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    check_numbers,
    check_score,
    check_whole,
    one_stage,
    through_head,
)
from deepsimplex.methods.networks import Generator, check_pictures
from deepsimplex.methods.openmax import all_distances, euclid
from deepsimplex.methods.weibull import (
    fit_means_and_tails,
    no_tails,
    openmax_logits,
    tail_probability,
    unknown_odds,
)
from deepsimplex.simplex import wide


@dataclass(frozen=True)
class CROSRSettings:
    """Bottleneck and weight are the paper's; tail and α those of a re-implementation."""

    latent: int = 32  # numbers in z
    reconstruction: float = 1.0  # weight of the squared error beside cross-entropy
    tail: int = 20  # farthest correct training samples of a class
    alpha: int = 10  # largest logits that are re-weighted; C if there are fewer classes

    def __post_init__(self) -> None:
        check_whole(self, latent=1, tail=2, alpha=0)
        check_numbers(self, reconstruction=ABOVE_0)


class CROSR(Method):
    """L = −log p_y + mean (x − decoder(z))², z = ReLU(W f + b); then OpenMax's tails on [y, z].

    Outputs are logits y (C) and latents z (32). In distances z is multiplied by the deviation of
    y over that of z (`unit`): both blocks spread alike, and without z it is OpenMax. The largest
    logit's class is predicted. Scores: log-odds of 1 − P̂_0, as in OpenMax, and the largest logit.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: CROSRSettings) -> None:
        super().__init__()
        check_pictures(encoder.shape)
        self.settings, self.classes = settings, classes
        self.scores = ("openmax", "max_logit")
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)
        self.lateral = nn.Linear(encoder.features, settings.latent)
        self.decoder = Generator(settings.latent, encoder.shape)
        self.register_buffer("unit", torch.ones((), dtype=torch.float64))
        self.register_buffer("means", torch.zeros(classes, classes + settings.latent))
        self.register_buffer("tails", no_tails(classes))

    unit: Tensor
    means: Tensor
    tails: Tensor

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder(images)
        latent = F.relu(through_head(self.lateral, features))
        return torch.cat([through_head(self.head, features), latent], 1)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs, finish=self.fit_detector)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy plus the mean squared error of normalised pixels."""
        logits, latent = self._split(self(batch.images))
        painted = wide(self.decoder(latent))
        error = (self.encoder.normalise(batch.images) - painted).square().mean()
        return F.cross_entropy(wide(logits), batch.labels) + self.settings.reconstruction * error

    def fit_detector(self, passes: Passes) -> None:
        """The unit of z, then class means of correct samples and Weibull tails around them."""
        logits, latent = deviations(passes, lambda images: self._split(self(images)))
        self.unit.copy_(torch.where(latent > 0, logits / latent.clamp_min(1e-30), 0.0))
        self.fit_tails(passes)

    def fit_tails(self, passes: Passes) -> None:
        means, tails = fit_means_and_tails(
            passes, self._activations, self.classes, euclid, self.settings.tail
        )
        self.means.copy_(means)
        self.tails.copy_(tails)

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs[:, : self.classes], outputs[:, self.classes :]

    def _joint(self, outputs: Tensor) -> Tensor:
        """[y, unit · z] in float64."""
        logits, latent = self._split(outputs.double())
        return torch.cat([logits, self.unit.double() * latent], 1)

    def _activations(self, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self(images)
        return self._split(outputs)[0], self._joint(outputs)

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return outputs[:, : self.classes]

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        logits = self.class_scores(outputs, score)
        if score == "max_logit":
            return logits.amax(1)
        far = all_distances(self._joint(outputs), self.means.double(), "euclid")
        w = tail_probability(far, self.tails)
        return unknown_odds(openmax_logits(logits, w, self.settings.alpha))


def deviations(
    passes: Passes, blocks: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """√ mean ‖r − r̄‖² over the training set of each of two blocks, images → (n, d), (n, d′)."""
    count = 0
    sums: list[Tensor] = []
    squares: list[Tensor] = []
    for batch in passes():
        rows = [block.double() for block in blocks(batch.images)]
        if not sums:
            first = [block[0] for block in rows]  # sums around some point, so as not to cancel
            sums, squares = [torch.zeros_like(r) for r in first], [r.new_zeros(()) for r in first]
        count += len(batch.images)
        for k, block in enumerate(rows):
            sums[k] += (block - first[k]).sum(0)
            squares[k] += (block - first[k]).square().sum()
    spread = [
        (square / count - (total / count).square().sum()).clamp_min(0).sqrt()
        for total, square in zip(sums, squares, strict=True)
    ]
    return spread[0], spread[1]
