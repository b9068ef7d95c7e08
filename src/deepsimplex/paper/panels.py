"""Panels of features: scatter plots in the plane, on a line and in space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from deepsimplex.paper.requests import COLOURS
from deepsimplex.paper.studies import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = 1500  # points a panel; more would only hide each other


def centres_of(outcome: Outcome) -> np.ndarray:
    assert outcome.centres is not None  # only methods on a simplex are asked
    return outcome.centres


def planar_figure(
    grid: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]],
    columns: Sequence[str],
    rows: Sequence[str],
    classes: Sequence[str],
    centres: dict[str, np.ndarray],
    by: Literal["row", "column"],
) -> Figure:
    """Scatter panels by (column, row); panels of one loss, which is a row or a column, share axes.

    `centres` are the vertices by loss; a loss without them has its own scale.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 * len(columns), 2.5 * len(rows) + 0.7), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            loss = row if by == "row" else column
            mates = [points for key, (points, _) in grid.items() if loss in key]
            reach = max(float(np.quantile(np.abs(p).max(1), 0.995)) for p in mates)
            if loss in centres:
                reach = max(reach, 1.25 * float(np.linalg.norm(centres[loss][0])))
            axes = panels[r, c]
            _plane(axes, *grid[column, row], centres.get(loss), 1.05 * reach)
            if r == 0:
                axes.set_title(column, fontsize=10)
            if c == 0:
                axes.set_ylabel(row, fontsize=11)
    _legend(figure, classes, "vertex" if centres else None)
    return figure


def _plane(
    axes: Any, points: np.ndarray, labels: np.ndarray, centres: np.ndarray | None, reach: float
) -> None:
    from matplotlib.patches import Circle
    from matplotlib.ticker import MaxNLocator

    # Drawn in a random order, or the last class would hide the others.
    order = np.random.default_rng(0).permutation(len(points))[:DRAWN]
    colours = [COLOURS[j] for j in labels[order]]
    axes.scatter(*points[order].T, s=5, c=colours, alpha=0.5, lw=0, rasterized=True)
    if centres is not None:
        length = float(np.linalg.norm(centres[0]))
        axes.add_patch(Circle((0, 0), length, fill=False, color="0.75", lw=0.8, zorder=0))
        for j, centre in enumerate(centres):
            _star(axes, centre, j)
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=7, length=2, color="0.6", labelcolor="0.4")
    axes.spines[:].set(color="0.8", lw=0.6)


def _star(axes: Any, centre: np.ndarray, j: int) -> None:
    at = [[value] for value in centre]
    axes.scatter(
        *at, s=90, marker="*", color=COLOURS[j], edgecolor="black", lw=0.8, zorder=5, clip_on=False
    )


def _legend(figure: Figure, classes: Sequence[str], star: str | None) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], ls="", marker="o", ms=5, color=COLOURS[j], label=name)
        for j, name in enumerate(classes)
    ]
    if star is not None:
        handles.append(Line2D([], [], ls="", marker="*", ms=10, mfc="w", mec="k", label=star))
    figure.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False)


def simplex_figure(
    outcomes: Sequence[Outcome], tests: Sequence[np.ndarray], classes: Sequence[str]
) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4), layout="constrained")
    random = np.random.default_rng(0)
    for place, (outcome, labels) in enumerate(zip(outcomes, tests, strict=True), 1):
        points, centres = outcome.outputs["test"], centres_of(outcome)
        if place == 3:
            axes = figure.add_subplot(1, 3, 3, projection="3d")
            _space(axes, points, labels, centres)
        else:
            axes = figure.add_subplot(1, 3, place)
            if place == 1:  # the height is only there to tell the points apart
                points = np.column_stack([points, random.uniform(-0.12, 0.12, len(points))])
                centres = np.column_stack([centres, np.zeros(2)])
            _plane(axes, points, labels, centres, 1.6)
            if place == 1:
                axes.plot([-1.6, 1.6], [0, 0], color="0.75", lw=0.8, zorder=0)
                axes.patches[0].remove()
            axes.axis("off")
        axes.set_title(f"{len(centres)} classes in {place}-D", fontsize=11)
    _legend(figure, classes, "vertex")
    return figure


def _space(axes: Any, points: np.ndarray, labels: np.ndarray, centres: np.ndarray) -> None:
    """The tetrahedron in its sphere."""
    around, down = np.mgrid[0 : 2 * np.pi : 25j, 0 : np.pi : 13j]
    ball = np.cos(around) * np.sin(down), np.sin(around) * np.sin(down), np.cos(down)
    axes.plot_wireframe(*ball, color="0.85", lw=0.4, zorder=0)
    for i in range(4):
        for j in range(i):
            axes.plot(*np.stack([centres[i], centres[j]], 1), color="0.5", lw=0.8, zorder=1)
    order = np.random.default_rng(0).permutation(len(points))[:DRAWN]
    colours = [COLOURS[j] for j in labels[order]]
    axes.scatter(
        *points[order].T, s=6, c=colours, alpha=0.5, lw=0, depthshade=False, rasterized=True
    )
    for j, centre in enumerate(centres):
        _star(axes, centre, j)
    axes.set_box_aspect((1, 1, 1), zoom=1.35)
    axes.view_init(elev=18, azim=28)
    axes.axis("off")
