"""Tables of a comparison: terminal rows, Markdown and CSV from one record."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

MEASURES = {
    "accuracy": "accuracy",
    "auroc": "AUROC",
    "oscr": "OSCR",
    "fpr95": "FPR@95",
    "macro_f1": "macro-F1",
    "known_kept": "kept",
    "unknown_rejected": "rejected",
}


def summary(results: list[dict[str, Any]], measures: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Mean and sample sd of each measure over trials."""
    table = {}
    for name in measures:
        values = np.array([record[name] for record in results])
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        table[name] = {"mean": float(values.mean()), "sd": sd, "values": values.tolist()}
    return table


def spread(cell: dict[str, Any]) -> str:
    """A mean and sd of fractions, in per cent."""
    sd = "" if cell["sd"] is None else f" ± {100 * cell['sd']:.1f}"
    return f"{100 * cell['mean']:.1f}{sd}"


def rows(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and one row a method; the last columns are paired AUROC difference and seconds."""
    heading = ["in %", *MEASURES.values(), "Δ AUROC", "seconds"]
    body = []
    first: np.ndarray | None = None
    for method, results in record["methods"].items():
        table = summary(results, tuple(MEASURES))
        aurocs = np.array(table["auroc"]["values"])
        difference = ""
        if first is None:
            first = aurocs
        else:
            paired = [{"d": value} for value in aurocs - first]
            cell = summary(paired, ("d",))["d"]
            difference = ("+" if cell["mean"] >= 0 else "") + spread(cell)
        spent = np.mean([result["seconds"] for result in results])
        cells = [spread(table[name]) for name in MEASURES]
        body.append([method, *cells, difference, f"{spent:.0f}"])
        for score, mean in _by_score(results).items():
            if score != results[0]["score"]:
                blank = [""] * (len(heading) - 3)
                body.append([f"  by {score}", "", spread(mean), *blank])
    return heading, body


def _by_score(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = results[0]["auroc_by_score"]
    return {name: summary([r["auroc_by_score"] for r in results], (name,))[name] for name in names}


def spaced(count: int) -> str:
    """25000 as 25 000."""
    return f"{count:,}".replace(",", " ")


def pipes(heading: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without the last line's end."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def markdown(record: dict[str, Any]) -> str:
    notes = "".join(f"\n{note}\n" for note in record.get("notes", []))
    return pipes(*rows(record)) + "\n" + notes


def as_csv(record: dict[str, Any]) -> str:
    """One line a method and trial, as measured, not rounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "trial", "score", "seed", *MEASURES, "seconds"])
    for method, results in record["methods"].items():
        for r in results:
            measured = [r[name] for name in MEASURES]
            writer.writerow([method, r["trial"], r["score"], r["seed"], *measured, r["seconds"]])
    return out.getvalue()
