"""`table1` and `closed`: the open-set tables, from one set of runs; a command for some cells
leaves the others of its record be.
"""

from __future__ import annotations

import itertools
from typing import Any

from deepsimplex import tables
from deepsimplex.data.protocols import repeated_trials
from deepsimplex.paper import charts, published
from deepsimplex.paper.opensets import EVERY, Plan, keep_scores, label, recipe_for, results
from deepsimplex.paper.requests import Request, joined
from deepsimplex.runs import command
from deepsimplex.terminal import console, table

Key = tuple[Any, ...]  # column, background, row, recipe, detector
Cells = dict[Key, dict[str, Any]]
EXTRA = ("held_out_accuracy", "auroc_mirrored", "auroc_one_view")
"""A measure to choose a recipe by, and the test by other views, where a run has them."""


def table1(request: Request, plan: Plan) -> dict[str, Any]:
    """AUROC of every row and column, ours beside published."""
    return _show(request, plan, "table1", "auroc", published.AUROC)


def closed(request: Request, plan: Plan) -> dict[str, Any]:
    """Closed-set accuracies of the same runs; those in table1's record are taken from there."""
    return _show(request, plan, "closed", "accuracy", published.ACCURACY, taken="table1")


def _show(
    request: Request,
    plan: Plan,
    name: str,
    measure: str,
    printed: dict[str, tuple[published.Cell, ...]],
    taken: str | None = None,
) -> dict[str, Any]:
    plan = plan.on_digits() if request.quick else plan
    given = {} if taken is None else _recorded(request, plan.named(taken))
    cells = {key: given[key] for key in _wanted(plan) if _enough(given.get(key), request, plan)}
    found, missing = results(request, plan, without={key[:3] for key in cells})
    measured = [_measured(key, records, plan) for key, records in found.items()]
    cells |= {_key(cell): cell for cell in measured}
    _print(plan, measure, printed, cells)
    before = joined(_recorded(request, plan.named(name)), given, _weight)
    after = joined(before, cells, _weight, _stays)
    content = {
        "measure": measure,
        "family": plan.family,
        "trials": max(_weight(cell)[1] for cell in after.values()),
        "protocol": "last epoch; nothing chosen on test; thresholds from held-out knowns",
        "cells": [cell | _distinct(cell, measure, plan.family) for cell in after.values()],
        "missing": missing,
        "published": {k: [published.cell(c) for c in v] for k, v in printed.items()},
    }
    if measure == "auroc":
        content["best published without background"] = published.BEST_WITHOUT_BACKGROUND
    if given and taken is not None:
        source = request.recorded(plan.named(taken))
        about = {"record": f"paper-{request.named(plan.named(taken))}.json"}
        content["taken from"] = about | {"environment": source["environment"]}
    there, path = request.recorded(plan.named(name)), request.place(plan.named(name))
    if there is not None and all(there[part] == content[part] for part in ("cells", "published")):
        console.print(f"Nothing new for the record: {path}")
    else:
        request.record(plan.named(name), content, joins=True)
    kept = [cell for cell in measured if after[_key(cell)] is cell]
    keep_scores(path, {(*_key(c)[:2], label(c)): found[_key(c)[:3]] for c in kept})
    request.draw(plan.named(name), charts.open_sets(content))
    return content


def _wanted(plan: Plan) -> list[Key]:
    every = itertools.product(plan.columns, plan.tracks, plan.rows)
    return [(*key, plan.recipe, plan.score) for key in every]


def _enough(cell: dict[str, Any] | None, request: Request, plan: Plan) -> bool:
    """Whether a cell has the epochs and the trials that are asked for."""
    if cell is None:
        return False
    asked = recipe_for(cell["row"], cell["column"], 0, request.epochs, plan.recipe).epochs
    return _weight(cell) >= (asked, plan.trials)


def _weight(cell: dict[str, Any]) -> tuple[int, int]:
    return cell["epochs"], len(cell["auroc"]["values"])


def _stays(old: dict[str, Any], new: dict[str, Any]) -> None:
    have, come = ("{} epochs, {} trials".format(*_weight(cell)) for cell in (old, new))
    console.print(
        f"{old['column']}, {old['row']}: the record's cell of {have} stays; "
        f"{come} are not recorded over it."
    )


