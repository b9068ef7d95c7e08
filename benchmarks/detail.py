"""How well fine detail alone tells the unknowns of CIFAR-10's splits: what a decoder stands on.

    python benchmarks/detail.py --data-root DATA --json results/bench-detail.json

C2AE rejects an image that its decoder cannot paint. What any decoder paints badly is detail: here
the mean |x − x̂| to the image averaged over squares of 2, 4 or 8 pixels, no training at all. Below
50 the known classes have more of it than the unknown, and reconstruction starts with that debt: on
average 9 to 13 points in ARPL's splits, 0 to 3 in Neal's, where published numbers were measured.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F

from deepsimplex import metrics
from deepsimplex.data.protocols import benchmark_trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.runs import environment, write_json

SIDES = (2, 4, 8)


def detail(images: torch.Tensor, side: int) -> torch.Tensor:
    """mean |x − x̂|, x̂ the image averaged over squares of `side`: (n, c, h, w) → (n,)."""
    coarse = F.interpolate(F.avg_pool2d(images, side), scale_factor=side)
    return (images - coarse).abs().flatten(1).mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for family, number in itertools.product(("arpl", "neal"), range(5)):
        trial = benchmark_trial("cifar10", family, number, asked.data_root)
        known, unknown = (to_tensor(x).float() for x in (trial.known_test[0], trial.unknown_test))
        aurocs = {
            side: metrics.auroc(-detail(known, side).numpy(), -detail(unknown, side).numpy())
            for side in SIDES
        }
        rows.append({"family": family, "split": number, "auroc": aurocs})
        shown = "  ".join(f"{side}: {100 * value:.1f}" for side, value in aurocs.items())
        print(f"{family} split {number}, AUROC in % of little detail below squares of  {shown}")
    if asked.json:
        about = {"command": f"python benchmarks/detail.py --data-root DATA --json {asked.json}"}
        about |= {"environment": environment(pick_device("cpu"))}
        write_json(asked.json, about | {"rows": rows})


if __name__ == "__main__":
    main()
