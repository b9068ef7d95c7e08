"""The paper's Fig. 4: are classes never seen in training nearest to those that resemble them?

    deepsimplex paper semantic  [--quick]

Six classes of CIFAR-10 are trained by the benchmarks' recipe; the mean feature of each of the ten
classes' test images is taken, and the distances between the means. The paper prints 5.8 to 6.7
between trained classes at a radius it does not give, so ours are shown over the nominal distance
between vertices, √(2C/(C−1)), which has no unit; nor has the largest over the smallest.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepsimplex.data.archives import CIFAR10
from deepsimplex.methods import settings_for
from deepsimplex.paper.drawings import Parts, Row, conducted, load_parts, look
from deepsimplex.paper.requests import COLOURS, Request
from deepsimplex.paper.studies import Study
from deepsimplex.recipes import benchmark_recipe, digits_recipe
from deepsimplex.terminal import console, percent, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Controls after the first: features of a learned head are the encoder's.
METHODS = (
    Row("dsc", "DSC"),
    Row("softmax", "softmax", space="encoder"),
    Row("center", "center loss", space="encoder"),
    Row("cac", "CAC", space="encoder"),
)
TRAINED = ("airplane", "automobile", "bird", "cat", "deer", "frog")
CLAIMS = {"dog": "cat", "truck": "automobile", "horse": "deer", "ship": "airplane"}
PUBLISHED = (5.8, 6.7)  # least and most distance between trained classes; u is not given


def semantic(request: Request) -> None:
    """Class means of trained and unseen classes, their distances, and the four claimed pairs."""
    known = len(TRAINED)
    order = range(10) if request.quick else [CIFAR10.index(c) for c in (*TRAINED, *CLAIMS)]
    parts = load_parts(request, order)
    asked = [(row, seed) for seed in range(request.seeds) for row in METHODS]
    studies = [_study(request, parts, row, seed) for row, seed in asked]
    outcomes = conducted(studies, request, "semantic")
    found: dict[str, list[dict[str, Any]]] = {row.title: [] for row in METHODS}
    for (row, seed), study, outcome in zip(asked, studies, outcomes, strict=True):
        labels = parts.test[1]
        features = look(row, study, outcome, "test", request, "semantic")
        means = class_means(features, labels)
        apart, turned = distances(means), cosines(means)
        pairs = apart[:known, :known][np.triu_indices(known, 1)]
        right = (outcome.predicted["test"] == labels)[labels < known]
        unit = nominal(known) if outcome.centres is not None else float(pairs.mean())
        found[row.title].append(
            {
                "seed": seed,
                "accuracy": float(right.mean()),
                "unit": unit,
                "distances": (apart / unit).round(5).tolist(),
                "cosines": turned.round(5).tolist(),
                "trained_pairs": [float(pairs.min() / unit), float(pairs.max() / unit)],
                "nearest": _names(parts, nearest(apart, known)),
                "nearest_by_cosine": _names(parts, nearest(-turned, known)),
                "commit": outcome.commit,
            }
        )
    claims = {} if request.quick else CLAIMS
    _print_pairs(found, request.seeds)
    agreed = _print_nearest(found, parts.classes[known:], claims)
    content = {
        "published": {"trained_pairs": PUBLISHED, "radius": None, "nearest": claims},
        "classes": parts.classes,
        "trained": parts.classes[:known],
        "methods": found,
        "agreed": agreed,
        "recipes": {row.title: studies[i].recipe.to_json() for i, row in enumerate(METHODS)},
    }
    request.publish("semantic", content, _figure(found, parts.classes, known))


def nominal(classes: int) -> float:
    """The distance between vertices at unit radius."""
    return math.sqrt(2 * classes / (classes - 1))


def class_means(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n, d), (n,) with labels 0…C−1 → (C, d)."""
    wide = features.astype(np.float64)
    return np.stack([wide[labels == j].mean(0) for j in range(labels.max() + 1)])


def distances(means: np.ndarray) -> np.ndarray:
    """‖μ_i − μ_j‖; (C, d) → (C, C)."""
    return np.asarray(np.linalg.norm(means[:, None] - means[None], axis=2))


def cosines(means: np.ndarray) -> np.ndarray:
    """μ_i·μ_j / ‖μ_i‖‖μ_j‖; (C, d) → (C, C)."""
    units = means / np.linalg.norm(means, axis=1, keepdims=True)
    return np.asarray(units @ units.T)


def nearest(matrix: np.ndarray, known: int) -> list[int]:
    """For each class from `known` on, the one among the first `known` that is least away."""
    return [int(j) for j in matrix[known:, :known].argmin(1)]


def _study(request: Request, parts: Parts, row: Row, seed: int) -> Study:
    method = row.method
    if request.quick:
        recipe = dataclasses.replace(digits_recipe(method, seed), epochs=15)
    else:
        recipe = benchmark_recipe(method, "crop+flip", seed)
    settings = settings_for(method, row.changes)
    epochs = request.epochs or recipe.epochs
    recipe = dataclasses.replace(recipe, settings=settings, epochs=epochs)
    images, labels = parts.train
    seen = labels < len(TRAINED)
    return Study(
        f"{method}-{seed}",
        images[seen],
        labels[seen],
        parts.classes[: len(TRAINED)],
        recipe,
        {"test": parts.test[0]},
    )


