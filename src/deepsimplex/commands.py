"""What each command does and prints; cli.py only parses."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepsimplex import compare
from deepsimplex.data.protocols import digits_trial, known_classes
from deepsimplex.data.sources import (
    LabelledSet,
    hold_out,
    image_files,
    load_data,
    read_images,
    to_tensor,
)
from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError
from deepsimplex.metrics import accuracy
from deepsimplex.model import Decision, Model, fit_model
from deepsimplex.recipes import default_recipe, digits_recipe
from deepsimplex.runs import Run, environment, fingerprint, write_json
from deepsimplex.terminal import console, percent, spread, table, training

MEASURES = ("accuracy", "auroc", "oscr", "fpr95", "known_kept", "unknown_rejected")
HEADINGS = ("accuracy", "AUROC", "OSCR", "FPR@95", "kept", "rejected")
KEEP = 0.95


def demo(out: Path | None, epochs: int | None, trials: int, device: str) -> None:
    began = time.perf_counter()
    where = pick_device(device)
    out = out or Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    cases = [digits_trial(number) for number in range(trials)]
    counts = cases[0].counts()
    console.print(
        f"Data: scikit-learn's digits (8×8), {len(cases)} ARPL splits of {counts['known classes']} "
        f"known and {counts['unknown classes']} unknown classes; the first: {counts['train']} to "
        f"train, {counts['calibration']} to calibrate, {counts['known test']} known and "
        f"{counts['unknown test']} unknown to test."
    )
    console.print(f"Device: {where}, {torch.get_num_threads()} threads. No unknown is trained on.")
    results: dict[str, list[dict[str, Any]]] = {"dsc": [], "softmax": []}
    with training("Training", trainings=2 * len(cases)) as begin:
        for number, trial in enumerate(cases):
            for method, records in results.items():
                recipe = digits_recipe(method, seed=number)
                if epochs is not None:
                    recipe = dataclasses.replace(recipe, epochs=epochs)
                report = begin(f"{method}, split {number}")
                folder = out / f"{method}-{number}"
                record = compare.run_trial(
                    trial, recipe, folder, keep=KEEP, device=device, report=report
                )
                records.append(record)
    tables = {method: compare.summary(records, MEASURES) for method, records in results.items()}
    table(
        f"Mean ± sd over {len(cases)} splits, in %",
        ("", *HEADINGS),
        [[method, *(spread(t[name]) for name in MEASURES)] for method, t in tables.items()],
    )
    console.print(
        "dsc: eq. 4, scored by distance. softmax: scored by max logit. kept: knowns above the "
        "calibrated threshold; rejected: unknowns below it."
    )
    best = Model.load(out / "dsc-0" / "model.safetensors", device)
    assert best.threshold is not None
    console.print(f"\nThreshold: {best.threshold.meaning()}")
    console.print("Decisions of the first DSC model on the first two test images of either kind:")
    trial = cases[0]
    for images, names in (
        (trial.known_test[0], [trial.classes[y] for y in trial.known_test[1]]),
        (trial.unknown_test, trial.unknown_names),
    ):
        for decision, name in zip(best.decide(to_tensor(images[:2])), names, strict=False):
            console.print(f"  a '{name}' → {decision.reason}")
    record = {
        "command": "deepsimplex demo",
        "environment": environment(where),
        "seconds": round(time.perf_counter() - began, 2),
        "methods": tables,
        "trials": results,
    }
    write_json(out / "results.json", record)
    compare.gather_scores(out / "scores.npz", sorted(out.glob("*/scores.npz")))
    console.print(
        f"\nModel: {out / 'dsc-0' / 'model.safetensors'}\nNumbers: {out / 'results.json'}\n"
        f"Took {record['seconds']:.0f} s. Next: deepsimplex predict {out / 'dsc-0'} digits"
    )


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
    seed: int,
    recipe_changes: dict[str, Any],
) -> None:
    data = load_data(source, size=size).known_only()
    classes = known_classes(data, known if known is not None else list(data.classes))
    chosen = np.isin(data.names, classes)
    images = to_tensor(data.images[chosen])
    labels = np.array([classes.index(name) for name in data.names[chosen]], dtype=np.int64)
    shape = tuple(images.shape[1:])
    recipe = default_recipe(method, shape, seed)
    changes = {name: value for name, value in recipe_changes.items() if value is not None}
    recipe = dataclasses.replace(recipe, **changes)
    extra = _background(background, shape)
    training_part, held = hold_out(labels, recipe.calibration if keep else 0.0, seed)
    console.print(
        f"Data: {data.source}, {len(classes)} known classes ({', '.join(classes[:8])}"
        f"{', …' if len(classes) > 8 else ''}), shape {shape}, {len(training_part)} to train, "
        f"{len(held)} held out to calibrate{'' if extra is None else f', {len(extra)} background'}."
    )
    asked = {
        "source": data.source,
        "known": list(classes),
        "keep": keep,
        "guarantee": guarantee,
        "by": by,
        "score": score,
        "radius": radius,
        "fingerprint": fingerprint(images, labels, extra),
    }
    with Run(out, recipe, asked, checkpoint_seconds) as run:
        if run.results is not None:
            console.print(
                f"Already finished: {run.model_path}. Choose another --out to train anew."
            )
            return
        if (out / "checkpoint.safetensors").exists():
            console.print(f"Going on from the checkpoint in {out}.")
        where = pick_device(device)
        console.print(f"Device: {where}. Method: {method}, {recipe.epochs} epochs.")
        with training("Training") as begin:
            model = fit_model(
                images[training_part],
                torch.from_numpy(labels[training_part]),
                classes,
                recipe,
                keep=keep,
                guarantee=guarantee,
                by=by,
                score=score,
                radius=radius,
                background=extra,
                calibration=(images[held], torch.from_numpy(labels[held])),
                device=device,
                keeper=run,
                report=begin(method),
            )
        model.save(run.model_path)
        results: dict[str, Any] = {"model": run.model_path.name, "images": len(training_part)}
        if len(held):
            by_class, _ = model.scores(images[held])
            results["held_out_accuracy"] = accuracy(labels[held], by_class.argmax(1))
            console.print(
                f"Accuracy on the {len(held)} held-out images: "
                f"{percent(results['held_out_accuracy'])} %."
            )
        if model.threshold is not None:
            results["threshold"] = model.threshold.to_json()
            console.print(f"Threshold: {model.threshold.meaning()}")
        run.finish(results, where)
    console.print(f"Model: {run.model_path}\nNext: deepsimplex predict {out} IMAGES")


def evaluate(path: Path, source: str, as_json: bool, device: str) -> None:
    model = load_model(path, device)
    data = _data_for(model, source)
    classes = [str(name) for name in model.classes]
    known = np.isin(data.names, classes)
    if not len(known):
        raise DeepSimplexError(f"images in {source}", "none", "check the path")
    labels = np.array([classes.index(name) for name in data.names[known]], dtype=np.int64)
    record: dict[str, Any] = {
        "model": str(path),
        "data": source,
        "known": int(known.sum()),
        "unknown": int((~known).sum()),
    }
    if known.all():
        by_class, scores = model.scores(to_tensor(data.images))
        predicted = by_class.argmax(1)
        record["accuracy"] = accuracy(labels, predicted)
        record["known_kept"] = float((scores >= model.limits(predicted)).mean())
    elif not known.any():
        by_class, scores = model.scores(to_tensor(data.images))
        kept = scores >= model.limits(by_class.argmax(1))
        record["unknown_rejected"] = float(1 - kept.mean())
    else:
        tested = compare.evaluate(model, (data.images[known], labels), data.images[~known])
        record |= tested.report(model)
    if as_json:
        print(json.dumps(record))
        return
    console.print(f"{record['known']} known and {record['unknown']} unknown images of {source}.")
    measured = [(n, h) for n, h in zip(MEASURES, HEADINGS, strict=True) if n in record]
    table(
        None,
        ("in %", *(heading for _, heading in measured)),
        [[model.score, *(percent(record[name]) for name, _ in measured)]],
    )


def predict(path: Path, inputs: list[str], form: str, device: str) -> None:
    model = load_model(path, device)
    writer = csv.writer(sys.stdout)
    columns = ("input", "label", "nearest", model.score, "limit", "reason")
    rows = []
    if form == "csv":
        writer.writerow(columns)
    for name, decision in _decisions(model, inputs):
        label = str(decision.nearest) if decision.known else "unknown"
        sign = -1 if model.score == "distance" else 1  # shown as a distance, not as its negative
        value, limit = sign * decision.knownness, sign * decision.limit
        shown = limit if np.isfinite(limit) else None
        row = (name, label, str(decision.nearest), value, shown, decision.reason)
        if form == "json":
            print(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False))
        elif form == "csv":
            writer.writerow(row)
        else:
            rows.append((name, label, str(decision.nearest), f"{value:.3f}", _limit(shown), row[5]))
    if form == "table":
        table(None, columns, rows)


def doctor(device: str) -> bool:
    """True when a short training on the device learns."""
    where = pick_device(device)
    for name, value in environment(where).items():
        console.print(f"{name:>13}  {value}")
    for extra in ("timm", "onnx", "fastapi"):
        found = importlib.util.find_spec(extra) is not None
        console.print(f"{extra:>13}  {'installed' if found else 'not installed (optional)'}")
    trial = digits_trial(0)
    recipe = dataclasses.replace(digits_recipe("dsc"), epochs=5)
    began = time.perf_counter()
    images, labels = to_tensor(trial.train[0]), torch.from_numpy(trial.train[1])
    model = fit_model(images, labels, trial.classes, recipe, device=device)
    by_class, _ = model.scores(to_tensor(trial.known_test[0]))
    reached = accuracy(trial.known_test[1], by_class.argmax(1))
    fine = reached > 0.8
    console.print(
        f"{'training':>13}  5 epochs of digits in {time.perf_counter() - began:.1f} s, "
        f"accuracy {percent(reached)} %: {'all is well' if fine else 'NOT as expected (> 80 %)'}"
    )
    return fine


def load_model(path: Path, device: str) -> Model:
    """A model file, or the one in a run folder."""
    return Model.load(path / "model.safetensors" if path.is_dir() else path, device)


def _data_for(model: Model, source: str) -> LabelledSet:
    """Test data in the model's own shape."""
    if len(model.shape) == 3:
        channels, size, _ = model.shape
        data = load_data(source, part="test", size=size, channels=channels)
    else:
        data = load_data(source, part="test")
    found = tuple(to_tensor(data.images[:1]).shape[1:])
    if found != model.shape:
        raise DeepSimplexError(
            f"samples of shape {model.shape}, as in training",
            f"{found} in {source}",
            "convert them",
        )
    return data


