"""The engine against the plain loop at equal epochs: accuracy and AUROC over seeds, and seconds.

    python benchmarks/accuracy.py --data-root DATA --json results/bench-accuracy.json

CIFAR-10, ARPL split 0, the OSRCI net, softmax, the common recipe at fewer epochs; last epoch.
Ours trains its seeds side by side; the plain loop (bench/training.py) one after another. The
seconds are whole wall clock, from the first import of data on the device to the last epoch,
kernels compiled and captured included. Expected: means that differ by less than their spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from deepsimplex import engine, inference, layers, metrics
from deepsimplex.batches import TrainingSet
from deepsimplex.bench.training import plain_epochs
from deepsimplex.data.protocols import benchmark_trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.lanes import drive
from deepsimplex.methods import build_method
from deepsimplex.recipes import benchmark_recipe
from deepsimplex.runs import environment, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--images", type=int, help="only so many, to try the script out")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    where = engine.pick_device(args.device)
    trial = benchmark_trial("cifar10", "arpl", 0, args.data_root)
    data = TrainingSet(
        to_tensor(trial.train[0][: args.images]), torch.from_numpy(trial.train[1][: args.images])
    )

    def recipe(seed: int) -> Any:
        plan = benchmark_recipe("softmax", "crop+flip", seed)
        return dataclasses.replace(plan, epochs=args.epochs)

    def net(seed: int) -> Any:
        torch.manual_seed(seed)
        method = build_method("softmax", "osrci", (3, 32, 32), len(trial.classes), None)
        method.encoder.normalise.fit(data.images)
        return method

    def test(method: Any) -> dict[str, float]:
        method.eval()
        known, unknown = to_tensor(trial.known_test[0]), to_tensor(trial.unknown_test)
        by_class, scores = inference.scores(method, known[: args.images], "max_logit")
        _, other = inference.scores(method, unknown[: args.images], "max_logit")
        labels = trial.known_test[1][: args.images]
        return {
            "accuracy": metrics.accuracy(labels, by_class.argmax(1).numpy()),
            "auroc": metrics.auroc(scores["max_logit"].numpy(), other["max_logit"].numpy()),
        }

    found: dict[str, Any] = {}
    began = time.perf_counter()
    ours = [net(seed) for seed in range(args.seeds)]
    jobs = [engine.training(m, data, recipe(s), where) for s, m in enumerate(ours)]
    drive(jobs, where, at_once=args.seeds)
    found["engine"] = {"seconds": time.perf_counter() - began, "runs": [test(m) for m in ours]}
    began = time.perf_counter()
    runs, seconds = [], 0.0
    for seed in range(args.seeds):
        method = net(seed)
        with layers.plain():
            for _ in plain_epochs(method, data, recipe(seed), where):
                pass
        seconds += time.perf_counter() - began
        runs.append(test(method))
        began = time.perf_counter()
    found["plain loop"] = {"seconds": seconds, "runs": runs}

    for name, row in found.items():
        for key in ("accuracy", "auroc"):
            values = [100 * run[key] for run in row["runs"]]
            row[key] = {"mean": statistics.mean(values), "sd": statistics.stdev(values)}
        print(
            f"{name:10}  accuracy {row['accuracy']['mean']:.2f} ± {row['accuracy']['sd']:.2f}  "
            f"AUROC {row['auroc']['mean']:.2f} ± {row['auroc']['sd']:.2f}  {row['seconds']:.1f} s"
        )
    ratio = found["plain loop"]["seconds"] / found["engine"]["seconds"]
    print(f"wall clock, {args.seeds} seeds of {args.epochs} epochs: {ratio:.1f}×")
    if args.json:
        record = {
            "command": f"python benchmarks/accuracy.py --data-root DATA --epochs {args.epochs} "
            f"--seeds {args.seeds}",
            "what": "engine against plain loop, CIFAR-10 ARPL split 0, last epoch",
            "environment": environment(where),
            "ratio of wall clock": ratio,
            "rows": found,
        }
        write_json(args.json, record)


if __name__ == "__main__":
    main()
