"""Choose the default recipe without looking at a test image or an unknown class.

    python benchmarks/choose.py --data-root DATA --only NAME,NAME --json results/choose-NAME.json

The six known classes of an ARPL split of CIFAR-10 or MNIST, training images only, two of them
left out at a time (three folds, every class once): trained on the other four, a quarter of whose
images are held out, how well are the two told apart from those? (`--leave 1 --held 0.1` is nearer
to the benchmark: five classes, nearly all their images, six folds; `--outside --held 0.1` leaves
none out and takes training images of half of CIFAR-100's classes for unknown or, with `--benchmark
cifar+50`, whose unknowns those are, of CIFAR-10's other classes.) A candidate is a loss and words
that change the recipe ("sum" is eq. 7 + eq. 4); every score that its features allow is reported for
each. What wins here becomes the default (docs/decisions); the benchmark's unknowns play no part.

results/choose-cifar10.json is older: "sum" is called "blend 1" there, and decay 5e-4 "wd". All
records up to e37545a have, instead of the scores nearest and joined, "knn5", "knn50" and "own +
knn50", standardised on the held-out knowns. What did not win is gone from the code: contrast is in
e37545a, "sphere" and "mixed" (directions and mixtures, after SpHOR) in f1c8a77, "double" and
"resized" (two operations, windows resized) in 36e19f9. Up to 1a6cb63 `--outside` took all unknown
images, since then every third or, with CIFAR+N, every sixth. The own score is also taken of many
views, where training moves (up to f76bbed of others too: moved by 1 and by 4, random crops, as in
training; in 54e8903 moved by several distances, and "settled", with BatchNorm's statistics of
images as they are) and, with `--seeds`, of the mean output of a fold's nets.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepsimplex import engine, inference, metrics
from deepsimplex.data.archives import load_official
from deepsimplex.data.augment import Views
from deepsimplex.data.background import Background, load_background
from deepsimplex.data.protocols import BENCHMARKS, Trial, leave_out_trials, split_trial, splits
from deepsimplex.data.resize import fit
from deepsimplex.data.sources import LabelledSet, to_tensor
from deepsimplex.detector_table import Joined, Nearest, Parts
from deepsimplex.detectors import linear_head
from deepsimplex.fitting import fitting
from deepsimplex.lanes import drive
from deepsimplex.methods import settings_for
from deepsimplex.methods.base import Method
from deepsimplex.recipes import Recipe, benchmark_recipe
from deepsimplex.runs import environment, write_json

LOSSES = {"eq4": "dsc", "eq7": "dsc-softmax", "sum": "dsc-blend", "turned": "dsc-turned"}
# What the words after a loss change in the benchmark recipe, and in the method's settings.
CHANGES: dict[str, dict[str, Any]] = {
    "rand": {"augment": "rand"},  # before the benchmark's own augmentation
    "strong": {"augment": "strong"},
    "bare": {"weight_decay": 0.0},
    "light": {"weight_decay": 1e-4},  # the benchmark recipe has 5e-4
    "lighter": {"weight_decay": 5e-5},
    "heavy": {"weight_decay": 1e-3},
    "average": {"average": 0.9995},
    "free": {"clip": None},
    "plain": {"clip": None, "nesterov": False, "warmup": 0.0},
    "whole": {"backbone": "osrci-whole"},  # no dropout
    "large": {"batch_size": 256, "learning_rate": 0.2},
    "restarts": {"restarts": 2},
    "warm": {"warmup": 1 / 30},
    "twice": {"epochs": 2},  # times as many
    "thrice": {"epochs": 3},
    "larger": {"batch_size": 512, "learning_rate": 0.4, "warmup": 0.05},
    "bg": {},
    "bg2": {"background_batch": 256},
    "bg4": {"background_batch": 512},
    **{f"x{times}": {"learning_rate": 0.1 * times} for times in (1, 3, 10, 30)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "smooth": {"label_smoothing": 0.1},
    "T2": {"temperature": 2.0},
    "3": {"blend": 3.0},
    "tenth": {"blend": 0.1},
    ".1": {"background_weight": 0.1},
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A loss, or a method, and words: "eq7 strong light free", "sum bg whole", "rpl x10"."""

    method: str
    settings: dict[str, Any]
    changes: dict[str, Any]
    background: bool

    @staticmethod
    def named(name: str) -> Candidate:
        loss, *words = name.split()
        wrong = [word for word in words if word not in CHANGES and word not in SETTINGS]
        if wrong:
            raise SystemExit(f"{name!r}: no {', '.join(wrong)} among {[*CHANGES, *SETTINGS]}")
        settings, changes = (
            {key: value for word in words for key, value in table.get(word, {}).items()}
            for table in (SETTINGS, CHANGES)
        )
        with_background = any(word.startswith("bg") for word in words)
        return Candidate(LOSSES.get(loss, loss), settings, changes, with_background)


