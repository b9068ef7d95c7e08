"""What a benchmark leaves: table cells for a person, a JSON record for a reader of results/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepsimplex.bench.timing import Measured, quartiles, ratios
from deepsimplex.runs import environment, write_json
from deepsimplex.terminal import console

NOTHING = "–"


def row(measured: Measured, reference: Measured | None = None, **keys: Any) -> dict[str, Any]:
    """`keys` and what was measured; `ratio` is this variant's time over the reference's."""
    return keys | {
        "outcome": measured.failed or "measured",
        "seconds": None if measured.failed else quartiles(measured.seconds),
        "rounds_s": [] if measured.failed else measured.seconds,
        "ratio": quartiles(ratios(measured, reference)) if reference is not None else None,
        "first_call_s": measured.first,
        "peak_bytes": measured.peak,
    }


def seconds_cell(record: dict[str, Any]) -> str:
    """Median and quartiles in the median's unit, or why there are none."""
    spread = record["seconds"]
    if spread is None:
        return str(record["outcome"])
    unit, factor = "s", 1.0
    for name, size in (("µs", 1e6), ("ms", 1e3)):
        if spread["median"] * size < 1000:
            unit, factor = name, size
            break
    low, middle, high = (f"{factor * spread[key]:.3g}" for key in ("q1", "median", "q3"))
    return f"{middle} {unit} ({low} – {high})"


def ratio_cell(spread: dict[str, float] | None) -> str:
    """Median and quartiles of a ratio."""
    if spread is None:
        return NOTHING
    low, middle, high = (_short(spread[key]) for key in ("q1", "median", "q3"))
    return f"{middle}× ({low} – {high})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def bytes_cell(size: int | None) -> str:
    if size is None:
        return NOTHING
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def first_cell(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.2g} s"


def finish(
    name: str,
    what: str,
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    out: Path | None,
    device: torch.device | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Write results/bench-NAME.json, or `out`, and say so; → the record."""
    words = [f"deepsimplex bench {name}"]
    for option, value in options.items():
        if value is True:
            words.append(f"--{option}")
        elif value is not None and value is not False:
            words.append(f"--{option} {value}")
    record = {
        "command": " ".join(words),
        "what": what,
        **more,
        "environment": environment(device),
        "rows": rows,
    }
    path = out or Path("results") / f"bench-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    console.print(f"Record: {path}")
    return record
