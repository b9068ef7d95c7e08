"""`bench train`: the engine against a plain eager PyTorch loop, epoch by epoch in one run.

Both train softmax by the same recipe on the same resident data with the same augmentation on the
device, bf16 and channels-last on a GPU. The plain loop is `plain_epochs` below: what one writes
without thinking about speed, and without waiting for the device in each step. Each row runs in
a process of its own, with kernel caches that start empty, so that the time to the first useful
step is a cold one and cuDNN's choices of one row do not reach another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex import engine, layers
from deepsimplex.batches import Feed, TrainingSet
from deepsimplex.bench.timing import check_repeats, quartiles
from deepsimplex.data.augment import augment
from deepsimplex.errors import DeepSimplexError
from deepsimplex.lanes import WARM_UP, Lane, surroundings
from deepsimplex.methods import build_method
from deepsimplex.methods.base import Method, Stage
from deepsimplex.recipes import Recipe, learning_rate
from deepsimplex.runs import command, environment, write_json
from deepsimplex.terminal import console, table


@dataclasses.dataclass(frozen=True)
class Row:
    """Some trainings of a net side by side, and what an epoch of all of them should take."""

    backbone: str
    batch: int
    images: int
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    at_once: int = 1
    augment: str = "crop+flip"
    target: float | None = None  # seconds
    target_ratio: float | None = None


ROWS = {
    "osrci": Row("osrci", 128, 30_000, classes=6, target=0.20, target_ratio=6),
    "osrci ×5": Row("osrci", 128, 30_000, classes=6, at_once=5, target=0.50, target_ratio=12),
    "resnet18 128": Row("resnet18-cifar", 128, 50_000, target=1.0, target_ratio=3),
    "resnet18 512": Row("resnet18-cifar", 512, 50_000, target=0.55, target_ratio=2),
}
CPU_ROWS = {
    "digits": Row("small", 64, 1_078, (1, 8, 8), 6, augment="none", target_ratio=1),
    "osrci": Row("osrci", 128, 640, classes=6),
}
QUICK = {"digits": Row("small", 64, 640, (1, 8, 8), 6, augment="none")}


def train(*, device: str, repeats: int, out: Path, quick: bool = False) -> None:
    """Every row in its own process; a table, and the record."""
    check_repeats(repeats)
    where = engine.pick_device(device)
    rows = ROWS if where.type == "cuda" else CPU_ROWS
    found = []
    for name in QUICK if quick else rows:
        console.print(f"{name} …")
        found.append(_apart(name, where, repeats, quick))
    table(None, HEADING, [cells(row) for row in found])
    record = {
        "command": command(),
        "what": (__doc__ or "").partition("\n\n")[0],
        "environment": environment(where),
        "rows": found,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, record)
    console.print(f"Written: {out}")


HEADING = (
    "training", "batch", "epoch s", "quartiles", "plain s", "ratio", "quartiles", "first step s",
    "again s", "deterministic ×", "data %",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    def span(q: dict[str, float], digits: int) -> str:
        return f"{q['q1']:.{digits}f}–{q['q3']:.{digits}f}"

    ours, ratio = row["epoch_s"], row["ratio"]
    digits = 3 if ours["median"] < 10 else 1
    return [
        row["name"],
        str(row["batch"]),
        f"{ours['median']:.{digits}f}",
        span(ours, digits),
        f"{row['plain_s']['median']:.2f}",
        f"{ratio['median']:.2f}",
        span(ratio, 2),
        f"{row['first_step_s']:.1f}",
        f"{row['first_step_again_s']:.2f}",
        f"{row['deterministic']['median']:.2f}" if row["deterministic"] else "–",
        f"{100 * row['data_share']:.1f}",
    ]


def _apart(name: str, where: torch.device, repeats: int, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as caches:
        fresh = {"TRITON_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches}
        words = [sys.executable, "-m", __name__, name, str(where), str(repeats), str(int(quick))]
        done = subprocess.run(words, env=os.environ | fresh, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise DeepSimplexError(f"the row {name!r} to run", lines[-1], "see whether `doctor` passes")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def measure(name: str, row: Row, where: torch.device, repeats: int) -> dict[str, Any]:
    """One row: epochs of ours, ours deterministic and the plain loop take turns."""
    recipe = Recipe(
        method="softmax", backbone=row.backbone, epochs=3 + repeats, batch_size=row.batch,
        augment=row.augment, weight_decay=1e-4,
    )  # fmt: skip
    data = synthetic(row)
    ours = Ours(row, data, recipe, where)
    again = Ours(row, data, recipe, where)
    strict = None
    if where.type == "cuda" and row.at_once == 1:
        strict = Ours(row, data, dataclasses.replace(recipe, deterministic=True), where)
    plain = [
        plain_epochs(_net(row, recipe, seed), data, recipe, where) for seed in range(row.at_once)
    ]
    times: dict[str, list[float]] = {"ours": [], "plain": [], "strict": []}
    for turn in range(repeats + 1):
        times["ours"].append(ours.epoch())
        if strict is not None:
            times["strict"].append(strict.epoch())
        began = time.perf_counter()
        for loop in plain:
            next(loop)
        times["plain"].append(time.perf_counter() - began)
        if turn == 0:  # the first is a warm-up
            for values in times.values():
                values.clear()
    drawing = data_seconds(data, recipe, where, ours.steps) * row.at_once
    return {
        "name": name,
        **dataclasses.asdict(row),
        "repeats": repeats,
        "steps": ours.steps,
        "epoch_s": quartiles(times["ours"]),
        "plain_s": quartiles(times["plain"]),
        "ratio": quartiles([p / o for o, p in zip(times["ours"], times["plain"], strict=True)]),
        "first_step_s": ours.first,
        "first_step_again_s": again.first,
        "deterministic": strict
        and quartiles([s / o for o, s in zip(times["ours"], times["strict"], strict=True)]),
        "data_share": drawing / statistics.median(times["ours"]),
    }


class Ours:
    """Trainings by the engine, side by side, that stand still between epochs."""

    def __init__(self, row: Row, data: TrainingSet, recipe: Recipe, where: torch.device) -> None:
        self.where, self.deterministic = where, recipe.deterministic
        self.ended: list[int] = [0] * row.at_once
        began = time.perf_counter()
        with self._surroundings():
            self.lanes = [Lane(where) for _ in range(row.at_once)]
            self.jobs = [self._job(i, row, data, recipe) for i in range(row.at_once)]
            for _ in range(WARM_UP + 1):
                self._step()
            for lane in self.lanes:
                lane.wait()
        self.first = time.perf_counter() - began
        self.steps = row.images // row.batch
        self.epochs = 0
        self.epoch()  # the rest of the first one

    def _job(
        self, index: int, row: Row, data: TrainingSet, recipe: Recipe
    ) -> Generator[None, None, None]:
        def ended(record: dict[str, Any]) -> None:
            self.ended[index] = record["epoch"]

        recipe = dataclasses.replace(recipe, seed=index)
        method = _net(row, recipe, index)
        return engine.training(method, data, recipe, self.where, report=ended)

    def _surroundings(self) -> Any:
        return surroundings(self.where, self.deterministic, alone=len(self.ended) == 1)

    def _step(self) -> None:
        for lane, job in zip(self.lanes, self.jobs, strict=True):
            with lane.taken():
                next(job)

    def epoch(self) -> float:
        """Seconds that the next epoch of all trainings takes."""
        self.epochs += 1
        began = time.perf_counter()
        with self._surroundings():
            while min(self.ended) < self.epochs:
                self._step()
        return time.perf_counter() - began


def plain_epochs(
    method: Method, data: TrainingSet, recipe: Recipe, where: torch.device
) -> Iterator[None]:
    """The loop one would write: it ends an epoch by looking at the loss, and yields."""
    images, labels = data.images.to(where), data.labels.to(where)
    method.to(where).train()
    gpu = where.type == "cuda"
    if gpu:
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.contiguous(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(
        method.parameters(), recipe.learning_rate, recipe.momentum,
        nesterov=recipe.nesterov, weight_decay=recipe.weight_decay,
    )  # fmt: skip
    steps = len(labels) // recipe.batch_size
    at = 0
    for _ in range(recipe.epochs):
        order = torch.randperm(len(labels)).to(where)
        total = torch.zeros((), device=where)
        for rows in order[: steps * recipe.batch_size].view(steps, -1):
            for group in optimiser.param_groups:
                rate = learning_rate(recipe, recipe.learning_rate, at, steps * recipe.epochs)
                group["lr"] = rate
            with layers.plain():
                batch = augment(images, rows, recipe.augment)
                with torch.autocast(where.type, torch.bfloat16, enabled=gpu):
                    loss = F.cross_entropy(method(batch).float(), labels[rows])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(method.parameters(), recipe.clip)
            optimiser.step()
            total += loss.detach()
            at += 1
        float(total)
        yield


def synthetic(row: Row, seed: int = 0) -> TrainingSet:
    """Noise around a pattern of each class's own: speed does not depend on what is in it."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 200, (row.classes, *row.shape), generator=generator)
    labels = torch.arange(row.images) % row.classes
    noise = torch.randint(0, 56, (row.images, *row.shape), generator=generator, dtype=torch.uint8)
    return TrainingSet(patterns[labels].to(torch.uint8) + noise, labels)


