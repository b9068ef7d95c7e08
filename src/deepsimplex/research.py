"""`compare`: methods side by side, on benchmarks or on one's own data."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from deepsimplex import compare as comparison
from deepsimplex import tables
from deepsimplex.data.archives import data_root
from deepsimplex.data.background import PHOTOGRAPHS, Background, load_background
from deepsimplex.data.protocols import (
    BENCHMARKS,
    Trial,
    benchmark_trial,
    random_trials,
    repeated_trials,
    split_trial,
    splits,
)
from deepsimplex.data.sources import check_on_bad, to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import check_request
from deepsimplex.lanes import drive, side_by_side
from deepsimplex.methods import METHODS, method_row
from deepsimplex.own import extra_beside, known_data, tell_cost
from deepsimplex.recipes import Recipe, benchmark_recipe, default_recipe, digits_recipe
from deepsimplex.runs import command, environment, write_atomically, write_json
from deepsimplex.terminal import console, table, training

KEEP = 0.95


def compare(
    name: str,
    methods: list[str],
    family: str,
    numbers: list[int] | int,
    *,
    score: str | None = None,
    background: str | None,
    root: Path | None,
    out: Path,
    results: Path,
    epochs: int | None,
    size: int | None,
    on_bad: str,
    seed: int,
    at_once: int | None,
    device: str,
) -> None:
    """Train and test each method on each trial, or go on where it stopped; then the tables."""
    began = time.perf_counter()
    if methods == ["all"]:
        methods = list(METHODS)
    helped = _needing_background(name, methods, background)
    where = pick_device(device)
    makers, about = _trials(name, family, numbers, background, data_root(root), seed, size, on_bad)
    console.print(f"{name}: {', '.join(methods)}; {about}. Device: {where}.")
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    by = f"-{score}" if score else ""
    runs = {
        (method, number): (out / f"{method}-{number}", out / f"{method}-{number}{by}")
        for number, _ in makers
        for method in methods
    }
    left = comparison.unfinished(runs.values())
    at_once = side_by_side(where, at_once, left)
    how: Any = {"score": score, "where": where, "at_once": at_once, "epochs": epochs}
    how["helped"] = [] if background else helped
    with training("Training", trainings=left) as begin:
        jobs = _jobs(name, makers, methods, runs, begin, **how)
        for record in drive(jobs, where, at_once=at_once):
            found[record["method"]].append(record)
    record = {
        "command": command(),
        "environment": environment(where),
        "seconds": round(time.perf_counter() - began, 2),
        "notes": [
            *_notes(name, family, [number for number, _ in makers], background, methods, helped),
            *([f"Accepted and ranked by the score {score}."] if score else []),
            *comparison.shortage([one for each in found.values() for one in each], KEEP),
        ],
        "methods": found,
    }
    parts = [runs[method, n][1] / "scores.npz" for method in methods for n, _ in makers]
    _publish(record, results / (_stem(name, family, background) + by), parts)


def _jobs(
    name: str,
    makers: list[tuple[int, Callable[[], Trial]]],
    methods: list[str],
    runs: dict[tuple[str, int], tuple[Path, Path]],
    begin: Callable[[str], Callable[[dict[str, Any]], None]],
    *,
    helped: list[str],
    score: str | None,
    where: torch.device,
    at_once: int,
    epochs: int | None,
) -> Iterator[Generator[None, None, dict[str, Any]]]:
    """A training of each method on each trial; those `helped` get photographs as background."""
    for number, make in makers:
        trial = make()
        first = number == makers[0][0]
        if first:
            console.print(_audit(trial))
            _check_scores(name, methods, trial, score)
        for method in methods:
            recipe = _recipe(name, method, trial, number)
            if epochs is not None:
                recipe = dataclasses.replace(recipe, epochs=epochs)
            if first and method == methods[0]:
                tell_cost(name, to_tensor(trial.train[0][:1]), recipe, where)
            plain, folder = runs[method, number]
            yield comparison.running(
                with_photographs(trial) if method in helped else trial,
                recipe,
                folder,
                where,
                keep=KEEP,
                score=score,
                at_once=at_once,
                donors=[] if folder == plain else [plain],
                report=begin(f"{method}, trial {number}"),
            )


def _stem(name: str, family: str, background: str | None) -> str:
    title = name if name in BENCHMARKS else Path(name).stem
    return f"compare-{title}-{family}" + (f"-{Path(background).name}" if background else "")


def _needing_background(name: str, methods: list[str], background: str | None) -> list[str]:
    """The methods that do; on digits they get photographs, elsewhere it must be given."""
    helped = [method for method in methods if method_row(method).needs_background]
    if helped and background is None and name != "digits":
        raise DeepSimplexError(
            f"a background for {', '.join(helped)}", "none", "give --background, or leave them out"
        )
    return helped


def _publish(record: dict[str, Any], stem: Path, parts: list[Path]) -> None:
    """Record, scores of every image and tables, beside each other; the table on the screen."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    wanted, stem = stem, _place(record, stem)
    if stem != wanted:
        console.print(f"{wanted}.json holds another comparison and stays as it is.")
    write_json(stem.with_name(f"{stem.name}.json"), record)
    comparison.gather_scores(stem.with_name(f"{stem.name}.npz"), parts)
    write_atomically(stem.with_name(f"{stem.name}.md"), tables.markdown(record).encode())
    write_atomically(stem.with_name(f"{stem.name}.csv"), tables.as_csv(record).encode())
    heading, body = tables.rows(record)
    table(None, heading, body)
    for note in record["notes"]:
        console.print(note)
    console.print(f"Written: {stem}.json, .npz (scores of every image), .md, .csv")


