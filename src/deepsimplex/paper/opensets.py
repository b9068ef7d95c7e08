"""The trainings behind the open-set tables: columns × tracks × rows × trials.

Rows are methods, columns the six benchmarks. The tracks without and with a background set stand
apart. Every trial has its run folder, so a command goes on where it stopped, and one reads what
another has trained.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from deepsimplex import compare
from deepsimplex.data.background import Background, load_background
from deepsimplex.data.protocols import BENCHMARKS, Trial, benchmark_trial, splits
from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError
from deepsimplex.lanes import drive, side_by_side
from deepsimplex.methods import METHODS, method_row, settings_for
from deepsimplex.paper import published
from deepsimplex.paper.requests import Request
from deepsimplex.recipes import BENCHMARK_RECIPES, Recipe, digits_recipe
from deepsimplex.research import KEEP, check_scored
from deepsimplex.terminal import training


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table: a method, and the row of the paper's that it answers."""

    method: str
    answers: str | None = None


ROWS = {
    "eq. 4": Entry("dsc", "DSC"),
    "eq. 5 A": Entry("dsc-eq5-a", "DSC"),
    "eq. 5 B": Entry("dsc-eq5-b", "DSC"),
    "eq. 5 C": Entry("dsc-eq5-c", "DSC"),
    "eq. 6": Entry("dsc-hinge", "DSC"),
    "eq. 7": Entry("dsc-softmax", "DSC"),
    "eq. 7 + eq. 4": Entry("dsc-blend", "DSC"),
    "eq. 7 turned": Entry("dsc-turned", "DSC"),
    "authors' code": Entry("dsc-authors", "DSC"),
    "softmax": Entry("softmax", "Softmax"),
    "openmax": Entry("openmax", "OpenMax"),
    "g-openmax": Entry("g-openmax", "G-OpenMax"),
    "c2ae": Entry("c2ae", "C2AE"),
    "cac": Entry("cac", "CAC"),
    "gcpl": Entry("gcpl", "CPN"),
    "osrci": Entry("osrci", "OSRCI"),
    "crosr": Entry("crosr", "CROSR"),
    "rpl": Entry("rpl", "RPL"),
    "gdfr": Entry("gdfr", "GDFR"),
    "arpl": Entry("arpl"),
    "arpl-cs": Entry("arpl-cs"),
    "objectosphere": Entry("objectosphere", "Objectosphere"),
    "entropic": Entry("entropic"),
    "energy": Entry("energy"),
    "oe": Entry("oe"),
    "background-class": Entry("background-class"),
}
EVERY = ROWS | {
    name: Entry(name) for name in METHODS if name not in {entry.method for entry in ROWS.values()}
}
"""The rows of table 1, then all other methods under their own names."""
TRACKS = ("none", "cifar100")
"""Background sets: none, and the CIFAR-100 training classes that are not unknowns."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run: columns × tracks × rows × trials."""

    family: str = "arpl"
    columns: tuple[str, ...] = published.COLUMNS
    tracks: tuple[str, ...] = TRACKS
    rows: tuple[str, ...] = tuple(ROWS)
    trials: int = 5
    recipe: str = "common"  # a name in recipes.BENCHMARK_RECIPES
    score: str | None = None  # a detector's, instead of each method's own

    def named(self, table: str) -> str:
        """The record's name: ARPL's splits are the tables', others stand beside them."""
        return table if self.family == "arpl" else f"{table}-{self.family}"


Found = dict[tuple[str, str, str], list[dict[str, Any]]]


def results(request: Request, plan: Plan) -> tuple[Found, dict[str, str]]:
    """Records of all trials that can be run here, and why the others cannot."""
    where = pick_device(request.device)
    at_once = side_by_side(where)
    found: Found = {}
    missing: dict[str, str] = {}
    possible = [c for c in plan.columns if not _lacks(c, plan, request.root, missing)]
    for column, row in itertools.product(possible, plan.rows):
        _check_score(column, row, plan)
    count = len(possible) * plan.trials * sum(fits(r, t) for r in plan.rows for t in plan.tracks)

    with training("Training", trainings=count) as begin:

        def job(
            track: str, number: int, row: str, group: dict[str, Trial]
        ) -> Generator[None, None, None]:
            """One training for all columns that ask for the same one."""
            donor = None
            for column, trial in group.items():
                name = f"{plan.family}-{column}-{track}/{_slug(row)}-{number}"
                name += f"-{plan.recipe}" if plan.recipe != "common" else ""
                name += f"-{plan.score}" if plan.score else ""
                folder = request.runs("opensets") / name
                record = yield from compare.running(
                    trial,
                    recipe_for(row, column, number, request.epochs, plan.recipe),
                    folder,
                    where,
                    keep=KEEP,
                    score=plan.score,
                    at_once=at_once,
                    donor=donor,
                    report=begin(f"{column}, {row}, trial {number}"),
                )
                found.setdefault((column, track, row), []).append(record)
                donor = donor or folder

        def jobs() -> Iterator[Generator[None, None, None]]:
            for columns in _alike(possible, plan.family):
                for track, number in itertools.product(plan.tracks, range(plan.trials)):
                    group = {
                        column: benchmark_trial(
                            column,
                            plan.family,
                            number,
                            request.root,
                            background=_background(track, column, request.root),
                        )
                        for column in columns
                    }
                    for row in plan.rows:
                        if fits(row, track):
                            yield job(track, number, row, group)

        drive(jobs(), where, at_once=at_once)
    order = itertools.product(possible, plan.tracks, plan.rows)
    in_order = {
        key: sorted(found[key], key=lambda record: record["seed"]) for key in order if key in found
    }
    return in_order, missing


def _check_score(column: str, row: str, plan: Plan) -> None:
    """Before the first training: can the row be scored so?"""
    about = BENCHMARKS[column]
    shape = about.channels, about.size, about.size
    count = len(splits(plan.family, column)[0]["known"])
    check_scored(recipe_for(row, column, 0, None), shape, count, plan.score)


def fits(row: str, track: str) -> bool:
    """Whether a method belongs in a track: those that must, or cannot, use background."""
    about = method_row(EVERY[row].method)
    return not about.needs_background if track == "none" else about.uses_background


def _alike(columns: list[str], family: str) -> list[list[str]]:
    """Columns with the same known classes in every trial, together: they can share models."""
    groups: dict[Any, list[str]] = {}
    for column in columns:
        known = json.dumps([trial["known"] for trial in splits(family, column)])
        groups.setdefault((BENCHMARKS[column].known, known), []).append(column)
    return list(groups.values())


def recipe_for(
    row: str, column: str, number: int, epochs: int | None, name: str = "common"
) -> Recipe:
    entry = EVERY[row]
    if column == "digits":
        recipe = digits_recipe(entry.method, seed=number)
    else:
        make = BENCHMARK_RECIPES[name]
        recipe = make(entry.method, BENCHMARKS[column].augment, seed=number)
    settings = settings_for(entry.method)
    return dataclasses.replace(recipe, settings=settings, epochs=epochs or recipe.epochs)


def _lacks(column: str, plan: Plan, root: Path, missing: dict[str, str]) -> bool:
    """Note what a column lacks; True if it cannot be run."""
    try:
        for track in plan.tracks:
            _background(track, column, root)
        benchmark_trial(column, plan.family, 0, root)
    except DeepSimplexError as error:
        missing[column] = str(error)
    return column in missing


def _background(track: str, column: str, root: Path) -> Background | None:
    if track == "none":
        return None
    about = BENCHMARKS[column]
    return load_background(
        track, root, against=about.known, size=about.size, channels=about.channels
    )


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")
