"""Trials: which classes are known, and which images train, calibrate and test.

The rules that every trial keeps, whoever makes it: unknown classes appear in the test only;
calibration images are not trained on; an image that is in a test part is in no other (identical
images do exist across the official sets: they are found by content and dropped from the training
side).
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from deepsimplex.data.archives import load_official
from deepsimplex.data.background import Background
from deepsimplex.data.resize import fit
from deepsimplex.data.sources import LabelledSet, hold_out, load_digits
from deepsimplex.errors import DeepSimplexError


@dataclass(frozen=True, eq=False)
class Trial:
    """One open-set problem. Labels count the known classes from 0 in the order of `classes`."""

    name: str
    classes: tuple[str, ...]
    train: tuple[np.ndarray, np.ndarray]
    calibration: tuple[np.ndarray, np.ndarray]
    known_test: tuple[np.ndarray, np.ndarray]
    unknown_test: np.ndarray
    unknown_names: tuple[str, ...]  # the true class of each unknown test image
    background: np.ndarray | None = None
    audit: dict[str, Any] = field(default_factory=dict)  # what was left out, and why

    def __post_init__(self) -> None:
        both = sorted(set(self.classes) & set(self.unknown_names))
        if both:
            raise DeepSimplexError(
                f"unknown classes of {self.name} to be none of the known",
                f"{', '.join(both)} among both",
                "choose other classes",
            )

    def counts(self) -> dict[str, int]:
        return {
            "known classes": len(self.classes),
            "unknown classes": len(set(self.unknown_names)),
            "train": len(self.train[1]),
            "calibration": len(self.calibration[1]),
            "known test": len(self.known_test[1]),
            "unknown test": len(self.unknown_test),
            "background": 0 if self.background is None else len(self.background),
        }


@dataclass(frozen=True)
class Benchmark:
    """Where a published benchmark's images come from and how they enter the net."""

    known: str
    unknown: str
    lists: str  # whose split lists it uses
    size: int
    channels: int
    augment: str  # digits are not mirrored


BENCHMARKS = {
    "digits": Benchmark("digits", "digits", "mnist", 8, 1, "none"),
    "mnist": Benchmark("mnist", "mnist", "mnist", 32, 3, "none"),
    "fashion-mnist": Benchmark("fashion-mnist", "fashion-mnist", "mnist", 32, 3, "flip"),
    "svhn": Benchmark("svhn", "svhn", "svhn", 32, 3, "crop"),
    "cifar10": Benchmark("cifar10", "cifar10", "cifar10", 32, 3, "crop+flip"),
    "cifar+10": Benchmark("cifar10", "cifar100", "cifar+10", 32, 3, "crop+flip"),
    "cifar+50": Benchmark("cifar10", "cifar100", "cifar+50", 32, 3, "crop+flip"),
    "tinyimagenet": Benchmark("tinyimagenet", "tinyimagenet", "tinyimagenet", 64, 3, "crop+flip"),
}

FAMILIES = ("arpl", "neal")


def splits(family: str, benchmark: str) -> list[dict[str, list[int]]]:
    """The published trials: class indices under "known" and "unknown"."""
    if family not in FAMILIES or benchmark not in BENCHMARKS:
        raise DeepSimplexError(
            f"splits among {', '.join(FAMILIES)} of a benchmark among {', '.join(BENCHMARKS)}",
            f"{family!r}, {benchmark!r}",
            "choose from these",
        )
    path = resources.files("deepsimplex.data") / "splits" / f"{family}.json"
    return json.loads(path.read_text())["trials"][BENCHMARKS[benchmark].lists]


def repeated_trials(family: str, benchmark: str) -> list[int]:
    """Trials whose known and unknown sets an earlier trial has already had."""
    seen: set[tuple[frozenset[int], frozenset[int]]] = set()
    repeats = []
    for number, lists in enumerate(splits(family, benchmark)):
        key = frozenset(lists["known"]), frozenset(lists["unknown"])
        if key in seen:
            repeats.append(number)
        seen.add(key)
    return repeats


def benchmark_trial(
    name: str,
    family: str,
    number: int,
    root: Path,
    *,
    background: Background | None = None,
    calibration: float = 0.05,
) -> Trial:
    """Trial `number` of a published benchmark, from the official files under `root`."""
    lists = splits(family, name)
    if not 0 <= number < len(lists):
        raise DeepSimplexError(f"a trial from 0 to {len(lists) - 1}", f"{number}", "choose one")
    if name == "digits":
        known = [str(c) for c in lists[number]["known"]]
        title = f"digits/{family}/{number}"
        return split_trial(load_digits(), known, name=title, seed=number, background=background)
    about = BENCHMARKS[name]
    train, test = (_prepared(about.known, part, root, about) for part in ("train", "test"))
    others = test
    if about.unknown != about.known:
        others = _prepared(about.unknown, "test", root, about)
    classes = tuple(train.classes[c] for c in lists[number]["known"])
    unknown = np.isin(others.labels, lists[number]["unknown"])
    images, labels = _of_classes(train, classes)
    kept, held = hold_out(labels, calibration, seed=number)
    return clean_trial(
        f"{name}/{family}/{number}",
        classes,
        (images[kept], labels[kept]),
        (images[held], labels[held]),
        _of_classes(test, classes),
        others.images[unknown],
        tuple(others.names[unknown].tolist()),
        background,
        frozenset((about.unknown, others.classes[c]) for c in lists[number]["unknown"]),
    )


