"""The trainings behind the open-set tables: columns × tracks × rows × trials.

Rows are methods, columns the six benchmarks. The tracks without and with a background set stand
apart. Every trial has its run folder, so a command goes on where it stopped, and one reads what
another has trained.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepsimplex import compare
from deepsimplex.data.background import PHOTOGRAPHS, Background, load_background
from deepsimplex.data.protocols import BENCHMARKS, Trial, benchmark_trial, splits
from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError
from deepsimplex.lanes import drive, side_by_side
from deepsimplex.methods import METHODS, method_row
from deepsimplex.paper import published
from deepsimplex.paper.requests import Request
from deepsimplex.recipes import BENCHMARK_RECIPES, Recipe, digits_recipe
from deepsimplex.research import KEEP, check_scored
from deepsimplex.runs import write_arrays
from deepsimplex.terminal import console, training


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of the table: a method, and the row of the paper's that it answers."""

    method: str
    answers: str | None = None
    score: str | None = None  # of the method's own, where that row was scored by another


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
    "openmax": Entry("openmax", "OpenMax", score="neal"),
    "g-openmax": Entry("g-openmax", "G-OpenMax"),
    "c2ae": Entry("c2ae", "C2AE"),
    "cac": Entry("cac", "CAC"),
    "gcpl": Entry("gcpl", "CPN"),
    "osrci": Entry("osrci", "OSRCI"),
    "crosr": Entry("crosr", "CROSR"),
    "rpl": Entry("rpl", "RPL"),
    "gdfr": Entry("gdfr", "GDFR"),
    "arpl": Entry("arpl", "ARPL"),
    "arpl-cs": Entry("arpl-cs", "ARPL+CS"),
    "objectosphere": Entry("objectosphere", "Objectosphere"),
    "entropic": Entry("entropic"),
    "energy": Entry("energy", "Energy"),
    "oe": Entry("oe"),
    "background-class": Entry("background-class"),
}
EVERY = ROWS | {
    name: Entry(name) for name in METHODS if name not in {entry.method for entry in ROWS.values()}
}
"""The rows of table 1, then all other methods under their own names, which it takes if asked."""
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
    recipe: str = "common"  # a name in recipes.BENCHMARK_RECIPES; of digits "digits"
    score: str | None = None  # for all rows, instead of each row's own
    at_once: int | None = None  # trainings side by side; None for what the device takes

    def scored(self, row: str) -> str | None:
        """By what a row is scored; None is the method's default."""
        return self.score or EVERY[row].score

    def named(self, table: str) -> str:
        """The record's name: ARPL's splits are the tables', others stand beside them."""
        return table if self.family == "arpl" else f"{table}-{self.family}"

    def on_digits(self) -> Plan:
        """The quick version: the same rows on digits, two trials at most.

        The background is what `compare digits` takes, patches of photographs.
        """
        if self.recipe != "common":
            raise DeepSimplexError(
                "--quick or a --recipe", f"both, {self.recipe!r}", "the quick version is on digits"
            )
        tracks = dict.fromkeys("none" if t == "none" else PHOTOGRAPHS for t in self.tracks)
        return dataclasses.replace(
            self,
            columns=("digits",),
            tracks=tuple(tracks),
            trials=min(2, self.trials),
            recipe="digits",
        )


Key = tuple[str, str, str]  # column, track, row
Found = dict[Key, list[dict[str, Any]]]