def encoded(method: Method, images: Tensor, mirror: bool) -> tuple[Tensor, Tensor]:
    """Encoder features and outputs, float32; with `mirror` the mean over image and mirror."""
    where = next(method.parameters()).device
    both = (
        inference.outputs(part, images, views=Views(mirror)) for part in (method.encoder, method)
    )
    features, outputs = (rows.to(where) for rows in both)
    return features, outputs


def bent(images: Tensor) -> Iterator[Tensor]:
    """An image a tenth larger, a tenth smaller, turned by 7° either way; mirror images too."""
    n, _, h, w = images.shape
    for scale, degrees in ((1.1, 0), (0.9, 0), (1.0, 7), (1.0, -7)):
        angle = math.radians(degrees)
        rows = [[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]]
        matrix = torch.tensor(rows, device=images.device) / scale
        grid = F.affine_grid(matrix.expand(n, 2, 3), [n, 1, h, w], align_corners=False)
        view = F.grid_sample(images.float(), grid, align_corners=False).round().to(torch.uint8)
        yield view
        yield view.flip(-1)


def by_views(method: Method, score: str, sides: list[Tensor]) -> dict[str, float]:
    """AUROC of many views: by their mean output, by the mean and the lower quartile of their own
    scores, with views that are bent too, and by the mean output's score as it compares with that
    of held-out knowns of the predicted class.
    """
    where = next(method.parameters()).device
    many = Views(True, 2)
    outputs: list[list[Tensor]] = []
    for side in sides:
        pixels = side.to(where)
        every = itertools.chain(many.of(pixels), bent(pixels))
        outputs.append([inference.outputs(method, view) for view in every])
    moved = [torch.stack(side[: many.count]) for side in outputs]
    also = [torch.stack(side) for side in outputs]
    known = [torch.stack([method.knownness(v.to(where), score) for v in side]) for side in moved]
    means = [side.mean(0).to(where) for side in moved]
    named = [method.class_scores(side, score).argmax(1) for side in means]
    one = [method.knownness(side, score) for side in means]
    return {
        f"{score} moved 2, standardised": _rank(by_class(one, named, spread=True)),
        f"{score} moved 2, less its class's mean": _rank(by_class(one, named, spread=False)),
        f"{score} moved 2": _auroc(method, score, [side.mean(0) for side in moved]),
        f"{score} moved 2 and bent": _auroc(method, score, [side.mean(0) for side in also]),
        f"{score} moved 2, mean score": _rank([side.mean(0) for side in known]),
        f"{score} moved 2, lower quartile": _rank([side.quantile(0.25, 0) for side in known]),
    }


