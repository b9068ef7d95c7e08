"""`table2`: closed set with ResNet-18 on MNIST, CIFAR-10 and CIFAR-100.

Each method runs at the best of three learning rates, chosen by accuracy on a tenth of the
training images held out for that (a shorter training, one seed); then on all of them, last epoch,
over seeds. A rate at an edge of its grid is marked: a better one may lie beyond.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from deepsimplex.data.archives import load_official
from deepsimplex.data.sources import LabelledSet, hold_out, load_data
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import METHODS
from deepsimplex.paper import charts, published
from deepsimplex.paper.requests import Request, joined
from deepsimplex.paper.studies import Outcome, Study, conduct
from deepsimplex.recipes import Recipe
from deepsimplex.runs import command
from deepsimplex.tables import spread, summary
from deepsimplex.terminal import console, table

ROWS = {
    "dsc": "DSC",
    "dsc-softmax": "DSC",
    "softmax": "Softmax",
    "center": "Center loss",
    "sphereface": "SphereFace",
    "cosface": "CosFace",
    "arcface": "ArcFace",
    "contrastive": None,
    "triplet": None,
    "triplet-semihard": None,
    "contrastive-center": None,
    "regularface": None,
    "mhe": None,
    "basis": None,
    "range": None,
    "marginal": None,
    "uniformface": None,
}
"""Methods, and the published row that each answers."""
EVERY = ROWS | {
    name: None for name, row in METHODS.items() if name not in ROWS and not row.needs_background
}
"""And all others that do without a background, if they are asked for."""
COLUMNS = {"mnist": "crop", "cifar10": "rand+crop+flip", "cifar100": "rand+crop+flip"}
"""Sets and their augmentation: no mirrored digits."""
RATES = (0.09, 0.3, 0.9)
"""Tried for every loss; for one that has a rate of its own, that, and a third and thrice of it."""
HELD_OUT = 0.1
BATCH = 512
EPOCHS = {"mnist": 40}
MOST = 200  # epochs of the other sets
SCREEN, LEAST = 0.1, 10  # share of them that a screening gets, and the fewest


def table2(
    request: Request, rows: tuple[str, ...] = tuple(ROWS), columns: tuple[str, ...] = tuple(COLUMNS)
) -> dict[str, Any]:
    """Choose rates, train, and print ours beside published."""
    if request.quick:
        columns = ("digits",)
    cells: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for column in columns:
        try:
            train, test = _data(column, request)
        except DeepSimplexError as error:
            missing[column] = str(error)
            continue
        plan = _recipe(request, column)
        screened = _choose(request, rows, column, train, plan)
        found = _final(request, column, train, test, plan, screened)
        if found:
            _print(column, found)
        cells += found
    for column, why in missing.items():
        console.print(f"{column}: {why}")
    if not cells and missing:
        raise DeepSimplexError(
            "data of one column or more", f"none of {', '.join(missing)}", "get them as said above"
        )
    if not cells:
        raise DeepSimplexError("a training that stays finite", "none", "choose other --rows")
    measured = {_key(cell): cell for cell in cells}
    content = {
        "cells": list(joined(_measured_before(request), measured, _seeds, _stays).values()),
        "missing": missing,
        "published": published.CLOSED,
    }
    request.record("table2", content, joins=True)
    request.draw("table2", charts.closed_sets(content, EVERY))
    return content


def _print(column: str, cells: list[dict[str, Any]]) -> None:
    rows = [
        [
            cell["row"],
            f"{cell['rate']:g}" + (", edge" if cell["edge"] else ""),
            spread(cell["accuracy"])
            + (f", {len(cell['diverged'])} diverged" if cell["diverged"] else ""),
            str(published.CLOSED.get(EVERY[cell["row"]] or "", {}).get(column, "–")),
        ]
        for cell in cells
    ]
    title = f"{column}: {cells[0]['train images']} training images, accuracy in %, "
    title += f"last of {cells[0]['epochs']} epochs"
    title += ", image and mirror image together" if cells[0]["mirror"] else ""
    table(title, ("", "rate", "ours", "published"), rows)


def _key(cell: dict[str, Any]) -> tuple[str, str, int]:
    return cell["column"], cell["row"], cell["epochs"]


def _measured_before(request: Request) -> dict[tuple[str, str, int], Any]:
    """Cells of the record that stands there: a command for some cells leaves the others be."""
    before = request.recorded("table2") or {"cells": []}
    return {_key(c): c for c in before["cells"] if c["row"] in EVERY}


def _seeds(cell: dict[str, Any]) -> int:
    return len(cell["accuracy"]["values"])


def _stays(old: dict[str, Any], new: dict[str, Any]) -> None:
    console.print(
        f"{old['column']}, {old['row']}: the record's cell of {_seeds(old)} seeds stays; "
        f"{_seeds(new)} are not recorded over it."
    )


def _data(column: str, request: Request) -> tuple[LabelledSet, LabelledSet]:
    if column == "digits":
        return load_data("digits"), load_data("digits", part="test")
    return tuple(load_official(column, part, request.root) for part in ("train", "test"))  # type: ignore[return-value]


def _recipe(request: Request, column: str) -> Recipe:
    """One recipe for all losses; the score of image and mirror image where training mirrors."""
    if request.quick:
        return Recipe(method="softmax", backbone="small", epochs=request.epochs or 10)
    augment = COLUMNS[column]
    return Recipe(
        method="softmax",
        backbone="resnet18-cifar",
        epochs=request.epochs or EPOCHS.get(column, MOST),
        batch_size=BATCH,
        augment=augment,
        mirror="flip" in augment,
    )


def _rates(method: str) -> tuple[float, ...]:
    own = METHODS[method].rate
    return RATES if own is None else (own / 3, own, 3 * own)


def _of(plan: Recipe, method: str, rate: float, seed: int, epochs: int) -> Recipe:
    net = plan.backbone
    if METHODS[method].flat and net.startswith("resnet"):
        net += "-unpooled"
    return dataclasses.replace(
        plan,
        method=method,
        settings=None,
        backbone=net,
        learning_rate=rate,
        seed=seed,
        epochs=epochs,
    )


def _choose(
    request: Request, rows: tuple[str, ...], column: str, train: LabelledSet, plan: Recipe
) -> dict[str, dict[float, float]]:
    """Accuracy on held-out training images by method and rate; a diverged one has 0."""
    kept, held = hold_out(train.labels, HELD_OUT, seed=0)
    seen, left = train.images[kept], {"held": train.images[held]}
    epochs = min(plan.epochs, max(LEAST, round(SCREEN * plan.epochs)))
    tried = [(method, rate) for method in rows for rate in _rates(method)]
    studies = [
        Study(
            f"{column}-{method}-{rate:g}-screen",
            seen,
            train.labels[kept],
            train.classes,
            _of(plan, method, rate, 0, epochs),
            left,
        )
        for method, rate in tried
    ]
    outcomes = conduct(studies, request.runs("table2"), request.device, f"{column}: rates")
    found: dict[str, dict[float, float]] = {method: {} for method in rows}
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
) -> list[dict[str, Any]]:
    chosen = {method: max(tried, key=lambda r: tried[r]) for method, tried in screened.items()}
    studies = [
        Study(
            f"{column}-{method}-{rate:g}-{seed}",
            train.images,
            train.labels,
            train.classes,
            _of(plan, method, rate, seed, plan.epochs),
            {"test": test.images},
        )
        for method, rate in chosen.items()
        for seed in range(request.seeds)
    ]
    outcomes = iter(conduct(studies, request.runs("table2"), request.device, column))
    cells = []
    for method, rate in chosen.items():
        mine: list[Outcome] = [next(outcomes) for _ in range(request.seeds)]
        finite = [outcome for outcome in mine if outcome.failed is None]
        values = [{"accuracy": outcome.accuracy("test", test.labels)} for outcome in finite]
        if not finite:
            console.print(f"{column}, {method}: diverged, {mine[0].failed}")
            continue
        cells.append(
            {
                "column": column,
                "row": method,
                "rate": rate,
                "edge": rate in (min(screened[method]), max(screened[method])),
                "screened": {f"{r:g}": a for r, a in screened[method].items()},
                "epochs": plan.epochs,
                **{name: getattr(plan, name) for name in ("batch_size", "augment", "mirror")},
                "train images": len(train.labels),
                **summary(values, ("accuracy",)),
                "last loss": [outcome.losses[-1] for outcome in finite],  # a triplet's m: collapsed
                "diverged": [outcome.failed for outcome in mine if outcome.failed is not None],
                "seconds": [outcome.seconds for outcome in mine],
                "commits": sorted({str(outcome.commit) for outcome in mine}),
                "command": command(),
            }
        )
    return cells
