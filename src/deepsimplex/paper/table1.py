"""`table1` and `closed`: the open-set tables, from one set of runs; a command for some cells
leaves the others of its record be.
"""

from __future__ import annotations

from typing import Any

from deepsimplex import tables
from deepsimplex.paper import published
from deepsimplex.paper.opensets import ROWS, Plan, results
from deepsimplex.paper.requests import Request
from deepsimplex.runs import command
from deepsimplex.terminal import console, table


def table1(request: Request, plan: Plan) -> dict[str, Any]:
    """AUROC of every row and column, ours beside published."""
    return _show(request, plan, "table1", "auroc", published.AUROC)


def closed(request: Request, plan: Plan) -> dict[str, Any]:
    """Closed-set accuracies of the same runs."""
    return _show(request, plan, "closed", "accuracy", published.ACCURACY)


def _show(
    request: Request,
    plan: Plan,
    name: str,
    measure: str,
    printed: dict[str, tuple[published.Cell, ...]],
) -> dict[str, Any]:
    plan = plan.on_digits() if request.quick else plan
    found, missing = results(request, plan)
    for track in plan.tracks:
        title = "without background" if track == "none" else f"background {track}"
        rows = [
            [
                row,
                *(
                    _cell(found.get((c, track, row)), measure, printed, c, track, row)
                    for c in plan.columns
                ),
            ]
            for row in plan.rows
            if any((column, track, row) in found for column in plan.columns)
        ]
        if track == "none" and measure == "auroc" and plan.family == "arpl":
            rows += _best(plan.columns) if rows else []
        if rows:
            shown = f"{measure if measure == 'accuracy' else measure.upper()} in %, {title}, "
            shown += f"{plan.trials} {plan.family} trials, {plan.recipe} recipe, "
            shown += f"score {plan.score} " if plan.score else "each by its own score "
            shown += "(published, under other protocols)"
            table(shown, ("", *plan.columns), rows)
    answered = {ROWS[row].answers for _, _, row in found}
    for theirs in (name for name in printed if name in published.UNPRINTED and name in answered):
        console.print(f"{theirs}: {published.UNPRINTED[theirs]}.")
    measured = (_measured(key, records, plan) for key, records in found.items())
    cells = {_key(cell): cell for cell in measured}
    before = _measured_before(request, plan.named(name))
    for key in [k for k in cells if k in before and before[k]["epochs"] > cells[k]["epochs"]]:
        kept = f"{key[0]}, {key[2]}: the record's cell of {before[key]['epochs']} epochs stays"
        console.print(f"{kept}; {cells.pop(key)['epochs']} are not recorded over it.")
    content = {
        "measure": measure,
        "family": plan.family,
        "trials": plan.trials,
        "protocol": "last epoch; nothing chosen on test; thresholds from held-out knowns",
        "cells": list((before | cells).values()),
        "missing": missing,
        "published": {k: [published.cell(c) for c in v] for k, v in printed.items()},
        "best published without background": published.BEST_WITHOUT_BACKGROUND,
    }
    request.record(plan.named(name), content)
    return content


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
        "method": ROWS[row].method,
        "score": records[0]["score"],
        "epochs": records[0]["epochs"],
        **tables.summary(records, ("auroc", "accuracy", "oscr", "fpr95")),
        "auroc by score": _by_score(records),
        "seconds": [record["seconds"] for record in records],
        "commits": sorted({str(record["commit"]) for record in records}),
        "command": command(),
    }


def _by_score(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean AUROC by each score of the method, and the detector's, of the same trainings."""
    every = [record["auroc_by_score"] for record in records]
    return {name: sum(one[name] for one in every) / len(every) for name in every[0]}


def _key(cell: dict[str, Any]) -> tuple[str | None, ...]:
    return tuple(cell[name] for name in ("column", "background", "row", "recipe", "detector"))


def _measured_before(request: Request, name: str) -> dict[tuple[str | None, ...], Any]:
    """Cells of the record that stands there: a command for some cells leaves the others be."""
    before = request.recorded(name) or {"cells": []}
    return {_key(cell): cell for cell in before["cells"] if cell["row"] in ROWS}


def _cell(
    records: list[dict[str, Any]] | None,
    measure: str,
    printed: dict[str, tuple[published.Cell, ...]],
    column: str,
    track: str,
    row: str,
) -> str:
    """Ours, and in brackets the published cell of the row it answers, in the same track."""
    if not records:
        return "–"
    ours = tables.spread(tables.summary(records, (measure,))[measure])
    theirs = ROWS[row].answers
    if column not in published.COLUMNS or theirs not in printed:
        return ours
    if (theirs in published.WITH_BACKGROUND) != (track != "none"):
        return ours
    return f"{ours} ({published.cell(printed[theirs][published.COLUMNS.index(column)])})"
