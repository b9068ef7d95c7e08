"""Nearest centre by formula against torch.cdist and a matrix product: time, memory and error.

The formula needs no table of centres; the other two need C×(C−1) numbers: 400 MB at 10 000
classes, 40 GB at 100 000. `error` is the largest relative error of the reported ‖f − v‖² to the
nearest centre, against float64 by subtraction, at ordinary places (‖f‖ ≈ 1) and near a centre
(1e-3 away), where ‖f‖² + 1 − 2f·v cancels. About two minutes on two cores and 3 GB of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepsimplex.bench import records
from deepsimplex.bench.memory import claim
from deepsimplex.bench.timing import check_repeats, interleaved
from deepsimplex.engine import pick_device
from deepsimplex.simplex import (
    Simplex,
    centres,
    dot_products,
    nearest_index,
    own_squared_distance,
)
from deepsimplex.terminal import console, table

SEED, BATCH, NEAR = 0, 1024, 1e-3
CLASSES = (10, 100, 1_000, 10_000, 100_000)
QUICK, QUICK_BATCH = (10, 100, 1_000), 128

Score = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Features (n, d) → index of the nearest centre (n,), squared distance to it (n,)."""


def score(
    device: str = "auto",
    repeats: int = 7,
    out: Path | None = None,
    quick: bool = False,
    largest: int | None = None,
) -> dict[str, Any]:
    """Print the table, write the record."""
    check_repeats(repeats)
    where, batch = pick_device(device), QUICK_BATCH if quick else BATCH
    rows = []
    for classes in QUICK if quick else CLASSES:
        if largest is None or classes <= largest:
            rows += compare(classes, batch, where, repeats)
            console.print(f"  {classes:,} classes done", style="dim")
    table(
        f"Nearest of C centres for {batch} features on {where}: time over the formula's",
        ("C", "by", "time", "ratio", "memory", "error", f"error at {NEAR:g}"),
        [_cells(row) for row in rows],
    )
    return records.finish(
        "score",
        "nearest centre: time / the formula's; largest relative error of the squared distance",
        rows,
        {"device": where, "repeats": repeats, "quick": quick, "largest": largest},
        out,
        where,
        seed=SEED,
        repeats=repeats,
        batch=batch,
        memory="peak beyond features and table; the table itself is 4·C·(C−1) bytes",
        float32_matmul_precision=torch.get_float32_matmul_precision(),
    )


def compare(classes: int, batch: int, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """A row for each of formula, cdist and GEMM."""
    simplex = Simplex(classes, classes - 1)
    ordinary, near = features(simplex, batch, device)
    ways = scores(simplex, device)
    found = interleaved(
        {name: functools.partial(way, ordinary) for name, way in ways.items()}, repeats, device
    )
    rows = []
    for name, measured in found.items():
        row = records.row(measured, found["formula"], classes=classes, variant=name)
        row["table_bytes"] = 0 if name == "formula" else 4 * classes * (classes - 1)
        for key, given in (("error", ordinary), ("error_near", near)):
            row[key] = None if measured.failed else error(simplex, ways[name], given)
        rows.append(row)
    return rows


def scores(simplex: Simplex, device: torch.device) -> dict[str, Score]:
    """The three; cdist and GEMM share one table, made when one of them first needs it."""
    C = simplex.classes

    @functools.cache
    def centre_table() -> Tensor:
        claim(3 * 4 * C * (C - 1), device)  # the table, a copy while it is made, cdist's own copy
        return centres(simplex, torch.arange(C, device=device))

    def formula(f: Tensor) -> tuple[Tensor, Tensor]:
        index = nearest_index(simplex, f)
        return index, own_squared_distance(simplex, f, index)

    def cdist(f: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(f, centre_table()).min(1)
        return nearest.indices, nearest.values.square()

    def gemm(f: Tensor) -> tuple[Tensor, Tensor]:
        squares = f.square().sum(1, keepdim=True) + 1 - 2 * (f @ centre_table().T)
        nearest = squares.min(1)
        return nearest.indices, nearest.values

    return {"formula": formula, "cdist": cdist, "GEMM": gemm}


def features(simplex: Simplex, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """At ordinary places, ‖f‖ ≈ 1, and `NEAR` a centre: (n, d) each, float32."""
    generator = torch.Generator().manual_seed(SEED)
    ordinary = torch.randn(batch, simplex.dim, generator=generator) / simplex.dim**0.5
    labels = torch.randint(simplex.classes, (batch,), generator=generator)
    near = torch.randn(batch, simplex.dim, generator=generator)
    near *= NEAR / near.norm(dim=1, keepdim=True)
    near += centres(simplex, labels)
    return ordinary.to(device), near.to(device)


def error(simplex: Simplex, way: Score, given: Tensor) -> float:
    """Largest relative error of a squared distance against float64, centre subtracted."""
    squared = way(given)[1].double()
    worst = 0.0
    for f, found in zip(given.split(64), squared.split(64), strict=True):
        index = dot_products(simplex, f.double()).argmax(1)
        true = (f.double() - centres(simplex, index, torch.float64)).square().sum(1)
        worst = max(worst, float(((found - true).abs() / true).max()))
    return worst


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    errors = [
        records.NOTHING if row[k] is None else f"{row[k]:.0e}" for k in ("error", "error_near")
    ]
    return (
        f"{row['classes']:,}",
        row["variant"],
        records.seconds_cell(row),
        records.ratio_cell(row["ratio"]),
        records.bytes_cell(row["peak_bytes"]),
        *errors,
    )
