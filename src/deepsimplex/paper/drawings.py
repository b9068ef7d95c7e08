"""The paper's pictures of trained features: Fig. 1, the 2-D pictures of Fig. 3, and imbalance.

    deepsimplex paper simplex | embeddings | imbalance  [--quick]

The 2-D pictures follow the authors' toy: classes 0, 1, 2 of CIFAR-10, LeNet++ whose 2-D feature
is the loss's input, batch 64, SGD with momentum 0.9 and decay 5e-4, cosine, no augmentation. Two
things differ. Their PReLU on the feature is left out (backbones.py), and the rate is 0.01 with
gradients clipped, not 1e-3, for 50 epochs, not 100. Of 1e-3, 0.01 and 0.1 it had the lowest
training loss after 4 epochs on 1500 of CIFAR-10's training images, under eq. 4 and under softmax;
eqs. 6 and 7 take the same rate, under which they trained on digits. Test images had no say.

Networks work at unit radius. The paper's u = 5 enters eq. 6 as the margin m = ‖s₁ − s₂‖/10 of its
code, eq. 7 as the temperature 1/u², which is s_j·f at radius u; and the drawing, which is scaled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deepsimplex import inference
from deepsimplex.data.archives import load_official
from deepsimplex.data.sources import load_data, to_tensor
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import settings_for
from deepsimplex.metrics import compactness
from deepsimplex.model import Model
from deepsimplex.paper.panels import centres_of, planar_figure, simplex_figure
from deepsimplex.paper.requests import Request
from deepsimplex.paper.studies import Outcome, Study, clear, conduct
from deepsimplex.recipes import Recipe, benchmark_recipe, digits_recipe
from deepsimplex.terminal import console, percent, table

RADIUS = 5.0  # the paper's u for its 2-D pictures
MARGIN = RADIUS * math.sqrt(3) / 10 / RADIUS**2  # of eq. 6, at unit radius
SHARE = 0.1  # what is left of the class that is cut
THREE = ((0, 1, 2), (1, 8, 9))  # classes of the 2-D pictures: of CIFAR-10, and of digits
QUICK = 50  # training images a class of the 2-D pictures when quick
FIGURE_ONLY = "figure only"  # what the paper publishes here


@dataclasses.dataclass(frozen=True)
class Row:
    """A loss in a picture: its method and settings, and which features are looked at.

    "outputs" are what a simplex loss sees; for a learned head it is the encoder's vector, since
    the outputs are logits.
    """

    method: str
    title: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    space: Literal["outputs", "encoder"] = "outputs"


SIMPLEX_LOSSES = (
    Row("dsc", "eq. 4", {"head": "none"}),
    Row("dsc-hinge", "eq. 6", {"head": "none", "margin": MARGIN}),
    Row("dsc-softmax", "eq. 7", {"head": "none", "temperature": 1 / RADIUS**2}),
)
CONTROLS = (  # the first is what others are held to
    Row("softmax", "softmax", space="encoder"),
    Row("center", "center loss", space="encoder"),
    Row("cac", "CAC", space="encoder"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Training and test images of some classes, labels 0…C−1 in the order of `classes`."""

    classes: tuple[str, ...]
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def load_parts(request: Request, chosen: Sequence[int], most: int | None = None) -> Parts:
    """The chosen classes of CIFAR-10, or of digits when quick; at most so many to train on."""
    found = {}
    for part in ("train", "test"):
        if request.quick:
            data = load_data("digits", part=part)
        else:
            data = load_official("cifar10", part, request.root)
        number = np.full(len(data.classes), -1)
        number[list(chosen)] = np.arange(len(chosen))
        labels = number[data.labels]
        keep = labels >= 0
        if most is not None and part == "train":
            for j in range(len(chosen)):
                keep[np.flatnonzero(labels == j)[most:]] = False
        found[part] = data.images[keep], labels[keep]
    return Parts(tuple(data.classes[j] for j in chosen), found["train"], found["test"])


def conducted(studies: Sequence[Study], request: Request, name: str) -> list[Outcome]:
    """The studies' outcomes; a picture needs every one of them."""
    outcomes = conduct(studies, request.runs(name), request.device)
    for outcome in outcomes:
        if outcome.failed is not None:
            raise DeepSimplexError(
                f"a training {outcome.name!r} that stays finite",
                outcome.failed,
                "lower the learning rate; there is nothing to draw",
            )
    return outcomes


