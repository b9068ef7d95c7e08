"""Trials: which classes are known, and which images train, calibrate and test."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from deepsimplex.data.sources import LabelledSet, hold_out, load_digits
from deepsimplex.errors import DeepSimplexError


@dataclass(frozen=True)
class Trial:
    """One open-set problem. Labels count the known classes from 0 in the order of `classes`.

    Calibration images are knowns that are not trained on; unknown classes appear in the test
    only.
    """

    name: str
    classes: tuple[str, ...]
    train: tuple[np.ndarray, np.ndarray]
    calibration: tuple[np.ndarray, np.ndarray]
    known_test: tuple[np.ndarray, np.ndarray]
    unknown_test: np.ndarray
    unknown_names: tuple[str, ...]  # the true class of each unknown test image

    def counts(self) -> dict[str, int]:
        return {
            "known classes": len(self.classes),
            "unknown classes": len(set(self.unknown_names)),
            "train": len(self.train[1]),
            "calibration": len(self.calibration[1]),
            "known test": len(self.known_test[1]),
            "unknown test": len(self.unknown_test),
        }


def splits(family: str, benchmark: str) -> list[list[int]]:
    """The known classes of each published trial."""
    path = resources.files("deepsimplex.data") / "splits" / f"{family}.json"
    record: dict[str, Any] = json.loads(path.read_text())
    return record["known"][benchmark]


def digits_trial(number: int) -> Trial:
    """scikit-learn's digits on ARPL's MNIST split `number`: 60 % train, 15 calibrate, 25 test."""
    known = splits("arpl", "mnist")
    if not 0 <= number < len(known):
        raise DeepSimplexError(f"a trial from 0 to {len(known) - 1}", f"{number}", "choose one")
    return open_set_trial(
        load_digits(), [str(c) for c in known[number]], name=f"digits/arpl/{number}", seed=number
    )


def open_set_trial(
    data: LabelledSet,
    known: list[str],
    *,
    name: str,
    seed: int,
    test: float = 0.25,
    calibration: float = 0.15,
) -> Trial:
    """Make a trial from one labelled set that has no test part of its own."""
    classes = known_classes(data, known)
    names = np.array(data.classes)[data.labels]
    is_known = np.isin(names, classes)
    images = data.images[is_known]
    labels = np.array([classes.index(n) for n in names[is_known]])
    rest, tested = hold_out(labels, test, seed)
    inner, held = hold_out(labels[rest], calibration / (1 - test), seed)
    training, calibrating = rest[inner], rest[held]
    return Trial(
        name,
        classes,
        (images[training], labels[training]),
        (images[calibrating], labels[calibrating]),
        (images[tested], labels[tested]),
        data.images[~is_known],
        tuple(names[~is_known].tolist()),
    )


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