def results(
    request: Request, plan: Plan, without: Collection[Any] = ()
) -> tuple[Found, dict[str, str]]:
    """Records of all trials that can be run here, with their folders, and why the others cannot.

    `without` are keys whose numbers are at hand. Rows that no track has a place for are told; if
    there is nothing at all, that is an error.
    """
    where = pick_device(request.device)
    every = itertools.product(plan.columns, plan.tracks, plan.rows)
    wanted = [key for key in every if fits(key[2], key[1]) and key not in without]
    _tell_misfits(plan)
    lacking, missing = _lacking({key[:2] for key in wanted}, plan, request.root)
    for place, why in missing.items():
        console.print(f"{place}: {why}")
    wanted = [key for key in wanted if key[:2] not in lacking]
    if not wanted and not without:
        raise _nothing(plan, missing)
    for column, row in dict.fromkeys((column, row) for column, _, row in wanted):
        _check_score(column, row, plan)
    found: Found = {key: [] for key in wanted}
    trainings = _left(request, plan, wanted)
    at_once = side_by_side(where, plan.at_once, trainings)

    with training("Training", trainings=trainings) as begin:

        def job(
            track: str, number: int, row: str, group: dict[str, Trial]
        ) -> Generator[None, None, None]:
            """One training for all columns that ask for the same one."""
            score = plan.scored(row)
            donors: list[Path] = []
            for column, trial in group.items():
                folder, own = _folders(request, plan, column, track, row, number)
                done = (folder / "results.json").exists()
                if folder != own:  # the same training by its own score may be there
                    donors.append(own)
                record = yield from compare.running(
                    trial,
                    recipe_for(row, column, number, request.epochs, plan.recipe),
                    folder,
                    where,
                    keep=KEEP,
                    score=score,
                    at_once=at_once,
                    donors=donors,
                    report=None if done else begin(f"{column}, {row}, trial {number}"),
                )
                found[column, track, row].append(record | {"folder": folder})
                donors.append(folder)

        def jobs() -> Iterator[Generator[None, None, None]]:
            for columns, track in itertools.product(_alike(plan), plan.tracks):
                here = [c for c in columns if any(key[:2] == (c, track) for key in wanted)]
                for number in range(plan.trials):
                    trials = {c: _trial(c, track, number, plan.family, request.root) for c in here}
                    for row in plan.rows:
                        group = {c: t for c, t in trials.items() if (c, track, row) in found}
                        if group:
                            yield job(track, number, row, group)

        drive(jobs(), where, at_once=at_once)
    for records in found.values():
        records.sort(key=lambda record: record["seed"])
    return found, missing


def _left(request: Request, plan: Plan, wanted: Collection[Key]) -> int:
    """How many trainings are to be done still; columns with the same knowns share theirs."""
    every = itertools.product(_alike(plan), plan.tracks, plan.rows, range(plan.trials))
    folders = (
        [
            folder
            for column in columns
            if (column, track, row) in wanted
            for folder in _folders(request, plan, column, track, row, number)
        ]
        for columns, track, row, number in every
    )
    return compare.unfinished(filter(None, folders))


def _folders(
    request: Request, plan: Plan, column: str, track: str, row: str, number: int
) -> tuple[Path, Path]:
    """Of a run, and of the same training by the row's own score."""
    name = f"{plan.family}-{column}-{track}/{_slug(row)}-{number}"
    name += f"-{plan.recipe}" if plan.recipe not in ("common", "digits") else ""
    name += f"-{request.epochs}-epochs" if request.epochs else ""
    name += f"-at-once-{plan.at_once}" if plan.at_once else ""  # timed for itself
    plain = request.runs("opensets") / name
    return _by(plain, plan.scored(row)), _by(plain, EVERY[row].score)


def _by(folder: Path, score: str | None) -> Path:
    return folder.with_name(f"{folder.name}-{score}") if score else folder


def keep_scores(record: Path, found: Mapping[Any, list[dict[str, Any]]]) -> None:
    """Beside a record, an .npz: true and predicted label and own score of every test image.

    `found` is by column, track and row, and so are the arrays named, with the trial: "cifar10/none/
    eq. 7/0.dot". Others in the file stay.
    """
    path, arrays = record.with_suffix(".npz"), {}
    if not found:
        return
    if path.exists():
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    for place, records in found.items():
        head = "/".join(place) + "/"
        arrays = {name: kept for name, kept in arrays.items() if not name.startswith(head)}
        for one in records:
            name = f"{head}{one['seed']}"
            with np.load(one["folder"] / "scores.npz") as file:
                arrays |= {f"{name}.{k}": file[k].astype(np.int16) for k in ("label", "predicted")}
                arrays[f"{name}.{one['score']}"] = file[one["score"]]
    write_arrays(path, arrays)


