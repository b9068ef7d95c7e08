"""C2AE: a decoder that paints the image only when told its true class (Oza, Patel, CVPR 2019).

The authors' code was not to be had; formulas and defaults are from memory [K]. The reject rule of
the paper, extreme values of matched and unmatched errors, is replaced by the threshold that every
row has. Whoever evaluated it again (Perera et al., 2020) found it far below its own table [K].
The decoder starts from the encoder's features: where those are means over a map, places are lost,
so on the benchmarks it has OSRCI's flat ones. Batches are the recipe's, not 64, and the decoder's
rate falls by the recipe's cosine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import (
    NUMBERS,
    Batch,
    Encoder,
    Method,
    Optimiser,
    Stage,
    Update,
    check_score,
    through_head,
)
from deepsimplex.methods.networks import Generator, check_pictures
from deepsimplex.simplex import wide


@dataclass(frozen=True)
class C2AESettings:
    match: float = 0.9  # α, weight of the image under its own class
    learning_rate: float = 1e-3  # Adam's, of the decoder; see the row's defaults

    def __post_init__(self) -> None:
        if not (isinstance(self.match, NUMBERS) and 0 < self.match < 1):
            raise DeepSimplexError("match between 0 and 1", repr(self.match), "change it")
        if not (isinstance(self.learning_rate, NUMBERS) and 0 < self.learning_rate < 1):
            raise DeepSimplexError(
                "learning_rate between 0 and 1", repr(self.learning_rate), "change it"
            )


class C2AE(Method):
    """Stage "fit": cross-entropy. Stage "decode", encoder and head frozen:

    G(x; j) = decoder(γ_j ⊙ F(x) + β_j), with γ_j and β_j each one linear layer of the condition
    l_j ∈ {−1, +1}^C (+1 at j). The head predicts; the score is −min_j mean|x − G(x; j)|.
    Outputs are C logits, then C errors.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: C2AESettings) -> None:
        super().__init__()
        check_pictures(encoder.shape)
        self.settings, self.classes = settings, classes
        self.scores = ("reconstruction",)
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)
        self.scale = nn.Linear(classes, encoder.features)
        self.shift = nn.Linear(classes, encoder.features)
        self.decoder = Generator(encoder.features, encoder.shape)

    def forward(self, images: Tensor) -> Tensor:
        features, target = self.encoder(images), self.encoder.normalise(images)
        errors = []
        for j in range(self.classes):  # one after another, for the memory's sake
            told = torch.full((len(images),), j, device=images.device)
            errors.append(pixel_error(target, self.paint(features, told)))
        return torch.cat([through_head(self.head, features), torch.stack(errors, 1)], 1)

    def paint(self, features: Tensor, told: Tensor) -> Tensor:
        """G(x; j): features (n, d), classes told (n,) → (n, c, h, w)."""
        condition = conditions(self.classes, self.scale.weight)[told]
        painted: Tensor = self.decoder(self.scale(condition) * features + self.shift(condition))
        return painted

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        adam = Optimiser("adam", self.settings.learning_rate)
        first = (self.encoder, self.head)
        second = (self.scale, self.shift, self.decoder)
        return (
            Stage("fit", (Update("fit", self.loss, parameters_of(*first)),), epochs),
            Stage(
                "decode",
                (Update("decode", self.decoding_loss, parameters_of(*second), adam),),
                epochs,
                frozen=first,
            ),
        )

    def loss(self, batch: Batch) -> Tensor:
        logits = wide(through_head(self.head, self.encoder(batch.images)))
        return F.cross_entropy(logits, batch.labels)

    def decoding_loss(self, batch: Batch) -> Tensor:
        """α·mean|x − G(x; y)| + (1 − α)·mean|x′ − G(x; y′)|, x′ another image of class y′ ≠ y.

        x′ is x's partner in a shuffled batch; partners of one class have weight 0.
        """
        with torch.no_grad():
            features = self.encoder(batch.images)
        order = torch.rand(len(batch.labels), device=batch.labels.device).argsort()
        told = torch.cat([batch.labels, batch.labels[order]])
        painted = self.paint(torch.cat([features, features]), told)
        images = self.encoder.normalise(batch.images)
        matched, unmatched = pixel_error(torch.cat([images, images[order]]), painted).chunk(2)
        return match_loss(
            matched, unmatched, batch.labels != batch.labels[order], self.settings.match
        )

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return outputs[:, : self.classes]

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        check_score(self, score)
        return -outputs[:, self.classes :].amin(1)


def conditions(classes: int, like: Tensor) -> Tensor:
    """l_j, −1 but for +1 at j, as the rows of (C, C), of the kind of `like`."""
    return 2 * torch.eye(classes, device=like.device, dtype=like.dtype) - 1


def pixel_error(images: Tensor, painted: Tensor) -> Tensor:
    """mean|x − x̂| of each image in normalised units: (n, c, h, w) twice → (n,)."""
    return (images - painted.to(images.dtype)).abs().flatten(1).mean(1)


def match_loss(matched: Tensor, unmatched: Tensor, differ: Tensor, match: float) -> Tensor:
    """α·mean matched + (1 − α)·mean of the unmatched errors that count; each (n,) → ()."""
    weight = differ.to(unmatched.dtype)
    wrong = (weight * unmatched).sum() / weight.sum().clamp_min(1)
    return match * matched.mean() + (1 - match) * wrong


def parameters_of(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(p for module in modules for p in module.parameters())
