"""Weibull tails of distances to class means, and OpenMax's use of them (Bendale, Boult 2016).

Fitted on the host in float64, once, after training; evaluated in torch, all classes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from deepsimplex.methods.base import Passes
from deepsimplex.methods.means import class_means

SHIFT = 10_000.0
"""LibMR's translation: a tail begins at this number, which makes κ about 1e4 over its width."""

NO_TAIL = (0.0, 1e30, 1.0)
"""τ, λ, κ that reject nothing: w is 0 at every distance."""

Activations = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Images (n, …) → logits (n, C), and the vectors (n, d) whose distances count."""

Distance = Callable[[Tensor, Tensor], Tensor]
"""Rows (n, d) and points (n, d) → distances (n,)."""


def no_tails(classes: int) -> Tensor:
    """The buffer before a fit: (C, 3), float64."""
    return torch.tensor([NO_TAIL] * classes, dtype=torch.float64)


def fit_tails(distances_by_class: Sequence[Tensor], tail: int) -> Tensor:
    """τ, λ, κ of each class from its `tail` largest distances: C tensors (n_j,) → (C, 3).

    A tail is a fifth of a class at most (but three samples): fitted to most of a small class, w
    would be far from 0 at a typical sample. A class whose tail has no width (no sample, one, or
    two, which are as far from their mean as each other) takes the fit to all classes' distances
    together; if these have no width either, it rejects nothing. float64, on the CPU.
    """
    rows = [d.detach().double().cpu().numpy() for d in distances_by_class]
    together = _fit(np.concatenate([np.zeros(0), *rows]), tail) or NO_TAIL
    return torch.tensor([_fit(row, tail) or together for row in rows], dtype=torch.float64)


def tail_probability(distances: Tensor, parameters: Tensor) -> Tensor:
    """w_j = 1 − exp(−((D_j + 10000 − τ_j)/λ_j)^κ_j); (n, C), (C, 3) → (n, C), float64.

    Rises with the distance, 0 at a class's typical sample and 1 far away.
    """
    tau, scale, shape = parameters.double().unbind(1)
    shifted = (distances.double() + (SHIFT - tau)).clamp_min(1e-300)  # below its support: w = 0
    power = shape * (shifted.log() - scale.log())
    return -torch.expm1(-power.clamp_max(700.0).exp())  # e⁷⁰⁹ is the last that is finite


def openmax_logits(logits: Tensor, w: Tensor, alpha: int) -> Tensor:
    """[ẑ_0, ẑ_1 … ẑ_C]: (n, C), (n, C) → (n, C+1), float64, the unknown class first.

    ẑ_j = z_j (1 − a_r w_j) with a_r = (α + 1 − r)/α for the r-th largest logit, r ≤ α ≤ C, and
    0 for the others; ẑ_0 = Σ_j (z_j − ẑ_j). As published, a negative logit is raised by its w
    and lowers ẑ_0: the ten largest logits of a thousand are positive, of six they are not.
    """
    z = logits.double()
    alpha = min(alpha, z.shape[1])
    rank = z.argsort(1, descending=True).argsort(1)  # 0 is the largest
    taken = z * ((alpha - rank).clamp_min(0) / max(alpha, 1)) * w
    return torch.cat([taken.sum(1, keepdim=True), z - taken], 1)


def unknown_odds(reweighted: Tensor) -> Tensor:
    """log((1 − P̂_0)/P̂_0), P̂ = softmax over [ẑ_0, ẑ]; (n, C+1) → (n,).

    It ranks as 1 − P̂_0 does, but never rounds to 1.
    """
    return reweighted[:, 1:].logsumexp(1) - reweighted[:, 0]


def fit_means_and_tails(
    passes: Passes, activations: Activations, classes: int, distance: Distance, tail: int
) -> tuple[Tensor, Tensor]:
    """Class means of the correctly classified training samples, and the tails around them.

    (C, d) in float32 and (C, 3) in float64. A class without a correct sample takes the mean of
    all it has, and the origin if it has none.
    """

    def beside(images: Tensor) -> Tensor:
        return torch.cat(activations(images), 1)

    def correct(logits_and_rows: Tensor, labels: Tensor) -> Tensor:
        return logits_and_rows[:, :classes].argmax(1) == labels

    means = class_means(passes, beside, classes, correct)[:, classes:]
    distances, labels = [], []
    for batch in passes():
        logits, rows = activations(batch.images)
        own = distance(rows.double(), means[batch.labels].double())
        right = logits.argmax(1) == batch.labels
        distances.append(own[right].cpu())
        labels.append(batch.labels[right].cpu())
    all_distances, all_labels = torch.cat(distances), torch.cat(labels)
    order = all_labels.argsort(stable=True)
    counts = torch.bincount(all_labels, minlength=classes).tolist()
    return means, fit_tails(all_distances[order].split(counts), tail).to(means.device)


def _fit(distances: np.ndarray, tail: int) -> tuple[float, float, float] | None:
    """Maximum likelihood of t = D + 10000 − τ, τ the least of the tail; None without a width.

    κ solves Σ t^κ log t / Σ t^κ − mean log t = 1/κ, whose left side rises with κ; then
    λ^κ = mean t^κ. With v = log(t/t_max) scaled to −1 … 0 the root is between ½ and n² + 2.
    """
    largest = np.sort(distances)[-min(tail, max(3, len(distances) // 5)) :]
    if len(largest) < 2 or largest[-1] - largest[0] <= 1e-6 * largest[-1]:
        return None
    logs = np.log1p((largest - largest[0]) / SHIFT)
    width = logs[-1]
    v = (logs - width) / width

    def slope(k: float) -> float:
        weights = np.exp(k * v)
        return float((weights * v).sum() / weights.sum() - v.mean() - 1 / k)

    k = brentq(slope, 0.5, len(v) ** 2 + 2.0, xtol=1e-13, rtol=1e-13)
    kappa = k / width
    scale = SHIFT * math.exp(width + math.log(np.exp(k * v).mean()) / kappa)
    return float(largest[0]), scale, float(kappa)
