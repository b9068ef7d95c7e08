"""What a paper command is asked for, and where its record and its figure go."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deepsimplex.engine import pick_device
from deepsimplex.runs import command, environment, write_json
from deepsimplex.terminal import console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colour-blind safe, in order of use; greys are for what is not a class.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")


@dataclasses.dataclass(frozen=True)
class Request:
    """Options that all paper commands share.

    `quick` asks for a version that a newcomer can run on a CPU in minutes, on digits that come
    with scikit-learn; its record and figure say so in their names.
    """

    quick: bool
    device: str
    root: Path  # of the official sets
    out: Path  # run folders; an interrupted command goes on there
    results: Path
    figures: Path
    seeds: int = 5
    epochs: int | None = None  # None: the command's own
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def runs(self, name: str) -> Path:
        return self.out / self.named(name)

    def recorded(self, name: str) -> Any:
        """results/paper-NAME.json as it stands; None if there is none."""
        path = self.results / f"paper-{self.named(name)}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def record(self, name: str, content: dict[str, Any], *, joins: bool = False) -> Path:
        """Write results/paper-NAME.json: the content with its birth certificate.

        A record that `joins` several commands keeps the wall clock of each, the longest where one
        was given twice: the second time it may have found all its runs finished.
        """
        path = self.results / f"paper-{self.named(name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        seconds = round(time.perf_counter() - self.began, 2)
        whole = {
            "command": command(),
            "environment": environment(pick_device(self.device)),
            "quick": self.quick,
            "seeds": self.seeds,
            "seconds": seconds,
            **content,
        }
        if joins:
            clock = (self.recorded(name) or {}).get("seconds of commands", {})
            longest = max(seconds, clock.get(command(), 0.0))
            whole["seconds of commands"] = clock | {command(): longest}
        write_json(path, whole)
        console.print(f"Record: {path}")
        return path

    def draw(self, name: str, figure: Figure) -> None:
        """Write figures/NAME.svg and .png, byte for byte the same from the same numbers."""
        import matplotlib as mpl

        self.figures.mkdir(parents=True, exist_ok=True)
        stem = self.figures / self.named(name)
        with mpl.rc_context({"svg.hashsalt": "deepsimplex"}):
            figure.savefig(stem.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
            figure.savefig(stem.with_suffix(".png"), bbox_inches="tight", dpi=150)
        console.print(f"Figure: {stem}.svg, .png")

    def named(self, name: str) -> str:
        return f"{name}-quick" if self.quick else name


Cell = dict[str, Any]
K = TypeVar("K")


def joined(
    before: dict[K, Cell],
    cells: dict[K, Cell],
    weight: Callable[[Cell], Any],
    stays: Callable[[Cell, Cell], None] | None = None,
) -> dict[K, Cell]:
    """Cells of a record and new ones over them, but none over a weightier one, which is told."""
    both = dict(before)
    for key, cell in cells.items():
        if key not in before or weight(before[key]) <= weight(cell):
            both[key] = cell
        elif stays is not None:
            stays(before[key], cell)
    return both
