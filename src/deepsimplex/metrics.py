"""How well knowns are told from unknowns, and how tight the classes are.

Scores say how known an image is: higher = more known. They are ranked as they come, never
squashed, scaled or changed; ±inf is a score like any other, NaN is an error. k is the score
of an image of a known class, u that of an unknown one. Every result is a fraction, not a
percentage. Arguments are NumPy arrays, lists or torch tensors on any device.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepsimplex.errors import DeepSimplexError


def accuracy(labels: ArrayLike, predicted: ArrayLike) -> float:
    """|{i: ŷ_i = y_i}| / n over images of known classes; labels, predicted (n,)."""
    truth, guess = _label_pair(labels, predicted)
    return int((truth == guess).sum()) / len(truth)


def auroc(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """P(k > u) + ½ P(k = u): the area under the ROC curve, exact, ties at mid-rank."""
    known, unknown = _score_pair(known_scores, unknown_scores)
    return _half_wins(known, unknown) / (2 * len(known) * len(unknown))


def oscr(known_scores: ArrayLike, known_correct: ArrayLike, unknown_scores: ArrayLike) -> float:
    """P(correct, k > u) + ½ P(correct, k = u): the area under CCR over FPR, ties at mid-rank.

    CCR(t) = |{known: ŷ = y, k ≥ t}| / N_k and FPR(t) = |{unknown: u ≥ t}| / N_u. So
    OSCR ≤ min(accuracy, AUROC), and OSCR = AUROC when every known is classified correctly.
    """
    known, unknown = _score_pair(known_scores, unknown_scores)
    correct = _vector(known_correct, "known_correct")
    _same_length(known, correct, "known_scores", "known_correct")
    if correct.dtype.kind not in "biuf" or not np.isin(correct, (0, 1)).all():
        raise DeepSimplexError(
            "known_correct to be True or False for each known image",
            f"values of type {correct.dtype}",
            "pass labels == predicted",
        )
    return _half_wins(known[correct.astype(bool)], unknown) / (2 * len(known) * len(unknown))


def fpr_at(known_scores: ArrayLike, unknown_scores: ArrayLike, tpr: float = 0.95) -> float:
    """|{u ≥ t}| / N_u at the largest t with |{k ≥ t}| ≥ tpr · N_k.

    t is the ⌈tpr·N_k⌉-th largest known score; `tpr` is read as the decimal it is written as,
    so 0.95 of 20 is 19 and not 20.
    """
    known, unknown = _score_pair(known_scores, unknown_scores)
    kept = math.ceil(_fraction(tpr) * len(known))
    place = len(known) - kept
    threshold = np.partition(known, place)[place]
    return int((unknown >= threshold).sum()) / len(unknown)


def aupr_in(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """Average precision with knowns as positives: mean over knowns k of |{k′ ≥ k}| / |{s ≥ k}|.

    s runs over knowns and unknowns together; this is Σ_t (R_t − R_{t−1}) P_t, as in
    scikit-learn's average_precision_score.
    """
    known, unknown = (np.sort(scores) for scores in _score_pair(known_scores, unknown_scores))
    hits = len(known) - np.searchsorted(known, known, "left")
    return _mean_precision(hits, len(unknown) - np.searchsorted(unknown, known, "left"))


def aupr_out(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """Average precision with unknowns as positives: mean over u of |{u′ ≤ u}| / |{s ≤ u}|.

    scikit-learn's average_precision_score of the negated scores.
    """
    known, unknown = (np.sort(scores) for scores in _score_pair(known_scores, unknown_scores))
    hits = np.searchsorted(unknown, unknown, "right")
    return _mean_precision(hits, np.searchsorted(known, unknown, "right"))


def detection_accuracy(known_scores: ArrayLike, unknown_scores: ArrayLike) -> float:
    """max_t ½ (P(k ≥ t) + P(u < t)): balanced accuracy at the best threshold; never below ½.

    Chosen on the test scores themselves, so it is a measure of separation, not an operating
    point. Raising t to the next known score costs no known, so only known scores are tried.
    """
    known, unknown = (np.sort(scores) for scores in _score_pair(known_scores, unknown_scores))
    kept = len(known) - np.searchsorted(known, known, "left")
    rejected = np.searchsorted(unknown, known, "left")
    best = int((kept * len(unknown) + rejected * len(known)).max())
    return best / (2 * len(known) * len(unknown))


def macro_f1(labels: ArrayLike, predicted: ArrayLike, unknown: int | str) -> float:
    """mean_c 2·TP_c / (|{y = c}| + |{ŷ = c}|), the unknown label a class like the others.

    Averaged are exactly the classes that occur in `labels` or in `predicted`. `unknown` must
    be one of them: without it this would be a closed-set figure under an open-set name.
    Equals scikit-learn's f1_score(labels, predicted, average="macro").
    """
    truth, guess = _label_pair(labels, predicted)
    classes, index = np.unique(np.concatenate([truth, guess]), return_inverse=True)
    if unknown not in classes.tolist():
        raise DeepSimplexError(
            f"the unknown label {unknown!r} among labels or predicted",
            f"only {_few(classes)}",
            "check the label given as unknown; for a closed set use sklearn.metrics.f1_score",
        )
    hits = np.bincount(index[: len(truth)][truth == guess], minlength=len(classes))
    return float(np.mean(2 * hits / np.bincount(index)))


def open_set_report(
    known_scores: ArrayLike,
    known_labels: ArrayLike,
    known_predicted: ArrayLike,
    unknown_scores: ArrayLike,
) -> dict[str, float]:
    """The figures of one trial; fpr95 is `fpr_at` 0.95."""
    truth, guess = _label_pair(known_labels, known_predicted)
    known, unknown = _score_pair(known_scores, unknown_scores)
    return {
        "accuracy": accuracy(truth, guess),
        "auroc": auroc(known, unknown),
        "oscr": oscr(known, truth == guess, unknown),
        "fpr95": fpr_at(known, unknown, 0.95),
        "aupr_in": aupr_in(known, unknown),
        "aupr_out": aupr_out(known, unknown),
        "detection_accuracy": detection_accuracy(known, unknown),
    }


@dataclass(frozen=True)
class Compactness:
    """The neural-collapse measures; what `compactness` returns."""

    within: float
    between: float
    ratio: float
    nc1: float
    lengths: tuple[float, ...]
    length_cv: float
    cosine_mean: float
    cosine_sd: float
    cosine_gap: float


def compactness(features: ArrayLike, labels: ArrayLike) -> Compactness:
    """How near the features are to one tight cluster a class on a regular simplex.

    With class means μ_c, their mean μ = (1/C) Σ_c μ_c and m_c = μ_c − μ; features (n, d),
    labels (n,), all in float64:

    within      (1/n) Σ_i ‖f_i − μ_{y_i}‖²
    between     (1/C) Σ_c ‖m_c‖²
    ratio       within / between
    nc1         tr(Σ_W Σ_B⁺) / C, Σ_W = (1/n) Σ_i (f_i − μ_{y_i})(f_i − μ_{y_i})ᵀ,
                Σ_B = (1/C) Σ_c m_c m_cᵀ
    lengths     ‖m_c‖, in the order of the sorted labels
    length_cv   sd of the lengths / their mean
    cosine_*    mean and sd of cos(m_c, m_c′) over pairs c < c′, and the largest
                |cos + 1/(C−1)|: 0 for a regular simplex

    A collapsed simplex has within = nc1 = length_cv = cosine_sd = cosine_gap = 0. Where all
    class means coincide, ratio and nc1 are inf; cosines with a mean at μ are NaN.
    """
    points, index, counts = _class_sorted(features, labels)
    starts = np.cumsum(counts) - counts
    means = np.add.reduceat(points, starts, axis=0) / counts[:, None]
    points -= means[index]
    means -= means.mean(axis=0)
    C = len(means)

    lengths = np.linalg.norm(means, axis=1)
    within = float(np.vdot(points, points)) / len(points)
    between = float(np.vdot(means, means)) / C
    cosines = _pairwise_cosines(means, lengths)
    return Compactness(
        within=within,
        between=between,
        ratio=within / between if between else math.inf,
        nc1=_nc1(points, means) if between else math.inf,
        lengths=tuple(lengths.tolist()),
        length_cv=float(lengths.std() / lengths.mean()) if between else math.nan,
        cosine_mean=float(cosines.mean()),
        cosine_sd=float(cosines.std()),
        cosine_gap=float(np.abs(cosines + 1 / (C - 1)).max()),
    )


def _nc1(residuals: NDArray[np.float64], means: NDArray[np.float64]) -> float:
    """tr(Σ_W Σ_B⁺)/C from the thin SVD of the centred means: no d × d matrix."""
    C, d = means.shape
    _, singular, axes = np.linalg.svd(means / math.sqrt(C), full_matrices=False)
    # The rows of `means` sum to 0, so the rank is at most C − 1.
    real = singular[: C - 1] > singular[0] * max(C, d) * np.finfo(np.float64).eps
    whiten = (axes[: C - 1][real] / singular[: C - 1][real, None]).T
    projected = residuals @ whiten
    return float(np.vdot(projected, projected)) / len(residuals) / C


def _pairwise_cosines(
    means: NDArray[np.float64], lengths: NDArray[np.float64]
) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        unit = means / lengths[:, None]
    return (unit @ unit.T)[np.triu_indices(len(means), 1)]


def _class_sorted(
    features: ArrayLike, labels: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """A float64 copy of the features, grouped by class; class index (n,), class sizes (C,)."""
    raw = _array(features, "features")
    if raw.ndim != 2 or raw.dtype.kind not in "iuf" or 0 in raw.shape:
        raise DeepSimplexError(
            "features of shape (n, d)", f"shape {raw.shape} of {raw.dtype}", "flatten each sample"
        )
    names = _labels(labels, "labels")
    _same_length(raw, names, "features", "labels")
    _, index, counts = np.unique(names, return_inverse=True, return_counts=True)
    if len(counts) < 2:
        raise DeepSimplexError(
            "2 or more classes", "1", "compactness compares classes; add samples of another"
        )
    order = np.argsort(index, kind="stable")
    points = raw[order].astype(np.float64)
    if not np.isfinite(points).all():
        raise DeepSimplexError(
            "finite features", "NaN or infinity among them", "look for a diverged training"
        )
    # Far from the origin the class sums would lose the digits that tell the means apart, and
    # this makes the means of constant features exactly equal.
    points -= points[0].copy()
    return points, index[order], counts


def _half_wins(known: NDArray[Any], unknown: NDArray[Any]) -> int:
    """Σ over pairs of 2·[k > u] + [k = u]. Sorted queries keep the search in cache."""
    known, unknown = np.sort(known), np.sort(unknown)
    below = np.searchsorted(unknown, known, "left")
    # Ties are rare as a rule: only tied knowns pay for a second search.
    tied = unknown.take(below, mode="clip") == known
    ties = np.searchsorted(unknown, known[tied], "right") - below[tied]
    return 2 * int(below.sum()) + int(ties.sum())


def _mean_precision(hits: NDArray[np.intp], false_alarms: NDArray[np.intp]) -> float:
    return float(np.mean(hits / (hits + false_alarms)))


def _fraction(tpr: float) -> Fraction:
    try:
        exact = Fraction(str(tpr))
    except ValueError:
        exact = Fraction(0)
    if not 0 < exact <= 1:
        raise DeepSimplexError("tpr in (0, 1]", repr(tpr), "0.95 is the usual choice")
    return exact


def _array(values: ArrayLike, name: str) -> NDArray[Any]:
    """As NumPy, on the CPU, precision kept; half precisions widened, which is exact."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        tensor: Any = values.detach().cpu()
        half = tensor.is_floating_point() and tensor.dtype.itemsize < 4
        return np.asarray((tensor.float() if half else tensor).numpy())
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DeepSimplexError(
            f"{name} as one array", f"a {type(values).__name__} of uneven parts", "make it regular"
        ) from error
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _vector(values: ArrayLike, name: str) -> NDArray[Any]:
    array = _array(values, name)
    if array.ndim != 1 or array.size == 0:
        raise DeepSimplexError(
            f"{name} of shape (n,), n ≥ 1",
            f"shape {array.shape}",
            "pass one value an image" if array.size else "pass at least one image",
        )
    return array


