"""`estimate`: how well is rejected what was never seen? One's own classes, left out in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deepsimplex import tables
from deepsimplex.compare import run_trial, shortage
from deepsimplex.data.archives import data_root
from deepsimplex.data.folders import counted
from deepsimplex.data.protocols import Trial, leave_out_trials, split_trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import check_background, check_pretrained
from deepsimplex.frozen import Pretrained
from deepsimplex.own import extra_beside, known_data, recipe_for, tell_cost
from deepsimplex.research import check_scored
from deepsimplex.runs import environment, write_json
from deepsimplex.terminal import console, table, training

HEADING = ("left out", "AUROC", "rejected", "if accepted, taken for")


def estimate(
    source: str,
    left_out: int,
    *,
    known: list[str] | None,
    keep: float,
    score: str | None,
    background: str | None,
    size: int | None,
    weights: Path | None,
    freeze: bool,
    out: Path,
    on_bad: str,
    device: str,
    how: dict[str, Any],
) -> None:
    """Train as `train` would without each class, test on it; `how` is for own.recipe_for."""
    where = pick_device(device)
    _, data = known_data(source, known, size, on_bad)
    folds = leave_out_trials(data, left_out, how["seed"])
    if min(len(fold) for fold in folds) < 2:
        raise DeepSimplexError(
            f"{left_out + 2} or more classes in {data.source}",
            f"{len(data.classes)}",
            "add some, or lower --leave-out" if left_out > 1 else "add some",
        )
    extra = extra_beside(background, data)
    start = Pretrained(weights, freeze, data_root() / "features" if freeze else None)
    records, taken = [], {}
    with training("Training", trainings=len(folds)) as begin:
        for number, classes in enumerate(folds):
            name = f"{data.source}/without/{number}"
            trial = split_trial(data, classes, name=name, seed=how["seed"], background=extra)
            images = to_tensor(trial.train[0])
            recipe = recipe_for(images, extra is not None, freeze=freeze, **how)
            if number == 0:
                check_background(recipe, extra is not None)
                check_scored(recipe, tuple(images.shape[1:]), len(classes), score, keep)
                check_pretrained(images, recipe, *start.ways().values())
                console.print(
                    f"{data.source}: {len(data.classes)} classes, {left_out} left out at a time; "
                    f"{counted(len(folds), 'training')} of {recipe.method}, "
                    f"{counted(recipe.epochs, 'epoch')} each."
                )
                tell_cost(source, images, recipe, where, freeze)
            missing = ", ".join(sorted(set(trial.unknown_names)))
            asked: Any = {"keep": keep, "score": score, "start": start, "device": device}
            folder = out / f"without-{number}"
            record = run_trial(trial, recipe, folder, **asked, report=begin(f"without {missing}"))
            records.append(record)
            taken[missing] = _taken_for(trial, folder), record
    _show(records, taken, keep)
    write_json(out / "estimate.json", {"environment": environment(), "folds": records})
    console.print(f"Written: {out / 'estimate.json'}")


def _show(
    records: list[dict[str, Any]], taken: dict[str, tuple[str, dict[str, Any]]], keep: float
) -> None:
    rows = [
        [name, *(f"{100 * r[key]:.1f}" for key in ("auroc", "unknown_rejected")), mistaken]
        for name, (mistaken, r) in taken.items()
    ]
    table("In %, for each class as if it had never been seen", HEADING, rows)
    means = tables.summary(records, ("accuracy", "auroc", "unknown_rejected"))
    cells = {name: tables.spread(cell) for name, cell in means.items()}
    console.print(
        f"Expect about: AUROC {cells['auroc']}, unknowns rejected {cells['unknown_rejected']} at a "
        f"threshold that keeps {100 * keep:g} % of knowns, accuracy {cells['accuracy']}."
    )
    for note in shortage(records, keep):
        console.print(note)


def _taken_for(trial: Trial, folder: Path) -> str:
    """The classes that left-out images were mistaken for, most frequent first."""
    with np.load(folder / "scores.npz") as scores:
        predicted = scores["predicted"][scores["label"] == -1]
    counts = np.bincount(predicted, minlength=len(trial.classes))
    order = np.argsort(-counts)[:3]
    total = max(1, counts.sum())
    return ", ".join(
        f"{trial.classes[j]} {100 * counts[j] / total:.0f} %" for j in order if counts[j]
    )