ASKED = ("trial", "seed", "epochs", "score", "mirror", "shift", "background", "counts", "audit")
"""Of a result, what it was asked for, apart from what it found."""


def _place(record: dict[str, Any], stem: Path) -> Path:
    """The stem, over an earlier record of the same comparison; numbered where another stands."""
    mine, place, number = _compared(json.dumps(record)), stem, 1
    while True:
        path = place.with_name(f"{place.name}.json")
        if not path.exists() or _compared(path.read_text()) == mine:
            return place
        number += 1
        place = stem.with_name(f"{stem.name}-{number}")


def _compared(text: str) -> Any:
    """What a record compares; None for a file of another kind."""
    try:
        every = json.loads(text)["methods"].items()
        # An older record says nothing of views: it had one.
        return {name: [[r.get(k) or None for k in ASKED] for r in rows] for name, rows in every}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _trials(
    name: str,
    family: str,
    numbers: list[int] | int,
    background: str | None,
    root: Path,
    seed: int,
    size: int | None,
    on_bad: str,
) -> tuple[list[tuple[int, Callable[[], Trial]]], str]:
    """Makers of the trials, so that one at a time is in memory, and a line about them."""
    check_on_bad(on_bad)  # a benchmark has no bad images, but a mistyped word is told all the same
    if name in BENCHMARKS:
        about = BENCHMARKS[name]
        if size is not None:
            raise DeepSimplexError(
                f"no --size for {name}, whose protocol has {about.size} pixels",
                f"--size {size}",
                "leave it out",
            )
        chosen = list(range(numbers)) if isinstance(numbers, int) else numbers
        extra = _extra(background, root, about.known, about.size, about.channels)
        most = len(splits(family, name))
        if not all(number < most for number in chosen):
            raise DeepSimplexError(
                f"{most} trials of {name}, numbered from 0", f"{max(chosen)}", "ask for fewer"
            )
        return [
            (n, lambda n=n: benchmark_trial(name, family, n, root, background=extra))  # type: ignore[misc]
            for n in chosen
        ], f"{family} splits, {len(chosen)} trials"
    if family != "random":
        raise DeepSimplexError(
            f"a benchmark among {', '.join(BENCHMARKS)}, or own data with --splits random",
            f"{name!r} with --splits {family}",
            "choose one",
        )
    _, data = known_data(name, None, size, on_bad)
    chosen = list(range(numbers)) if isinstance(numbers, int) else numbers
    extra = extra_beside(background, data, root)
    known = random_trials(data, max(chosen) + 1, seed)
    return [
        (
            n,
            lambda n=n: split_trial(  # type: ignore[misc]
                data, known[n], name=f"{data.source}/random/{seed}/{n}", seed=n, background=extra
            ),
        )
        for n in chosen
    ], f"{len(chosen)} random choices of known classes, seed {seed}"