def by_class(scores: list[Tensor], named: list[Tensor], *, spread: bool) -> list[Tensor]:
    """Knowns' and unknowns' scores less the mean, over the standard deviation, of the knowns that
    are given the same class: of the other half of them for a known.
    """
    (known, unknown), (mine, others) = scores, named
    half = torch.arange(len(known), device=known.device) % 2 == 0

    def moments(part: Tensor, label: int) -> tuple[Tensor, Tensor]:
        of = known[part & (mine == label)]
        of = of if len(of) > 1 else known[part]
        return of.mean(), of.std() if spread else torch.ones_like(of[0])

    known_new, unknown_new = known.clone(), unknown.clone()
    for label in torch.cat([mine, others]).unique().tolist():
        for part in (half, ~half):
            mean, sd = moments(~part, label)
            at = part & (mine == label)
            known_new[at] = (known[at] - mean) / sd
        mean, sd = moments(half | ~half, label)
        at = others == label
        unknown_new[at] = (unknown[at] - mean) / sd
    return [known_new, unknown_new]


@torch.no_grad()
def knownness(
    method: Method, bank: Tensor, labels: Tensor, features: Tensor, outputs: Tensor
) -> dict[str, Tensor]:
    """Every score there is for the features: the method's own, and by training features."""
    found = {name: method.knownness(outputs, name).double() for name in method.scores}
    near: dict[str, Any] = {"nearest": Nearest()}
    head = linear_head(method)
    if head is not None:
        width, classes = bank.shape[1], len(head.weight)
        weight, bias = head.weight.to(bank), head.bias.to(bank)
        parts = Parts(len(bank), width, classes, weight, bias, method, (255.0,))
        near["joined"] = Joined(parts)
    for name, detector in near.items():
        detector.fit_features(bank, labels)
        found[name] = -detector.predict_features(features).double()
    means = torch.stack([bank[labels == c].mean(0) for c in labels.unique()])
    found["class mean"] = -torch.cdist(features, means).amin(1).double()
    found["length"] = features.norm(dim=1).double()
    return found


def job(
    name: str, trial: Trial, fold: int, how: str, epochs: int, where: torch.device, seed: int
) -> Generator[None, None, dict[str, Any]]:
    plan = Candidate.named(name)
    changes = dict(plan.changes)
    if "augment" in changes:
        changes["augment"] = f"{changes['augment']}+{how}".removesuffix("+none")
    recipe: Recipe = dataclasses.replace(
        benchmark_recipe(plan.method, how, seed=seed),
        settings=settings_for(plan.method, plan.settings),
        **changes | {"epochs": epochs * changes.get("epochs", 1)},
    )
    extra = trial.background if plan.background else None
    images, labels = to_tensor(trial.train[0]), torch.from_numpy(trial.train[1])
    began = time.perf_counter()
    model = yield from fitting(
        images,
        labels,
        trial.classes,
        recipe,
        where,
        background=None if extra is None else to_tensor(extra),
    )
    record: dict[str, Any] = {
        "candidate": name,
        "fold": fold,
        "seed": seed,
        "recipe": recipe.to_json(),
    }
    record["seconds"] = time.perf_counter() - began
    aurocs: dict[str, float] = {}
    for mirror in (False, True):
        bank, _ = encoded(model.method, images[:10_000], mirror)
        parts = [
            encoded(model.method, to_tensor(part), mirror)
            for part in (trial.known_test[0], trial.unknown_test)
        ]
        by_class = model.method.class_scores(parts[0][1], model.score).argmax(1).numpy(force=True)
        end = " mirrored" if mirror else ""
        record[f"accuracy{end}"] = metrics.accuracy(trial.known_test[1], by_class)
        where_labels = labels[:10_000].to(bank.device)
        known, unknown = (knownness(model.method, bank, where_labels, *part) for part in parts)
        for score in known:
            pair = known[score].cpu().numpy(), unknown[score].cpu().numpy()
            aurocs[score + end] = metrics.auroc(*pair)
    own, sides = model.score, (trial.known_test[0], trial.unknown_test)
    if "crop" in how:
        aurocs |= by_views(model.method, own, [to_tensor(side) for side in sides])
    record["outputs"] = model.method, own, [out.cpu() for _, out in parts]
    record["auroc"] = aurocs
    return record