def _recorded(request: Request, name: str) -> Cells:
    """Cells of the record that stands there."""
    before = request.recorded(name) or {"cells": []}
    return {_key(cell): cell for cell in before["cells"] if cell["row"] in EVERY}


def _key(cell: dict[str, Any]) -> Key:
    return tuple(cell[name] for name in ("column", "background", "row", "recipe", "detector"))


def _print(
    plan: Plan, measure: str, printed: dict[str, tuple[published.Cell, ...]], cells: Cells
) -> None:
    """A table a track: ours, and in brackets the published cell of the row it answers."""
    for track in plan.tracks:
        rows = []
        for row in plan.rows:
            line = [cells.get((c, track, row, plan.recipe, plan.score)) for c in plan.columns]
            if any(line):
                rows.append([row, *(_text(cell, measure, printed) for cell in line)])
        if rows and track == "none" and measure == "auroc" and plan.family == "arpl":
            rows += _best(plan.columns)
        if rows:
            title = "without background" if track == "none" else f"background {track}"
            shown = f"{measure if measure == 'accuracy' else measure.upper()} in %, {title}, "
            shown += f"{plan.trials} {plan.family} trials, {plan.recipe} recipe, "
            shown += f"score {plan.score}" if plan.score else "each by its own score"
            if plan.columns == ("digits",):
                shown += " (none published: the paper has no digits of 8 pixels)"
            else:
                shown += " (published, under other protocols)"
            table(shown, ("", *plan.columns), rows)
    for column in plan.columns:
        repeated = [
            f"{row} {tables.spread(other)}"
            for (c, _, row, *_), cell in cells.items()
            if c == column
            for other in _distinct(cell, measure, plan.family).values()
        ]
        if repeated:
            console.print(
                f"{column}: some of the splits are equal; over the different ones alone: "
                f"{', '.join(repeated)}."
            )
    answered = {EVERY[cell["row"]].answers for cell in cells.values()}
    if plan.columns != ("digits",):
        for note in published.unprinted(answered & {*printed}):
            console.print(note)


def _text(
    cell: dict[str, Any] | None, measure: str, printed: dict[str, tuple[published.Cell, ...]]
) -> str:
    if cell is None:
        return "–"
    answers = EVERY[cell["row"]].answers
    theirs = published.answer(printed, answers, cell["column"], cell["background"])
    ours = tables.spread(cell[measure])
    return f"{ours} ({published.cell(theirs)})" if theirs else ours


def _best(columns: tuple[str, ...]) -> list[list[str]]:
    """The row of the best published numbers without background, if these columns have any."""
    best = {c: published.BEST_WITHOUT_BACKGROUND.get(c) for c in columns}
    if not any(best.values()):
        return []
    return [["best published", *(f"{b[0]} ({b[1]})" if b else "–" for b in best.values())]]


def _measured(
    key: tuple[str, str, str], records: list[dict[str, Any]], plan: Plan
) -> dict[str, Any]:
    """A cell of the record: its numbers, and what they come from."""
    column, track, row = key
    return {
        "column": column,
        "background": track,
        "row": row,
        "recipe": plan.recipe,
        "detector": plan.score,
        "method": EVERY[row].method,
        "score": records[0]["score"],
        "epochs": records[0]["epochs"],
        **tables.summary(records, ("auroc", "accuracy", "oscr", "fpr95")),
        **tables.summary(records, tuple(n for n in EXTRA if records[0].get(n) is not None)),
        "auroc by score": _by_score(records),
        "seconds": [record["seconds"] for record in records],
        "commits": sorted({str(record["commit"]) for record in records}),
        "hardware": sorted({str(record.get("hardware")) for record in records}),
        "command": command(),
    }


def _distinct(cell: dict[str, Any], measure: str, family: str) -> dict[str, Any]:
    """The measure over the different splits alone, where a family has one twice."""
    repeats, values = repeated_trials(family, cell["column"]), cell[measure]["values"]
    kept = [{measure: value} for number, value in enumerate(values) if number not in repeats]
    if len(kept) == len(values):
        return {}
    return {f"{measure} of different splits": tables.summary(kept, (measure,))[measure]}


def _by_score(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean AUROC by each score of the method, and the detector's, of the same trainings."""
    every = [record["auroc_by_score"] for record in records]
    return {name: sum(one[name] for one in every) / len(every) for name in every[0]}