def look(row: Row, study: Study, outcome: Outcome, name: str, request: Request, of: str) -> Any:
    """Features (n, d) of the images study.look[name], of a study of the command `of`."""
    if row.space == "outputs":
        return outcome.outputs[name]
    path: Path = request.runs(of) / study.folder / "model.safetensors"
    if not path.exists():
        raise DeepSimplexError(
            f"the model of the training {study.name!r}",
            "its results without it",
            f"delete {path.parent}; the same command trains it again",
        )
    encoder = Model.load(path, request.device).method.encoder
    return inference.outputs(encoder, to_tensor(study.look[name])).numpy()


def simplex(request: Request) -> None:
    """Fig. 1: 2 classes in 1-D, 3 in 2-D, 4 in 3-D; the features are of test images.

    CIFAR-10's first classes, the OSRCI net and a linear head by the benchmarks' recipe.
    """
    studies, tests = [], []
    for count in (2, 3, 4):
        parts = load_parts(request, range(count))
        recipe = digits_recipe("dsc") if request.quick else benchmark_recipe("dsc", "crop+flip")
        settings = settings_for("dsc", {"head": "linear"})
        epochs = request.epochs or (20 if request.quick else recipe.epochs)
        recipe = dataclasses.replace(recipe, settings=settings, epochs=epochs)
        look_at = {"test": parts.test[0]}
        studies.append(Study(f"classes-{count}", *parts.train, parts.classes, recipe, look_at))
        tests.append(parts.test[1])
    outcomes = conducted(studies, request, "simplex")
    found = []
    for outcome, labels in zip(outcomes, tests, strict=True):
        points, count = outcome.outputs["test"], len(np.unique(labels))
        means = np.stack([points[labels == j].mean(0) for j in range(count)])
        pairs = [math.dist(means[i], means[j]) for i in range(count) for j in range(i)]
        found.append(
            {
                "classes": count,
                "dimension": points.shape[1],
                "nominal_distance": math.sqrt(2 * count / (count - 1)),
                "distances_between_means": pairs,
                "accuracy": outcome.accuracy("test", labels),
                "commit": outcome.commit,
            }
        )
    table(
        "Simplex: test images of 2, 3 and 4 classes, unit radius",
        ["classes", "dimension", "vertices apart", "class means apart", "accuracy", "published"],
        [
            [
                str(f["classes"]),
                str(f["dimension"]),
                f"{f['nominal_distance']:.3f}",
                _range(f["distances_between_means"]),
                percent(f["accuracy"]),
                FIGURE_ONLY,
            ]
            for f in found
        ],
    )
    recipe_of = studies[-1].recipe.to_json()
    content = {"published": FIGURE_ONLY, "panels": found, "recipe": recipe_of}
    request.publish("simplex", content, simplex_figure(outcomes, tests, studies[-1].classes))