def _names(parts: Parts, indices: Sequence[int]) -> dict[str, str]:
    """From each unseen class to a trained one."""
    unseen = parts.classes[len(TRAINED) :]
    return {name: parts.classes[j] for name, j in zip(unseen, indices, strict=True)}


def _print_pairs(found: dict[str, list[dict[str, Any]]], seeds: int) -> None:
    low, high = PUBLISHED
    rows = [["paper", "", f"{low} to {high}, radius not given", f"{high / low:.2f}"]]
    for title, runs in found.items():
        least = float(np.mean([run["trained_pairs"][0] for run in runs]))
        most = float(np.mean([run["trained_pairs"][1] for run in runs]))
        accuracy = percent(float(np.mean([run["accuracy"] for run in runs])))
        rows.append([title, accuracy, f"{least:.2f} to {most:.2f}", f"{most / least:.2f}"])
    table(
        f"Semantic: distances between the means of trained classes, mean of {seeds} seeds",
        ["method", "accuracy", "trained pairs", "most / least"],
        rows,
    )
    console.print(
        "Trained pairs: least to most, over the distance between vertices; for features without "
        "vertices over their mean."
    )


def _print_nearest(
    found: dict[str, list[dict[str, Any]]], unseen: Sequence[str], claims: dict[str, str]
) -> dict[str, dict[str, dict[str, int]]]:
    """The table of nearest trained classes, and in how many seeds each was it."""
    agreed: dict[str, dict[str, dict[str, int]]] = {}
    for title, runs in found.items():
        for by, key in (("distance", "nearest"), ("cosine", "nearest_by_cosine")):
            counts = {name: Counter(run[key][name] for run in runs) for name in unseen}
            agreed[f"{title}, {by}"] = {name: dict(c.most_common()) for name, c in counts.items()}
    seeds = len(next(iter(found.values())))
    rows = [
        [
            name,
            claims.get(name, "–"),
            *(_cell(a[name], claims.get(name), seeds) for a in agreed.values()),
        ]
        for name in unseen
    ]
    table("Nearest trained class of each unseen one", ["unseen", "paper", *agreed], rows)
    if claims:
        for way, counted in agreed.items():
            held = sum(counted[name].get(claim, 0) for name, claim in claims.items())
            total = seeds * len(claims)
            console.print(
                f"{way}: the claimed class is nearest in {held} of {total} cases; by chance "
                f"{total / len(TRAINED):.1f}."
            )
    else:
        console.print("Digits: the paper claims nothing here.")
    return agreed


def _cell(counts: dict[str, int], claim: str | None, seeds: int) -> str:
    """The claimed class with its seeds, then what else was nearest; else the most frequent."""
    first = claim if claim is not None else next(iter(counts))
    rest = ", ".join(f"{name}: {count}" for name, count in counts.items() if name != first)
    return f"{first}: {counts.get(first, 0)} of {seeds}" + (f" ({rest})" if rest else "")


def _figure(found: dict[str, list[dict[str, Any]]], classes: Sequence[str], known: int) -> Figure:
    from matplotlib.figure import Figure

    down = -(-len(found) // 2)
    figure = Figure(figsize=(11.2, 5.4 * down), layout="constrained")
    panels = [*figure.subplots(down, 2, squeeze=False).flat]
    for empty in panels[len(found) :]:
        empty.remove()
    for axes, (title, runs) in zip(panels[: len(found)], found.items(), strict=True):
        matrix = np.mean([run["distances"] for run in runs], axis=0)
        _heat(axes, matrix, classes, known)
        unit = "that of the vertices" if title == METHODS[0].title else "the mean trained pair"
        axes.set_title(f"{title}: distance of class means over {unit}", fontsize=10)
    key = f"Mean of {len(runs)} seeds. Orange: unseen in training; boxed: nearest trained class."
    figure.supxlabel(key, fontsize=9, color="0.3")
    return figure


def _heat(axes: Axes, matrix: np.ndarray, classes: Sequence[str], known: int) -> None:
    """Numbers on colours; the lower the distance the darker. The diagonal says nothing."""
    from matplotlib.patches import Rectangle

    shown = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
    least, most = np.nanmin(shown), np.nanmax(shown)
    axes.imshow(shown, cmap="cividis", vmin=least, vmax=most)
    for i, j in np.ndindex(*matrix.shape):
        if i != j:
            dark = (matrix[i, j] - least) / (most - least) < 0.55
            colour = "white" if dark else "black"
            axes.text(
                j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", fontsize=8, color=colour
            )
    for i, j in enumerate(nearest(matrix, known), known):
        for x, y in ((j, i), (i, j)):
            box = Rectangle((x - 0.41, y - 0.41), 0.82, 0.82, fill=False, color=COLOURS[1], lw=2)
            axes.add_patch(box)
    axes.axhline(known - 0.5, color="white", lw=4)
    axes.axvline(known - 0.5, color="white", lw=4)
    axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right", fontsize=9)
    axes.set_yticks(range(len(classes)), classes, fontsize=9)
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label in ticks[known:]:
            label.set(color=COLOURS[1], fontweight="bold")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
