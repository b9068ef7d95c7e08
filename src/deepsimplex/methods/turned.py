"""DSC with a vertex for every class in each of four turns of the image.

A net that must say how an image was turned has to know what it shows: labels (class, turn) are
4C vertices instead of C, and a test image is judged by its four turned views together. The idea
of joint labels is self-supervised label augmentation (Lee, Hwang, Shin, ICML 2020) [K]; here the
4C centres are a simplex, and cost no table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import Batch, Encoder, Method, Stage, check_score, one_stage
from deepsimplex.methods.dsc import DSC, DSCSettings

TURNS = 4


class Turned(Method):
    """Outputs are the features of the four views, one after another: (n, 4d)."""

    def __init__(self, encoder: Encoder, classes: int, settings: DSCSettings) -> None:
        super().__init__()
        if len(encoder.shape) != 3 or encoder.shape[1] != encoder.shape[2]:
            raise DeepSimplexError(
                "square images, which can be turned",
                f"samples of shape {encoder.shape}",
                "choose another method, or crop the images",
            )
        self.settings, self.classes = settings, classes
        self.inner = DSC(encoder, TURNS * classes, settings)
        self.scores = self.inner.scores

    @property
    def encoder(self) -> Encoder:  # type: ignore[override]
        return self.inner.encoder

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.inner(images.rot90(turn, (2, 3))) for turn in range(TURNS)], 1)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        """The inner loss on images turned at random, labels class + C·turn."""
        images, turn = turned(batch.images)
        background = None if batch.background is None else turned(batch.background)[0]
        labels = batch.labels + self.classes * turn
        return self.inner.loss(Batch(images, labels, background, batch.step, batch.total))

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """Mean over the views of the score of (class, that view's turn): (n, 4d) → (n, C)."""
        check_score(self, score)
        total = torch.zeros(len(outputs), self.classes, dtype=outputs.dtype, device=outputs.device)
        for turn, features in enumerate(outputs.chunk(TURNS, 1)):
            own = slice(turn * self.classes, (turn + 1) * self.classes)
            total = total + self.inner.class_scores(features, score)[:, own]
        return total / TURNS

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)


def turned(images: Tensor) -> tuple[Tensor, Tensor]:
    """Each image by a quarter turn of its own, and how many: (n, c, s, s) → the same, (n,)."""
    turn = torch.randint(0, TURNS, (len(images),), device=images.device)
    result = images
    for number in range(1, TURNS):
        mine = (turn == number).view(-1, 1, 1, 1)
        result = torch.where(mine, images.rot90(number, (2, 3)), result)
    return result, turn
