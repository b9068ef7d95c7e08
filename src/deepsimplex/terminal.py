"""What a person sees: tables, a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Lines are folded between words on a terminal, and left whole for pipes and files.
console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())

Report = Callable[[dict[str, Any]], None]


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def spread(cell: dict[str, Any]) -> str:
    return f"{100 * cell['mean']:.1f} ± {100 * cell['sd']:.1f}"


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """First column left, the others right; folded to a terminal's width, never cut elsewhere."""
    if title:
        console.print(title, style="bold")
    grid = Table(box=None, pad_edge=False, padding=(0, 1))
    for index, name in enumerate(columns):
        grid.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    target = console if console.is_terminal else Console(highlight=False, width=10_000)
    target.print(grid)


@contextlib.contextmanager
def training(title: str, trainings: int = 1) -> Iterator[Callable[[str], Report]]:
    """A bar over all epochs of all trainings; yields a function that begins the next one.

    Not a terminal: a line as each training begins, and every tenth of its epochs.
    """
    if not console.is_terminal:

        def plain(name: str) -> Report:
            console.print(f"{title}: {name}")

            def line(record: dict[str, Any]) -> None:
                epoch, epochs = record["epoch"], record["epochs"]
                if trainings == 1 and (epoch % max(1, epochs // 10) == 0 or epoch == epochs):
                    console.print(f"  {_state(record)}")

            return line

        yield plain
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, state="")
        done = 0

        def begin(name: str) -> Report:
            def advance(record: dict[str, Any]) -> None:
                nonlocal done
                progress.update(
                    task,
                    description=f"{title}: {name}",
                    total=trainings * record["epochs"],
                    completed=done + record["epoch"],
                    state=f"loss {_loss(record)}",
                )
                if record["epoch"] == record["epochs"]:
                    done += record["epochs"]

            return advance

        yield begin


def _loss(record: dict[str, Any]) -> str:
    return " ".join(f"{value:.4f}" for value in record["loss"].values())


def _state(record: dict[str, Any]) -> str:
    return (
        f"epoch {record['epoch']}/{record['epochs']}  loss {_loss(record)}  "
        f"{record['seconds']:.2f} s"
    )
