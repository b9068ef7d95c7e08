"""`radius`: accuracy against the radius u, eq. 4 as printed beside eq. 4 at unit radius.

The paper's table is ResNet-18 on CIFAR-100. As printed, u scales eq. 4's gradient, so that it acts
as a learning rate in disguise; at unit radius it is a unit of length (docs/decisions/0001). The
columns share one recipe, the paper's without clipped gradients; one of them clips all the same, to
see what is left of u where nothing diverges. At one rate unit radius is u = 1 as printed.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepsimplex.data.archives import load_official
from deepsimplex.data.sources import LabelledSet, load_data
from deepsimplex.methods import settings_for
from deepsimplex.paper.requests import COLOURS, Request
from deepsimplex.paper.studies import Outcome, Study, conduct
from deepsimplex.recipes import Recipe
from deepsimplex.tables import spread, summary
from deepsimplex.terminal import console, table

RADII = (1, 5, 32, 64, 100, 150, 200, 1000)
PUBLISHED = {32: 76.2, 64: 79.5, 100: 79.4, 150: 79.9, 200: 79.0}
"""CIFAR-100 with ResNet-18, in % (the appendix's table of u); u = 1 is said not to work."""
CLIP = 1.0
COLUMNS = {
    "literal": "as printed, no clipping",
    "literal-clipped": "as printed, clipped",
    "unit": "unit radius",
}


def radius(request: Request) -> dict[str, Any]:
    """Train every cell, print the table, draw it."""
    train, test = _data(request)
    plan = _recipe(request)
    cells = [(column, u) for column in COLUMNS for u in (RADII if column != "unit" else (1,))]
    studies = [
        Study(
            f"{column}-{u}-{seed}" if column != "unit" else f"unit-{seed}",
            train.images,
            train.labels,
            train.classes,
            _of(plan, column, u, seed),
            {"test": test.images},
        )
        for column, u in cells
        for seed in range(request.seeds)
    ]
    outcomes = iter(conduct(studies, request.runs("radius"), request.device, "radius"))
    found: dict[str, dict[str, Any]] = {column: {} for column in COLUMNS}
    for column, u in cells:
        group = [next(outcomes) for _ in range(request.seeds)]
        found[column][str(u)] = _cell(group, test.labels)
    found["unit"] = dict.fromkeys(map(str, RADII), found["unit"]["1"])
    _print(request, train, test, plan, found)
    content = {
        "data": _counts(train, test),
        "recipe": plan.to_json(),
        "cells": found,
        "unit radius": "does not contain u: trained once a seed, the same in every row",
        "published": {str(u): value for u, value in PUBLISHED.items()},
    }
    drawn = _figure(request, train.source, found)
    request.publish("radius", content, drawn, _under(plan))
    return content


def _data(request: Request) -> tuple[LabelledSet, LabelledSet]:
    if request.quick:
        return load_data("digits"), load_data("digits", part="test")
    return (
        load_official("cifar100", "train", request.root),
        load_official("cifar100", "test", request.root),
    )


def _recipe(request: Request) -> Recipe:
    if request.quick:
        return Recipe(
            backbone="small",
            epochs=request.epochs or 6,
            batch_size=64,
            learning_rate=0.02,
            clip=None,
        )
    return Recipe(
        backbone="resnet18-cifar",
        epochs=request.epochs or 30,
        learning_rate=0.05,
        augment="crop+flip",
        clip=None,
    )


def _of(plan: Recipe, column: str, u: int, seed: int) -> Recipe:
    if column == "unit":
        return dataclasses.replace(plan, seed=seed)
    return dataclasses.replace(
        plan,
        method="dsc-literal",
        settings=settings_for("dsc-literal", {"radius": float(u)}),
        clip=CLIP if column == "literal-clipped" else None,
        seed=seed,
    )


def _cell(group: list[Outcome], labels: np.ndarray) -> dict[str, Any]:
    """Accuracies of the trainings that stayed finite; for the others the step they left at."""
    finite = [{"a": o.accuracy("test", labels)} for o in group if o.failed is None]
    failed = [o.failed for o in group if o.failed is not None]
    return {
        "accuracy": summary(finite, ("a",))["a"] if finite else None,
        "diverged": [step_of(message) for message in failed],
        "messages": failed,
        "last loss": [o.losses[-1] if o.losses else None for o in group],
        "seconds": [round(o.seconds, 2) for o in group],
    }


def step_of(message: str) -> int | None:
    """The step at which the loss was first not finite; None if only the weights tell."""
    found = re.search(r"at step (\d+)", message)
    return int(found[1]) if found else None


def _text(cell: dict[str, Any]) -> str:
    steps = [step for step in cell["diverged"] if step is not None]
    when = ""
    if steps:
        when = f" at step {min(steps)}" + (f"–{max(steps)}" if max(steps) > min(steps) else "")
    if cell["accuracy"] is None:
        return f"diverged{when}"
    lost = f" ({len(cell['diverged'])} diverged{when})" if cell["diverged"] else ""
    return spread(cell["accuracy"]) + lost


def _counts(train: LabelledSet, test: LabelledSet) -> dict[str, Any]:
    each = np.bincount(train.labels, minlength=len(train.classes))
    return {
        "name": train.source,
        "train images": len(train.labels),
        "train images a class": [int(each.min()), int(each.max())],
        "test images": len(test.labels),
        "classes": len(train.classes),
    }


def _under(plan: Recipe) -> str:
    """Below the figure: unit radius is drawn as it does at this rate, not as it does at its own."""
    return f"rate {plan.learning_rate:g}\nunit radius, clipped, is u = 1 as printed, clipped"


def _print(
    request: Request,
    train: LabelledSet,
    test: LabelledSet,
    plan: Recipe,
    found: dict[str, dict[str, Any]],
) -> None:
    rows = [
        [
            str(u),
            *(_text(found[column][str(u)]) for column in COLUMNS),
            f"{PUBLISHED[u]}" if u in PUBLISHED else "–",
        ]
        for u in RADII
    ]
    title = (
        f"{train.source}: accuracy in % on {len(test.labels)} test images, last of {plan.epochs} "
        f"epochs on {len(train.labels)} images, rate {plan.learning_rate:g}, "
        f"{request.seeds} seed{'s' if request.seeds > 1 else ''}"
    )
    table(title, ("u", *COLUMNS.values(), "published (CIFAR-100)"), rows)
    console.print("The unit-radius loss does not contain u: one training a seed fills its column.")


def _figure(request: Request, name: str, found: dict[str, dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    places = np.arange(len(RADII))
    for column, colour, shift, mark in zip(
        ("literal", "literal-clipped"), COLOURS[1::-1], (-0.08, 0.08), "os", strict=True
    ):
        cells = [found[column][str(u)] for u in RADII]
        accuracies = [c["accuracy"] or {"mean": np.nan, "sd": None} for c in cells]
        axes.errorbar(
            places + shift,
            [100 * a["mean"] for a in accuracies],  # the line breaks where all diverged
            [100 * (a["sd"] or 0) for a in accuracies],
            color=colour, marker=mark, linestyle="-", capsize=3, label=COLUMNS[column],
        )  # fmt: skip
        lost = [x + shift for x, c in zip(places, cells, strict=True) if c["diverged"]]
        axes.plot(lost, [0.0] * len(lost), "x", color=colour, ms=9, mew=2, clip_on=False, zorder=5)
    unit = found["unit"][str(RADII[0])]["accuracy"]
    if unit is not None:
        mean, sd = 100 * unit["mean"], 100 * (unit["sd"] or 0)
        axes.axhline(mean, color=COLOURS[2], label=f"{COLUMNS['unit']} (no u in it)")
        axes.axhspan(mean - sd, mean + sd, color=COLOURS[2], alpha=0.15, lw=0)
    if not request.quick:
        at = {x: PUBLISHED[u] for x, u in zip(places, RADII, strict=True) if u in PUBLISHED}
        theirs = "published, all 50 000 images"
        axes.plot(list(at), list(at.values()), "D--", color="0.5", ms=5, label=theirs)
    axes.plot([], [], "x", color="0.3", ms=9, mew=2, label="diverged")
    axes.set_xticks(places, [str(u) for u in RADII])
    axes.set(xlabel="radius u", ylabel="test accuracy, %", ylim=(0, 105), title=f"Eq. 4 on {name}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
