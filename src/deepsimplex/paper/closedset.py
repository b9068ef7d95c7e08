"""`table2`: closed set with ResNet-18 on MNIST, CIFAR-10 and CIFAR-100.

Each method runs at the best of its learning rates, chosen by accuracy on a tenth of the training
images held out for that (a shorter training, one seed); then on all of them, last epoch, over
seeds. The squared loss wants rates an order above softmax's, so the lists differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepsimplex.data.archives import load_official
from deepsimplex.data.sources import LabelledSet, hold_out, load_data
from deepsimplex.errors import DeepSimplexError
from deepsimplex.paper import published
from deepsimplex.paper.requests import Request
from deepsimplex.paper.studies import Study, conduct
from deepsimplex.recipes import Recipe
from deepsimplex.tables import spread, summary
from deepsimplex.terminal import console, table

RATES = {
    "softmax": (0.03, 0.1, 0.3),
    "dsc": (0.1, 0.3, 1.0),
    "dsc-softmax": (0.03, 0.1, 0.3),
}
ANSWERS = {"softmax": "Softmax", "dsc": "DSC", "dsc-softmax": "DSC"}
"""The published row that stands beside ours."""
COLUMNS = {"mnist": "crop", "cifar10": "crop+flip", "cifar100": "crop+flip"}
"""Sets and their augmentation: no mirrored digits."""
HELD_OUT = 0.1
EPOCHS, SCREEN = 100, 0.25  # of the final training; share of it that a screening gets


def table2(request: Request) -> dict[str, Any]:
    """Choose rates, train, and print ours beside published."""
    columns = {"digits": "none"} if request.quick else COLUMNS
    cells: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    for column, augment in columns.items():
        try:
            train, test = _data(column, request)
        except DeepSimplexError as error:
            missing[column] = str(error)
            continue
        plan = _recipe(request, augment, train)
        chosen = _choose(request, column, train, plan)
        cells[column] = _final(request, column, train, test, plan, chosen)
    for column, cell in cells.items():
        rows = [
            [
                method,
                f"{cell['rates'][method]:g}",
                spread(cell["accuracy"][method]),
                str(published.CLOSED[ANSWERS[method]].get(column, "–")),
            ]
            for method in RATES
        ]
        title = f"{column}: {cell['train images']} training images, accuracy in %, last epoch"
        table(title, ("", "rate", "ours", "published"), rows)
    for column, why in missing.items():
        console.print(f"{column}: {why}")
    content = {"cells": cells, "missing": missing, "published": published.CLOSED}
    request.record("table2", content)
    return content


def _data(column: str, request: Request) -> tuple[LabelledSet, LabelledSet]:
    if column == "digits":
        return load_data("digits"), load_data("digits", part="test")
    return tuple(load_official(column, part, request.root) for part in ("train", "test"))  # type: ignore[return-value]


def _recipe(request: Request, augment: str, train: LabelledSet) -> Recipe:
    net = "small" if request.quick else "resnet18-cifar"
    epochs = request.epochs or (10 if request.quick else EPOCHS)
    return Recipe(method="softmax", backbone=net, epochs=epochs, augment=augment)


def _of(plan: Recipe, method: str, rate: float, seed: int, epochs: int) -> Recipe:
    return dataclasses.replace(
        plan, method=method, settings=None, learning_rate=rate, seed=seed, epochs=epochs
    )


def _choose(
    request: Request, column: str, train: LabelledSet, plan: Recipe
) -> dict[str, dict[float, float]]:
    """Accuracy on held-out training images by method and rate; a diverged one has 0."""
    kept, held = hold_out(train.labels, HELD_OUT, seed=0)
    epochs = max(1, round(SCREEN * plan.epochs))
    tried = [(method, rate) for method, rates in RATES.items() for rate in rates]
    studies = [
        Study(
            f"{column}-{method}-{rate:g}-screen",
            train.images[kept],
            train.labels[kept],
            train.classes,
            _of(plan, method, rate, 0, epochs),
            {"held": train.images[held]},
        )
        for method, rate in tried
    ]
    outcomes = conduct(studies, request.runs("table2"), request.device, f"{column}: rates")
    found: dict[str, dict[float, float]] = {method: {} for method in RATES}
    for (method, rate), outcome in zip(tried, outcomes, strict=True):
        found[method][rate] = outcome.accuracy("held", train.labels[held])
    return found


def _final(
    request: Request,
    column: str,
    train: LabelledSet,
    test: LabelledSet,
    plan: Recipe,
    screened: dict[str, dict[float, float]],
) -> dict[str, Any]:
    rates = {method: max(tried, key=lambda r: tried[r]) for method, tried in screened.items()}
    studies = [
        Study(
            f"{column}-{method}-{seed}",
            train.images,
            train.labels,
            train.classes,
            _of(plan, method, rates[method], seed, plan.epochs),
            {"test": test.images},
        )
        for method in RATES
        for seed in range(request.seeds)
    ]
    outcomes = iter(conduct(studies, request.runs("table2"), request.device, column))
    accuracy = {}
    for method in RATES:
        values = [next(outcomes).accuracy("test", test.labels) for _ in range(request.seeds)]
        accuracy[method] = summary([{"a": value} for value in values], ("a",))["a"]
    counts = np.bincount(train.labels, minlength=len(train.classes))
    return {
        "train images": len(train.labels),
        "images a class": [int(counts.min()), int(counts.max())],
        "epochs": plan.epochs,
        "screened": {m: {f"{r:g}": a for r, a in tried.items()} for m, tried in screened.items()},
        "rates": rates,
        "accuracy": accuracy,
    }