def embeddings(request: Request) -> None:
    """Fig. 3: features of three classes in the plane under eqs. 4, 6 and 7, one training each."""
    parts = _three(request)
    studies = [_planar(request, parts, row, 0) for row in SIMPLEX_LOSSES]
    outcomes = conducted(studies, request, "embeddings")
    found: dict[str, Any] = {}
    for row, outcome in zip(SIMPLEX_LOSSES, outcomes, strict=True):
        assert outcome.centres is not None
        away = ((outcome.outputs["train"] - outcome.centres[parts.train[1]]) ** 2).sum(1)
        found[row.title] = {"train_within_margin_of_eq6": float((away <= MARGIN).mean())}
        for part, labels in (("train", parts.train[1]), ("test", parts.test[1])):
            ratio = compactness(outcome.outputs[part], labels).ratio
            found[row.title] |= {
                f"{part}_accuracy": outcome.accuracy(part, labels),
                f"{part}_spread": math.sqrt(ratio),
            }
        found[row.title]["commit"] = outcome.commit
    table(
        f"Embeddings: {', '.join(parts.classes)} in the plane",
        ["loss", "train accuracy", "test accuracy", "train spread", "test spread", "published"],
        [
            [
                title,
                *(percent(f[f"{part}_accuracy"]) for part in ("train", "test")),
                *(f"{f[f'{part}_spread']:.3f}" for part in ("train", "test")),
                FIGURE_ONLY,
            ]
            for title, f in found.items()
        ],
    )
    notes = [
        "Spread: root mean square distance to the class mean, over that of the class means to "
        "theirs; it has no unit.",
        f"Drawn at radius u = {RADIUS:g}: outputs at unit radius, multiplied.",
        _tightest(found),
    ]
    for note in notes:
        console.print(note)
    recipes = {r.title: s.recipe.to_json() for r, s in zip(SIMPLEX_LOSSES, studies, strict=True)}
    content = {
        "published": FIGURE_ONLY,
        "classes": parts.classes,
        "losses": found,
        "notes": notes,
        "recipes": recipes,
    }
    grid = {
        (row.title, part): (RADIUS * outcome.outputs[part], labels)
        for part, labels in (("train", parts.train[1]), ("test", parts.test[1]))
        for row, outcome in zip(SIMPLEX_LOSSES, outcomes, strict=True)
    }
    columns = [row.title for row in SIMPLEX_LOSSES]
    centres = dict.fromkeys(columns, RADIUS * centres_of(outcomes[0]))
    figure = planar_figure(grid, columns, ["train", "test"], parts.classes, centres, by="column")
    request.publish("embeddings", content, figure, f"u = {RADIUS:g}, a scale a loss")


def _tightest(found: dict[str, Any]) -> str:
    spreads = {title: f["test_spread"] for title, f in found.items()}
    order = sorted(spreads, key=lambda title: spreads[title])
    return (
        "Paper: eq. 4 compact, eq. 6 in balls, eq. 7 overlapping. Here, from the tightest on test "
        f"images: {', '.join(f'{t} ({spreads[t]:.3f})' for t in order)}."
    )


def imbalance(request: Request) -> None:
    """Fig. 3's problem with one class cut to a tenth: what does that class lose?

    The class is number seed mod 3, since the paper's "blue" one is not named. Each seed trains
    every loss on all images and on the cut set; test images are always balanced.
    """
    parts, rows = _three(request), (*SIMPLEX_LOSSES, *CONTROLS)
    asked = [
        (row, seed, cut)
        for seed in range(request.seeds)
        for row in rows
        for cut in (None, seed % len(parts.classes))
    ]
    studies = [_planar(request, parts, *one) for one in asked]
    outcomes = conducted(studies, request, "imbalance")
    found: dict[str, list[dict[str, Any]]] = {row.title: [] for row in rows}
    for (row, seed, cut), study, outcome in zip(asked, studies, outcomes, strict=True):
        kind = "balanced" if cut is None else "imbalanced"
        accuracies = {
            kind: _by_class(outcome, "test", parts.test[1]),
            f"{kind}, training images": _by_class(outcome, "train", study.labels),
        }
        if cut is None:
            found[row.title].append({"seed": seed, **accuracies})
        else:
            found[row.title][-1] |= {"cut": cut, **accuracies, "commit": outcome.commit}
    _print_classes(found, parts.classes)
    lost = {
        title: [one["balanced"][one["cut"]] - one["imbalanced"][one["cut"]] for one in seeds]
        for title, seeds in found.items()
    }
    lines = verdicts(lost, CONTROLS[0].title)
    lines.append(
        f"Drawn for seed 0: simplex losses at radius u = {RADIUS:g}, multiplied; of learned heads "
        "the encoder's 2-D features, at their own scale."
    )
    for line in lines:
        console.print(line)
    content: dict[str, Any] = {
        "published": FIGURE_ONLY,
        "classes": parts.classes,
        "share": SHARE,
        "losses": found,
        "lost": lost,
    }
    recipes = {row.title: studies[2 * i].recipe.to_json() for i, row in enumerate(rows)}
    content |= {"notes": lines, "recipes": recipes}
    grid, centres = {}, {}
    for (row, seed, cut), study, outcome in zip(asked, studies, outcomes, strict=True):
        if seed > 0:
            continue
        scale = RADIUS if outcome.centres is not None else 1.0
        for part, labels in (("train", study.labels), ("test", parts.test[1])):
            column = f"{'balanced' if cut is None else f'{parts.classes[cut]} cut to 10 %'}, {part}"
            points = look(row, study, outcome, part, request, "imbalance")
            grid[column, row.title] = scale * points, labels
        if outcome.centres is not None:
            centres[row.title] = RADIUS * outcome.centres
    columns = list(dict.fromkeys(column for column, _ in grid))
    names = [row.title for row in rows]
    figure = planar_figure(grid, columns, names, parts.classes, centres, by="row")
    request.publish("imbalance", content, figure, f"drawn is seed 0, u = {RADIUS:g}")


