"""The cost of each method in trainings of softmax, from a record of `compare`.

    deepsimplex compare digits --methods all --trials 3
    python benchmarks/costs.py results/compare-digits-arpl-all.json

Writes src/deepsimplex/methods/costs.json, which `deepsimplex methods` shows: whole trainings with
all their stages, calibration and test, one after another on an idle machine; the median of the
trials, since the first training of a process also starts libraries up. Two runs of one method
differ by a tenth or two.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from deepsimplex.methods import METHODS
from deepsimplex.runs import write_json

COSTS = Path(__file__).parents[1] / "src/deepsimplex/methods/costs.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("record", type=Path)
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    seconds = {
        name: statistics.median(run["seconds"] for run in runs)
        for name, runs in record["methods"].items()
    }
    missing = [name for name in METHODS if name not in seconds]
    if missing:
        raise SystemExit(f"{args.record} lacks {', '.join(missing)}; compare --methods all")
    costs = {name: round(seconds[name] / seconds["softmax"], 2) for name in METHODS}
    write_json(COSTS, {"source": f"results/{args.record.name}", "costs": costs})


if __name__ == "__main__":
    main()
