"""One's own images: read once, cut to the known classes, with the recipe they get unasked.

`train` and `estimate` go through here, so that the second tells of what the first makes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepsimplex.data.archives import data_root
from deepsimplex.data.background import Background, background_beside
from deepsimplex.data.protocols import known_classes
from deepsimplex.data.sources import LabelledSet, load_data
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import settings_for
from deepsimplex.recipes import SMALL, Recipe, changed, default_recipe, long_on_cpu
from deepsimplex.terminal import console, progress


def load(source: str, **how: Any) -> LabelledSet:
    """Data decoded once: image files go through a cache below the data root, with a bar."""
    with progress("Reading images") as advance:
        return load_data(source, cache=data_root() / "decoded", progress=advance, **how)


def known_data(
    source: str, known: list[str] | None, size: int | None, on_bad: str
) -> tuple[LabelledSet, LabelledSet]:
    """All that `source` has, and its images of the known classes, labelled in the order asked."""
    if size is not None and (source == "digits" or Path(source).suffix == ".npz"):
        raise DeepSimplexError("no --size for arrays", f"--size {size}", "resize them in the file")
    whole = load(source, size=size, on_bad=on_bad)
    if whole.said:
        console.print(f"Found: {whole.said}.")
    tell_unreadable(whole)
    data = whole.known_only()
    classes = known_classes(data, known if known is not None else list(data.classes))
    if classes == data.classes:
        return whole, data
    chosen = np.isin(data.names, classes)
    labels = np.array([classes.index(name) for name in data.names[chosen]], dtype=np.int64)
    return whole, dataclasses.replace(
        data, images=data.images[chosen], labels=labels, classes=classes
    )


def tell_unreadable(data: LabelledSet) -> None:
    if data.skipped:
        console.print(f"Left out, unreadable: {', '.join(data.skipped)}.")


def tell_cost(
    source: str, images: Tensor, recipe: Recipe, where: torch.device, freeze: bool = False
) -> None:
    """On a CPU: how to have the long training of larger images shorter."""
    if not freeze and long_on_cpu(tuple(images.shape[1:]), recipe, where.type):
        way = "fewer --epochs" if Path(source).suffix == ".npz" else f"--size {SMALL}"
        console.print(f"On a CPU this may take hours, and much less with {way} and another --out.")


def extra_beside(
    background: str | None, data: LabelledSet, root: Path | None = None
) -> Background | None:
    """Background for trials with this data; each trial leaves its own images out of it."""
    if background is None:
        return None
    shape, pixels = data.images.shape[1:], data.images.dtype == np.uint8
    return background_beside(background, data_root(root), data.source, shape, pixels)


def recipe_for(
    images: Tensor,
    background: bool,
    *,
    method: str,
    settings: dict[str, Any],
    seed: int,
    freeze: bool,
    changes: dict[str, Any],
) -> Recipe:
    """The default for these images, with what was asked otherwise."""
    shape, pixels = tuple(images.shape[1:]), images.dtype == torch.uint8
    recipe = default_recipe(method, shape, seed, len(images), background, pixels and not freeze)
    still = {"augment": "none"} if freeze else {}  # features of a frozen net are computed once
    asked = {name: value for name, value in changes.items() if value is not None}
    return changed(recipe, {**still, **asked, "settings": settings_for(recipe.method, settings)})
