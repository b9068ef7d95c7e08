"""`paper readme`: README's tables, built from the records in results/.

Between `<!-- NAME -->` and `<!-- /NAME -->` everything is replaced by what the records say; a
table whose record is missing says which command makes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepsimplex.errors import DeepSimplexError
from deepsimplex.paper import published
from deepsimplex.paper.opensets import EVERY, label, shortened
from deepsimplex.paper.requests import behind, read_record
from deepsimplex.tables import pipes, spaced, spread

TOLD = ("common", "long", "moved", "once", "whole-moved", "faint")
"""Recipes whose rows README shows; the ways to them are in the record and its figure."""


def update(readme: Path, results: Path) -> str:
    """README with its tables made anew; nothing is written."""
    text = readme.read_text()
    for name, build in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise DeepSimplexError(
                f"one {begin} and one {end} in {readme}",
                f"{text.count(begin)} and {text.count(end)}",
                "put the markers back where the table belongs",
            )
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        made = f"{begin}\n{build(results)}\n{end}"
        text = pattern.sub(lambda _, made=made: made, text)  # type: ignore[misc]
    return text


def _read(results: Path, name: str) -> Any:
    return read_record(results / f"{name}.json")


def _middle(spread: dict[str, float], digits: int) -> str:
    low, high = spread["q1"], spread["q3"]
    return f"{spread['median']:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def training_speed(results: Path) -> str:
    record = _read(results, "bench-train")
    if record is None:
        return "Not measured yet: `deepsimplex bench train` on a GPU."
    rows = [
        [
            row["name"],
            str(row["batch"]),
            spaced(row["images"]),
            _middle(row["epoch_s"], 3),
            f"{row['plain_s']['median']:.2f}",
            f"{row['ratio']['median']:.1f}×",
            f"{row['first_step_s']:.0f}",
            f"{row['deterministic']['median']:.2f}×" if row["deterministic"] else "–",
        ]
        for row in record["rows"]
    ]
    heading = [
        "training", "batch", "images", "s an epoch (quartiles)", "plain loop", "ratio",
        "s to first step", "deterministic",
    ]  # fmt: skip
    return pipes(heading, rows)


def open_set(results: Path) -> str:
    record = _read(results, "paper-table1")
    if record is None:
        return "Not measured yet: `deepsimplex paper table1` on a GPU."
    columns = [c for c in published.COLUMNS if any(x["column"] == c for x in record["cells"])]
    told = [c for c in record["cells"] if c["recipe"] in TOLD and not c["detector"]]
    rows = []
    for track in ("none", "cifar100"):
        mine = [c for c in told if c["background"] == track]
        mine.sort(key=lambda c: (TOLD.index(c["recipe"]), list(EVERY).index(c["row"])))
        named: dict[str, dict[str, Any]] = {}
        for cell in mine:
            named.setdefault(label(cell), {})[cell["column"]] = cell
        for name, cells in named.items():
            shown = [_measured(cells.get(c), record["trials"]) for c in columns]
            rows.append([name, "–" if track == "none" else "CIFAR-100", *shown])
    best = published.BEST_WITHOUT_BACKGROUND
    sources = ["best published", "–", *(f"{best[c][0]}" if c in best else "–" for c in columns)]
    places = [published.COLUMNS.index(c) for c in columns]
    paper = [
        "the paper's DSC",
        "80M tiny",
        *(published.cell(published.AUROC["DSC"][p]) for p in places),
    ]
    return pipes(["AUROC in %", "background", *columns], [*rows, sources, paper])


def _measured(cell: dict[str, Any] | None, trials: int) -> str:
    return spread(cell["auroc"]) + _short(cell, trials) if cell else "–"


def _short(cell: dict[str, Any], trials: int) -> str:
    """In brackets, of what a cell has less than its row's name and the table say."""
    have = len(cell["auroc"]["values"])
    told = [f"{cell['epochs']} epochs"] if shortened(cell) else []
    told += [f"{have} of {trials} trials"] if have < trials else []
    return f" ({', '.join(told)})" if told else ""


def closed_set(results: Path) -> str:
    """Of every set the longest trainings that DSC and softmax both have, or the longest."""
    record = _read(results, "paper-table2")
    if record is None:
        return "Not measured yet: `deepsimplex paper table2` on a GPU."
    lengths: dict[str, dict[str, set[int]]] = {}
    for cell in record["cells"]:
        lengths.setdefault(cell["column"], {}).setdefault(cell["row"], set()).add(cell["epochs"])
    longest = {
        column: max(
            rows.get("dsc", set()) & rows.get("softmax", set()) or set().union(*rows.values())
        )
        for column, rows in lengths.items()
    }
    told = [c for c in record["cells"] if c["epochs"] == longest[c["column"]]]
    cells = {(c["column"], c["row"], c["epochs"]): c for c in told}
    columns = list(dict.fromkeys((column, epochs) for column, _, epochs in cells))
    rows = [
        [
            row,
            *(
                spread(cells[column, row, epochs]["accuracy"])
                if (column, row, epochs) in cells
                else "–"
                for column, epochs in columns
            ),
        ]
        for row in dict.fromkeys(row for _, row, _ in cells)
    ]
    for theirs, title in (("DSC", "the paper's DSC"), ("Softmax", "the paper's softmax")):
        printed = published.CLOSED[theirs]
        rows.append([title, *(str(printed.get(column, "–")) for column, _ in columns)])
    images = {c["column"]: c["train images"] for c in record["cells"]}
    heading = [
        "accuracy in %",
        *(
            f"{column}, {epochs} epochs of {spaced(images[column])} images"
            for column, epochs in columns
        ),
    ]
    return pipes(heading, rows)


def claims(results: Path) -> str:
    record = _read(results, "paper-claims")
    if record is None:
        return "Not judged yet: `deepsimplex paper claims`."
    rows = [[c["claim"], c["verdict"], c["because"], behind(c)] for c in record["claims"]]
    return pipes(["the paper's claim", "verdict", "because", "record"], rows)


TABLES: dict[str, Callable[[Path], str]] = {
    "training speed": training_speed,
    "open set": open_set,
    "closed set": closed_set,
    "claims": claims,
}