def split_trial(
    data: LabelledSet,
    known: list[str],
    *,
    name: str,
    seed: int,
    test: float = 0.25,
    calibration: float = 0.15,
    background: Background | None = None,
) -> Trial:
    """A trial from one labelled set that has no test part of its own."""
    classes = known_classes(data, known)
    images, labels = _of_classes(data, classes)
    unknown = ~np.isin(data.names, classes)
    rest, tested = hold_out(labels, test, seed)
    inner, held = hold_out(labels[rest], calibration / (1 - test), seed)
    training, calibrating = rest[inner], rest[held]
    return clean_trial(
        name,
        classes,
        (images[training], labels[training]),
        (images[calibrating], labels[calibrating]),
        (images[tested], labels[tested]),
        data.images[unknown],
        tuple(data.names[unknown].tolist()),
        background,
    )


def random_trials(data: LabelledSet, count: int, seed: int, share: float = 0.6) -> list[list[str]]:
    """`count` random choices of about `share` of the classes as known; at least 2, never all."""
    random = np.random.default_rng(seed)
    if len(data.classes) < 3:
        raise DeepSimplexError(
            f"3 or more classes in {data.source} to set some aside",
            f"{len(data.classes)}",
            "add some",
        )
    known = min(max(2, round(share * len(data.classes))), len(data.classes) - 1)
    return [random.permutation(data.classes)[:known].tolist() for _ in range(count)]


def leave_out_trials(data: LabelledSet, count: int, seed: int) -> list[list[str]]:
    """The known classes of each fold when every class is left out once, `count` at a time."""
    order = np.random.default_rng(seed).permutation(data.classes).tolist()
    folds = [order[i : i + count] for i in range(0, len(order), count)]
    return [[name for name in data.classes if name not in fold] for fold in folds]


def digits_trial(number: int) -> Trial:
    """scikit-learn's digits on ARPL's MNIST split `number`: 60 % train, 15 calibrate, 25 test."""
    return benchmark_trial("digits", "arpl", number, Path())


def clean_trial(
    name: str,
    classes: tuple[str, ...],
    train: tuple[np.ndarray, np.ndarray],
    calibration: tuple[np.ndarray, np.ndarray],
    known_test: tuple[np.ndarray, np.ndarray],
    unknown_test: np.ndarray,
    unknown_names: tuple[str, ...],
    background: Background | None = None,
    unknown_classes: frozenset[tuple[str, str]] = frozenset(),
) -> Trial:
    """A trial in which an image of the test is in no other part, nor one of calibration in train.

    `unknown_classes`, as (set, class), leave the background.
    """
    audit: dict[str, Any] = {}
    protected = dict.fromkeys(digests(known_test[0]), "known test")
    protected |= dict.fromkeys(digests(unknown_test), "unknown test")

    def without_repeats(part: str, images: np.ndarray) -> np.ndarray:
        keys = digests(images)
        keep = np.array([key not in protected for key in keys], dtype=bool)
        dropped = [{"index": int(i), "equal to": protected[keys[i]]} for i in np.flatnonzero(~keep)]
        if dropped:
            audit.setdefault("repeats", {})[part] = dropped
        protected.update(dict.fromkeys(keys, part))
        return keep

    parts = {}
    for part, (images, labels) in (("calibration", calibration), ("train", train)):
        keep = without_repeats(part, images)
        parts[part] = (images, labels) if keep.all() else (images[keep], labels[keep])
    extra = None
    if background is not None:
        extra, audit["background"] = background.without(unknown_classes)
        extra = extra[without_repeats("background", extra)]
    return Trial(
        name,
        classes,
        parts["train"],
        parts["calibration"],
        known_test,
        unknown_test,
        unknown_names,
        extra,
        audit,
    )


def digests(images: np.ndarray) -> list[bytes]:
    """A content hash of each image."""
    whole = np.ascontiguousarray(images)
    return [hashlib.blake2b(image.data, digest_size=16).digest() for image in whole]


def known_classes(data: LabelledSet, known: list[str]) -> tuple[str, ...]:
    """The asked-for classes, seen to exist and to be two or more."""
    missing = [name for name in known if name not in data.classes]
    if missing:
        raise DeepSimplexError(
            f"classes of {data.source} ({', '.join(data.classes[:12])})",
            f"{', '.join(missing)}",
            "check the spelling",
        )
    if len(set(known)) < 2:
        names = f" ({', '.join(known)})" if known else ""
        raise DeepSimplexError(
            f"at least 2 known classes in {data.source}",
            f"{len(set(known))}{names}",
            "give images of another class (label -1 and 'unknown' are no classes)",
        )
    return tuple(dict.fromkeys(known))


def _of_classes(data: LabelledSet, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Images of these classes, labelled by their place in `classes`."""
    place = np.full(len(data.classes) + 1, -1)
    for index, name in enumerate(classes):
        place[data.classes.index(name)] = index
    labels = place[data.labels]
    return data.images[labels >= 0], labels[labels >= 0]


@functools.lru_cache(maxsize=6)
def _prepared(source: str, part: str, root: Path, about: Benchmark) -> LabelledSet:
    """An official set at the benchmark's size and channels; the same for all of its trials."""
    data = load_official(source, part, root)
    return LabelledSet(
        source, fit(data.images, about.size, about.channels), data.labels, data.classes
    )
