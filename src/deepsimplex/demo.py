"""The first things a newcomer runs: the demo, and the doctor."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

from deepsimplex import compare, tables
from deepsimplex.answers import HEADINGS, MEASURES
from deepsimplex.commands import KEEP
from deepsimplex.data.protocols import digits_trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.fitting import fit_model
from deepsimplex.metrics import accuracy
from deepsimplex.model import Model
from deepsimplex.recipes import digits_recipe
from deepsimplex.runs import command, environment, write_json
from deepsimplex.tables import spread
from deepsimplex.terminal import called, console, percent, table, training


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
    means = {method: tables.summary(records, MEASURES) for method, records in results.items()}
    table(
        f"Mean ± sd over {len(cases)} splits, in %",
        ("", *HEADINGS),
        [[method, *(spread(t[name]) for name in MEASURES)] for method, t in means.items()],
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
        "command": command(),
        "environment": environment(where),
        "seconds": round(time.perf_counter() - began, 2),
        "methods": means,
        "trials": results,
    }
    write_json(out / "results.json", record)
    compare.gather_scores(out / "scores.npz", sorted(out.glob("*/scores.npz")))
    console.print(
        f"\nModel: {out / 'dsc-0' / 'model.safetensors'}\nNumbers: {out / 'results.json'}\n"
        f"Took {record['seconds']:.0f} s. Next, with a folder of images for each class in "
        f"photos/: {called()} train photos --out runs/photos"
    )


def doctor(device: str) -> bool:
    """True when a short training on the device learns."""
    where = pick_device(device)
    for name, value in environment(where).items():
        console.print(f"{name:>13}  {value}")
    for extra in ("timm", "pytorch-ood"):
        found = importlib.util.find_spec(extra.replace("-", "_")) is not None
        console.print(f"{extra:>13}  {'installed' if found else 'not installed (optional)'}")
    trial = digits_trial(0)
    recipe = dataclasses.replace(digits_recipe("dsc"), epochs=5)
    began = time.perf_counter()
    images, labels = to_tensor(trial.train[0]), torch.from_numpy(trial.train[1])
    model = fit_model(images, labels, trial.classes, recipe, device=device)
    tested = model.judge(to_tensor(trial.known_test[0]))
    reached = accuracy(trial.known_test[1], tested.predicted)
    fine = reached > 0.8
    console.print(
        f"{'training':>13}  5 epochs of digits in {time.perf_counter() - began:.1f} s, "
        f"accuracy {percent(reached)} %: {'all is well' if fine else 'NOT as expected (> 80 %)'}"
    )
    return fine
