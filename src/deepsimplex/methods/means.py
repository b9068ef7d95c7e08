"""Class means of training features: what a row without a classifier predicts by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepsimplex.methods.base import Passes


def class_means(passes: Passes, features: Callable[[Tensor], Tensor], classes: int) -> Tensor:
    """Mean feature of each class over one pass of the training set: (C, d), float32.

    Summed in float64. A class without an image keeps the origin.
    """
    total = count = torch.zeros(())
    for batch in passes():
        rows = features(batch.images).double()
        if total.ndim == 0:
            total = rows.new_zeros(classes, rows.shape[1])
            count = rows.new_zeros(classes)
        total.index_add_(0, batch.labels, rows)
        count.index_add_(0, batch.labels, torch.ones_like(rows[:, 0]))
    return (total / count.clamp_min(1)[:, None]).float()
