"""Trainings that a table or figure needs, each in its run folder: stopped, they go on.

A `Study` says what is trained on what and which images' outputs are wanted; `conduct` trains
them all, side by side on a GPU, and returns the outputs. A training that diverges is an outcome
like any other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import torch

from deepsimplex import engine, inference
from deepsimplex.data.sources import to_tensor
from deepsimplex.errors import NonFiniteLossError
from deepsimplex.fitting import fitting
from deepsimplex.lanes import drive, side_by_side
from deepsimplex.methods.dsc import DSC
from deepsimplex.recipes import Recipe
from deepsimplex.runs import Run, code_commit, fingerprint, write_arrays
from deepsimplex.terminal import Report, console, training


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """Train `recipe` on images (n, h, w, c) with labels 0…C−1, then look at other images."""

    name: str  # of its folder: letters, digits, dashes
    images: np.ndarray
    labels: np.ndarray
    classes: Sequence[str]
    recipe: Recipe
    look: dict[str, np.ndarray]  # images whose outputs are wanted, by a name

    @property
    def folder(self) -> str:
        """Trainings of other lengths stand beside one another."""
        return f"{self.name}-{self.recipe.epochs}-epochs"

    def done(self, root: Path) -> bool:
        return (root / self.folder / "results.json").exists()


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a study. Outputs are at unit radius; `centres` are the vertices, or None."""

    name: str
    seed: int
    outputs: dict[str, np.ndarray]  # (n, d)
    predicted: dict[str, np.ndarray]  # (n,)
    centres: np.ndarray | None  # (C, d)
    losses: list[float]  # of each epoch
    seconds: float
    commit: str | None
    failed: str | None = None  # why there is nothing else

    def accuracy(self, name: str, labels: np.ndarray) -> float:
        return float((self.predicted[name] == labels).mean()) if self.failed is None else 0.0


def conduct(
    studies: Sequence[Study], folder: Path, device: str, title: str = "Training"
) -> list[Outcome]:
    """Every study's outcome, in order; those that were done before are read back."""
    where = engine.pick_device(device)
    done = sum(study.done(folder) for study in studies)
    if done:
        console.print(f"{title}: {done} of {len(studies)} trainings were done before.")
    with training(title, trainings=len(studies) - done) as begin:
        jobs = (
            _one(study, folder, where, None if study.done(folder) else begin(study.name))
            for study in studies
        )
        return drive(jobs, where, at_once=side_by_side(where))


def _one(
    study: Study, root: Path, where: torch.device, report: Report | None
) -> Generator[None, None, Outcome]:
    began, folder = time.perf_counter(), root / study.folder
    data = {
        "study": study.name,
        "fingerprint": fingerprint(study.images, study.labels, *study.look.values()),
        "look": sorted(study.look),
    }
    with Run(folder, study.recipe, data, device=where) as run:
        if run.results is None:
            try:
                arrays = yield from _trained(study, where, run, report)
                failed = None
            except NonFiniteLossError as error:
                arrays, failed = {}, str(error)
            write_arrays(folder / "outputs.npz", arrays)
            seconds = time.perf_counter() - began
            run.finish({"failed": failed, "seconds": seconds, "commit": code_commit()})
    return _read(study, folder)


def _trained(
    study: Study, where: torch.device, run: Run, report: Report | None
) -> Generator[None, None, dict[str, np.ndarray]]:
    model = yield from fitting(
        to_tensor(study.images),
        torch.from_numpy(study.labels),
        study.classes,
        study.recipe,
        where,
        keeper=run,
        report=report,
    )
    model.save(run.model_path)
    arrays = {}
    for name, images in study.look.items():
        view = to_tensor(images)
        outputs = inference.outputs(model.method, view, views=study.recipe.views)
        by_class = model.method.class_scores(outputs.to(where), model.score)
        arrays[f"outputs.{name}"] = outputs.numpy()
        arrays[f"predicted.{name}"] = by_class.argmax(1).numpy(force=True)
    if isinstance(model.method, DSC):
        every = torch.arange(len(study.classes), device=where)
        arrays["centres"] = model.method.simplex.centres(every).numpy(force=True)
    return arrays


def _read(study: Study, folder: Path) -> Outcome:
    record = json.loads((folder / "results.json").read_text())
    lines = (folder / "log.jsonl").read_text().splitlines()
    with np.load(folder / "outputs.npz") as file:
        arrays = {name: file[name] for name in file.files}

    def under(prefix: str) -> dict[str, np.ndarray]:
        return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}

    return Outcome(
        study.name,
        study.recipe.seed,
        under("outputs."),
        under("predicted."),
        arrays.get("centres"),
        [sum(json.loads(line)["loss"].values()) for line in lines],
        record["seconds"],
        record["commit"],
        record["failed"],
    )


def clear(differences: np.ndarray) -> int:
    """The sign of the mean of paired differences if 0 lies outside Student's 95 % interval, else 0.

    One difference decides nothing.
    """
    from scipy.special import stdtrit

    n = len(differences)
    if n < 2:
        return 0
    bound = stdtrit(n - 1, 0.975) * differences.std(ddof=1) / math.sqrt(n)
    return int(np.sign(differences.mean())) if abs(differences.mean()) > bound else 0
