"""`deepsimplex methods`: every row of METHODS, and what a reader asks of it."""

from __future__ import annotations

import itertools
import json
import textwrap
from importlib import resources
from typing import Any

import torch

from deepsimplex.methods import METHODS, build_method, method_row
from deepsimplex.terminal import console

EPOCHS = 100
"""A recipe of so many epochs shows how many each stage takes."""


def catalogue() -> list[dict[str, Any]]:
    """A record a row; costs are whole trainings on digits, in those of softmax."""
    measured = json.loads((resources.files("deepsimplex.methods") / "costs.json").read_text())
    found = []
    for name, row in METHODS.items():
        with torch.device("meta"):
            method = build_method(name, "small", (1, 8, 8), 3)
        found.append(
            {
                "method": name,
                "family": row.family,
                "about": row.about,
                "cite": row.cite,
                "defaults": row.defaults,
                "background": "needed"
                if row.needs_background
                else "used if given"
                if row.uses_background
                else "not used",
                "stages": {stage.name: stage.epochs for stage in method.stages(EPOCHS)},
                "cost": measured["costs"].get(name),
                "rate": row.rate,
                "scores": list(method.scores),
            }
        )
    order = list(dict.fromkeys(record["family"] for record in found))
    return sorted(found, key=lambda record: order.index(record["family"]))


def show(as_json: bool, only: str | None = None) -> None:
    """Print the catalogue, or one row of it."""
    records = catalogue()
    if only is not None:
        method_row(only)
        records = [record for record in records if record["method"] == only]
    if as_json:
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return
    for family, members in itertools.groupby(records, key=lambda record: record["family"]):
        console.print(f"\n{family}", style="bold")
        for record in members:
            _print(record)
    console.print(
        f"\n{len(records)} row{'s' * (len(records) > 1)}. Cost: a whole training on digits, two "
        f"cores, in those of softmax. Stages in epochs of {EPOCHS}.",
        style="dim",
    )


def _print(record: dict[str, Any]) -> None:
    stages = ", ".join(f"{name} {epochs}" for name, epochs in record["stages"].items())
    cost = "not measured" if record["cost"] is None else f"{record['cost']:.1f}×"
    lines = [
        record["about"],
        f"{record['cite']}; defaults: {record['defaults']}"
        + (f"; rate {record['rate']:g}, whatever the net" if record["rate"] else ""),
        f"background {record['background']}; stages {stages}; cost {cost}; "
        f"scores {', '.join(record['scores'])}",
    ]
    width = max(40, console.width - 22)
    parts = [part for line in lines for part in textwrap.wrap(line, width)]
    for number, part in enumerate(parts):
        label = record["method"] if number == 0 else ""
        console.print(f"  {label:20}{part}", highlight=False, markup=False)
