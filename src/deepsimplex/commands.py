"""What each command does and prints; cli.py only parses."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepsimplex.answers import load_model
from deepsimplex.asked import unlike
from deepsimplex.data import download
from deepsimplex.data.archives import data_root
from deepsimplex.data.augment import Views
from deepsimplex.data.background import PHOTOGRAPHS, background_beside
from deepsimplex.data.check import check as check_listing
from deepsimplex.data.drawings import apart
from deepsimplex.data.folders import counted, list_images
from deepsimplex.data.sources import LabelledSet, hold_out, to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError, ModelFileError, RunError
from deepsimplex.fitting import (
    check_background,
    check_pretrained,
    check_request,
    fit_model,
    scored,
)
from deepsimplex.frozen import Pretrained
from deepsimplex.metrics import accuracy
from deepsimplex.model import Model, repeated
from deepsimplex.own import known_data, recipe_for, tell_cost
from deepsimplex.recipes import Recipe, default_recipe
from deepsimplex.runs import Run, fingerprint
from deepsimplex.terminal import called, console, percent, progress, training

KEEP = 0.95


def train(
    source: str,
    out: Path,
    *,
    known: list[str] | None,
    keep: float | None,
    guarantee: str,
    by: str,
    score: str | None,
    background: Path | None,
    size: int | None,
    radius: float,
    device: str,
    checkpoint_seconds: float,
    method: str,
    settings: dict[str, Any],
    seed: int,
    weights: Path | None,
    freeze: bool,
    trained: Path | None,
    on_bad: str,
    recipe_changes: dict[str, Any],
) -> None:
    where = pick_device(device)
    if not str(out).strip("."):
        raise DeepSimplexError("--out as a folder of its own", repr(str(out)), "e.g. runs/first")
    whole, data = known_data(source, known, size, on_bad)
    images, labels, classes = to_tensor(data.images), data.labels, data.classes
    others = _background(background, images)
    how: Any = {"method": method, "settings": settings, "seed": seed, "changes": recipe_changes}
    recipe = recipe_for(images, others is not None, freeze=freeze, **how)
    training_part, held = hold_out(labels, recipe.calibration if keep else 0.0, seed)
    _describe(data, len(whole.labels), len(training_part), len(held), others)
    promise: Any = {"keep": keep, "guarantee": guarantee, "by": by}
    promise |= {"score": score, "radius": radius}
    check_request(recipe, tuple(images.shape[1:]), len(classes), **promise)
    check_background(recipe, others is not None)
    start = Pretrained(weights, freeze, data_root() / "features" if freeze else None)
    check_pretrained(images, recipe, *start.ways().values())
    asked = {"source": data.source, "known": list(classes), **promise, "freeze": freeze}
    asked |= {"fingerprint": fingerprint(images, labels, others), **start.asked()}
    run = Run(out, recipe, asked, checkpoint_seconds, where)
    _check_trained(trained, run)
    some, theirs = images[training_part], torch.from_numpy(labels[training_part])
    with run:
        if run.results is not None:
            _check_whole(run)
            console.print(f"Already finished: {run.model_path}. Another --out trains anew.")
            return
        promise["calibration"] = images[held]
        if trained is not None:
            promise["feature_cache"] = start.cache
            model = _scored_anew(trained, run, recipe.views, some, theirs, **promise)
        else:
            _announce(recipe, start, run)
            tell_cost(source, images, recipe, where, freeze)
            promise["background"] = others
            model = _fitted(run, recipe, start, some, theirs, classes, **promise)
        model.save(run.model_path)
        run.finish(_training_results(model, images[held], labels[held], trained))
    console.print(
        f"Model: {run.model_path}\nNext: {called()} predict {shlex.quote(str(out))} IMAGES"
    )


def _check_whole(run: Run) -> None:
    """A finished run whose model can be read."""
    try:
        Model.load(run.model_path, "cpu")
    except ModelFileError as error:
        raise RunError(
            error.expected,
            error.got,
            f"delete {run.folder / 'results.json'}; the same command makes the model again",
        ) from None


def _announce(recipe: Recipe, start: Pretrained, run: Run) -> None:
    if (run.folder / "checkpoint.safetensors").exists():
        console.print(f"Going on from the checkpoint in {run.folder}.")
    untrained = "" if start.weights else ", backbone untrained"
    frozen = f", head only{untrained}" if start.freeze else ""
    epochs = counted(recipe.epochs, "epoch")
    views = recipe.views.count
    scored = f", scored by {views} views of an image" if views > 1 else ""
    console.print(f"Device: {run.device}. Method: {recipe.method}{frozen}, {epochs}{scored}.")


def _check_trained(folder: Path | None, run: Run) -> None:
    """Refuse the network of a run that trained anything else than this one is asked to."""
    reason = None if folder is None else unlike(folder, run.asked)
    if reason is not None:
        raise DeepSimplexError(
            f"{folder} as a finished run of this very training",
            reason,
            "give the data and options it was trained with, or leave --trained out",
        )


def _fitted(
    run: Run,
    recipe: Recipe,
    start: Pretrained,
    images: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    **how: Any,
) -> Model:
    """Trained in the folder of a run, with a bar."""
    how |= {**start.ways(), "device": str(run.device), "keeper": run}
    with training("Training", epochs=recipe.epochs) as begin:
        return fit_model(images, labels, classes, recipe, **how, report=begin(recipe.method))


def _scored_anew(
    folder: Path,
    run: Run,
    views: Views,
    images: Tensor,
    labels: Tensor,
    *,
    radius: float,
    **how: Any,
) -> Model:
    """The network of a finished run, by other views and in another unit, scored and calibrated."""
    console.print(f"Device: {run.device}. The network of {folder}, scored anew.")
    model = load_model(folder, str(run.device)).by_views(views)
    return scored(dataclasses.replace(model, radius=radius), images, labels, **how)


def _describe(
    data: LabelledSet, whole: int, train: int, held: int, background: Tensor | None
) -> None:
    names, unused = data.classes, whole - len(data.labels)
    extra = "" if background is None else f", {len(background)} background"
    if background is not None and apart(background, to_tensor(data.images)):
        extra += " (photographs, to be drawn in the grey levels of the images)"
    console.print(
        f"Data: {data.source}, {len(names)} known classes "
        f"({', '.join(names[:8])}{', …' if len(names) > 8 else ''}), "
        f"shape {tuple(to_tensor(data.images[:1]).shape[1:])}, "
        f"{train} to train, {held} held out to calibrate"
        f"{extra}{f', {unused} of other classes not used' if unused else ''}."
    )


def _training_results(
    model: Model, images: Tensor, labels: np.ndarray, trained: Path | None
) -> dict[str, Any]:
    """What training can say of itself: accuracy on the held-out knowns, and the threshold.

    A network that another run trained was made in that run's environment, which is told.
    """
    results: dict[str, Any] = {"held_out": len(labels)}
    if trained is not None:
        about = json.loads((trained / "environment.json").read_text())
        results["trained by"] = {"run": str(trained), "environment": about}
    if len(labels):
        results["held_out_accuracy"] = accuracy(labels, model.judge(images).predicted)
        reached = percent(results["held_out_accuracy"])
        console.print(f"Accuracy on the {len(labels)} held-out images: {reached} %.")
        usual = np.bincount(labels).max() / len(labels)
        if results["held_out_accuracy"] <= usual:
            console.print(
                f"That is no better than naming one class always ({percent(usual)} %): nothing was "
                "learned. Try a lower --learning-rate, or more --epochs."
            )
    if model.threshold is not None:
        results["threshold"] = model.threshold.to_json()
        console.print(f"Threshold: {model.threshold.meaning(model.classes)}")
    return results


def check(source: Path, as_json: bool) -> bool:
    """True when the set is fit to train on."""
    with progress("Looking") as advance:
        how: Any = {"workers": os.cpu_count() or 1, "progress": advance}
        report = check_listing(list_images(source), share=Recipe.calibration, keep=KEEP, **how)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        lines = report.lines()
        if report.fit and report.trained:
            shape = 3, report.side, report.side
            recipe = default_recipe("auto", shape, images=report.trained)
            how = f"{report.side}×{report.side} pixels, {recipe.method}, {recipe.epochs} epochs"
            lines.insert(-2, f"If nothing is said, train takes {how}.")
        for line in lines:
            console.print(line)
    return report.fit


def get(name: str, root: Path | None) -> None:
    with progress(name) as advance:
        folder = download.get(
            name, root, progress=lambda file, done, total: advance(done, total or done)
        )
    console.print(f"{name} lies in {folder}. Next: {called()} compare {name}")


def _background(folder: Path | None, images: Tensor) -> Tensor | None:
    if folder is None:
        return None
    if not folder.is_dir() and str(folder) != PHOTOGRAPHS:
        raise DeepSimplexError(
            f"a folder of images as background, or the word {PHOTOGRAPHS}",
            repr(str(folder)),
            "check the path",
        )
    shape, pixels = (*images.shape[2:], images.shape[1]), images.dtype == torch.uint8
    extra = to_tensor(background_beside(str(folder), Path(), "", shape, pixels).images)
    known = repeated(extra, images)
    if known.all():
        raise DeepSimplexError(
            "background that is none of the known images", f"{len(known)} of them", "give others"
        )
    if known.any():
        console.print(f"Left out of the background: {known.sum()} of the known images.")
    return extra[~known]
