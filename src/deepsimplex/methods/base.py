"""The contract between a method and the one loop.

A method is a network with named scores and a list of stages. A stage says which losses are
descended by which optimiser, how batches are drawn, what stays frozen, and what happens after
each step and after the last one. The loop (engine.py) knows nothing else about methods, and a
method knows nothing about loops, devices or files.

State that must survive a stop (running centres, counters, Weibull tails) is a registered buffer:
it is in the checkpoint and in the model file because it is in `state_dict()`. Randomness comes
from torch's default generators, which are seeded anew for every step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError


@dataclass(frozen=True, eq=False)
class Batch:
    """What a loss sees: images (n, …), labels (n,), background images (K, …) or None.

    All of it lies on the device, the step too: on a GPU a loss is captured once and replayed,
    so it computes with these tensors and never looks at their values.
    """

    images: Tensor
    labels: Tensor
    background: Tensor | None
    step: Tensor  # (), counted over the stage; survives resume
    total: int | None = None  # steps of the whole stage, where they are known


# What counts as a number in settings and recipes; bool is one to Python, and refused by range.
NUMBERS = (int, float, np.integer, np.floating)
WHOLE_NUMBERS = (int, np.integer)
ABOVE_0 = 1e-12
"""The least of a number that may be small but not 0."""


@runtime_checkable
class Choosy(Protocol):
    """Settings of which some decide whether others are read."""

    def unread(self) -> tuple[str, ...]:
        """Fields that nothing looks at, the others being what they are."""


# Each call is one pass over the training set in order, not augmented: class means, Weibull tails.
Passes = Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class Optimiser:
    """An optimiser of a stage's own, where the recipe's will not do (a GAN's Adam, say)."""

    kind: Literal["sgd", "adamw", "adam"]
    learning_rate: float
    momentum: float = 0.9  # β₁ for Adam
    beta2: float = 0.999
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: Callable[[int, int], float] | None = None  # (step, steps) → factor; None: recipe's


@dataclass(frozen=True)
class Update:
    """One optimiser step: the loss it descends and the parameters it moves.

    `loss` may update buffers in place (running centres, counters), as BatchNorm does. Updates
    that name the same `shares` step one optimiser, with one momentum.
    """

    name: str
    loss: Callable[[Batch], Tensor]
    parameters: tuple[nn.Parameter, ...]
    optimiser: Optimiser | None = None
    shares: str | None = None


@dataclass(frozen=True)
class Stage:
    """A stretch of training. Updates run in order on each batch.

    Parameters of no update get no gradient. None takes the recipe's number.
    """

    name: str
    updates: tuple[Update, ...]
    epochs: int
    batch_size: int | None = None
    background_batch: int | None = None
    augment: str | None = None
    per_class: int | None = None  # class-balanced P×K batches of K = per_class images or more
    frozen: tuple[nn.Module, ...] = ()  # kept in eval mode
    after_step: Callable[[Batch], None] | None = None  # without gradients
    finish: Callable[[Passes], None] | None = None  # after the last step, in eval mode
    capture: bool = True  # False: a loss whose shapes depend on values, run as written on a GPU


class Normalise(nn.Module):
    """(x − mean) / std by channel for images (n, c, h, w), by column for vectors (n, p).

    Raw input goes in, uint8 pixels as 0…255; the statistics are part of the model. The mean of a
    vector's column is kept and subtracted in float64: a column may sit far from zero.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        size = (shape[0], *(1 for _ in shape[1:]))
        exact = torch.float64 if len(shape) == 1 else torch.float32
        self.register_buffer("mean", torch.zeros(size, dtype=exact))
        self.register_buffer("std", torch.ones(size))

    mean: Tensor
    std: Tensor

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean).to(self.std.dtype) / self.std  # integers become floats

    def fit(self, images: Tensor) -> None:
        """Statistics of the training images (n, …); a constant channel is only centred."""
        if images.dtype == torch.uint8:
            self._fit_pixels(images)
            return
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
        self._set(mean, (square / count).sqrt())

    def _fit_pixels(self, images: Tensor) -> None:
        """The same from a histogram of each channel: exact, and in one pass over bytes."""
        values = torch.arange(256, dtype=torch.float64)
        counts = torch.stack(
            [
                sum(
                    (torch.bincount(r[:, c].flatten(), minlength=256) for r in images.split(4096)),
                    torch.zeros(256, dtype=torch.int64),
                )
                for c in range(images.shape[1])
            ]
        ).double()
        total = counts.sum(1)
        mean = counts @ values / total
        square = (counts * (values - mean[:, None]).square()).sum(1) / total
        self._set(mean, square.sqrt())

    def _set(self, mean: Tensor, std: Tensor) -> None:
        std = torch.where(std > 1e-12 * (1 + mean.abs()), std, 1.0)
        self.mean.copy_(mean.view(self.mean.shape))
        self.std.copy_(std.view(self.std.shape))


class Encoder(nn.Module):
    """Raw images → normalised → backbone → feature vectors (n, features)."""

    def __init__(self, backbone: nn.Module, features: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
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


def one_stage(
    method: Method, loss: Callable[[Batch], Tensor], epochs: int, **options: Any
) -> tuple[Stage, ...]:
    """All parameters by one loss, the recipe's way; `options` are the Stage's."""
    update = Update("fit", loss, tuple(method.parameters()))
    return (Stage("fit", (update,), epochs, **options),)


def part_of(epochs: int, share: float) -> int:
    """So much of the epochs: one at least where there are any, and none of share 0."""
    return max(min(1, epochs), round(share * epochs)) if share else 0


def through_head(head: nn.Module, features: Tensor) -> Tensor:
    """head(features), not rounded to bfloat16, which would blur a distance of 1 by 2⁻⁹.

    A head of millions of weights keeps autocast's precision: its products would take the time.
    """
    small = sum(p.numel() for p in head.parameters()) < 2**24
    half = features.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(features.device.type, enabled=False) if small else nullcontext():
        out: Tensor = head(features.float() if small and half else features)
        return out


def known_and_background(
    method: Callable[[Tensor], Tensor], batch: Batch
) -> tuple[Tensor, Tensor | None]:
    """Outputs of a batch's knowns and background from one forward pass."""
    if batch.background is None:
        return method(batch.images), None
    outputs = method(torch.cat([batch.images, batch.background]))
    return outputs[: len(batch.images)], outputs[len(batch.images) :]


def check_choices(settings: Any) -> None:
    """Every Literal field of a settings dataclass has one of its values, every bool is one."""
    for name, hint in get_type_hints(type(settings)).items():
        if hint is bool and not isinstance(getattr(settings, name), bool):
            raise DeepSimplexError(
                f"{name} as true or false", repr(getattr(settings, name)), "choose one"
            )
        pure = get_origin(hint) is Literal
        parts = [hint] if pure else get_args(hint)
        choices = [v for part in parts if get_origin(part) is Literal for v in get_args(part)]
        value = getattr(settings, name)
        # True is 1 and 1.0 is 1, but not as a choice.
        foreign = isinstance(value, bool | float) or value not in choices
        if choices and (pure or isinstance(value, str)) and foreign:
            raise DeepSimplexError(
                f"{name} among {', '.join(map(str, choices))}", repr(value), "choose one"
            )


def check_numbers(settings: Any, **least: float | None) -> None:
    """Each named field is a finite number, of `least` or more, or a word of its Literal."""
    hints = get_type_hints(type(settings))
    for name, low in least.items():
        value = getattr(settings, name)
        words = [w for p in get_args(hints[name]) if get_origin(p) is Literal for w in get_args(p)]
        if isinstance(value, str) and value in words:
            continue
        number = isinstance(value, NUMBERS) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or (low is not None and value < low):
            wanted = f"a finite {name}" if low is None else f"{name} of {low:g} or more"
            wanted = f"{name} above 0" if low == ABOVE_0 else wanted
            raise DeepSimplexError(wanted, repr(value), "change it")


def check_whole(settings: Any, **least: int) -> None:
    """Each named field is a whole number of `least` or more, or None where that may be."""
    hints = get_type_hints(type(settings))
    for name, low in least.items():
        value = getattr(settings, name)
        if value is None and type(None) in get_args(hints[name]):
            continue
        whole = isinstance(value, WHOLE_NUMBERS) and not isinstance(value, bool)
        if not whole or value < low:
            raise DeepSimplexError(
                f"{name} as a whole number of {low} or more", repr(value), "change it"
            )


def check_score(method: Method, score: str) -> None:
    if score not in method.scores:
        raise DeepSimplexError(
            f"a score among {', '.join(method.scores)}", repr(score), "choose one of them"
        )