def _auroc(method: Method, score: str, outputs: list[Tensor]) -> float:
    """Of knowns' and unknowns' outputs."""
    where = next(method.parameters()).device
    return _rank([method.knownness(side.to(where), score) for side in outputs])


def _rank(sides: list[Tensor]) -> float:
    known, unknown = (side.double().cpu().numpy() for side in sides)
    return metrics.auroc(known, unknown)


def committee(records: list[dict[str, Any]]) -> dict[int, float]:
    """AUROC of the mean output, mirrored, of the trainings of a fold."""
    found = {}
    for fold in {r["fold"] for r in records}:
        every = [r["outputs"] for r in records if r["fold"] == fold]
        means = [torch.stack([sides[k] for _, _, sides in every]).mean(0) for k in (0, 1)]
        found[fold] = _auroc(every[0][0], every[0][1], means)
    return found


def training_set(args: argparse.Namespace) -> LabelledSet:
    about = BENCHMARKS[args.benchmark]
    data = load_official(about.known, "train", args.data_root)
    keep = np.ones(len(data.labels), dtype=bool)
    if args.images:
        for label in range(len(data.classes)):
            keep[np.flatnonzero(data.labels == label)[args.images :]] = False
    images = fit(data.images[keep], about.size, about.channels)
    return dataclasses.replace(data, images=images, labels=data.labels[keep])


def only(data: LabelledSet, known: list[str]) -> LabelledSet:
    keep = np.isin(data.names, known)
    classes = tuple(c for c in data.classes if c in known)
    labels = np.array([classes.index(n) for n in data.names[keep]])
    return dataclasses.replace(data, images=data.images[keep], labels=labels, classes=classes)


def folds(args: argparse.Namespace, extra: Background | None) -> list[Trial]:
    """Some of the known classes left out at a time, to be unknown."""
    every, trials = training_set(args), list[Trial]()
    for split in map(int, args.split.split(",")):
        classes = splits("arpl", args.benchmark)[split]["known"]
        data = only(every, [every.classes[c] for c in classes])
        left = leave_out_trials(data, args.leave, 0)[: args.folds]
        trials += [
            _trial(args, data, known, len(trials) + n, extra) for n, known in enumerate(left)
        ]
    return trials


def outside(args: argparse.Namespace, extra: Background) -> list[Trial]:
    """All known classes of each split, and unknown ones from where the benchmark has none.

    CIFAR-10: every other class of CIFAR-100 is unknown, the rest are background. CIFAR+N, whose
    unknowns are of CIFAR-100: the other classes of CIFAR-10, and its own background.
    """
    data, trials = training_set(args), []
    every = extra.classes
    apart = np.isin(every, sorted(set(every.tolist()))[::2])
    for number in map(int, args.split.split(",")):
        lists = splits("arpl", args.benchmark)[number]
        known = [data.classes[c] for c in lists["known"]]
        if args.benchmark == "cifar10":
            rest = dataclasses.replace(extra, images=extra.images[~apart], classes=every[~apart])
            trial = _trial(args, only(data, known), known, number, rest)
            unknown: Any = {
                "unknown_test": extra.images[apart][::3],
                "unknown_names": (*every[apart][::3],),
            }
            trial = dataclasses.replace(trial, **unknown)
        else:
            names = load_official("cifar100", "test", args.data_root).classes
            keep = np.isin(every, [names[c] for c in lists["unknown"]], invert=True)
            rest = dataclasses.replace(extra, images=extra.images[keep], classes=every[keep])
            trial = _trial(args, data, known, number, rest)
            some: Any = {"unknown_test": trial.unknown_test[::6], "unknown_names": ()}
            trial = dataclasses.replace(trial, **some)
        trials.append(trial)
    return trials