def _check_score(column: str, row: str, plan: Plan) -> None:
    """Before the first training: can the row be scored so?"""
    about = BENCHMARKS[column]
    shape = about.channels, about.size, about.size
    count = len(splits(plan.family, column)[0]["known"])
    check_scored(recipe_for(row, column, 0, None, plan.recipe), shape, count, plan.scored(row))


def fits(row: str, track: str) -> bool:
    """Whether a method belongs in a track: those that must, or cannot, use background."""
    about = method_row(EVERY[row].method)
    return not about.needs_background if track == "none" else about.uses_background


def _tell_misfits(plan: Plan) -> None:
    """Rows without a place in any track that is asked for, and why."""
    alone = [row for row in plan.rows if not any(fits(row, track) for track in plan.tracks)]
    needy = [row for row in alone if method_row(EVERY[row].method).needs_background]
    others = [row for row in alone if row not in needy]
    for rows, why in ((needy, "need a background"), (others, "have no use for a background")):
        if rows:
            console.print(f"Not in track {', '.join(plan.tracks)}: {', '.join(rows)}, which {why}.")


def _nothing(plan: Plan, missing: dict[str, str]) -> DeepSimplexError:
    """Why there is not a single cell, in one line."""
    if missing:
        return DeepSimplexError(
            "data of one column or more", f"none of {', '.join(missing)}", "get them as said above"
        )
    return DeepSimplexError(
        f"rows with a place in track {', '.join(plan.tracks)}",
        ", ".join(plan.rows),
        "choose another --track, or leave it out",
    )


def _alike(plan: Plan) -> list[list[str]]:
    """Columns with the same known classes in every trial, together: they can share models."""
    groups: dict[Any, list[str]] = {}
    for column in plan.columns:
        known = json.dumps([trial["known"] for trial in splits(plan.family, column)])
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
    return dataclasses.replace(recipe, epochs=epochs or recipe.epochs)


def label(cell: dict[str, Any]) -> str:
    """What a cell of a record is called: its row, the recipe if not the usual, the detector."""
    named = cell["recipe"] not in ("common", "digits")
    by = f", by {cell['detector']}" if cell["detector"] else ""
    return cell["row"] + (f", {cell['recipe']}" if named else "") + by


def shortened(cell: dict[str, Any]) -> bool:
    """Whether a cell's training was shorter than its recipe."""
    whole = recipe_for(cell["row"], cell["column"], 0, None, cell["recipe"]).epochs
    return bool(cell["epochs"] < whole)


def _lacking(
    places: set[tuple[str, str]], plan: Plan, root: Path
) -> tuple[set[tuple[str, str]], dict[str, str]]:
    """Of these columns and tracks, those whose data are not here; and why, in words."""
    lacking: set[tuple[str, str]] = set()
    missing: dict[str, str] = {}
    for column in plan.columns:
        splits(plan.family, column)  # a family that there is not is no missing data
        tracks = [track for track in plan.tracks if (column, track) in places]
        try:
            if tracks:
                benchmark_trial(column, plan.family, 0, root)
        except DeepSimplexError as error:
            lacking |= {(column, track) for track in tracks}
            missing[column] = str(error)
            continue
        for track in tracks:
            try:
                _background(track, column, root)
            except DeepSimplexError as error:
                lacking.add((column, track))
                missing[f"{column}, background {track}"] = str(error)
    return lacking, missing


def _trial(column: str, track: str, number: int, family: str, root: Path) -> Trial:
    background = _background(track, column, root)
    return benchmark_trial(column, family, number, root, background=background)


def _background(track: str, column: str, root: Path) -> Background | None:
    if track == "none":
        return None
    about = BENCHMARKS[column]
    return load_background(
        track, root, against=about.known, size=about.size, channels=about.channels
    )


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")
