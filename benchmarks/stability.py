"""At which learning rates does eq. 4 train? With and without a clipped gradient.

    python benchmarks/stability.py --json results/stability-digits.json

Known digits only (accuracy on held-out knowns and the last training loss; no unknown is looked
at), five splits a cell, about three minutes on two cores. Expected: without clipping it fails
from about 0.1 on, with a norm of at most 1 it trains from 0.03 to 1.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepsimplex.data.protocols import digits_trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.errors import NonFiniteLossError
from deepsimplex.fitting import fit_model
from deepsimplex.metrics import accuracy
from deepsimplex.recipes import digits_recipe
from deepsimplex.runs import environment, write_json

RATES = (0.03, 0.1, 0.3, 1.0)


def cell(rate: float, clip: float | None) -> dict[str, Any]:
    reached, losses = [], []
    for number in range(5):
        trial = digits_trial(number)
        recipe = digits_recipe("dsc", seed=number)
        recipe = dataclasses.replace(recipe, learning_rate=rate, clip=clip)
        seen: list[float] = []
        try:
            model = fit_model(
                to_tensor(trial.train[0]),
                torch.from_numpy(trial.train[1]),
                trial.classes,
                recipe,
                report=lambda record, seen=seen: seen.append(record["loss"]["fit"]),
            )
        except NonFiniteLossError:
            reached.append(None)
            losses.append(None)
            continue
        by_class, _ = model.scores(to_tensor(trial.calibration[0]))
        reached.append(accuracy(trial.calibration[1], by_class.argmax(1)))
        losses.append(seen[-1])
    return {"learning_rate": rate, "clip": clip, "accuracy": reached, "last_loss": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    where = parser.parse_args().json
    print("  rate   clip  trained  accuracy of those  last loss of those")
    cells = []
    for clip in (None, 1.0):
        for rate in RATES:
            found = cell(rate, clip)
            cells.append(found)
            right = [a for a in found["accuracy"] if a is not None]
            loss = [v for v in found["last_loss"] if v is not None]
            print(
                f"{rate:6.2f} {clip or 'none':>6}  {len(right)} of 5"
                f"  {100 * np.mean(right) if right else float('nan'):17.1f}"
                f"  {np.mean(loss) if loss else float('nan'):18.4f}",
                flush=True,
            )
    if where:
        record = {"command": f"python benchmarks/stability.py --json {where}", "cells": cells}
        write_json(where, record | {"environment": environment()})


if __name__ == "__main__":
    main()
