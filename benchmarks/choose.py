"""Choose the default recipe without looking at a test image or an unknown class.

    python benchmarks/choose.py --data-root DATA --only NAME,NAME --json results/choose-NAME.json

The six known classes of an ARPL split of CIFAR-10 or MNIST, training images only, two of them
left out at a time (three folds, every class once): trained on the other four, a quarter of whose
images are held out, how well are the two told apart from those? (`--leave 1 --held 0.1` is nearer
to the benchmark: five classes, nearly all their images, six folds.) Every candidate below is a
recipe; every score that its features allow is reported for each. What wins here becomes the
default (docs/decisions); the benchmark's unknowns play no part. "sum" is eq. 7 + eq. 4.

results/choose-cifar10.json is older: "sum" is called "blend 1" there, and decay 5e-4 "wd". All
records up to e37545a have, instead of the scores nearest and joined, "knn5", "knn50" and "own +
knn50", standardised on the held-out knowns. What did not win is gone from the code: contrast is in
e37545a, "sphere" and "mixed" (directions and mixtures, after SpHOR) in f1c8a77.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepsimplex import engine, metrics
from deepsimplex.data.archives import load_official
from deepsimplex.data.background import load_background
from deepsimplex.data.protocols import BENCHMARKS, Trial, leave_out_trials, split_trial, splits
from deepsimplex.data.resize import fit
from deepsimplex.data.sources import to_tensor
from deepsimplex.detector_table import Joined, Nearest, Parts
from deepsimplex.detectors import linear_head
from deepsimplex.fitting import fitting
from deepsimplex.lanes import drive
from deepsimplex.methods import settings_for
from deepsimplex.methods.base import Method
from deepsimplex.recipes import Recipe, benchmark_recipe
from deepsimplex.runs import environment, write_json

RAND = {"augment": "rand"}  # before the benchmark's own augmentation
STRONG = {"augment": "strong"}
LIGHT = {"weight_decay": 1e-4}  # the benchmark recipe has 5e-4
HEAVY = {"weight_decay": 1e-3}
SMOOTH = {"average": 0.9995}
FREE = {"clip": None}
PLAIN = {"clip": None, "nesterov": False, "warmup": 0.0}
WHOLE = {"backbone": "osrci-whole"}  # no dropout
LARGE = {"batch_size": 256, "learning_rate": 0.2}
# name → (method, settings, changes of the benchmark recipe, background?)
CANDIDATES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "softmax": ("softmax", {}, {}, False),
    "softmax rand": ("softmax", {}, RAND, False),
    "eq4": ("dsc", {}, {}, False),
    "eq4 rand": ("dsc", {}, RAND, False),
    "eq7": ("dsc-softmax", {}, {}, False),
    "eq7 free": ("dsc-softmax", {}, FREE, False),
    "eq7 light free": ("dsc-softmax", {}, {**LIGHT, **FREE}, False),
    "eq7 plain": ("dsc-softmax", {}, PLAIN, False),
    "eq7 rand heavy free": ("dsc-softmax", {}, {**RAND, **HEAVY, **FREE}, False),
    "eq7 whole": ("dsc-softmax", {}, WHOLE, False),
    "eq7 whole free": ("dsc-softmax", {}, {**WHOLE, **FREE}, False),
    "eq7 rand whole": ("dsc-softmax", {}, {**RAND, **WHOLE}, False),
    "sum bg whole": ("dsc-blend", {}, WHOLE, True),
    "sum bg free": ("dsc-blend", {}, FREE, True),
    "sum bg heavy": ("dsc-blend", {}, HEAVY, True),
    "eq7 light": ("dsc-softmax", {}, LIGHT, False),
    "eq7 rand": ("dsc-softmax", {}, RAND, False),
    "eq7 rand light": ("dsc-softmax", {}, {**RAND, **LIGHT}, False),
    "eq7 rand heavy": ("dsc-softmax", {}, {**RAND, **HEAVY}, False),
    "eq7 rand smooth": ("dsc-softmax", {"label_smoothing": 0.1}, RAND, False),
    "eq7 rand restarts": ("dsc-softmax", {}, {**RAND, "restarts": 2}, False),
    "eq7 rand average": ("dsc-softmax", {}, {**RAND, **SMOOTH}, False),
    "eq7 smooth": ("dsc-softmax", {"label_smoothing": 0.1}, {}, False),
    "eq7 T2": ("dsc-softmax", {"temperature": 2.0}, {}, False),
    "eq7 large": ("dsc-softmax", {}, LARGE, False),
    "eq7 strong": ("dsc-softmax", {}, STRONG, False),
    "eq7 strong light": ("dsc-softmax", {}, {**STRONG, **LIGHT}, False),
    "eq7 strong heavy": ("dsc-softmax", {}, {**STRONG, **HEAVY}, False),
    "softmax strong light": ("softmax", {}, {**STRONG, **LIGHT}, False),
    "sum": ("dsc-blend", {}, {}, False),
    "sum rand": ("dsc-blend", {}, RAND, False),
    "turned": ("dsc-turned", {}, {}, False),
    "turned light": ("dsc-turned", {}, LIGHT, False),
    "turned rand": ("dsc-turned", {}, RAND, False),
    "turned rand light": ("dsc-turned", {}, {**RAND, **LIGHT}, False),
    "turned rand average": ("dsc-turned", {}, {**RAND, **SMOOTH}, False),
    "eq4 bg": ("dsc", {}, {}, True),
    "eq7 bg": ("dsc-softmax", {}, {}, True),
    "sum bg": ("dsc-blend", {}, {}, True),
    "sum bg light": ("dsc-blend", {}, LIGHT, True),
    "sum bg rand": ("dsc-blend", {}, RAND, True),
    "sum bg4": ("dsc-blend", {}, {"background_batch": 512}, True),
    "sum 3 bg": ("dsc-blend", {"blend": 3.0}, {}, True),
    "turned bg": ("dsc-turned", {}, {}, True),
    "turned bg .1": ("dsc-turned", {"background_weight": 0.1}, {}, True),
    # Losses divided by the dimension: how much more than softmax's rate do they want?
    **{
        f"{method} x{times}": (method, {}, {"learning_rate": 0.1 * times}, False)
        for method in ("rpl", "gcpl", "dsc-authors")
        for times in (1, 3, 10, 30)
    },
}


def encoded(method: Method, images: Tensor, mirror: bool) -> tuple[Tensor, Tensor]:
    """Encoder features and outputs, float32; with `mirror` the mean over image and mirror."""
    where = next(method.parameters()).device
    rows: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for part in images.split(2048):
            views = [part.to(where)]
            views += [views[0].flip(3)] if mirror else []
            features = [method.encoder(view) for view in views]
            outputs = [method(view) for view in views]
            rows.append((torch.stack(features).mean(0), torch.stack(outputs).mean(0)))
    return torch.cat([f for f, _ in rows]), torch.cat([o for _, o in rows])


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
    name: str, trial: Trial, fold: int, augment: str, epochs: int, where: torch.device
) -> Generator[None, None, dict[str, Any]]:
    method, settings, changes, with_background = CANDIDATES[name]
    if "augment" in changes:
        whole = f"{changes['augment']}+{augment}".removesuffix("+none")
        changes = {**changes, "augment": whole}
    recipe: Recipe = dataclasses.replace(
        benchmark_recipe(method, augment, seed=fold),
        settings=settings_for(method, settings),
        epochs=epochs,
        **changes,
    )
    extra = trial.background if with_background else None
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
    record: dict[str, Any] = {"candidate": name, "fold": fold, "recipe": recipe.to_json()}
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
    record["auroc"] = aurocs
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--benchmark", choices=("cifar10", "mnist"), default="cifar10")
    parser.add_argument("--only", help="candidates, comma-separated; all if not given")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--leave", type=int, default=2, help="classes left out at a time")
    parser.add_argument("--held", type=float, default=0.25, help="share of images to test on")
    parser.add_argument("--folds", type=int, help="so many of them; all if not given")
    parser.add_argument("--images", type=int, help="so many of a class, to try the script out")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = engine.pick_device(args.device)
    names = args.only.split(",") if args.only else list(CANDIDATES)
    about = BENCHMARKS[args.benchmark]
    data = load_official(args.benchmark, "train", args.data_root)
    known = [data.classes[c] for c in splits("arpl", args.benchmark)[args.split]["known"]]
    keep = np.isin(data.names, known)
    if args.images:
        for name in known:
            keep[np.flatnonzero(data.names == name)[args.images :]] = False
    classes = tuple(c for c in data.classes if c in known)
    data = dataclasses.replace(
        data,
        images=fit(data.images[keep], about.size, about.channels),
        labels=np.array([classes.index(n) for n in data.names[keep]]),
        classes=classes,
    )
    extra = None
    if any(CANDIDATES[name][3] for name in names):
        extra = load_background(
            "cifar100", args.data_root, against=args.benchmark, size=32, channels=3
        )
    folds = leave_out_trials(data, args.leave, 0)[: args.folds]
    trials = [
        split_trial(
            data,
            fold,
            name=f"choose/{n}",
            seed=n,
            test=args.held,
            background=extra,
            calibration=0.01,
        )
        for n, fold in enumerate(folds)
    ]
    done: list[dict[str, Any]] = []

    def kept(work: Generator[None, None, dict[str, Any]]) -> Generator[None, None, None]:
        done.append((yield from work))

    jobs = (
        kept(job(c, t, n, about.augment, args.epochs, where))
        for c in names
        for n, t in enumerate(trials)
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
        table[name] = {"folds": len(mine), "accuracy": accuracy, "auroc": scores}
        best = sorted(scores.items(), key=lambda item: -item[1])[:6]
        line = "  ".join(f"{s} {100 * v:.2f}" for s, v in best)
        own = next(iter(scores))
        print(f"{name:14} acc {100 * accuracy:.2f}  {own} {100 * scores[own]:.2f} | {line}")
    print(f"{seconds:.0f} s")
    if args.json:
        record = {
            "command": f"python benchmarks/choose.py --data-root DATA --benchmark "
            f"{args.benchmark} --epochs {args.epochs} --leave {args.leave} --held {args.held:g} "
            + (f"--folds {args.folds} " if args.folds else "")
            + f"--split {args.split} --only '{','.join(names)}'",
            "environment": environment(where),
            "seconds": seconds,
            "means": table,
            "records": records,
        }
        write_json(args.json, record)


if __name__ == "__main__":
    main()
