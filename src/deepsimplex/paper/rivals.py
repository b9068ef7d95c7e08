"""`rivals`: every method once, on one split, beside what was published for it.

CIFAR-10, the first ARPL split, the benchmarks' recipe. Rows that need background, or gain by it,
are trained with CIFAR-100's classes; the others without, and simplex rows both ways. Published
numbers are means of five trials under other protocols: where ours is more than five points away,
the reason that is known stands beside it.
"""

from __future__ import annotations

import itertools
from typing import Any

from deepsimplex.paper import charts, published
from deepsimplex.paper.opensets import EVERY, Plan, results
from deepsimplex.paper.requests import Request
from deepsimplex.runs import command
from deepsimplex.terminal import percent, table

NEAL = "copied from Neal et al. 2018: other splits, their net with a 2048-wide head, Adam 1e-4"
REASONS = {
    "Softmax": NEAL + "; one against the rest, scored by probability",
    "OpenMax": NEAL,
    "G-OpenMax": NEAL,
    "OSRCI": NEAL,
    "C2AE": "its authors' own; evaluated again by Perera et al. at about 71",
    "CAC": "Neal's splits, an older recipe (lr 0.01, 200 epochs)",
    "CPN": "Neal's splits, an older recipe",
    "CROSR": "a three-level DHRNet of wider layers; a re-implementation reports 71",
    "RPL": "an older recipe (lr 0.01, batch 64); Neal's splits",
    "GDFR": "the better of two backbones a column",
    "Objectosphere": "the DSC authors' own run, background 80 million tiny images",
    "Energy": "commented out in the paper's source, never printed; background as DSC's",
    "DSC": "background 80 million tiny images or 300K; the best epoch on the test set",
}
"""Why a published number may differ by more than FAR points, by its row in table 1."""
FAR = 5.0
COLUMN = "cifar10"


def rivals(request: Request, rows: tuple[str, ...] = tuple(EVERY)) -> dict[str, Any]:
    """Train every row on the first split; a record of all of them, and the table."""
    plan = Plan(columns=(COLUMN,), rows=rows, trials=1)
    plan = plan.on_digits() if request.quick else plan
    (column,) = plan.columns
    found, missing = results(request, plan)
    lines = [_line(track, row, record, column) for (_, track, row), (record,) in found.items()]
    for track in plan.tracks:
        shown = [line for line in lines if line["background"] == track]
        if shown:
            title = "without background" if track == "none" else f"background {track}"
            heading = ("", "accuracy", "AUROC", "OSCR", "seconds", "published", "why so far apart")
            title = f"{column}, arpl split 0, {title}, {plan.recipe} recipe, in %"
            table(title, heading, [_cells(line) for line in shown])
    every = _measured_before(request) | {_key(line): line for line in lines}
    order = [every[key] for key in itertools.product(plan.tracks, EVERY) if key in every]
    content = {"column": column, "family": "arpl", "trial": 0, "rows": order, "missing": missing}
    request.record("rivals", content)
    request.draw("rivals", charts.rivals(content))
    return content


def _key(line: dict[str, Any]) -> tuple[str, str]:
    return line["background"], line["row"]


def _measured_before(request: Request) -> dict[tuple[str, str], Any]:
    """Rows of the record that stands there: a command for some rows leaves the others be."""
    before = request.recorded("rivals") or {"rows": []}
    return {_key(line): line for line in before["rows"]}


def _line(track: str, row: str, record: dict[str, Any], column: str) -> dict[str, Any]:
    answers = EVERY[row].answers
    theirs = published.answer(published.AUROC, answers, column, track)
    far = theirs is not None and abs(100 * record["auroc"] - theirs[0]) > FAR
    return {
        "row": row,
        "background": track,
        **{key: record[key] for key in ("method", "score", "epochs", "seed", "commit")},
        **{key: record[key] for key in ("accuracy", "auroc", "oscr", "fpr95", "auroc_by_score")},
        "seconds": record["seconds"],
        "trainings at once": record["trainings at once"],
        "published": theirs,
        "why": REASONS[answers] if far and answers is not None else None,
        "command": command(),
    }


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        line["row"],
        *(percent(line[key]) for key in ("accuracy", "auroc", "oscr")),
        f"{line['seconds']:.0f}",
        published.cell(line["published"]),
        line["why"] or "",
    ]
