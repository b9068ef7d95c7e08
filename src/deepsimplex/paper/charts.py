"""Charts of the tables, drawn from their records: ours as dots, published numbers hollow."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from deepsimplex.paper import published
from deepsimplex.paper.opensets import EVERY, label, shortened
from deepsimplex.paper.requests import COLOURS, behind
from deepsimplex.recipes import BENCHMARK_RECIPES
from deepsimplex.tables import spaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANE = 0.18  # of a row: between what is ours and what is published, and between tracks
VERDICTS = (  # first that fits: how a verdict begins or what it holds, its colour, its mark
    ("not clear", COLOURS[5], "D"),
    ("does not hold", COLOURS[1], "X"),
    ("holds only", COLOURS[4], "s"),
    ("holds", COLOURS[2], "o"),
    ("not measured", "0.7", "o"),
)


@dataclass(frozen=True)
class Dot:
    """A number in %, with its sd if there is one, in a row and a track."""

    row: str
    track: str
    mean: float
    sd: float | None = None
    ours: bool = True
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """A column of a table; `best` is drawn as a line through all rows."""

    title: str
    dots: Sequence[Dot]
    best: float | None = None


def open_sets(record: dict[str, Any]) -> Figure:
    """`table1` and `closed`: a panel a benchmark, the tracks apart by colour."""
    measure, cells = record["measure"], record["cells"]
    printed = published.AUROC if measure == "auroc" else published.ACCURACY
    best: Mapping[str, Any] = {}
    if measure == "auroc" and record["family"] == "arpl":
        best = published.BEST_WITHOUT_BACKGROUND
    trials = sorted({len(cell[measure]["values"]) for cell in cells})
    panels = []
    for column in _columns(cells):
        dots = []
        for cell in (cell for cell in cells if cell["column"] == column):
            row, track = label(cell), cell["background"]
            theirs = published.answer(printed, EVERY[cell["row"]].answers, column, track)
            few = len(cell[measure]["values"])
            notes = [f"epochs: {cell['epochs']}"] if shortened(cell) else []
            notes += [f"trials: {few}"] if few < trials[-1] else []
            dots.append(_ours(row, track, cell[measure], ", ".join(notes)))
            dots += [Dot(row, track, *theirs, ours=False)] if theirs else []
        panels.append(Panel(column, dots, best[column][0] if column in best else None))
    rows = list(dict.fromkeys(label(cell) for cell in sorted(cells, key=_order)))
    what = "AUROC" if measure == "auroc" else "Closed-set accuracy"
    title = f"{what} in %, mean ± sd of {_listed(trials)} {record['family']} trials, last epoch"
    return _figure(title, panels, rows)


def rivals(record: dict[str, Any]) -> Figure:
    """Every method once: one panel, without sd."""
    lines = record["rows"]
    dots = []
    for line in lines:
        row, track = line["row"], line["background"]
        dots.append(Dot(row, track, 100 * line["auroc"]))
        if line["published"]:
            mean, sd = line["published"]
            dots.append(Dot(row, track, mean, sd, ours=False))
    rows = [row for row in EVERY if any(line["row"] == row for line in lines)]
    epochs = sorted({line["epochs"] for line in lines})
    title = f"AUROC in %, {record['family']} split {record['trial']}, epochs: {_listed(epochs)}"
    return _figure(title, [Panel(record["column"], dots)], rows, width=4.6)


def closed_sets(record: dict[str, Any], answers: Mapping[str, str | None]) -> Figure:
    """`table2`: a panel a set and number of epochs; `answers` gives each row's published one."""
    cells = record["cells"]
    panels = []
    for column, epochs in dict.fromkeys((c["column"], c["epochs"]) for c in cells):
        dots = []
        images = max(c["train images"] for c in cells if c["column"] == column)
        for cell in cells:
            if (cell["column"], cell["epochs"]) == (column, epochs):
                tried = list(cell["screened"])
                note = "rate at edge" if f"{cell['rate']:g}" in (tried[0], tried[-1]) else ""
                dots.append(_ours(cell["row"], "none", cell["accuracy"], note))
                theirs = published.CLOSED.get(answers[cell["row"]] or "", {}).get(column)
                dots += [Dot(cell["row"], "none", theirs, ours=False)] if theirs else []
        panels.append(Panel(f"{column}, {epochs} epochs\nof {spaced(images)} images", dots))
    rows = [row for row in answers if any(cell["row"] == row for cell in cells)]
    seeds = sorted({len(cell["accuracy"]["values"]) for cell in cells})
    counted = "one seed" if seeds == [1] else f"mean ± sd of {_listed(seeds)} seeds"
    return _figure(f"Closed-set accuracy in %, {counted}, last epoch", panels, rows)


