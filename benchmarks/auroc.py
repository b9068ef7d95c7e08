"""metrics.auroc against sklearn.metrics.roc_auc_score, as ratios of wall time.

    python benchmarks/auroc.py --json results/bench-auroc.json

About a minute on two cores and 2 GB of memory. Ours and theirs take turns, so that a busy
moment of the machine hits both; each pair gives one ratio, and the table shows the median and
the quartiles of the pairs. Half of the scores are of knowns, N(1, 1), half of unknowns,
N(0, 1). Expected: 5 or more at 10 million scores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from deepsimplex.metrics import auroc
from deepsimplex.runs import environment, write_json

SEED = 0
SIZES = (100_000, 1_000_000, 10_000_000)


def seconds(call: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    value = float(call())
    return time.perf_counter() - start, value


def row(size: int, dtype: str, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    known = rng.normal(1, 1, size // 2).astype(dtype)
    unknown = rng.normal(0, 1, size - size // 2).astype(dtype)
    # scikit-learn's form of the same data, made outside the clock.
    truth = np.r_[np.ones(len(known), np.int8), np.zeros(len(unknown), np.int8)]
    scores = np.concatenate([known, unknown])
    pairs = []
    for turn in range(repeats + 1):
        ours, value = seconds(lambda: auroc(known, unknown))
        theirs, reference = seconds(lambda: roc_auc_score(truth, scores))
        if turn:  # the first is a warm-up
            pairs.append((ours, theirs))
    ratios = [theirs / ours for ours, theirs in pairs]
    return {
        "scores": size,
        "dtype": dtype,
        "repeats": repeats,
        "ratio": quartiles(ratios),
        "ours_s": quartiles([ours for ours, _ in pairs]),
        "sklearn_s": quartiles([theirs for _, theirs in pairs]),
        "auroc": value,
        "difference": abs(value - reference),
    }


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs a row, 2 or more")
    args = parser.parse_args()

    print(f"{'scores':>10}  {'dtype':7}  {'ratio':>6}  {'quartiles':>13}  difference")
    rows = []
    for size in SIZES:
        for dtype in ("float32", "float64"):
            result = row(size, dtype, args.repeats)
            rows.append(result)
            ratio = result["ratio"]
            span = f"{ratio['q1']:.1f} – {ratio['q3']:.1f}"
            print(
                f"{size:10,}  {dtype:7}  {ratio['median']:5.1f}×  {span:>13}"
                f"  {result['difference']:.0e}",
                flush=True,
            )
    if args.json:
        record = {
            "command": f"python benchmarks/auroc.py --repeats {args.repeats} --json {args.json}",
            "what": "wall time of sklearn.metrics.roc_auc_score / deepsimplex.metrics.auroc",
            "seed": SEED,
            "environment": environment(),
            "rows": rows,
        }
        write_json(args.json, record)


if __name__ == "__main__":
    main()
