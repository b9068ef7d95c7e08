"""`deepsimplex bench …`: parse and call. torch is not imported to answer --help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(
    help="Ratios of speed, memory and error: a table, and a record in results/.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Repeats = Annotated[int, typer.Option(help="Rounds, each variant once; 5 or more.")]
Out = Annotated[Path | None, typer.Option(help="Record; results/bench-NAME.json if not given.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, under a minute.")]
Largest = Annotated[int | None, typer.Option(min=10, help="The most classes to go up to.")]


@bench_app.command()
def train(
    device: Device = "auto", repeats: Repeats = 7, out: Out = None, quick: Quick = False
) -> None:
    """Training against a plain loop."""
    from deepsimplex.bench import training

    path = out or Path("results/bench-train.json")
    training.train(device=device, repeats=repeats, out=path, quick=quick)


@bench_app.command()
def loss(
    device: Device = "auto",
    repeats: Repeats = 7,
    out: Out = None,
    quick: Quick = False,
    largest: Largest = None,
) -> None:
    """The simplex loss against cross-entropy and ArcFace, time and memory."""
    from deepsimplex.bench import losses

    losses.loss(device=device, repeats=repeats, out=out, quick=quick, largest=largest)


@bench_app.command()
def score(
    device: Device = "auto",
    repeats: Repeats = 7,
    out: Out = None,
    quick: Quick = False,
    largest: Largest = None,
) -> None:
    """The nearest centre by formula against a table of centres, time and error."""
    from deepsimplex.bench import scores

    scores.score(device=device, repeats=repeats, out=out, quick=quick, largest=largest)


@bench_app.command()
def auroc(repeats: Repeats = 7, out: Out = None, quick: Quick = False) -> None:
    """AUROC against scikit-learn's."""
    from deepsimplex.bench import aurocs

    aurocs.auroc(repeats=repeats, out=out, quick=quick)


@bench_app.command()
def startup(repeats: Repeats = 7, out: Out = None, quick: Quick = False) -> None:
    """The wait before anything happens."""
    from deepsimplex.bench import startup as starts

    starts.startup(repeats=repeats, out=out, quick=quick)