def _scores(values: ArrayLike, name: str) -> NDArray[Any]:
    array = _vector(values, name)
    if array.dtype.kind not in "biuf":
        raise DeepSimplexError(f"{name} to be real numbers", f"{array.dtype}", "pass scores")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise DeepSimplexError(
            f"{name} without NaN",
            f"{int(np.isnan(array).sum())} NaN of {array.size}",
            "a NaN has no rank; look for the image or layer that makes it",
        )
    return array


def _score_pair(
    known_scores: ArrayLike, unknown_scores: ArrayLike
) -> tuple[NDArray[Any], NDArray[Any]]:
    return _scores(known_scores, "known_scores"), _scores(unknown_scores, "unknown_scores")


def _labels(values: ArrayLike, name: str) -> NDArray[Any]:
    # NumPy would turn a mixed list into text, and then 1 would equal "1".
    plain = isinstance(values, list | tuple)
    array = _vector(np.array(values, dtype=object) if plain else values, name)
    if array.dtype.kind == "O" and len({isinstance(item, str) for item in array}) == 1:
        array = _vector(_array(array.tolist(), name), name)
    if array.dtype.kind not in "biufU" or (array.dtype.kind == "f" and np.isnan(array).any()):
        raise DeepSimplexError(
            f"{name} to be all numbers or all names",
            f"{array.dtype}, first {array[:3].tolist()}",
            "encode each class as one integer or one string",
        )
    return array


def _label_pair(labels: ArrayLike, predicted: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    truth, guess = _labels(labels, "labels"), _labels(predicted, "predicted")
    _same_length(truth, guess, "labels", "predicted")
    if (truth.dtype.kind == "U") != (guess.dtype.kind == "U"):
        raise DeepSimplexError(
            "labels and predicted of one kind",
            f"{truth.dtype} and {guess.dtype}",
            "use class names for both or class numbers for both",
        )
    return truth, guess


def _same_length(first: NDArray[Any], second: NDArray[Any], name: str, other: str) -> None:
    if len(first) != len(second):
        raise DeepSimplexError(
            f"{name} and {other} of one length",
            f"{len(first)} and {len(second)}",
            "pass them for the same images in the same order",
        )


def _few(classes: NDArray[Any]) -> str:
    shown = ", ".join(repr(name) for name in classes[:5].tolist())
    return shown + (", …" if len(classes) > 5 else "")