def with_photographs(trial: Trial) -> Trial:
    """The trial with patches of photographs for background, for a method that needs some."""
    _, size, _, channels = trial.train[0].shape
    extra = load_background(PHOTOGRAPHS, Path(), against="", size=size, channels=channels)
    images, audit = extra.without(frozenset())
    return dataclasses.replace(trial, background=images, audit=trial.audit | {"background": audit})


def _extra(
    background: str | None, root: Path, against: str, size: int, channels: int
) -> Background | None:
    if background is None:
        return None
    return load_background(background, root, against=against, size=size, channels=channels)


def _recipe(name: str, method: str, trial: Trial, number: int) -> Recipe:
    if name == "digits":
        return digits_recipe(method, seed=number)
    if name in BENCHMARKS:
        return benchmark_recipe(method, BENCHMARKS[name].augment, seed=number)
    return _default(method, trial, number)[1]


def _default(method: str, trial: Trial, seed: int) -> tuple[tuple[int, ...], Recipe]:
    """Shape of an image, and what `train` would take for the trial's."""
    images = to_tensor(trial.train[0][:1])
    shape, pixels = tuple(images.shape[1:]), images.dtype == torch.uint8
    count, background = len(trial.train[1]), trial.background is not None
    return shape, default_recipe(method, shape, seed, count, background, pixels)


def _check_scores(name: str, methods: list[str], trial: Trial, score: str | None) -> None:
    """Before the first training: can every method be scored so?"""
    if score is None:
        return
    shape = tuple(to_tensor(trial.train[0][:1]).shape[1:])
    for method in methods:
        check_scored(_recipe(name, method, trial, 0), shape, len(trial.classes), score)


def check_scored(
    recipe: Recipe,
    shape: tuple[int, ...],
    classes: int,
    score: str | None,
    keep: float = KEEP,
) -> None:
    """Can trials of this recipe be rejected by `score`?"""
    asked: Any = {"keep": keep, "guarantee": "mean", "by": "all", "score": score, "radius": 1.0}
    check_request(recipe, shape, classes, **asked)


def _audit(trial: Trial) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in trial.counts().items())
    lines = [f"First trial, {trial.name}: {counts}."]
    for part, dropped in trial.audit.get("repeats", {}).items():
        lines.append(f"Left out of {part}: {len(dropped)} images equal to some in a test part.")
    left = trial.audit.get("background")
    if left:
        named = [*left.get("overlapping classes left out", [])]
        named += [*left.get("unknown classes left out", {})]
        lines.append(
            f"Background {left['name']} ({left['note']}): without {', '.join(named) or '–'}."
        )
    return "\n".join(lines)


def _notes(
    name: str,
    family: str,
    numbers: list[int],
    background: str | None,
    methods: list[str],
    helped: list[str],
) -> list[str]:
    """What a reader of the table must know."""
    track = f"with background {background}" if background else "without background"
    notes = [
        f"Track: {track}. Last epoch; thresholds from held-out knowns; nothing chosen on test."
    ]
    if background:
        without = [method for method in methods if not METHODS[method].uses_background]
        if without:
            notes.append(f"Not using the background: {', '.join(without)}.")
    elif helped:
        notes.append(f"With background {PHOTOGRAPHS}, which they need: {', '.join(helped)}.")
    if name in BENCHMARKS:
        repeats = [n for n in repeated_trials(family, name) if n in numbers]
        if repeats:
            notes.append(f"Trials that repeat an earlier one's classes: {repeats}.")
    return notes
