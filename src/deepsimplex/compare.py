"""Methods × trials → records → tables."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepsimplex import metrics
from deepsimplex.asked import unlike
from deepsimplex.calibration import least_sample
from deepsimplex.data.augment import ONE, Views
from deepsimplex.data.protocols import Trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.fitting import fitting, scored
from deepsimplex.frozen import FROM_CHANCE, Pretrained
from deepsimplex.lanes import drive
from deepsimplex.methods import METHODS
from deepsimplex.model import Model
from deepsimplex.recipes import Recipe
from deepsimplex.runs import Run, code_commit, fingerprint, hardware, write_arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Predictions and every named score of a trial's test images, knowns apart from unknowns."""

    labels: np.ndarray
    known_predicted: np.ndarray
    known_scores: dict[str, np.ndarray]
    unknown_predicted: np.ndarray
    unknown_scores: dict[str, np.ndarray]

    def report(self, model: Model) -> dict[str, Any]:
        """Threshold-free measures by the model's score, and what its threshold does."""
        known, unknown = self.known_scores[model.score], self.unknown_scores[model.score]
        kept = known >= model.limits(self.known_predicted)
        passed = unknown >= model.limits(self.unknown_predicted)
        decided = np.concatenate(
            [np.where(kept, self.known_predicted, -1), np.where(passed, self.unknown_predicted, -1)]
        )
        return {
            **metrics.open_set_report(known, self.labels, self.known_predicted, unknown),
            "known_kept": float(kept.mean()),
            "unknown_rejected": float(1 - passed.mean()),
            "macro_f1": metrics.macro_f1(self.arrays()["label"], decided, unknown=-1),
            "auroc_by_score": {
                name: metrics.auroc(scores, self.unknown_scores[name])
                for name, scores in self.known_scores.items()
            },
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """Each test image's true label (−1 for an unknown), predicted label and scores."""
        missing = np.full(len(self.unknown_predicted), -1)
        predicted = np.concatenate([self.known_predicted, self.unknown_predicted])
        scores = {
            name: np.concatenate([known, self.unknown_scores[name]])
            for name, known in self.known_scores.items()
        }
        label = np.concatenate([self.labels, missing])
        return {"label": label.astype(np.int32), "predicted": predicted.astype(np.int32), **scores}


def evaluate(model: Model, known: tuple[np.ndarray, np.ndarray], unknown: np.ndarray) -> Evaluation:
    """Score known test images (with labels 0…C−1) and unknown ones."""
    return Evaluation(
        known[1], *model.all_scores(to_tensor(known[0])), *model.all_scores(to_tensor(unknown))
    )


def run_trial(
    trial: Trial,
    recipe: Recipe,
    folder: Path,
    *,
    keep: float,
    score: str | None = None,
    start: Pretrained = FROM_CHANCE,
    device: str = "auto",
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train, calibrate and test one method on one trial in its own run folder, or go on there."""
    where = pick_device(device)
    how: Any = {"keep": keep, "score": score, "start": start, "report": report}
    job = running(trial, recipe, folder, where, **how)
    return drive([job], where, deterministic=recipe.deterministic)[0]


def running(
    trial: Trial,
    recipe: Recipe,
    folder: Path,
    where: torch.device,
    *,
    keep: float,
    score: str | None = None,
    start: Pretrained = FROM_CHANCE,
    at_once: int = 1,
    donors: Sequence[Path] = (),
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Generator[None, None, dict[str, Any]]:
    """`run_trial`, yielding after every step; for lanes.drive, `at_once` of them on the device.

    `score` is one of the method's own or a detector's name; None takes the method's default.
    `donors` are folders of other runs: the first that trained the same recipe on the same images
    gives its model, which is scored and tested here, and nothing is trained twice.
    """
    background = None
    if METHODS[recipe.method].uses_background and trial.background is not None:
        background = to_tensor(trial.background)
    data: dict[str, Any] = {
        "trial": trial.name,
        "keep": keep,
        "training": fingerprint(*trial.train, *trial.calibration, background),
        "test": fingerprint(*trial.known_test, trial.unknown_test),
    }
    if score is not None:
        data["score"] = score
    if start != FROM_CHANCE:
        data |= {"freeze": start.freeze, **start.asked()}
    began = time.perf_counter()
    with Run(folder, recipe, data, device=where) as run:
        if run.results is not None:
            return run.results
        images, labels = to_tensor(trial.train[0]), torch.from_numpy(trial.train[1])
        how: Any = {"score": score, "keep": keep, "calibration": to_tensor(trial.calibration[0])}
        borrowed = _borrowed(donors, run.asked, recipe.views, where)
        made: dict[str, Any] = {"commit": code_commit(), "hardware": hardware(where)}
        if borrowed is not None:
            model, made = borrowed
            model = scored(model, images, labels, **how, feature_cache=start.cache)
        else:
            model = yield from fitting(
                images,
                labels,
                trial.classes,
                recipe,
                where,
                **how,
                **start.ways(),
                background=background,
                keeper=run,
                report=report,
            )
        model.save(run.model_path)
        evaluation = evaluate(model, trial.known_test, trial.unknown_test)
        write_arrays(folder / "scores.npz", evaluation.arrays())
        seconds = time.perf_counter() - began  # without what only a record asks for
        results = _found(model, trial, evaluation) | {
            "background": background is not None,
            "seconds": seconds,
            "trainings at once": at_once,
            "trained by": None,
            **made,
        }
        run.finish(results)
        return results


def unfinished(trainings: Iterable[Iterable[Path]]) -> int:
    """How many are to be done still, of trainings that are each in one of several run folders."""
    done = (any((folder / "results.json").exists() for folder in those) for those in trainings)
    return sum(not one for one in done)


def _found(model: Model, trial: Trial, evaluation: Evaluation) -> dict[str, Any]:
    """What was trained, on what, and what its test says."""
    recipe = model.recipe
    return {
        "trial": trial.name,
        "method": recipe.method,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "score": model.score,
        **dataclasses.asdict(recipe.views),
        "counts": trial.counts(),
        "audit": trial.audit,
        "held_out_accuracy": _accuracy(model, *trial.calibration),
        **_other_views(model, trial),
        **evaluation.report(model),
    }


def shortage(records: list[dict[str, Any]], keep: float) -> list[str]:
    """A line, if some had too few images to calibrate for any to be rejected."""
    needed = least_sample(keep)
    short = [r["counts"]["calibration"] for r in records if r["counts"]["calibration"] < needed]
    if not short:
        return []
    return [
        f"Nothing could be rejected in {len(short)} of {len(records)} trainings: a threshold that "
        f"keeps {100 * keep:g} % needs {needed} images to calibrate, and there were {min(short)}."
    ]


def _borrowed(
    donors: Sequence[Path], asked: dict[str, Any], views: Views, where: torch.device
) -> tuple[Model, dict[str, Any]] | None:
    """Of the first finished run that trained what is asked: its model, by these views, and how it
    was made. A file of another version of its method cannot be read.
    """
    for donor in donors:
        if unlike(donor, asked) is None:
            try:
                model = Model.load(donor / "model.safetensors", str(where)).by_views(views)
                found = json.loads((donor / "results.json").read_text())
                made = {"commit": found["commit"], "hardware": found.get("hardware")}
            except (OSError, ValueError, LookupError):  # a DeepSimplexError is a ValueError
                continue
            return model, made | {"trained by": f"{donor.parent.name}/{donor.name}"}
    return None


def _accuracy(model: Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Of images of known classes that were not trained on and are no test: to choose by."""
    return float((model.judge(to_tensor(images)).predicted == labels).mean())


def _other_views(model: Model, trial: Trial) -> dict[str, float | None]:
    """AUROC of an image alone where the test takes several views of it; with its mirror image,
    where training mirrors and the test does not.
    """
    plain = model.recipe.views == ONE
    found: dict[str, float | None] = {"auroc_mirrored": None, "auroc_one_view": None}
    if model.detector is None and (not plain or "flip" in model.recipe.augment):
        other = model.by_views(Views(mirror=plain))
        evaluation = evaluate(other, trial.known_test, trial.unknown_test)
        known, unknown = evaluation.known_scores, evaluation.unknown_scores
        name = "auroc_mirrored" if plain else "auroc_one_view"
        found[name] = metrics.auroc(known[model.score], unknown[model.score])
    return found


def gather_scores(path: Path, parts: list[Path]) -> None:
    """Several runs' scores in one file, each array's name led by its run's."""
    arrays: dict[str, Any] = {}
    for part in parts:
        with np.load(part) as file:
            arrays |= {f"{part.parent.name}.{name}": file[name] for name in file.files}
    write_arrays(path, arrays)
