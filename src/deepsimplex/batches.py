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
    """The data on the device if it takes at most half of what is free there."""
    if device.type == "cuda":
        size = data.images.nbytes + (0 if data.background is None else data.background.nbytes)
        if size > torch.cuda.mem_get_info(device)[0] // 2:
            return TrainingSet(data.images, data.labels.to(device), data.background)
    background = None if data.background is None else data.background.to(device)
    return TrainingSet(data.images.to(device), data.labels.to(device), background)


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
        background = background.to(data.background.device)
    return known.to(data.images.device), background


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


def draw(
    data: TrainingSet, known: Tensor, background: Tensor | None, step: int, at: int, how: str
) -> Batch:
    device = data.labels.device
    images = augment(data.images[known].to(device, non_blocking=True), how)
    extra = None
    if background is not None and data.background is not None:
        extra = augment(data.background[background[step]].to(device, non_blocking=True), how)
    return Batch(images, data.labels[known.to(device)], extra, at)


def passes(data: TrainingSet, batch: int = 1024) -> Iterator[Batch]:
    """The training set once, in order, not augmented."""
    device = data.labels.device
    for start in range(0, len(data.labels), batch):
        rows = slice(start, start + batch)
        yield Batch(data.images[rows].to(device), data.labels[rows], None, 0)


def mix(*parts: int) -> int:
    """A 63-bit seed from small integers."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
