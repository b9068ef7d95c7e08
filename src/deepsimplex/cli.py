"""The command line: parse, call commands.py, print. torch is not imported to answer --help.

Exit codes: 0 done · 1 a value, the data, the model or the run is at fault · 2 the command line does
not parse · 70 a bug of ours · 130 interrupted (Ctrl-C) · 143 terminated (SIGTERM); a training that
is stopped writes its checkpoint first, and the same command goes on from there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepsimplex import __version__
from deepsimplex.bench.commands import bench_app
from deepsimplex.errors import DeepSimplexError, Stopped, meant
from deepsimplex.options import (
    Augment,
    BatchSize,
    Data,
    Device,
    Freeze,
    Keep,
    Known,
    Method,
    ModelPath,
    Net,
    OnBad,
    Rate,
    Score,
    Seed,
    Setting,
    Shift,
    Size,
    Weights,
    changes,
    names,
    settings,
)
from deepsimplex.paper.commands import paper_app

# Some versions of typer bring their own copy of click; the bases of its exceptions are alike.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="deepsimplex",
    help="An image classifier that knows when it does not know.",
    epilog="Exit codes: 0 done, 1 bad value, data, model or run, 2 no such command or option, "
    "70 a bug, 130 interrupted, 143 terminated (a stopped training goes on with the same command).",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"deepsimplex {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder; a new one if not given.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of each training.")] = None,
    trials: Annotated[int, typer.Option(min=1, max=5, help="How many of the 5 splits.")] = 5,
    device: Device = "auto",
) -> None:
    """DSC beside softmax on digits it has and has not seen."""
    from deepsimplex.demo import demo as run_demo

    run_demo(out, epochs, trials, device)


@app.command()
def train(
    data: Data,
    out: Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")],
    method: Method = "auto",
    backbone: Net = "auto",
    known: Known = None,
    keep: Keep = 0.95,
    reject: Annotated[bool, typer.Option(help="Calibrate a threshold and reject below it.")] = True,
    guarantee: Annotated[
        str, typer.Option(help="mean: on average over calibration draws; pac: 90 % sure.")
    ] = "mean",
    by: Annotated[str, typer.Option(help="all: one threshold; predicted: one a class.")] = "all",
    score: Score = None,
    background: Annotated[
        Path | None,
        typer.Option(help="Folder of images that are none of the classes, or photographs."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    batch_size: BatchSize = None,
    learning_rate: Rate = None,
    augment: Augment = None,
    shift: Shift = None,
    size: Size = None,
    weights: Weights = None,
    freeze: Freeze = False,
    trained: Annotated[
        Path | None,
        typer.Option(help="A finished run of this training: only score and calibrate it anew."),
    ] = None,
    on_bad: OnBad = "fail",
    setting: Setting = None,
    radius: Annotated[float, typer.Option(help="Unit of length of distances.")] = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    checkpoint_seconds: Annotated[float, typer.Option(min=0)] = 60.0,
) -> None:
    """Train a classifier and calibrate its "unknown"."""
    from deepsimplex import commands

    commands.train(
        data,
        out,
        known=names(known),
        keep=keep if reject else None,
        guarantee=guarantee,
        by=by,
        score=score,
        background=background,
        size=size,
        radius=radius,
        device=device,
        checkpoint_seconds=checkpoint_seconds,
        method=method,
        settings=settings(setting),
        weights=weights,
        freeze=freeze,
        trained=trained,
        on_bad=on_bad,
        seed=seed,
        recipe_changes=changes(backbone, epochs, batch_size, learning_rate, augment, shift),
    )


@app.command()
def evaluate(
    model: ModelPath,
    data: Data,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    on_bad: OnBad = "fail",
    device: Device = "auto",
) -> None:
    """Test a model on knowns and unknowns.

    Classes it was not trained on, and the images of an unknown/ folder, count as unknown.
    """
    from deepsimplex import answers

    answers.evaluate(model, data, json, device, on_bad)


@app.command()
def predict(
    model: ModelPath,
    inputs: Annotated[
        list[str], typer.Argument(help="Image files, folders, a .npz file, or 'digits'.")
    ],
    json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values.")] = False,
    on_bad: OnBad = "fail",
    device: Device = "auto",
) -> None:
    """Label images, or call them unknown, with the reason."""
    from deepsimplex import answers

    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other; choose one")
    answers.predict(model, inputs, "json" if json else "csv" if csv else "table", device, on_bad)


@app.command()
def check(
    data: Annotated[Path, typer.Argument(help="A folder of class folders, or a .csv table.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, every file named.")] = False,
) -> None:
    """Look a data set over before training; writes nothing."""
    from deepsimplex import commands

    if not commands.check(data, json):
        raise typer.Exit(1)


@app.command()
def estimate(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the runs; the same command resumes.")],
    method: Method = "auto",
    leave_out: Annotated[int, typer.Option(min=1, help="Classes left out at a time.")] = 1,
    backbone: Net = "auto",
    known: Known = None,
    keep: Keep = 0.95,
    score: Score = None,
    background: Annotated[
        str | None,
        typer.Option(help="Folder of images that are none of the classes, or photographs."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    batch_size: BatchSize = None,
    learning_rate: Rate = None,
    augment: Augment = None,
    shift: Shift = None,
    size: Size = None,
    weights: Weights = None,
    freeze: Freeze = False,
    on_bad: OnBad = "fail",
    setting: Setting = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """How well will it reject what it has never seen? Leaves out your own classes in turn."""
    from deepsimplex.estimate import estimate as run_estimate

    otherwise = changes(backbone, epochs, batch_size, learning_rate, augment, shift)
    run_estimate(
        data,
        leave_out,
        known=names(known),
        keep=keep,
        score=score,
        background=background,
        size=size,
        weights=weights,
        freeze=freeze,
        out=out,
        on_bad=on_bad,
        device=device,
        how={"method": method, "settings": settings(setting), "seed": seed, "changes": otherwise},
    )


@app.command()
def compare(
    benchmark: Annotated[
        str,
        typer.Argument(help="digits, mnist, cifar10, cifar+10 …, or data of your own."),
    ],
    methods: Annotated[str, typer.Option(help="Names, comma-separated, or all.")] = "softmax,dsc",
    splits: Annotated[str, typer.Option(help="arpl, neal, or random for own data.")] = "arpl",
    trials: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    trial: Annotated[list[int] | None, typer.Option(help="Only this one; repeatable.")] = None,
    score: Score = None,
    background: Annotated[
        str | None, typer.Option(help="cifar100, tinyimagenet32, 300k, photographs or a folder.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Where official sets lie.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; resumes there.")] = None,
    results: Annotated[Path, typer.Option(help="Folder for record and tables.")] = Path("results"),
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    size: Size = None,
    on_bad: OnBad = "fail",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of random splits.")] = 0,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Trainings side by side; 5 on a GPU, else 1.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Methods side by side on a benchmark, under one protocol."""
    from deepsimplex import research

    track = f"-{Path(background).name}" if background else ""
    research.compare(
        benchmark,
        [name.strip() for name in methods.split(",") if name.strip()],
        splits,
        trial or trials,
        score=score,
        background=background,
        root=data_root,
        out=out or Path("runs") / f"compare-{Path(benchmark).name}-{splits}{track}",
        results=results,
        epochs=epochs,
        size=size,
        on_bad=on_bad,
        seed=seed,
        at_once=at_once,
        device=device,
    )


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every method: what it is, where it comes from, what it needs and costs."""
    from deepsimplex import catalogue

    catalogue.show(json, name)


data_app = typer.Typer(help="Official data sets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10, cifar100, svhn …")],
    data_root: Annotated[Path | None, typer.Option(help="Where to put it.")] = None,
) -> None:
    """Download a set from its official address, or say how to place it by hand."""
    from deepsimplex import commands

    commands.get(name, data_root)


app.add_typer(bench_app, name="bench")
app.add_typer(paper_app, name="paper")


@app.command()
def doctor(device: Device = "auto") -> None:
    """See whether this machine can train."""
    from deepsimplex.demo import doctor as examine

    if not examine(device):
        raise typer.Exit(1)


def run(arguments: list[str] | None = None) -> int:
    """Parse and call; every failure a person can cause is one line on stderr."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
    command = typer.main.get_command(app)
    words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = command.main(words, prog_name="deepsimplex", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `deepsimplex paper`: asked what there is
            return run([*words, "--help"])
        return _fail(2, _usage(error, command))
    except DeepSimplexError as error:
        return _fail(1, str(error))
    except Stopped as stopped:
        return _fail(128 + stopped.signal, "stopped; the same command goes on from the checkpoint")
    except (KeyboardInterrupt, typer.Abort):
        return _fail(130, "interrupted")
    except BrokenPipeError:
        # The reader went away (| head): leave quietly, and keep Python from flushing into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        return _fail(1, "expected enough memory; got too little; use smaller images or batches")
    except OSError as error:
        what = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        return _fail(
            1, f"expected to read and write files; got {what}; check path, rights and space"
        )
    except Exception as error:  # a bug: one line for the user, the rest for the report
        if "DEEPSIMPLEX_DEBUG" in os.environ:
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(70, f"a bug: {what}; DEEPSIMPLEX_DEBUG=1 shows where; please report it")


def main() -> None:
    sys.exit(run())


def _fail(code: int, message: str) -> int:
    print(f"deepsimplex: {' '.join(message.split())}", file=sys.stderr)
    return code


def _usage(error: Any, command: Any) -> str:
    """The parser's message in one line, with a suggestion and where to read more."""
    message = error.format_message().rstrip(".")
    context = error.ctx
    where = context.command_path if context is not None else "deepsimplex"
    if "No such command" in message and "Did you mean" not in message:
        words = [word.strip("'\"") for word in message.split()]
        if hint := meant(words[-1], command.commands, ""):
            message += f"; {hint}"
    return f"{message}; see '{where} --help'"


if __name__ == "__main__":
    main()