def _trial(
    args: argparse.Namespace,
    data: LabelledSet,
    known: list[str],
    number: int,
    extra: Background | None,
) -> Trial:
    how: Any = {"test": args.held, "background": extra, "calibration": 0.01}
    return split_trial(data, known, name=f"choose/{number}", seed=number, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--benchmark", default="cifar10", help="or mnist, cifar+50")
    parser.add_argument("--only", required=True, help="candidates, comma-separated")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--leave", type=int, default=2, help="classes left out at a time")
    parser.add_argument("--held", type=float, default=0.25, help="share of images to test on")
    parser.add_argument("--folds", type=int, help="so many of each split; all if not given")
    parser.add_argument("--images", type=int, help="so many of a class, to try the script out")
    parser.add_argument("--split", default="0", help="ARPL's; several by comma")
    parser.add_argument("--outside", action="store_true", help="unknown is of another set")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each; and their mean")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = engine.pick_device(args.device)
    names = list(dict.fromkeys(args.only.split(",")))
    if args.seeds > 1 and any(name.split()[0] not in LOSSES for name in names):
        raise SystemExit(f"--seeds: the mean output of nets with fixed centres only, {[*LOSSES]}")
    wanted = any(Candidate.named(name).background for name in names)
    about = BENCHMARKS[args.benchmark]
    extra = None
    if wanted or args.outside:
        extra = load_background(
            "cifar100", args.data_root, against=about.known, size=32, channels=about.channels
        )
        if args.images:
            few = slice(None, None, 100)
            extra = dataclasses.replace(extra, images=extra.images[few], classes=extra.classes[few])
    trials = outside(args, extra) if extra and args.outside else folds(args, extra)
    done: list[dict[str, Any]] = []

    def kept(work: Generator[None, None, dict[str, Any]]) -> Generator[None, None, None]:
        done.append((yield from work))

    jobs = (
        kept(job(c, t, n, about.augment, args.epochs, where, n + 10 * seed))
        for c in names
        for n, t in enumerate(trials)
        for seed in range(args.seeds)
    )
    began = time.perf_counter()
    try:
        drive(jobs, where, at_once=args.at_once)
    finally:  # what was found is not lost with what fails
        show(args, names, done, time.perf_counter() - began, where)


def show(
    args: argparse.Namespace,
    names: list[str],
    records: list[dict[str, Any]],
    seconds: float,
    where: torch.device,
) -> None:
    table = {}
    for name in names:
        mine = [r for r in records if r["candidate"] == name]
        if not mine:
            continue
        scores = {s: statistics.mean(r["auroc"][s] for r in mine) for s in mine[0]["auroc"]}
        accuracy = statistics.mean(r["accuracy"] for r in mine)
        count = len({r["fold"] for r in mine})
        table[name] = {
            "folds": count,
            "trainings": len(mine),
            "accuracy": accuracy,
            "auroc": scores,
        }
        if args.seeds > 1:
            table[name]["committee"] = committee(mine)
            print(f"{name}: committee {table[name]['committee']}")
        for record in mine:
            record.pop("outputs", None)
        best = sorted(scores.items(), key=lambda item: -item[1])
        line = "  ".join(f"{s} {100 * v:.2f}" for s, v in best)
        own = next(iter(scores))
        print(f"{name:14} acc {100 * accuracy:.2f}  {own} {100 * scores[own]:.2f} | {line}")
    print(f"{seconds:.0f} s")
    if args.json:
        record = {
            "command": f"python benchmarks/choose.py --data-root DATA --benchmark "
            f"{args.benchmark} --epochs {args.epochs} --held {args.held:g} "
            + ("--outside " if args.outside else f"--leave {args.leave} ")
            + (f"--folds {args.folds} " if args.folds else "")
            + (f"--seeds {args.seeds} " if args.seeds > 1 else "")
            + f"--split {args.split} --only '{','.join(names)}'",
            "environment": environment(where),
            "seconds": seconds,
            "means": table,
            "records": records,
        }
        write_json(args.json, record)


if __name__ == "__main__":
    main()
