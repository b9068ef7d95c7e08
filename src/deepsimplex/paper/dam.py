"""`dam`: fewer features than C−1, and what then stands between them and the centres.

The paper's own demonstration: d = 2 features, C = 20 classes. They are the first twenty of
CIFAR-100, the only set of that size at hand (its twenty coarse classes are not in every copy).
The net with 2-D features is LeNet++; where more features are the remedy it is the OSRCI net.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from deepsimplex.backbones import build_backbone
from deepsimplex.data.archives import load_official
from deepsimplex.data.sources import load_data
from deepsimplex.methods import build_method, settings_for
from deepsimplex.methods.dsc import DSC
from deepsimplex.paper.equidistant import measured
from deepsimplex.paper.requests import COLOURS, Request
from deepsimplex.paper.studies import Outcome, Study, conduct
from deepsimplex.recipes import Recipe
from deepsimplex.tables import spread, summary
from deepsimplex.terminal import console, table

PLANE = 2
DIMENSIONS = (3, 8, 32, 128)
"""Where the almost-equidistant sets of docs/decisions/0011 are measured."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way from features to centres. `fits` says why not, where it does not."""

    name: str
    label: str
    backbone: str = "lenet++"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    fits: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Train and test images of C classes."""

    source: str
    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape[3], self.images.shape[1], self.images.shape[2]


def dam(request: Request) -> dict[str, Any]:
    """Train every variant, print the table, draw the module and the accuracies."""
    problem = _problem(request)
    plan = _recipe(request)
    found = []
    every = variants(len(problem.classes))
    studies = [_study(problem, plan, v, s) for v in every if not v.fits for s in _seeds(request)]
    outcomes = iter(conduct(studies, request.runs("dam"), request.device, "dam"))
    for variant in every:
        group = [] if variant.fits else [next(outcomes) for _ in _seeds(request)]
        found.append(_row(problem, variant, group))
    sets = [measured(d) for d in DIMENSIONS]
    _print(request, problem, plan, found)
    _print_sets(sets)
    content = {
        "data": {
            "name": problem.source,
            "classes": list(problem.classes),
            "train images": len(problem.labels),
            "test images": len(problem.test_labels),
        },
        "recipe": plan.to_json(),
        "variants": found,
        "published": None,  # the paper prints no number for this
        "almost-equidistant sets": sets,
    }
    request.publish("dam", content, _figure(problem, found))
    request.draw("dam-module", module_figure(PLANE, len(problem.classes)))
    return content


def variants(classes: int) -> list[Variant]:
    """What is compared, for C classes."""
    width, fitting = classes - 1, -(-(classes - 2) // 2)  # smallest d with 2d+2 ≥ C
    hidden = classes // 2
    doubled = {"simplex": "doubled", "width": fitting}
    return [
        Variant("linear", f"linear {PLANE}→{width}", settings={"head": "linear"}),
        Variant("dam", f"DAM {PLANE}→{width}→{width}", settings={"head": "dam"}),
        Variant(
            "bottleneck",
            f"bottleneck DAM {PLANE}→{hidden}→{width}",
            settings={"head": "dam", "hidden": hidden},
        ),
        Variant(
            "doubled-plane",
            f"doubled, d = {PLANE}",
            fits=f"{2 * PLANE + 2} centres at most; {classes} need d ≥ {fitting}",
        ),
        Variant(
            "doubled-dam",
            f"DAM {PLANE}→{fitting}→{fitting}, doubled",
            settings={"head": "dam", **doubled},
        ),
        Variant("doubled", f"linear →{fitting}, doubled", "osrci", {"head": "linear", **doubled}),
        Variant("pooled", f"linear →{width}", "osrci", {"head": "linear"}),
        Variant("unpooled", f"unpooled, linear →{width}", "osrci-flat", {"head": "linear"}),
    ]


def least_loss(centres: np.ndarray, labels: np.ndarray, rank: int) -> float:
    """Least eq. 4 of outputs in an affine space of `rank` dimensions, whatever the features do.

    What is left of the centres' scatter beside its `rank` largest principal parts; with equally
    many images of each of C classes at a regular simplex, 1 − rank/(C−1).
    """
    share = np.bincount(labels, minlength=len(centres)) / len(labels)
    spread_out = np.sqrt(share)[:, None] * (centres - share @ centres)
    parts = np.linalg.svd(spread_out, compute_uv=False) ** 2
    return float(parts[rank:].sum())


def _seeds(request: Request) -> range:
    return range(request.seeds)


def _problem(request: Request) -> Problem:
    if request.quick:
        # A border of one pixel: at 8×8 the OSRCI net's last map is one pixel, pooled or not.
        border = ((0, 0), (1, 1), (1, 1), (0, 0))
        train, test = load_data("digits"), load_data("digits", part="test")
        some = slice(640)
        return Problem(
            "digits",
            np.pad(train.images[some], border),
            train.labels[some],
            np.pad(test.images, border),
            test.labels,
            train.classes,
        )
    train = load_official("cifar100", "train", request.root)
    test = load_official("cifar100", "test", request.root)
    ours, theirs = train.labels < 20, test.labels < 20
    return Problem(
        "cifar100, first 20 classes",
        train.images[ours],
        train.labels[ours],
        test.images[theirs],
        test.labels[theirs],
        train.classes[:20],
    )


def _recipe(request: Request) -> Recipe:
    # At rate 0.1 the few ReLUs behind two features die (seen in the training loss on digits).
    if request.quick:
        return Recipe(epochs=request.epochs or 10, batch_size=32, learning_rate=0.01)
    return Recipe(epochs=request.epochs or 100, learning_rate=0.01, augment="crop+flip")


def _study(problem: Problem, plan: Recipe, variant: Variant, seed: int) -> Study:
    recipe = dataclasses.replace(
        plan,
        backbone=variant.backbone,
        settings=settings_for(plan.method, variant.settings),
        seed=seed,
    )
    look = {"train": problem.images, "test": problem.test_images}
    name = f"{variant.name}-{seed}"
    return Study(name, problem.images, problem.labels, problem.classes, recipe, look)


def _row(problem: Problem, variant: Variant, group: list[Outcome]) -> dict[str, Any]:
    """A line of the table; without numbers where the variant does not fit or diverged."""
    row: dict[str, Any] = {"name": variant.name, "label": variant.label, "fits": variant.fits}
    if variant.fits is not None:
        return row
    finite = [outcome for outcome in group if outcome.failed is None]
    values = [
        {
            "train": outcome.accuracy("train", problem.labels),
            "test": outcome.accuracy("test", problem.test_labels),
        }
        for outcome in finite
    ]
    return row | {
        **_sizes(problem, variant),
        "accuracy": summary(values, ("train", "test")) if values else None,
        "diverged": len(group) - len(finite),
        "last loss": [outcome.losses[-1] for outcome in finite],
        "seconds": [round(outcome.seconds, 2) for outcome in group],
    }


def _sizes(problem: Problem, variant: Variant) -> dict[str, Any]:
    settings = settings_for("dsc", variant.settings)
    with torch.device("meta"):
        method = build_method(
            "dsc", variant.backbone, problem.shape, len(problem.classes), settings
        )
        features = build_backbone(variant.backbone, problem.shape).features
    assert isinstance(method, DSC)
    span = method.simplex.span
    rank = features if settings.head == "linear" else settings.hidden or span
    every = torch.arange(len(problem.classes))
    centres = method.simplex.centres(every, torch.float64).numpy()
    return {
        "backbone": variant.backbone,
        "features": features,
        "centres' dimensions": span,
        "margin": method.simplex.margin,
        "head weights": sum(p.numel() for p in method.head.parameters()),
        "all weights": sum(p.numel() for p in method.parameters()),
        "least loss": least_loss(centres, problem.labels, rank),
    }


def _print(request: Request, problem: Problem, plan: Recipe, found: list[dict[str, Any]]) -> None:
    rows = []
    for row in found:
        if row["fits"] is not None:
            rows.append([f"{row['label']}: {row['fits']}", *["–"] * 8])
            continue
        cell = row["accuracy"]
        rows.append(
            [
                row["label"],
                row["backbone"],
                f"{row['features']}",
                f"{row['head weights']:,}",
                spread(cell["train"]) if cell else "diverged",
                spread(cell["test"]) if cell else "diverged",
                f"{np.mean(row['last loss']):.2f}" if cell else "–",
                f"{row['least loss']:.2f}",
                f"{np.mean(row['seconds']):.0f}",
            ]
        )
    seeds = f"{request.seeds} seed{'s' if request.seeds > 1 else ''}"
    title = (
        f"{problem.source}: C = {len(problem.classes)}, {len(problem.labels)} training and "
        f"{len(problem.test_labels)} test images, last of {plan.epochs} epochs, {seeds}"
    )
    heading = ("", "net", "d", "head weights", "train %", "test %", "eq. 4", "its least", "seconds")
    table(title, heading, rows)
    console.print(
        "Published: the paper prints no number for these. "
        "Eq. 4 is the last epoch's mean; its least is what the head's rank leaves."
    )


def _print_sets(sets: list[dict[str, Any]]) -> None:
    def ball(found: dict[str, float] | None) -> str:
        value = None if found is None else found["in unit ball"]
        return "–" if value is None else f"{value:.3f}" if value > 1e-3 else f"{value:.0e}"

    rows = [
        [
            str(record["dim"]),
            str(record["points"]),
            *(ball(record.get(name)) for name in ("mirrored", "best turn", "colliding")),
            f"{record['doubled in unit ball']:.3f}",
            ball(
                {"in unit ball": halves} if (halves := record["two doubled in unit ball"]) else None
            ),
        ]
        for record in sets
    ]
    heading = ("d", "2d+4", "mirrored", "best turn", "colliding", "doubled, 2d+2", "two, 2d+4")
    table("Almost-equidistant sets: smallest distance in a unit ball", heading, rows)


def module_figure(features: int, classes: int) -> Figure:
    """The paper's Fig. 2: d features → FC → ReLU → FC → C−1 outputs."""
    width = classes - 1
    figure = Figure(figsize=(7.2, 2.3))
    axes = figure.subplots()
    blocks = (
        (f"features\nd = {features}", "0.9", 0.9),
        (f"FC\n{features} → {width}", COLOURS[5], 1.5),
        ("ReLU", COLOURS[4], 1.5),
        (f"FC\n{width} → {width}", COLOURS[5], 1.5),
        (f"outputs\nC−1 = {width}", "0.9", 1.5),
    )
    for place, (text, colour, height) in enumerate(blocks):
        _box(axes, 1.9 * place, height, text, colour)
        if place:
            axes.annotate(
                "", (1.9 * place - 0.65, 0), (1.9 * (place - 1) + 0.65, 0),
                arrowprops={"arrowstyle": "-|>", "color": "0.25", "shrinkA": 1, "shrinkB": 1},
            )  # fmt: skip
    axes.plot([1.1, 1.1, 6.5, 6.5, 1.1], [-1, 1, 1, -1, -1], color="0.5", lw=1, ls="--")
    axes.text(3.8, 1.08, "dimension augmentation module", ha="center", va="bottom", fontsize=10)
    axes.text(0, -0.75, "backbone", ha="center", va="top", fontsize=9, color="0.35")
    axes.text(7.6, -0.85, "eq. 4", ha="center", va="top", fontsize=9, color="0.35")
    axes.set(xlim=(-0.8, 8.4), ylim=(-1.2, 1.4), aspect="equal")
    axes.axis("off")
    return figure


