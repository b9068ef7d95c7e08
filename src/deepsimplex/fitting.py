"""From images and a recipe to a model: checked first, trained, then calibrated.

Calibration images are knowns that train nothing; unknowns play no part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepsimplex import engine
from deepsimplex.backbones import resolve_backbone
from deepsimplex.batches import TrainingSet
from deepsimplex.calibration import Threshold, conformal_threshold
from deepsimplex.data.augment import ONE, check_augment
from deepsimplex.data.drawings import suited
from deepsimplex.data.sources import hold_out
from deepsimplex.detectors import check_score, fit_detector, needs_head
from deepsimplex.engine import Keeper
from deepsimplex.errors import DeepSimplexError
from deepsimplex.frozen import feature_set, load_weights, trained_on_features
from deepsimplex.lanes import drive
from deepsimplex.methods import build_method, method_row
from deepsimplex.model import Model, digests, repeated
from deepsimplex.recipes import Recipe


def check_request(
    recipe: Recipe,
    shape: tuple[int, ...],
    classes: int,
    *,
    keep: float | None,
    guarantee: str,
    by: str,
    score: str | None,
    radius: float,
) -> None:
    """Refuse what could not be done, before anything is trained or written."""
    check_promise(keep, guarantee, by)
    check_augment(recipe.augment, shape)
    if recipe.views != ONE and len(shape) != 3:
        raise DeepSimplexError(
            "images to mirror or move", f"samples of shape {shape}", "leave mirror and shift out"
        )
    if recipe.shift and recipe.shift >= min(shape[1:]):
        raise DeepSimplexError(
            f"a shift below the image's {min(shape[1:])} pixels",
            f"{recipe.shift}",
            "lower it",
        )
    if not 0 < radius < np.inf:
        raise DeepSimplexError("a radius above 0", repr(radius), "it is a unit of length")
    name = resolve_backbone(recipe.backbone, shape)
    # Whether a head is linear is seen by trying it, which "meta" has no numbers for.
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if needs_head(score) else "meta"):
        method = build_method(recipe.method, name, shape, classes, recipe.settings)
    if score is not None:
        check_score(method, score)


def check_background(recipe: Recipe, given: bool) -> None:
    """Background where the method needs it, none where it has no use for it."""
    row = method_row(recipe.method)
    if row.needs_background and not given:
        raise DeepSimplexError(
            f"background images for method {recipe.method!r}",
            "none",
            "give some, or choose another method",
        )
    if given and not row.uses_background:
        raise DeepSimplexError(
            f"no background for method {recipe.method!r}",
            "some",
            "leave it out, or choose dsc-blend",
        )


def check_promise(keep: float | None, guarantee: str, by: str) -> None:
    """A threshold's promise that can be kept."""
    if keep is not None:
        Threshold((-np.inf,), "all", keep, guarantee, 0.9, (0,))
    if by not in ("all", "predicted"):
        raise DeepSimplexError("by 'all' or 'predicted'", repr(by), "choose one")


def check_pretrained(
    images: Tensor, recipe: Recipe, weights: Path | None, freeze: bool, cache: Path | None
) -> None:
    """Refuse what weights and freezing cannot do, before anything is trained or written."""
    if freeze and method_row(recipe.method).pictures:
        raise DeepSimplexError(
            f"no frozen backbone for method {recipe.method!r}, which turns or paints images",
            "freeze",
            "choose another method, or do not freeze",
        )
    if freeze and recipe.augment != "none":
        raise DeepSimplexError(
            "augment 'none' with a frozen backbone, whose features are computed once",
            repr(recipe.augment),
            "set augment to 'none', or do not freeze",
        )
    if cache is not None and not freeze:
        raise DeepSimplexError("no feature cache without freeze", str(cache), "freeze, or omit it")
    rgb = images.ndim == 4 and images.shape[1] == 3
    if weights is not None and rgb and images.dtype != torch.uint8:
        raise DeepSimplexError(
            "uint8 pixels 0…255, which pretrained weights are normalised for",
            str(images.dtype).removeprefix("torch."),
            "give the images as uint8",
        )


def fit_model(
    images: Tensor,
    labels: Tensor,
    classes: Sequence[Any] | np.ndarray,
    recipe: Recipe,
    *,
    device: str = "auto",
    **options: Any,
) -> Model:
    """`fitting`, start to end; the same options."""
    where = engine.pick_device(device)
    job = fitting(images, labels, classes, recipe, where, **options)
    return drive([job], where, deterministic=recipe.deterministic)[0]