def _decisions(model: Model, inputs: list[str]) -> Iterator[tuple[str, Decision]]:
    files = []
    for name in inputs:
        path = Path(name)
        if name == "digits" or path.suffix == ".npz":
            images = to_tensor(_data_for(model, name).images)
            for index, decision in enumerate(model.decide(images)):
                yield f"{name}[{index}]", decision
        elif path.is_dir():
            files += image_files(path)
        else:
            files.append(path)
    if files and len(model.shape) != 3:
        raise DeepSimplexError(
            f"feature vectors of {model.shape[0]} numbers", "image files", "give a .npz file"
        )
    for start in range(0, len(files), 256):
        chunk = files[start : start + 256]
        images = to_tensor(read_images(chunk, model.shape[1], model.shape[0]))
        yield from zip(map(str, chunk), model.decide(images), strict=True)


def _background(folder: Path | None, shape: tuple[int, ...]) -> Tensor | None:
    if folder is None:
        return None
    if len(shape) != 3 or not folder.is_dir():
        raise DeepSimplexError("a folder of images as background", f"{folder}", "check the path")
    files = image_files(folder)
    if not files:
        raise DeepSimplexError(f"images in {folder}", "none", "check the path")
    return to_tensor(read_images(files, shape[1], shape[0]))


def _limit(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
