"""What each method costs in trainings of softmax, each timed beside one of its own.

    python benchmarks/costs.py

Writes results/costs-digits.json and, of that, src/deepsimplex/methods/costs.json, which
`deepsimplex methods` shows: whole trainings on digits with all their stages, calibration and test,
as `compare digits` has them. A machine's speed drifts over minutes, so each is followed by softmax
on the same trial, and the median of the trials' ratios counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from deepsimplex import compare
from deepsimplex.data.protocols import benchmark_trial
from deepsimplex.methods import METHODS, method_row
from deepsimplex.recipes import digits_recipe
from deepsimplex.research import KEEP, with_photographs
from deepsimplex.runs import environment, write_json

TOP = Path(__file__).parents[1]


def seconds(method: str, number: int) -> float:
    trial = benchmark_trial("digits", "arpl", number, Path())
    if method_row(method).needs_background:
        trial = with_photographs(trial)
    with tempfile.TemporaryDirectory() as folder:
        recipe = digits_recipe(method, seed=number)
        found = compare.run_trial(trial, recipe, Path(folder), keep=KEEP, device="cpu")
    return float(found["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--results", type=Path, default=TOP / "results")
    args = parser.parse_args()
    seconds("softmax", 0)  # libraries start up
    rows: dict[str, Any] = {}
    for name in METHODS:
        pairs = [(seconds(name, n), seconds("softmax", n)) for n in range(args.trials)]
        ratio = statistics.median(mine / softmax for mine, softmax in pairs)
        rows[name] = {"ratio": ratio, "seconds": pairs}
        print(f"{name:20} {ratio:.2f}", flush=True)
    where = torch.device("cpu")
    record = {"command": "python benchmarks/costs.py", "environment": environment(where)}
    record |= {"what": "seconds of a training, of softmax's after it, and their ratio's median"}
    write_json(args.results / "costs-digits.json", record | {"methods": rows})
    costs = {name: round(row["ratio"], 2) for name, row in rows.items()} | {"softmax": 1.0}
    source = {"source": "results/costs-digits.json", "costs": costs}
    write_json(TOP / "src/deepsimplex/methods/costs.json", source)


if __name__ == "__main__":
    main()
