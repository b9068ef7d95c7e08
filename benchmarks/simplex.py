"""Nearest centre by formula against a table of centres: time, memory and error as ratios.

    python benchmarks/simplex.py --json results/bench-simplex.json

About a minute on two cores and 3 GB of memory. The three take turns; a row shows medians of the
paired ratios. Expected: level with a GEMM at ten classes, far ahead from a thousand on, and right
where the expanded distance is not. At a million classes a table of centres would need 4 TB.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepsimplex.runs import environment, write_json
from deepsimplex.simplex import Simplex

SEED, BATCH, REPEATS = 0, 256, 7
CLASSES = (10, 100, 1000, 10_000)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def near_vertices(simplex: Simplex, distance: float) -> tuple[Tensor, Tensor]:
    """Features at about `distance` from vertices, and the true distances in float64."""
    torch.manual_seed(SEED)
    labels = torch.randint(0, simplex.classes, (BATCH,))
    vertices = simplex.centres(labels, torch.float64)
    step = torch.randn(BATCH, simplex.dim, dtype=torch.float64)
    features = (vertices + distance * step / step.norm(dim=1, keepdim=True)).float()
    return features, (features.double() - vertices).norm(dim=1)


def row(classes: int) -> dict[str, Any]:
    simplex = Simplex(classes, classes - 1)
    features, true = near_vertices(simplex, 1e-2)
    table = simplex.centres(torch.arange(classes))

    def formula() -> Tensor:
        return simplex.nearest(features).distance

    def gemm() -> Tensor:
        squares = features.square().sum(1, keepdim=True) + 1 - 2 * features @ table.T
        return squares.amin(1).clamp_min(0).sqrt()

    def cdist() -> Tensor:
        return torch.cdist(features, table).amin(1)

    calls = {"formula": formula, "gemm": gemm, "cdist": cdist}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            spent = seconds(call)
            if turn:  # the first is a warm-up
                times[name].append(spent)
    record: dict[str, Any] = {"classes": classes, "formula_ms": 1e3 * np.median(times["formula"])}
    for name in ("gemm", "cdist"):
        ratios = np.divide(times[name], times["formula"])
        record[f"{name}_ratio"] = np.percentile(ratios, (25, 50, 75)).round(2).tolist()
    for name, call in calls.items():
        error = ((call().double() - true).abs() / true).max()
        record[f"{name}_error"] = float(error)
    return record


def million() -> dict[str, float]:
    """Extra memory of the nearest of a million centres, as a share of the features' own."""
    simplex = Simplex(1_000_000, 999_999)
    torch.manual_seed(SEED)
    features = torch.empty(BATCH, simplex.dim).normal_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = seconds(lambda: simplex.nearest(features))
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": spent, "extra_memory": 1024 * extra / features.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    where = parser.parse_args().json
    big = million()  # first: the peak is read off the whole process
    print(f"nearest of 1 000 000 centres, batch {BATCH}: {big['seconds']:.2f} s, ", end="")
    print(f"extra memory {100 * big['extra_memory']:.1f} % of the features'")
    print("classes  formula ms  gemm / formula  cdist / formula  error: formula  gemm     cdist")
    rows = []
    for classes in CLASSES:
        r = row(classes)
        rows.append(r)
        print(
            f"{classes:7d}  {r['formula_ms']:10.3f}  {r['gemm_ratio'][1]:14.2f}  "
            f"{r['cdist_ratio'][1]:15.2f}  {r['formula_error']:14.0e}  {r['gemm_error']:.0e}  "
            f"{r['cdist_error']:.0e}"
        )
    if where:
        record = {"command": f"python benchmarks/simplex.py --json {where}", "seed": SEED}
        record |= {"batch": BATCH, "repeats": REPEATS, "rows": rows, "million": big}
        write_json(where, record | {"environment": environment()})


if __name__ == "__main__":
    main()
