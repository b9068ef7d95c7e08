"""What a trained model says: of a test set, and of new images."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepsimplex import compare
from deepsimplex.data.folders import image_files
from deepsimplex.data.pictures import bad_pictures, shown, try_images
from deepsimplex.data.sources import LabelledSet, check_on_bad, load_data, to_tensor
from deepsimplex.errors import DeepSimplexError
from deepsimplex.metrics import accuracy
from deepsimplex.model import Decision, Model
from deepsimplex.own import load, tell_unreadable
from deepsimplex.terminal import console, percent, table

MEASURES = ("accuracy", "auroc", "oscr", "fpr95", "known_kept", "unknown_rejected")
HEADINGS = ("accuracy", "AUROC", "OSCR", "FPR@95", "kept", "rejected")
SKIP = "repair or remove them, or leave them out with --on-bad skip"


def evaluate(path: Path, source: str, as_json: bool, device: str, on_bad: str) -> None:
    model = load_model(path, device)
    data = _data_for(model, source, on_bad)
    seen = model.was_seen(to_tensor(data.images))
    if seen.all():
        raise DeepSimplexError(
            f"images in {source} that the model was not trained on",
            f"{len(seen)}, all trained or calibrated on",
            "keep a test folder apart",
        )
    images, names = data.images[~seen], data.names[~seen]
    classes = [str(name) for name in model.classes]
    known = np.isin(names, classes)
    labels = np.array([classes.index(name) for name in names[known]], dtype=np.int64)
    record: dict[str, Any] = {"model": str(path), "data": source, "left_out": int(seen.sum())}
    record |= {"unreadable": data.skipped}
    record |= {"known": int(known.sum()), "unknown": int((~known).sum())}
    if known.any() and not known.all():
        tested = compare.evaluate(model, (images[known], labels), images[~known])
        record |= tested.report(model)
    else:
        verdicts = model.judge(to_tensor(images))
        kept = float(verdicts.accepted.mean())
        if known.all():
            record |= {"accuracy": accuracy(labels, verdicts.predicted), "known_kept": kept}
        else:
            record["unknown_rejected"] = 1 - kept
    if as_json:
        print(json.dumps(record))
        return
    if seen.any():
        console.print(f"{seen.sum()} images were trained or calibrated on and are left out.")
    tell_unreadable(data)
    console.print(f"{record['known']} known and {record['unknown']} unknown images of {source}.")
    measured = [(n, h) for n, h in zip(MEASURES, HEADINGS, strict=True) if n in record]
    table(
        None,
        ("in %", *(heading for _, heading in measured)),
        [[model.score, *(percent(record[name]) for name, _ in measured)]],
    )


def predict(path: Path, inputs: list[str], form: str, device: str, on_bad: str) -> None:
    check_on_bad(on_bad)
    model = load_model(path, device)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = ("input", "label", "nearest", model.score, "threshold", "reason")
    rows = []
    if form == "csv":
        writer.writerow(columns)
    for name, decision in _decisions(model, inputs, on_bad):
        label = str(decision.nearest) if decision.known else "unknown"
        sign = -1 if model.score == "distance" else 1  # shown as a distance, not as its negative
        value, limit = sign * decision.knownness, sign * decision.limit
        bound = limit if np.isfinite(limit) else None
        row = (name, label, str(decision.nearest), value, bound, decision.reason)
        if form == "json":
            print(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False))
        elif form == "csv":
            writer.writerow(row)
        else:
            rows.append((name, label, str(decision.nearest), f"{value:.3f}", _limit(bound), row[5]))
    if form == "table":
        table(None, columns, rows)


def load_model(path: Path, device: str) -> Model:
    """A model file, or the one in a run folder."""
    inside = path / "model.safetensors"
    if path.is_dir() and not inside.exists():
        raise DeepSimplexError(
            f"a finished run in {path}", "no model in it", "repeat the train command to go on"
        )
    return Model.load(inside if path.is_dir() else path, device)


def _data_for(model: Model, source: str, on_bad: str = "fail") -> LabelledSet:
    """Test data in the model's own shape."""
    if Path(source).is_dir() or Path(source).suffix == ".csv":
        size, channels = _picture_shape(model)
        return load(source, part="test", size=size, channels=channels, on_bad=on_bad)
    data = load_data(source, part="test")
    found = to_tensor(data.images[:1])
    if tuple(found.shape[1:]) != model.shape or model.pixels != (found.dtype == torch.uint8):
        kind = "uint8 pixels" if model.pixels else "numbers"
        raise DeepSimplexError(
            f"{kind} of shape {model.shape}, as trained",
            f"{data.images.dtype} of shape {tuple(found.shape[1:])} in {source}",
            "convert them",
        )
    return data


def _picture_shape(model: Model) -> tuple[int, int]:
    """Side and channels that image files must be brought to, if the model takes such at all."""
    if len(model.shape) != 3 or not model.pixels or model.shape[1] != model.shape[2]:
        kind = "vectors" if len(model.shape) == 1 else "arrays"
        raise DeepSimplexError(
            f"{kind} of shape {model.shape}, as trained", "image files", "give a .npz file"
        )
    return model.shape[1], model.shape[0]


def _decisions(model: Model, inputs: list[str], on_bad: str) -> Iterator[tuple[str, Decision]]:
    """Decisions in the order of the inputs; files that stand together are read together. With
    on_bad "skip" unreadable ones are named beside the answers, on the error stream.
    """
    files: list[Path] = []

    def read() -> Iterator[tuple[str, Decision]]:
        for start in range(0, len(files), 256):
            chunk = files[start : start + 256]
            images, bad = try_images(chunk, *_picture_shape(model))
            if bad and on_bad == "fail":
                raise bad_pictures([(chunk[index], reason) for index, reason in bad], SKIP)
            for index, reason in bad:
                print(f"Left out, unreadable: {shown(chunk[index])} ({reason})", file=sys.stderr)
            kept = np.setdiff1d(np.arange(len(chunk)), [index for index, _ in bad])
            names = (str(chunk[index]) for index in kept)
            yield from zip(names, model.decide(to_tensor(images[kept])), strict=True)
        files.clear()

    for name in inputs:
        path = Path(name)
        if name == "digits" or path.suffix == ".npz":
            yield from read()
            decided = model.decide(to_tensor(_data_for(model, name).images))
            yield from ((f"{name}[{index}]", one) for index, one in enumerate(decided))
        elif path.is_dir():
            found = image_files(path)
            if not found:
                raise DeepSimplexError(f"images in {path}", "none", "check the path")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise DeepSimplexError(f"a file or folder at {path}", "nothing", "check the path")
    yield from read()


def _limit(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