def _box(axes: Axes, x: float, height: float, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - 0.6, -height / 2), 1.2, height,
            boxstyle="round,pad=0,rounding_size=0.08", facecolor=colour, edgecolor="0.25",
        )
    )  # fmt: skip
    axes.text(x, 0, text, ha="center", va="center", fontsize=10)


def _figure(problem: Problem, found: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(6.4, 3.6))
    axes = figure.subplots()
    places = np.arange(len(found))[::-1]
    for part, colour, mark, shift in (
        ("train", COLOURS[0], "o", 0.12),
        ("test", COLOURS[1], "s", -0.12),
    ):
        kept = [(y, r["accuracy"][part]) for y, r in zip(places, found, strict=True) if _ran(r)]
        heights = [y + shift for y, _ in kept]
        means = [100 * a["mean"] for _, a in kept]
        axes.plot(means, heights, mark, color=colour, label=f"{part}, mean")
        for y, (_, a) in zip(heights, kept, strict=True):
            each = [100 * value for value in a["values"]]
            axes.plot(each, [y] * len(each), ".-", color=colour, ms=5, lw=1, alpha=0.5)
    for y, row in zip(places, found, strict=True):
        if not _ran(row):
            axes.text(12, y, row["fits"] or "diverged", va="center", fontsize=9, color="0.4")
    axes.plot([], [], ".-", color="0.5", ms=5, lw=1, label="each seed")
    axes.axvline(100 / len(problem.classes), color="0.6", lw=1, ls=":", label="chance")
    labels = [row["label"] + _net(row) for row in found]
    axes.set_yticks(places, labels)
    axes.set(
        xlabel="accuracy, %", xlim=(0, 102), title=f"{problem.source}, C = {len(problem.classes)}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _ran(row: dict[str, Any]) -> bool:
    return row["fits"] is None and row["accuracy"] is not None


def _net(row: dict[str, Any]) -> str:
    return "" if row["fits"] is not None else f" ({row['backbone']}, d = {row['features']})"
