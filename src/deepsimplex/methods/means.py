"""Class means of training features, and distances to points: how a row without weights predicts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepsimplex.methods.base import Passes


def class_means(
    passes: Passes,
    features: Callable[[Tensor], Tensor],
    classes: int,
    correct: Callable[[Tensor, Tensor], Tensor] | None = None,
    otherwise: Tensor | None = None,
) -> Tensor:
    """Mean feature of each class over one pass of the training set: (C, d), float32.

    `correct`, features and labels → (n,), says which samples count. A class without one takes its
    row of `otherwise`, or the mean of all it has, the origin without an image. Summed in float64.
    """
    total = count = torch.zeros(())
    for batch in passes():
        rows, labels = features(batch.images).double(), batch.labels
        right = torch.ones_like(labels) if correct is None else correct(rows, labels).long()
        if total.ndim == 0:
            total = rows.new_zeros(2 * classes, rows.shape[1])
            count = rows.new_zeros(2 * classes)
        place = 2 * labels + right  # the wrong ones of each class, then the right ones
        total.index_add_(0, place, rows)
        count.index_add_(0, place, torch.ones_like(rows[:, 0]))
    total, count = total.view(classes, 2, -1), count.view(classes, 2, 1)
    if otherwise is None:
        otherwise = total.sum(1) / count.sum(1).clamp_min(1)
    means = total[:, 1] / count[:, 1].clamp_min(1)
    return torch.where(count[:, 1] > 0, means, otherwise).float()


def pair_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖, subtracted first, with gradient 0, not ∞, at 0; (n, d), (m, d) → (n, m)."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
