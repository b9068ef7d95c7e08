"""What a person sees: tables, a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table


def _console(width: int | None = None) -> Console:
    """Names may hold brackets and colons: no markup, no emoji.

    Lines are folded between words on a terminal, and left whole for pipes and files.
    """
    whole = not sys.stdout.isatty()
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=whole, width=width)


console = _console()

Report = Callable[[dict[str, Any]], None]


def called() -> str:
    """The command as the user called it."""
    name = Path(sys.argv[0])
    return str(name) if name.name == "deepsimplex" and not name.is_absolute() else "deepsimplex"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def table(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1
) -> None:
    """The first columns, which are words, left, the others right; folded to a terminal's width,
    never cut elsewhere.
    """
    if title:
        console.print(title, style="bold")
    grid = Table(box=None, pad_edge=False, padding=(0, 1))
    for index, name in enumerate(columns):
        grid.add_column(name, justify="left" if index < words else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    (console if console.is_terminal else _console(width=10_000)).print(grid)


@contextlib.contextmanager
def training(
    title: str, trainings: int = 1, epochs: int | None = None
) -> Iterator[Callable[[str], Report]]:
    """A bar over all epochs of all trainings, `epochs` each if that is known; yields a function
    that begins the next one.

    Not a terminal: a line as each training begins, and one at most every ten seconds; of several
    trainings every minute.
    """
    if not console.is_terminal:

        def plain(name: str) -> Report:
            console.print(f"{title}: {name}")
            said = time.monotonic()

            def line(record: dict[str, Any]) -> None:
                nonlocal said
                last = record["epoch"] == record["epochs"]
                edge = trainings == 1 and (record["epoch"] == 1 or last)
                if edge or time.monotonic() - said > (10 if trainings == 1 else 60):
                    of = "" if trainings == 1 else f"{name}: "
                    console.print(f"  {of}{_state(record)}")
                    said = time.monotonic()

            return line

        yield plain
        return

    columns = (
        SpinnerColumn(),  # an epoch may be long
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=epochs and trainings * epochs, state="")
        done: dict[str, int] = {}  # by training; several may run side by side

        def begin(name: str) -> Report:
            past = 0  # epochs of finished stages

            def advance(record: dict[str, Any]) -> None:
                nonlocal past
                done[name] = past + record["epoch"]
                if record["epoch"] == record["epochs"]:
                    past += record["epochs"]
                progress.update(
                    task,
                    description=f"{title}: {name}",
                    total=max(trainings * record["epochs"], sum(done.values())),
                    completed=sum(done.values()),
                    state=f"loss {_loss(record)}",
                )

            return advance

        yield begin


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere; yields a function of (done, total)."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _loss(record: dict[str, Any]) -> str:
    return " ".join(f"{value:.4f}" for value in record["loss"].values())


def _state(record: dict[str, Any]) -> str:
    return (
        f"epoch {record['epoch']}/{record['epochs']}  loss {_loss(record)}  "
        f"about {record['seconds'] * (record['epochs'] - record['epoch']):.0f} s left"
    )
