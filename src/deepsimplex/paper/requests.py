"""What a paper command is asked for, and where its record and its figure go."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError
from deepsimplex.runs import command, environment, write_json
from deepsimplex.tables import spaced
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

    def __post_init__(self) -> None:
        """Where nothing can be written is told before anything is trained."""
        for folder in (self.results, self.figures):
            above = next(path for path in (folder, *folder.parents) if path.exists())
            if not above.is_dir() or not os.access(above, os.W_OK):
                raise DeepSimplexError(
                    f"to write records and figures to {folder}",
                    f"{above}, which is no folder to write to",
                    "choose another --results, --figures or --out",
                )

    def runs(self, name: str) -> Path:
        return self.out / self.named(name)

    def recorded(self, name: str) -> Any:
        """results/paper-NAME.json as it stands; None if there is none."""
        return read_record(self.place(name))

    def place(self, name: str) -> Path:
        return self.results / f"paper-{self.named(name)}.json"

    def publish(self, name: str, content: dict[str, Any], figure: Figure, *more: str) -> None:
        """The record of a study and its figure, which says below what it was drawn from."""
        name = self._beside(name, content)
        self.record(name, content)
        self.draw(name, figure, ", ".join((conditions(content, self.seeds).lstrip(", "), *more)))

    def _beside(self, name: str, content: dict[str, Any]) -> str:
        """NAME or, where a record of longer trainings or of more seeds stands, one beside it."""
        before = self.recorded(name)
        mine = max(epochs_of(content)), self.seeds
        if before is None or (
            mine[0] >= max(epochs_of(before), default=0) and mine[1] >= before.get("seeds", 1)
        ):
            return name
        beside = f"{name}-{mine[0]}-epochs" + (f"-{mine[1]}-seeds" if mine[1] > 1 else "")
        console.print(
            f"{name}: the record{conditions(before, before['seeds'])}, stays; "
            f"this one is {self.named(beside)}."
        )
        return beside

    def record(self, name: str, content: dict[str, Any], *, joins: bool = False) -> Path:
        """Write results/paper-NAME.json: the content with its birth certificate.

        A record that `joins` several commands keeps the wall clock of each, the longest where one
        was given twice: the second time it may have found all its runs finished.
        """
        path = self.place(name)
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

    def draw(self, name: str, figure: Figure, under: str = "") -> None:
        """Write figures/NAME.svg and .png, byte for byte the same from the same numbers.

        `under` stands below the figure: what it was drawn from.
        """
        import matplotlib as mpl

        if under:
            _write_below(figure, under)
        self.figures.mkdir(parents=True, exist_ok=True)
        stem = self.figures / self.named(name)
        with mpl.rc_context({"svg.hashsalt": "deepsimplex"}):
            figure.savefig(stem.with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
            figure.savefig(stem.with_suffix(".png"), bbox_inches="tight", dpi=150)
        console.print(f"Figure: {stem}.svg, .png")

    def named(self, name: str) -> str:
        return f"{name}-quick" if self.quick else name


def _write_below(figure: Figure, words: str) -> None:
    """Under all that is drawn; where a legend stands there, over that, which moves in saving."""
    for legend in figure.legends:
        legend.set_title(words)
        legend.get_title().set(fontsize=8, color="0.3")
        return
    figure.draw_without_rendering()
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    x, y = (drawn.x0 + drawn.x1) / 2 / width, (drawn.y0 - 0.08) / height
    figure.text(x, y, words, ha="center", va="top", fontsize=8, color="0.3")


def read_record(path: Path) -> Any:
    """A record's content; None if there is no such file."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DeepSimplexError(
            f"a record in {path}", f"a damaged file ({error})", "put it back, or delete it"
        ) from None


def behind(claim: dict[str, Any]) -> str:
    """The records a judged claim rests on, by name."""
    return ", ".join(name.removesuffix(".json") for name in claim["records"]) or "computed"


def epochs_of(record: dict[str, Any]) -> list[int]:
    """Of the recipe or the recipes of a record."""
    recipes = [record["recipe"]] if "recipe" in record else record.get("recipes", {}).values()
    return sorted({recipe["epochs"] for recipe in recipes})


def conditions(record: dict[str, Any], seeds: int | None = None) -> str:
    """ ", 25 000 images of cifar100, 30 epochs, 5 seeds", as far as the record knows."""
    epochs = epochs_of(record)
    told = ", " + " or ".join(map(str, epochs)) + " epochs" if epochs else ""
    if "data" in record:
        images, name = (record["data"][key] for key in ("train images", "name"))
        told = f", {spaced(images)} images of {name}{told}"
    return told + counted(record.get("seeds") if seeds is None else seeds)


def counted(seeds: int | None) -> str:
    return "" if seeds is None else ", one seed" if seeds == 1 else f", {seeds} seeds"


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
