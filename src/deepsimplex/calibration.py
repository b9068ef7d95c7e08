"""A reject threshold with a finite-sample promise (split conformal).

Reject an image iff its score is below the threshold; a tie is kept. Calibrate on images of
known classes that trained nothing. If those and the new knowns are exchangeable (say, drawn
alike and independently), then, for any network, score and sample size,

guarantee="mean"  P(a new known is kept) ≥ keep, the probability taken over the calibration
                  draw as well. One draw may fall short: without ties the share it keeps is
                  Beta(n+1−k, k) distributed; at keep = 0.95 it is below 0.95 in 44 % of
                  draws of 100, and in nearly half of large ones.
guarantee="pac"   with probability ≥ `confidence` over the calibration draw, the share of new
                  knowns kept is ≥ keep. Stricter, so fewer unknowns are rejected.

By predicted class the same holds among the knowns sent to each class, one class at a time
(not for all classes at once under "pac"). The group has to be the predicted class: the true
one is not there when the threshold is applied, and limits calibrated by true class but
applied by predicted class keep too few.

Not promised: anything about unknowns, about any one true class, or after the data drift.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepsimplex.errors import DeepSimplexError


@dataclass(frozen=True)
class Threshold:
    """Limits on a score: one in `values`, or one a class when `by` is "predicted".

    −inf keeps everything. `counts` are the calibration images behind each value.
    """

    values: tuple[float, ...]
    by: str  # "all" or "predicted"
    keep: float
    guarantee: str  # "mean" or "pac"
    confidence: float
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        _open_unit(self.keep, "keep")
        _open_unit(self.confidence, "confidence")
        _one_of(self.guarantee, ("mean", "pac"), "guarantee")
        _one_of(self.by, ("all", "predicted"), "by")
        groups = len(self.values)
        if not groups or groups != len(self.counts) or (self.by == "all" and groups != 1):
            raise DeepSimplexError(
                "one value and one count for each group",
                f"{groups} values and {len(self.counts)} counts by {self.by!r}",
                "make thresholds with conformal_threshold",
            )
        if any(math.isnan(value) for value in self.values) or min(self.counts) < 0:
            raise DeepSimplexError(
                "limits that are not NaN and counts ≥ 0",
                f"{self.values} and {self.counts}",
                "make thresholds with conformal_threshold",
            )

    def accept(self, scores: ArrayLike, predicted: ArrayLike | None = None) -> NDArray[np.bool_]:
        """score ≥ limit; scores (n,), predicted (n,) when limits go by class → (n,)."""
        known = _scores(scores)
        if self.by == "all":
            return known >= self.values[0]
        if predicted is None:
            raise DeepSimplexError(
                "predicted, for limits that go by predicted class",
                "None",
                "pass each image's nearest class",
            )
        limits = self.limit_for(predicted)
        _same_length(known, limits)
        return known >= limits

    def limit_for(self, predicted: ArrayLike) -> NDArray[np.float64]:
        """The limit each image is held to; predicted (n,) → (n,)."""
        if self.by == "all":
            return np.full(len(_vector(predicted, "predicted")), self.values[0])
        return np.asarray(self.values)[_class_indices(predicted, len(self.values))]

    def meaning(self, classes: Sequence[Any] | NDArray[Any] | None = None) -> str:
        """What is promised, in one sentence, and where too small a sample keeps everything.

        Classes are called by their names in `classes`, or by number.
        """
        share = f"{100 * self.keep:g} %"
        group = " among those predicted as each class" if self.by == "predicted" else ""
        if self.guarantee == "mean":
            promise = (
                f"A new image of a known class is kept with probability at least {share}"
                f"{group}, on average over draws of the calibration images"
            )
        else:
            promise = (
                f"With {100 * self.confidence:g} % confidence in the draw of the calibration "
                f"images, at least {share} of new images of known classes are kept{group}"
            )
        return f"{promise} ({sum(self.counts)} were used){self._shortage(classes)}."

    def _shortage(self, classes: Sequence[Any] | NDArray[Any] | None) -> str:
        needed = least_sample(self.keep, self.guarantee, self.confidence)
        short = [group for group, n in enumerate(self.counts) if n < needed]
        if not short:
            return ""
        if self.by == "all":
            return f"; everything is kept, because a limit needs at least {needed} of them"
        names = [str(group if classes is None else classes[group]) for group in short[:10]]
        named = ("number " if classes is None else "") + ", ".join(names)
        named += ", …" if len(short) > 10 else ""
        return (
            f"; {len(short)} of {len(self.counts)} classes ({named}) keep everything, "
            f"because a limit needs at least {needed} images predicted as the class"
        )

    def to_json(self) -> dict[str, Any]:
        """Strict JSON has no infinities: −inf is null, +inf the text "inf"."""
        values = [{-math.inf: None, math.inf: "inf"}.get(value, value) for value in self.values]
        return {
            "values": values,
            "by": self.by,
            "keep": self.keep,
            "guarantee": self.guarantee,
            "confidence": self.confidence,
            "counts": list(self.counts),
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Threshold:
        try:
            return Threshold(
                values=tuple(-math.inf if v is None else float(v) for v in record["values"]),
                by=record["by"],
                keep=float(record["keep"]),
                guarantee=record["guarantee"],
                confidence=float(record["confidence"]),
                counts=tuple(int(n) for n in record["counts"]),
            )
        except DeepSimplexError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DeepSimplexError(
                "a threshold record as to_json writes it",
                f"{type(error).__name__}: {error}",
                "calibrate again",
            ) from error


def conformal_threshold(
    scores: ArrayLike,
    keep: float,
    *,
    predicted: ArrayLike | None = None,
    classes: int | None = None,
    guarantee: str = "mean",
    confidence: float = 0.9,
) -> Threshold:
    """The k-th smallest score of held-out knowns, −inf when k = 0.

    mean   k = ⌊(n+1)(1−keep)⌋
    pac    the largest k with P(Binomial(n, 1−keep) ≥ k) ≥ confidence

    scores (n,), higher = more known. With `predicted` (n,) in 0 … classes−1, one limit for
    each predicted class, from the scores of the images sent there, rightly or wrongly.
    """
    _open_unit(keep, "keep")
    _open_unit(confidence, "confidence")
    _one_of(guarantee, ("mean", "pac"), "guarantee")
    known = _scores(scores)
    if not len(known):
        raise DeepSimplexError("1 or more scores", "none", "hold out images of known classes")
    groups = [known]
    if predicted is not None:
        if classes is None or classes < 1:
            raise DeepSimplexError(
                "the number of classes with predicted",
                f"classes={classes}",
                "pass classes=; a class nothing was sent to needs a limit too",
            )
        index = _class_indices(predicted, classes)
        _same_length(known, index)
        cuts = np.cumsum(np.bincount(index, minlength=classes))[:-1]
        groups = np.split(known[np.argsort(index, kind="stable")], cuts)
    return Threshold(
        values=tuple(_kth_smallest(g, _rank(len(g), keep, guarantee, confidence)) for g in groups),
        by="all" if predicted is None else "predicted",
        keep=float(keep),
        guarantee=guarantee,
        confidence=float(confidence),
        counts=tuple(len(g) for g in groups),
    )


def _kth_smallest(scores: NDArray[np.float64], k: int) -> float:
    return float(np.partition(scores, k - 1)[k - 1]) if k else -math.inf


def _rank(n: int, keep: float, guarantee: str, confidence: float) -> int:
    """How many of n + 1 (mean) or of n (pac) may lie below the limit, itself included."""
    if guarantee == "mean":
        return math.floor((n + 1) * _reject(keep))
    from scipy.stats import binom  # half a second to import, and only this promise needs it

    def shortfall(k: int) -> float:
        return -float(binom.sf(k - 1, n, float(_reject(keep))))

    # The tail falls as k grows; 1e-12 forgives its rounding.
    return bisect.bisect_right(range(1, n + 1), 1e-12 - confidence, key=shortfall)


def least_sample(keep: float, guarantee: str = "mean", confidence: float = 0.9) -> int:
    """The smallest n with k ≥ 1: (n+1)(1−keep) ≥ 1, or 1 − keepⁿ ≥ confidence."""
    if guarantee == "mean":
        return math.ceil(1 / _reject(keep)) - 1
    return math.ceil(math.log1p(-confidence) / math.log(keep) - 1e-9)


def _reject(keep: float) -> Fraction:
    """1 − keep of the decimal as written: (19+1)·(1−0.95) is 1, in floats it is not."""
    return 1 - Fraction(str(float(keep)))


def _vector(values: ArrayLike, name: str) -> NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        tensor: Any = values.detach().cpu()
        values = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise DeepSimplexError(
            f"{name} to be numbers of shape (n,)",
            f"shape {array.shape} of {array.dtype}",
            "pass one number an image",
        )
    return array


def _scores(values: ArrayLike) -> NDArray[np.float64]:
    array = _vector(values, "scores").astype(np.float64)
    if np.isnan(array).any():
        raise DeepSimplexError(
            "scores without NaN",
            f"{int(np.isnan(array).sum())} NaN of {array.size}",
            "look for the image or layer that makes it",
        )
    return array


def _class_indices(predicted: ArrayLike, classes: int) -> NDArray[np.intp]:
    array = _vector(predicted, "predicted")
    whole = array.dtype.kind in "iu" or not array.size
    if not whole or (array.size and not 0 <= array.min() <= array.max() < classes):
        raise DeepSimplexError(
            f"predicted to be class numbers 0 … {classes - 1}",
            f"{array.dtype} from {array.min()} to {array.max()}",
            "pass the nearest class, also for images that will be rejected",
        )
    return array.astype(np.intp)


def _same_length(scores: NDArray[Any], predicted: NDArray[Any]) -> None:
    if len(scores) != len(predicted):
        raise DeepSimplexError(
            "scores and predicted of one length",
            f"{len(scores)} and {len(predicted)}",
            "pass them for the same images in the same order",
        )


def _open_unit(value: object, name: str) -> None:
    if not isinstance(value, Real) or not 0 < float(value) < 1:
        raise DeepSimplexError(
            f"{name} strictly between 0 and 1", repr(value), "0.95 means nineteen of twenty"
        )


def _one_of(value: str, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise DeepSimplexError(f"{name} to be one of {', '.join(allowed)}", repr(value), "pick one")
