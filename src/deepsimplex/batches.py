"""Batches: which images each step of an epoch sees, drawn from resident data.

The order of an epoch depends on seed, stage and epoch alone, so a training that is stopped and
started again sees the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepsimplex.data.augment import augment
from deepsimplex.methods.base import Batch, Stage
from deepsimplex.recipes import Recipe


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Raw images (N, c, h, w) or vectors (N, p), labels 0…C−1 (N,), background (M, …) or None."""

    images: Tensor
    labels: Tensor
    background: Tensor | None = None


def resident(data: TrainingSet, device: torch.device) -> TrainingSet:
    """The data on the device if it takes at most half of what is free there; labels always.

    On a GPU images lie channels-last, as its convolutions want them.
    """
    if device.type != "cuda":
        background = None if data.background is None else data.background.to(device)
        return TrainingSet(data.images.to(device), data.labels.to(device), background)
    size = data.images.nbytes + (0 if data.background is None else data.background.nbytes)
    if size > torch.cuda.mem_get_info(device)[0] // 2:
        return TrainingSet(data.images, data.labels.to(device), data.background)
    background = None if data.background is None else _placed(data.background, device)
    return TrainingSet(_placed(data.images, device), data.labels.to(device), background)


def _placed(images: Tensor, device: torch.device) -> Tensor:
    images = images.to(device)
    return images.contiguous(memory_format=torch.channels_last) if images.ndim == 4 else images


class Feed:
    """The batches of a stage, an epoch at a time, each drawn by a counter on the device.

    Its buffers stay where they are from epoch to epoch, for a captured step reads them again.
    Data that do not fit on the device are fetched into one of them before each step.
    """

    def __init__(
        self, data: TrainingSet, recipe: Recipe, stage: Stage, number: int, how: str
    ) -> None:
        self.data, self.recipe, self.stage, self.number, self.how = data, recipe, stage, number, how
        known, background = epoch_order(data, recipe, stage, number, 0)
        device = data.labels.device
        self.known = known.to(device)
        self.background = None if background is None else background.to(device)
        self.here = data.images.device == device
        self.fetched: TrainingSet | None = None
        if not self.here:
            extra = None
            if background is not None and data.background is not None:
                extra = _placed(data.background[background[0]], device)
            self.fetched = TrainingSet(_placed(data.images[known[0]], device), data.labels, extra)

    @property
    def steps(self) -> int:
        return len(self.known)

    @property
    def total(self) -> int:
        return self.steps * self.stage.epochs

    def begin(self, epoch: int) -> None:
        """Lay out an epoch."""
        known, background = epoch_order(self.data, self.recipe, self.stage, self.number, epoch)
        self.known.copy_(known)
        if self.background is not None and background is not None:
            self.background.copy_(background)
        self.orders = None if self.here else (known, background)

    def fetch(self, step: int) -> None:
        """Bring a batch of data that live in the host's memory; nothing when they are here."""
        if self.fetched is None or self.orders is None:
            return
        known, background = self.orders
        self.fetched.images.copy_(self.data.images[known[step]].pin_memory(), non_blocking=True)
        if background is not None and self.data.background is not None:
            rows = self.data.background[background[step]].pin_memory()
            assert self.fetched.background is not None
            self.fetched.background.copy_(rows, non_blocking=True)

    def draw(self, turn: Tensor, at: Tensor) -> Batch:
        """The batch of step `turn` (1,) of the epoch, augmented; `at` counts over the stage."""
        known = self.known.index_select(0, turn)[0]
        labels = self.data.labels.index_select(0, known)
        rows, source = known, self.data
        if self.fetched is not None:
            rows, source = torch.arange(len(known), device=known.device), self.fetched
        images = augment(source.images, rows, self.how)
        if self.background is None or source.background is None:
            return Batch(images, labels, None, at, self.total)
        rows = self.background.index_select(0, turn)[0]
        if self.fetched is not None:
            rows = torch.arange(len(rows), device=rows.device)
        others = augment(source.background, rows, self.how)
        return Batch(images, labels, others, at, self.total)


def epoch_order(
    data: TrainingSet, recipe: Recipe, stage: Stage, number: int, epoch: int
) -> tuple[Tensor, Tensor | None]:
    """Indices of an epoch's batches, (steps, n) and (steps, K); a rest too short is left out."""
    generator = torch.Generator().manual_seed(mix(recipe.seed, number, epoch))
    size = min(stage.batch_size or recipe.batch_size, len(data.labels))
    if stage.per_class is None:
        known = torch.randperm(len(data.labels), generator=generator)
        known = known[: len(known) // size * size].view(-1, size)
    else:
        known = balanced_order(data.labels.cpu(), size, stage.per_class, generator)
    background = None
    if data.background is not None:
        need = len(known) * (stage.background_batch or recipe.background_batch)
        background = _rounds(len(data.background), need, generator).view(len(known), -1)
    return known, background


def balanced_order(
    labels: Tensor, batch: int, per_class: int, generator: torch.Generator
) -> Tensor:
    """P×K batches of about `batch` images: P classes, K images of each; (steps, P·K).

    K is `per_class`, or more when all classes together would not fill the batch. Classes come
    round before any returns, and so do a class's images; a small class repeats some.
    """
    members = [torch.nonzero(labels == c)[:, 0] for c in labels.unique()]
    p = min(len(members), max(2, batch // per_class))
    k = max(per_class, batch // p) if p == len(members) else per_class
    steps = max(1, len(labels) // (p * k))
    classes = _rounds(len(members), steps * p, generator, whole=p)
    queues = []
    for c, own in enumerate(members):
        need = k * int((classes == c).sum())
        queues.append(iter(own[_rounds(len(own), need, generator, whole=k)].split(k)))
    return torch.cat([next(queues[c]) for c in classes.tolist()]).view(steps, p * k)


def _rounds(have: int, need: int, generator: torch.Generator, whole: int = 1) -> Tensor:
    """`need` indices below `have`: permutations one after another.

    Each is cut to a multiple of `whole`, so that no group of so many holds an index twice.
    """
    use = have // whole * whole or have
    rounds = [torch.randperm(have, generator=generator)[:use] for _ in range(-(-need // use))]
    return torch.cat([torch.empty(0, dtype=torch.int64), *rounds])[:need]


def passes(data: TrainingSet, batch: int = 1024) -> Iterator[Batch]:
    """The training set once, in order, not augmented."""
    device = data.labels.device
    none = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(data.labels), batch):
        rows = slice(start, start + batch)
        yield Batch(data.images[rows].to(device), data.labels[rows], None, none)


def mix(*parts: int) -> int:
    """A 63-bit seed from small integers."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
