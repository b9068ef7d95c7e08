"""Methods × trials → records → tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepsimplex import metrics
from deepsimplex.data.protocols import Trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.model import Model, fit_model
from deepsimplex.recipes import Recipe
from deepsimplex.runs import Run, fingerprint


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of a trial's test images: knowns with labels and predictions, then unknowns."""

    known_scores: np.ndarray
    known_labels: np.ndarray
    known_predicted: np.ndarray
    unknown_scores: np.ndarray
    unknown_predicted: np.ndarray

    def report(self, model: Model) -> dict[str, float]:
        """Threshold-free measures, and what the calibrated threshold does."""
        record = metrics.open_set_report(
            self.known_scores, self.known_labels, self.known_predicted, self.unknown_scores
        )
        kept = self.known_scores >= model.limits(self.known_predicted)
        passed = self.unknown_scores >= model.limits(self.unknown_predicted)
        record["known_kept"] = float(kept.mean())
        record["unknown_rejected"] = float(1 - passed.mean())
        labels = np.concatenate([self.known_labels, np.full(len(passed), -1)])
        decided = np.concatenate(
            [
                np.where(kept, self.known_predicted, -1),
                np.where(passed, self.unknown_predicted, -1),
            ]
        )
        record["macro_f1"] = metrics.macro_f1(labels, decided, unknown=-1)
        return record


def evaluate(model: Model, known: tuple[np.ndarray, np.ndarray], unknown: np.ndarray) -> Evaluation:
    """Score known test images (with labels 0…C−1) and unknown ones."""
    by_class, scores = model.scores(to_tensor(known[0]))
    unknown_by_class, unknown_scores = model.scores(to_tensor(unknown))
    return Evaluation(
        scores, known[1], by_class.argmax(1), unknown_scores, unknown_by_class.argmax(1)
    )


def run_trial(
    trial: Trial,
    recipe: Recipe,
    folder: Path,
    *,
    keep: float,
    device: str = "auto",
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train, calibrate and test one method on one trial in its own run folder, or go on there."""
    images, calibration = to_tensor(trial.train[0]), to_tensor(trial.calibration[0])
    data = {
        "trial": trial.name,
        "keep": keep,
        "fingerprint": fingerprint(*trial.train, calibration),
    }
    with Run(folder, recipe, data) as run:
        if run.results is not None:
            return run.results
        model = fit_model(
            images,
            torch.from_numpy(trial.train[1]),
            trial.classes,
            recipe,
            keep=keep,
            calibration=(calibration, torch.from_numpy(trial.calibration[1])),
            device=device,
            keeper=run,
            report=report,
        )
        model.save(run.model_path)
        evaluation = evaluate(model, trial.known_test, trial.unknown_test)
        write_scores(folder / "scores.npz", evaluation)
        results = {
            "trial": trial.name,
            "method": recipe.method,
            "seed": recipe.seed,
            "score": model.score,
            "counts": trial.counts(),
            **evaluation.report(model),
        }
        run.finish(results, pick_device(device))
        return results


def write_scores(path: Path, evaluation: Evaluation) -> None:
    """Each test image's true label, predicted label and score; unknowns have label −1."""
    unknown = len(evaluation.unknown_scores)
    np.savez_compressed(
        path,
        label=np.concatenate([evaluation.known_labels, np.full(unknown, -1)]).astype(np.int32),
        predicted=np.concatenate([evaluation.known_predicted, evaluation.unknown_predicted]).astype(
            np.int32
        ),
        score=np.concatenate([evaluation.known_scores, evaluation.unknown_scores]),
    )


def gather_scores(path: Path, parts: list[Path]) -> None:
    """Several runs' scores in one file, each array's name led by its run's."""
    arrays = {}
    for part in parts:
        with np.load(part) as file:
            arrays |= {f"{part.parent.name}.{name}": file[name] for name in file.files}
    np.savez_compressed(path, **arrays)


def summary(results: list[dict[str, Any]], measures: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Mean and sample sd of each measure over trials."""
    table = {}
    for name in measures:
        values = np.array([record[name] for record in results])
        sd = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        table[name] = {"mean": float(values.mean()), "sd": sd, "values": values.tolist()}
    return table
