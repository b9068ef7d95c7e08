"""metrics.auroc against sklearn.metrics.roc_auc_score: ratios of wall time.

About two minutes on two cores and 2 GB of memory. Half of the scores are of knowns, N(1, 1),
half of unknowns, N(0, 1). Expected: 5 or more at 10 million scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from deepsimplex.bench import records
from deepsimplex.bench.timing import check_repeats, interleaved
from deepsimplex.metrics import auroc as ours
from deepsimplex.terminal import table

SEED = 0
SIZES = (100_000, 1_000_000, 10_000_000)
QUICK = (10_000, 100_000)


def auroc(repeats: int = 7, out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Print the table, write the record."""
    check_repeats(repeats)
    rows = []
    for size in QUICK if quick else SIZES:
        for dtype in ("float32", "float64"):
            rows += compare(size, dtype, repeats)
    table(
        "AUROC: time, and time over deepsimplex's",
        ("scores", "dtype", "by", "time", "ratio", "difference"),
        [
            (
                f"{row['scores']:,}",
                row["dtype"],
                row["variant"],
                records.seconds_cell(row),
                records.ratio_cell(row["ratio"]),
                f"{row['difference']:.0e}",
            )
            for row in rows
        ],
    )
    return records.finish(
        "auroc",
        "wall time of sklearn.metrics.roc_auc_score / deepsimplex.metrics.auroc",
        rows,
        {"repeats": repeats, "quick": quick},
        out,
        seed=SEED,
        repeats=repeats,
    )


def compare(size: int, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each of the two; `difference` is of their values."""
    rng = np.random.default_rng(SEED)
    known = rng.normal(1, 1, size // 2).astype(dtype)
    unknown = rng.normal(0, 1, size - size // 2).astype(dtype)
    # scikit-learn's form of the same data, made outside the clock.
    truth = np.r_[np.ones(len(known), np.int8), np.zeros(len(unknown), np.int8)]
    scores = np.concatenate([known, unknown])
    found = interleaved(
        {
            "deepsimplex": lambda: ours(known, unknown),
            "scikit-learn": lambda: roc_auc_score(truth, scores),
        },
        repeats,
    )
    value = ours(known, unknown)
    difference = abs(value - float(roc_auc_score(truth, scores)))
    keys = {"scores": size, "dtype": dtype, "auroc": value, "difference": difference}
    return [
        records.row(measured, found["deepsimplex"], variant=name, **keys)
        for name, measured in found.items()
    ]