def _print_classes(found: dict[str, list[dict[str, Any]]], classes: Sequence[str]) -> None:
    """Each class with all its images and, over the seeds that cut it, with a tenth of them."""
    rows = []
    for title, seeds in found.items():
        for j, name in enumerate(classes):
            cut = [one["imbalanced"][j] for one in seeds if one["cut"] == j]
            rest = [one["imbalanced"][j] for one in seeds if one["cut"] != j]
            whole = [one["balanced"][j] for one in seeds]
            rows.append([title, name, *(_mean_sd(v) for v in (whole, cut, rest)), str(len(cut))])
    table(
        f"Imbalance: test accuracy by class, mean ± sd over seeds (published: {FIGURE_ONLY})",
        ["loss", "class", "balanced", "when cut to 10 %", "when another is", "seeds cut"],
        rows,
    )


def verdicts(lost: dict[str, list[float]], control: str) -> list[str]:
    """What the cut class loses under each loss, and whether that is less than under the control.

    Paired by seed; called clear where 0 lies outside Student's 95 % interval of the mean.
    """
    words = {1: f"less than {control}", 0: "no clear difference", -1: f"more than {control}"}
    base = np.array(lost[control])
    lines = [f"{control}: the cut class loses {_mean_sd(lost[control])} points."]
    for title, values in lost.items():
        if title == control:
            continue
        less, n = base - np.array(values), len(values)
        said = words[clear(less)] if n > 1 else "one seed decides nothing"
        apart = f"{_mean_sd(less)} less" if less.mean() >= 0 else f"{_mean_sd(-less)} more"
        lines.append(
            f"{title}: it loses {_mean_sd(values)} points, {apart} than under "
            f"{control}, less in {(less > 0).sum()} of {n} seeds: {said}."
        )
    return lines


def cut_to_share(labels: np.ndarray, cut: int, share: float, seed: int) -> np.ndarray:
    """Indices of all images but those of class `cut`, of which a share is kept, drawn by seed."""
    members = np.flatnonzero(labels == cut)
    count = max(1, round(share * len(members)))
    kept = np.random.default_rng(seed).permutation(members)[:count]
    return np.sort(np.concatenate([np.flatnonzero(labels != cut), kept]))


def _three(request: Request) -> Parts:
    return load_parts(request, THREE[request.quick], most=QUICK if request.quick else None)


def _planar(request: Request, parts: Parts, row: Row, seed: int, cut: int | None = None) -> Study:
    """LeNet++ with a 2-D feature under one loss, on all images or with a class cut."""
    images, labels = parts.train
    if cut is not None:
        kept = cut_to_share(labels, cut, SHARE, seed)
        images, labels = images[kept], labels[kept]
    recipe = Recipe(
        method=row.method,
        settings=settings_for(row.method, row.changes),
        backbone="lenet++",
        epochs=request.epochs or (7 if request.quick else 50),
        batch_size=12 if request.quick else 64,
        learning_rate=0.01,
        precision="float32",  # the feature is the encoder's last layer, which bfloat16 would round
        seed=seed,
    )
    name = f"{row.method}-{'balanced' if cut is None else f'cut-{cut}'}-{seed}"
    look_at = {"train": images, "test": parts.test[0]}
    return Study(name, images, labels, parts.classes, recipe, look_at)


def _by_class(outcome: Outcome, part: str, labels: np.ndarray) -> list[float]:
    right = outcome.predicted[part] == labels
    return [float(right[labels == j].mean()) for j in np.unique(labels)]


def _mean_sd(values: Sequence[float] | np.ndarray) -> str:
    if len(values) == 0:
        return "–"
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3f}" if len(values) == 1 else f"{low:.3f} to {high:.3f}"
