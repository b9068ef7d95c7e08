"""The contract between a method and the one loop.

A method is a network with named scores and a list of stages. A stage says which losses are
descended by which optimiser, how batches are drawn, what stays frozen, and what happens after
each step and after the last one. The loop (engine.py) knows nothing else about methods, and a
method knows nothing about loops, devices or files.

State that must survive a stop (running centres, counters, Weibull tails) is a registered buffer:
it is in the checkpoint and in the model file because it is in `state_dict()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError


@dataclass(frozen=True)
class Batch:
    """What a loss sees: images (n, …), labels (n,), background images (K, …) or None."""

    images: Tensor
    labels: Tensor
    background: Tensor | None
    step: int  # counted over the stage; survives resume


# Each call is one pass over the training set in order, not augmented: class means, Weibull tails.
Passes = Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class Optimiser:
    """An optimiser of a stage's own, where the recipe's will not do (a GAN's Adam, say)."""

    kind: Literal["sgd", "adamw", "adam"]
    learning_rate: float
    momentum: float = 0.9  # β₁ for Adam
    weight_decay: float = 0.0
    constant: bool = False  # no schedule


@dataclass(frozen=True)
class Update:
    """One optimiser step: the loss it descends and the parameters it moves.

    `loss` may update buffers in place (running centres, counters), as BatchNorm does.
    """

    name: str
    loss: Callable[[Batch], Tensor]
    parameters: tuple[nn.Parameter, ...]
    optimiser: Optimiser | None = None


@dataclass(frozen=True)
class Stage:
    """A stretch of training. Updates run in order on each batch."""

    name: str
    updates: tuple[Update, ...]
    epochs: int
    per_class: int | None = None  # class-balanced P×K batches of K = per_class images each
    frozen: tuple[nn.Module, ...] = ()  # kept in eval mode
    after_step: Callable[[Batch], None] | None = None  # without gradients
    finish: Callable[[Passes], None] | None = None  # after the last step, in eval mode


class Normalise(nn.Module):
    """(x − mean) / std by channel for images (n, c, h, w), by column for vectors (n, p).

    Raw input goes in, uint8 pixels as 0…255; the statistics are part of the model.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        size = (shape[0], *(1 for _ in shape[1:]))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    mean: Tensor
    std: Tensor

    def forward(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def fit(self, images: Tensor) -> None:
        """Statistics of the training images (n, …); a constant channel is only centred."""
        axes = [0, *range(2, images.ndim)]
        count = images.numel() // images.shape[1]
        # A few rows at a time in float64: no float copy of the whole set.
        total = torch.zeros(images.shape[1], dtype=torch.float64)
        square = torch.zeros_like(total)
        for rows in images.split(4096):
            total += rows.double().sum(axes)
        mean = total / count
        centre = mean.view(1, -1, *(1 for _ in images.shape[2:]))
        for rows in images.split(4096):
            square += (rows.double() - centre).square().sum(axes)
        std = (square / count).sqrt()
        std = torch.where(std > 1e-12 * (1 + mean.abs()), std, 1.0)
        self.mean.copy_(mean.view(self.mean.shape))
        self.std.copy_(std.view(self.std.shape))


class Encoder(nn.Module):
    """Raw images → normalised → backbone → feature vectors (n, features)."""

    def __init__(self, backbone: nn.Module, features: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features = features
        self.normalise = Normalise(shape)
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(self.normalise(images))


class Method(nn.Module, ABC):
    """A classifier with named knownness scores; higher = more known."""

    scores: tuple[str, ...]  # the first is the default
    encoder: Encoder

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Images → outputs (n, d): all that the scores need."""

    @abstractmethod
    def stages(self, epochs: int) -> tuple[Stage, ...]:
        """What to train, in order, for a recipe of so many epochs."""

    @abstractmethod
    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """(n, d) → (n, C); the prediction is the argmax."""

    @abstractmethod
    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        """(n, d) → (n,), higher = more known."""


def known_and_background(
    method: Callable[[Tensor], Tensor], batch: Batch
) -> tuple[Tensor, Tensor | None]:
    """Outputs of a batch's knowns and background from one forward pass."""
    if batch.background is None:
        return method(batch.images), None
    outputs = method(torch.cat([batch.images, batch.background]))
    return outputs[: len(batch.images)], outputs[len(batch.images) :]


def check_score(method: Method, score: str) -> None:
    if score not in method.scores:
        raise DeepSimplexError(
            f"a score among {', '.join(method.scores)}", repr(score), "choose one of them"
        )