def fitting(
    images: Tensor,
    labels: Tensor,
    classes: Sequence[Any] | np.ndarray,
    recipe: Recipe,
    where: torch.device,
    *,
    keep: float | None = None,
    guarantee: str = "mean",
    by: str = "all",
    score: str | None = None,
    radius: float = 1.0,
    background: Tensor | None = None,
    calibration: Tensor | None = None,
    weights: Path | None = None,
    freeze: bool = False,
    feature_cache: Path | None = None,
    keeper: Keeper | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Generator[None, None, Model]:
    """Train on raw images (n, …) with labels 0…C−1, then calibrate on knowns held out.

    With `keep` set, the threshold comes from the images of `calibration` or, without it, from a
    share of the training images that the network then never sees. Unknowns play no part.

    The backbone starts from `weights`, a local file, or from chance. Frozen, it keeps them, and
    the head is trained on its features, computed once and kept in the folder `feature_cache`.
    A `score` that is a detector's is fitted to the training images after the last step. A
    background of photographs beside drawings is drawn first (data/drawings.py).
    Yields after every step, for lanes.drive.
    """
    names = np.asarray(classes)
    shape = tuple(images.shape[1:])
    promise: Any = {"keep": keep, "guarantee": guarantee, "by": by}
    check_request(recipe, shape, len(names), score=score, radius=radius, **promise)
    parts = [images] if calibration is None else [images, calibration]
    _check_problem(labels, names, recipe, background, parts)
    check_pretrained(images, recipe, weights, freeze, feature_cache)
    recipe = dataclasses.replace(recipe, backbone=resolve_backbone(recipe.backbone, shape))
    seen = [digests(images)]
    if background is not None:
        seen.append(digests(background))
    if keep is not None and calibration is None:
        training, held = hold_out(labels.numpy(), recipe.calibration, recipe.seed)
        calibration = images[held]
        images, labels = images[training], labels[training]
    elif calibration is not None:
        seen.append(digests(calibration))
    model = _untrained(recipe, names, images, radius, np.concatenate(seen))
    method = model.method
    if weights is not None:
        load_weights(method, weights)  # and its own normalisation
    others = None if background is None else suited(background, images)
    data = TrainingSet(images, labels, others)
    trained: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if freeze:
        method.to(where)
        data = feature_set(method, data, feature_cache)
        trained = trained_on_features(method)
    with trained:
        yield from engine.training(method, data, recipe, where, keeper=keeper, report=report)
    if len(shape) == 1:
        method.double()  # so that a row's scores do not depend on the rows beside it
    how: Any = {"score": score, "calibration": calibration, "feature_cache": feature_cache}
    return scored(model, images, labels, **how, **promise)


def scored(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    score: str | None,
    keep: float | None,
    guarantee: str = "mean",
    by: str = "all",
    calibration: Tensor | None = None,
    feature_cache: Path | None = None,
) -> Model:
    """A trained model by `score`, None for its method's own, with a threshold for that.

    A detector's score is fitted to the images it was trained on. The network stays as it is, so a
    finished model can be scored anew.
    """
    method = model.method
    score, fitted = score or method.scores[0], None
    check_score(method, score)
    if score not in method.scores:
        about: Any = {"cache": feature_cache, "views": model.recipe.views}
        fitted = fit_detector(score, method, images, labels, len(model.classes), **about)
    model = dataclasses.replace(model, score=score, detector=fitted, threshold=None)
    if keep is None or calibration is None:
        return model
    return calibrate(model, calibration, keep, guarantee=guarantee, by=by)


def _untrained(
    recipe: Recipe, names: np.ndarray, images: Tensor, radius: float, seen: np.ndarray
) -> Model:
    """A fresh method by the recipe's seed, normalised by the training images, as a model."""
    shape = tuple(images.shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)
        method = build_method(recipe.method, recipe.backbone, shape, len(names), recipe.settings)
    method.encoder.normalise.fit(images)
    pixels = images.dtype == torch.uint8
    return Model(method, recipe, names, shape, method.scores[0], None, radius, None, pixels, seen)


def calibrate(
    model: Model, images: Tensor, keep: float, *, guarantee: str = "mean", by: str = "all"
) -> Model:
    """The model with a reject threshold from known images it was not trained on."""
    check_promise(keep, guarantee, by)
    count = len(model.classes) if by == "predicted" else 1
    if len(images) == 0:
        nothing = Threshold((-np.inf,) * count, by, keep, guarantee, 0.9, (0,) * count)
        return dataclasses.replace(model, threshold=nothing)
    by_class, knownness = dataclasses.replace(model, radius=1.0).scores(images)
    predicted = by_class.argmax(1) if by == "predicted" else None
    threshold = conformal_threshold(
        knownness, keep, predicted=predicted, classes=len(model.classes), guarantee=guarantee
    )
    return dataclasses.replace(model, threshold=threshold)


def _check_problem(
    labels: Tensor,
    names: np.ndarray,
    recipe: Recipe,
    background: Tensor | None,
    parts: Sequence[Tensor],
) -> None:
    if labels.is_floating_point():
        kind = str(labels.dtype).removeprefix("torch.")
        raise DeepSimplexError("labels as whole numbers from 0", kind, "number the classes")
    smallest, largest = (int(v) for v in torch.aminmax(labels)) if len(labels) else (0, 0)
    if smallest < 0 or largest >= len(names):
        raise DeepSimplexError(
            f"labels in 0 … {len(names) - 1}, one for each class",
            f"{smallest if smallest < 0 else largest}",
            "number the classes from 0, without gaps",
        )
    for part, what in zip(parts, ("images", "calibration images"), strict=False):
        if not _finite(part):
            raise DeepSimplexError(f"{what} of finite numbers", "NaN or infinity", "check them")
    check_background(recipe, background is not None)
    if background is None:
        return
    known = sum(int(repeated(background, part).sum()) for part in parts)
    if known:
        raise DeepSimplexError(
            "background that is none of the known images", f"{known} of them", "leave those out"
        )
    if len(background) == 0 or not _finite(background):
        got = "NaN or infinity" if len(background) else "no image"
        raise DeepSimplexError("background images of finite numbers", got, "check them")


def _finite(images: Tensor) -> bool:
    return not images.is_floating_point() or engine.finite(images)
