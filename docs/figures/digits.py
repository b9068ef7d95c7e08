"""The README's picture: three digits sent to their vertices, and what the others do.

    python docs/figures/digits.py

A minute on two cores; writes digits.svg and digits.png beside itself.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from deepsimplex import engine
from deepsimplex.data.protocols import split_trial
from deepsimplex.data.sources import load_digits, to_tensor
from deepsimplex.fitting import fit_model
from deepsimplex.methods.dsc import DSC
from deepsimplex.recipes import digits_recipe

KNOWN = ["2", "4", "8"]
COLOURS = ("#0072b2", "#d55e00", "#009e73")


def main() -> None:
    trial = split_trial(load_digits(), KNOWN, name="figure", seed=0)
    model = fit_model(
        to_tensor(trial.train[0]),
        torch.from_numpy(trial.train[1]),
        trial.classes,
        digits_recipe("dsc"),
        keep=0.95,
        calibration=to_tensor(trial.calibration[0]),
    )
    assert isinstance(model.method, DSC)
    assert model.threshold is not None
    known = engine.outputs(model.method, to_tensor(trial.known_test[0])).numpy()
    unknown = engine.outputs(model.method, to_tensor(trial.unknown_test)).numpy()
    centres = model.method.simplex.centres(torch.arange(3)).numpy()
    limit = -model.threshold.values[0]

    plt.rcParams["svg.hashsalt"] = "deepsimplex"
    figure, axes = plt.subplots(figsize=(5.2, 4.6))
    axes.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.8", lw=1))
    axes.scatter(*unknown.T, s=9, color="0.55", marker="x", lw=0.7, label="unknown digits")
    for j, name in enumerate(trial.classes):
        own = known[trial.known_test[1] == j]
        axes.scatter(*own.T, s=12, color=COLOURS[j], label=f"known: {name}")
        axes.add_patch(plt.Circle(centres[j], limit, fill=False, color=COLOURS[j], ls="--"))
        axes.scatter(*centres[j], s=150, color=COLOURS[j], marker="*", edgecolor="black")
    axes.set_aspect("equal")
    axes.axis("off")
    reach = np.abs(np.concatenate([known, unknown, 1.4 * centres])).max()
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach))
    axes.legend(loc="lower left", frameon=False, fontsize=9)
    here = Path(__file__).parent
    figure.savefig(here / "digits.svg", bbox_inches="tight", metadata={"Date": None})
    figure.savefig(here / "digits.png", bbox_inches="tight", dpi=110)
    kept = (model.scores(to_tensor(trial.known_test[0]))[1] >= -limit).mean()
    gone = (model.scores(to_tensor(trial.unknown_test))[1] < -limit).mean()
    print(f"limit {limit:.2f}: {100 * kept:.1f} % of knowns kept, {100 * gone:.1f} % rejected")


if __name__ == "__main__":
    main()