def claims(record: dict[str, Any]) -> Figure:
    """A line a claim: its mark, the verdict, the reason and the records."""
    lines = [
        [
            textwrap.fill(part, width, break_on_hyphens=False)
            for part, width in zip(
                (claim["claim"], claim["verdict"], f"{claim['because']} ({behind(claim)})"),
                WIDTHS,
                strict=True,
            )
        ]
        for claim in record["claims"]
    ]
    heights = [max(text.count("\n") for text in line) + 1.8 for line in lines]
    figure = Figure(figsize=(12, 0.17 * (2.0 + sum(heights)) + 0.4))
    axes = figure.add_axes((0, 0, 1, 1))
    top = 2.0
    for text, x in zip(("the paper's claim", "verdict", "because (record)"), PLACES, strict=True):
        axes.text(x, top / 2, text, va="center", fontsize=9, color="0.3")
    axes.axhline(top, color="0.6", lw=0.8)
    for claim, line, height in zip(record["claims"], lines, heights, strict=True):
        middle = top + height / 2
        colour, mark = _seen(claim["verdict"])
        axes.plot([0.012], [middle], mark, color=colour, ms=10)
        for text, x, weight in zip(line, PLACES, ("bold", "normal", "normal"), strict=True):
            axes.text(x, middle, text, va="center", fontsize=9, fontweight=weight)
        top += height
        axes.axhline(top, color="0.9", lw=0.8)
    axes.set(xlim=(0, 1), ylim=(top, 0), xticks=[], yticks=[])
    axes.axis("off")
    return figure


WIDTHS, PLACES = (29, 30, 104), (0.03, 0.245, 0.43)
"""Claim, verdict and reason: in how many letters a line, and where they begin."""


def _seen(verdict: str) -> tuple[str, str]:
    return next((colour, mark) for words, colour, mark in VERDICTS if words in verdict)


def _columns(cells: Sequence[dict[str, Any]]) -> list[str]:
    found = {cell["column"] for cell in cells}
    return [column for column in (*published.COLUMNS, "digits") if column in found]


def _order(cell: dict[str, Any]) -> tuple[int, int, str]:
    recipes = ["digits", *BENCHMARK_RECIPES]
    return list(EVERY).index(cell["row"]), recipes.index(cell["recipe"]), cell["detector"] or ""


def _ours(row: str, track: str, summary: dict[str, Any], note: str) -> Dot:
    sd = None if summary["sd"] is None else 100 * summary["sd"]
    return Dot(row, track, 100 * summary["mean"], sd, note=note)


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def _figure(title: str, panels: Sequence[Panel], rows: Sequence[str], width: float = 2.4) -> Figure:
    tracks = list(dict.fromkeys(dot.track for panel in panels for dot in panel.dots))
    wide = max(5.4, 2.0 + width * len(panels))
    figure = Figure(figsize=(wide, 1.5 + 0.34 * len(rows)), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    heights = _heights([dot for panel in panels for dot in panel.dots], rows)
    for axes, panel in zip(every, panels, strict=True):
        _draw(axes, panel, rows, heights)
    figure.suptitle(title, fontsize=11)
    any_best = any(panel.best is not None for panel in panels)
    handles = _handles(tracks, any(not d.ours for p in panels for d in p.dots), any_best)
    side = min(len(handles), max(1, int(wide / 2.9)))
    figure.legend(handles=handles, loc="outside lower center", ncol=side, frameon=False)
    return figure


def _heights(dots: Sequence[Dot], rows: Sequence[str]) -> dict[tuple[str, str, bool], float]:
    """Where each (row, track, ours) is drawn: around its row, none over another."""
    found = {}
    for place, row in enumerate(rows):
        kinds = {(dot.track, dot.ours) for dot in dots if dot.row == row}
        # From above: without background, with; in each ours, then theirs.
        order = sorted(kinds, key=lambda kind: (kind[0] != "none", not kind[1]))
        for lane, (track, ours) in enumerate(order):
            found[row, track, ours] = place + LANE * (lane - (len(order) - 1) / 2)
    return found


def _draw(
    axes: Axes, panel: Panel, rows: Sequence[str], heights: dict[tuple[str, str, bool], float]
) -> None:
    for dot in panel.dots:
        colour, y = _colour(dot.track), heights[dot.row, dot.track, dot.ours]
        axes.errorbar(
            dot.mean, y, xerr=dot.sd, color=colour, ms=5, lw=1.1, capsize=2,
            marker="o" if dot.ours else "D", mfc=colour if dot.ours else "white",
            zorder=4 if dot.ours else 3,
        )  # fmt: skip
        if dot.note:
            axes.annotate(
                dot.note, (dot.mean, y), (0, 5), textcoords="offset points", ha="center",
                fontsize=7, color="0.35",
            )  # fmt: skip
    if panel.best is not None:
        axes.axvline(panel.best, color="0.45", lw=1, ls="--", zorder=1)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(panel.title, fontsize=10)
    axes.set(ylim=(len(rows) - 0.4, -0.6))
    axes.margins(x=0.08)
    axes.grid(axis="y", color="0.92", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(track: str) -> str:
    return COLOURS[0] if track == "none" else COLOURS[1]


def _handles(tracks: Sequence[str], theirs: bool, best: bool) -> list[Line2D]:
    def mark(label: str, colour: str, **style: Any) -> Line2D:
        return Line2D([], [], ls="", color=colour, ms=5, label=label, **style)

    if tracks == ["none"]:
        found = [mark("ours", _colour("none"), marker="o")]
    else:
        names = {t: "without background" if t == "none" else f"background {t}" for t in tracks}
        found = [mark(f"ours, {names[t]}", _colour(t), marker="o") for t in tracks]
    if theirs:
        found.append(mark("published, other protocols", "0.35", marker="D", mfc="white"))
    if best:
        label = "best published without background"
        found.append(Line2D([], [], color="0.45", lw=1, ls="--", label=label))
    return found