def data_seconds(data: TrainingSet, recipe: Recipe, where: torch.device, steps: int) -> float:
    """Seconds to draw and augment an epoch's batches and nothing else (a captured draw)."""
    from deepsimplex.batches import resident
    from deepsimplex.lanes import Repeated

    seconds = 0.0
    with surroundings(where, False, alone=True):
        lane = Lane(where)
        with lane.taken():
            feed = Feed(resident(data, where), recipe, Stage("s", (), 1), 0, recipe.augment)
            feed.begin(0)
            turn = torch.zeros(1, dtype=torch.int64, device=where)
            kept: list[Tensor] = []

            def body() -> None:
                kept[:] = [feed.draw(turn, turn[0]).images]

            draw = Repeated(body, lambda: None, capture=where.type == "cuda")
            for count in (WARM_UP + 1, steps):
                began = time.perf_counter()
                for _ in range(count):
                    draw()
                lane.wait()
                seconds = time.perf_counter() - began
    return seconds


def _net(row: Row, recipe: Recipe, seed: int) -> Method:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_method("softmax", recipe.backbone, row.shape, row.classes, None)


if __name__ == "__main__":
    name, device, repeats, quick = sys.argv[1:]
    where = torch.device(device)
    rows = QUICK if int(quick) else ROWS if where.type == "cuda" else CPU_ROWS
    print(json.dumps(measure(name, rows[name], where, int(repeats))))
