"""Choose the default for small images and vectors, as choose.py does for the benchmarks.

    python benchmarks/choose_small.py digits --json results/choose-digits.json
    python benchmarks/choose_small.py mnist --split 0 --images 3600 --background cifar100 …

Training images only (of digits all, which are the demo's test images too), two classes left out at
a time, every class once (`--split`: only those that are known in that ARPL split); each method by
its default recipe on the CPU, without a background, with one as it is and, where it is photographs
beside drawings, with it drawn (data/drawings.py); its own score, the nearest training feature, and
both joined. Records up to 076d1a9 have photographs as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from choose import only

from deepsimplex import fitting, metrics
from deepsimplex.data.archives import load_official
from deepsimplex.data.background import PHOTOGRAPHS, Background, load_background
from deepsimplex.data.protocols import leave_out_trials, split_trial, splits
from deepsimplex.data.sources import LabelledSet, load_data, to_tensor
from deepsimplex.detectors import fit_detector
from deepsimplex.fitting import fit_model
from deepsimplex.recipes import default_recipe
from deepsimplex.runs import environment, write_json

METHODS = ("dsc", "dsc-softmax", "dsc-blend", "softmax")
HELPED = ("dsc", "dsc-softmax", "dsc-blend")


def fold(
    data: LabelledSet, known: list[str], method: str, extra: Background | None, seed: int
) -> Any:
    """Accuracy, and AUROC by every score, of one training without two classes."""
    trial = split_trial(data, known, name="choose", seed=seed, background=extra)
    images, labels = to_tensor(trial.train[0]), torch.from_numpy(trial.train[1])
    recipe = default_recipe(method, tuple(images.shape[1:]), seed, len(labels))
    others = None if trial.background is None else to_tensor(trial.background)
    model = fit_model(images, labels, trial.classes, recipe, background=others, device="cpu")
    sides = [to_tensor(part) for part in (trial.known_test[0], trial.unknown_test)]
    predicted, own = model.all_scores(sides[0])
    found = {model.score: (own[model.score], model.all_scores(sides[1])[1][model.score])}
    for name in ("nearest", "joined"):
        detector = fit_detector(name, model.method, images, labels, len(trial.classes))
        known_side, unknown_side = (detector.knownness(side).numpy() for side in sides)
        found[name] = known_side, unknown_side
    aurocs = {name: metrics.auroc(*pair) for name, pair in found.items()}
    accuracy = metrics.accuracy(trial.known_test[1], predicted)
    left_out = sorted(set(trial.unknown_names))
    return {"left out": left_out, "seed": seed, "accuracy": accuracy, "auroc": aurocs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", choices=("digits", "mnist", "cifar10"))
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, help="so many, drawn once")
    parser.add_argument("--split", type=int, help="its known classes only; all if not given")
    parser.add_argument(
        "--only", help='rows, by ";": "dsc;dsc-blend, cifar100 drawn"; all if not given'
    )
    parser.add_argument("--background", default=PHOTOGRAPHS, help="or cifar100")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = load_data("digits")
    if args.data != "digits":
        data = load_official(args.data, "train", args.data_root)
    if args.split is not None:
        about = splits("arpl", "mnist" if args.data == "digits" else args.data)[args.split]
        data = only(data, [data.classes[c] for c in about["known"]])
    if args.images:
        some = np.random.default_rng(0).permutation(len(data.labels))[: args.images]
        data = dataclasses.replace(data, images=data.images[some], labels=data.labels[some])
    table: dict[str, Any] = {}
    began = time.perf_counter()
    _, size, _, channels = data.images.shape
    root, about = args.data_root or Path(), {"against": args.data, "size": size}
    extra = load_background(args.background, root, channels=channels, **about)
    runs = [(m, "") for m in METHODS]
    runs += [(m, f", {args.background} {how}") for how in ("as they are", "drawn") for m in HELPED]
    if args.only:
        wanted = args.only.split(";")
        if wrong := set(wanted) - {m + how for m, how in runs}:
            raise SystemExit(f"{sorted(wrong)}: not among {[m + how for m, how in runs]}")
        runs = [(m, how) for m, how in runs if m + how in wanted]
    for method, how in runs:
        untouched = mock.patch.object(fitting, "suited", lambda background, knowns: background)
        with untouched if how.endswith("as they are") else contextlib.nullcontext():
            records = [
                fold(data, known, method, extra if how else None, seed)
                for seed in range(args.seeds)
                for known in leave_out_trials(data, 2, seed)[: args.folds]
            ]
        name = method + how
        scores = {s: statistics.mean(r["auroc"][s] for r in records) for s in records[0]["auroc"]}
        accuracy = statistics.mean(r["accuracy"] for r in records)
        table[name] = {"accuracy": accuracy, "auroc": scores, "records": records}
        line = "  ".join(f"{s} {100 * v:.2f}" for s, v in scores.items())
        print(f"{name:34} acc {100 * accuracy:.2f}  {line}", flush=True)
    if args.json:
        words = " --data-root DATA" if args.data != "digits" else ""
        words += f" --split {args.split}" if args.split is not None else ""
        words += f" --images {args.images}" if args.images else ""
        words += f" --only '{args.only}'" if args.only else ""
        words += f" --background {args.background}"
        command = f"python benchmarks/choose_small.py {args.data}{words}"
        command += f" --folds {args.folds} --seeds {args.seeds}"
        born = {"command": command, "environment": environment(torch.device("cpu"))}
        seconds = time.perf_counter() - began
        write_json(args.json, born | {"seconds": seconds, "means": table})


if __name__ == "__main__":
    main()
