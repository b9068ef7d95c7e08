"""Eqs. 4–7 and the background terms, as functions of features at unit radius.

Margins and temperatures are explicit: at unit radius eq. 4 has no parameter, and what the paper
calls u elsewhere is a margin (eqs. 5, 6) or a temperature (eq. 7). The `literal_…` forms take
features at radius u and the paper's own m, for its tables.

Every loss is computed in float32 (float64 for float64 features) inside any autocast, and none
makes a tensor larger than (n, C), (K, C) or (n, K). `check=False` skips the checks that read
values, and with them the wait for a GPU.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from deepsimplex.errors import DeepSimplexError
from deepsimplex.layers import has_triton
from deepsimplex.simplex import (
    Simplex,
    centroid_squared_distance,
    check_shapes,
    check_values,
    dot_products,
    length,
    own_squared_distance,
    squared_distances,
    wide,
)

Reading = Literal["A", "B", "C"]
Margin = float | Literal["auto"]

MANY = 10_000
"""Classes from which eq. 4 on a GPU is one kernel (kernels/loss.py, results/bench-loss.json)."""


def simplex_loss(
    simplex: Simplex, features: Tensor, labels: Tensor, *, check: bool = True
) -> Tensor:
    """(1/n)Σ_i ‖f_i − v_{y_i}‖², eq. 4; features (n, d), labels (n,) → ()."""
    with _full_precision(simplex, features, labels, check=check):
        single = features.dtype != torch.float64
        if simplex.classes >= MANY and features.is_cuda and single and has_triton():
            from deepsimplex.kernels.loss import fused_simplex_loss

            return fused_simplex_loss(simplex, features, labels)
        return own_squared_distance(simplex, features, labels).mean()


def hinge_loss(
    simplex: Simplex, features: Tensor, labels: Tensor, margin: float, *, check: bool = True
) -> Tensor:
    """(1/n)Σ_i [‖f_i − v_{y_i}‖² − m]₊, eq. 6: nothing is asked inside the radius √m."""
    with _full_precision(simplex, features, labels, check=check):
        return F.relu(own_squared_distance(simplex, features, labels) - margin).mean()


def softmax_loss(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor,
    temperature: float,
    label_smoothing: float = 0.0,
    *,
    check: bool = True,
) -> Tensor:
    """−(1/n)Σ_i Σ_j q_ij log softmax_j(f_i·v_j / T), eq. 7 with b_j = 0.

    q is the label's one-hot vector, a share `label_smoothing` of it spread over all classes.
    """
    with _full_precision(simplex, features, labels, check=check):
        logits = dot_products(simplex, features) / temperature
        return F.cross_entropy(logits, labels.long(), label_smoothing=label_smoothing)


def background_loss(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor,
    background: Tensor,
    margin: Margin,
    *,
    reading: Reading = "A",
    check: bool = True,
) -> Tensor:
    """Eq. 4 plus `pair_hinge`, eq. 5 with λ = 1/(2nK); background (K, d); K = 0 gives eq. 4."""
    hinge = pair_hinge(simplex, features, labels, background, margin, reading=reading, check=check)
    return simplex_loss(simplex, features, labels, check=False) + hinge


def pair_hinge(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor,
    background: Tensor,
    margin: Margin,
    *,
    reading: Reading = "A",
    check: bool = True,
) -> Tensor:
    """½·mean over all pairs (i, k) of a hinge: background at least a margin farther than known.

    With r_i = ‖f_i − v_{y_i}‖ and D_ki = ‖f_k − v_{y_i}‖, the three readings of eq. 5 are
    A  [m + r_i² − D_ki²]₊    as printed, and the authors' code: m is compared with squares
    B  [m² + r_i² − D_ki²]₊   m is a length
    C  [m + r_i − D_ki]₊      plain distances
    `"auto"` takes for m the largest r_i of the batch (its square in reading A), as the paper's
    appendix describes; no gradient flows through it.
    """
    if reading not in get_args(Reading):
        raise DeepSimplexError(
            "reading 'A', 'B' or 'C'", repr(reading), "see pair_hinge's docstring"
        )
    if isinstance(margin, str) and margin != "auto":
        raise DeepSimplexError("a margin as a number or 'auto'", repr(margin), "choose one")
    with _full_precision(simplex, features, labels, background, check=check):
        own = own_squared_distance(simplex, features, labels)
        if len(background) == 0:
            return own.new_zeros(())
        away = squared_distances(simplex, background)[:, labels.long()]
        if reading == "C":
            own, away = length(own), length(away)
        m = own.detach().amax() if margin == "auto" else margin
        if reading == "B" and margin != "auto":
            m = m**2
        return F.relu(m + own - away).mean() / 2


def centroid_pull(simplex: Simplex, background: Tensor, *, check: bool = True) -> Tensor:
    """(1/K)Σ_k ‖f_k − centroid‖²: background drawn to the point equally far from every class."""
    with _full_precision(simplex, background, check=check):
        if len(background) == 0:
            return wide(background).new_zeros(())
        return centroid_squared_distance(simplex, background).mean()


def authors_loss(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor,
    background: Tensor,
    margin: float,
    *,
    ramp: float | None = None,
    check: bool = True,
) -> Tensor:
    """The three terms of the authors' code, all distances squared:

    (1/2nd)Σ_i r_i + (1/2Cn)Σ_i Σ_{j≠y_i}[m + r_i − D_ij]₊ + (1/2nK)Σ_i Σ_k[m + r_i − D_{k,y_i}]₊

    with `ramp` clipping the hinge of the last term from above. Without background the last is left
    out; the authors' own script for that case has eq. 4 over d alone, without rivals.
    """
    with _full_precision(simplex, features, labels, background, check=check):
        targets = labels.long()[:, None]
        own = own_squared_distance(simplex, features, labels)[:, None]
        rivals = F.relu(margin + own - squared_distances(simplex, features))
        rivals = rivals.scatter(1, targets, 0).sum() / (2 * simplex.classes * len(features))
        total = own.mean() / (2 * simplex.dim) + rivals
        if len(background) == 0:
            return total
        away = squared_distances(simplex, background)[:, targets[:, 0]]
        pairs = F.relu(margin + own.T - away)
        if ramp is not None:
            pairs = pairs.clamp_max(ramp)
        return total + pairs.mean() / 2


def literal_simplex_loss(
    simplex: Simplex, features: Tensor, labels: Tensor, radius: float = 64.0
) -> Tensor:
    """Eq. 4 as printed, features at radius u: (1/n)Σ_i ‖f_i − u·v_{y_i}‖²."""
    return radius**2 * simplex_loss(simplex, wide(features) / radius, labels)


def literal_hinge_loss(
    simplex: Simplex, features: Tensor, labels: Tensor, margin: float, radius: float = 64.0
) -> Tensor:
    """Eq. 6 as printed, features at radius u; m is compared with squared distances."""
    return radius**2 * hinge_loss(simplex, wide(features) / radius, labels, margin / radius**2)


def literal_softmax_loss(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor,
    radius: float = 5.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Eq. 7 as printed: logits u·v_j·f_i + b_j with features at radius u, biases (C,)."""
    with _full_precision(simplex, features, labels, check=True):
        logits = radius * dot_products(simplex, features)
        return F.cross_entropy(logits if bias is None else logits + bias, labels.long())


def literal_background_loss(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor,
    background: Tensor,
    radius: float = 64.0,
    margin: float | None = None,
    weight: float | None = None,
    reading: Reading = "A",
) -> Tensor:
    """Eq. 5 as printed, features at radius u; m = u/2 and λ = 1/(2nK) unless given."""
    m = radius / 2 if margin is None else margin
    f, b = wide(features) / radius, wide(background) / radius
    unit = radius if reading == "C" else radius**2
    hinge = unit * pair_hinge(
        simplex, f, labels, b, m / radius**2 if reading == "A" else m / radius, reading=reading
    )
    if weight is not None:
        hinge = 2 * weight * len(features) * len(background) * hinge
    return literal_simplex_loss(simplex, features, labels, radius) + hinge


def literal_authors_loss(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor,
    background: Tensor,
    radius: float = 200.0,
    margin: float = 48.0,
    ramp: float | None = None,
) -> Tensor:
    """`authors_loss` at radius u with the script's own u = 200, m = 48."""
    return radius**2 * authors_loss(
        simplex,
        wide(features) / radius,
        labels,
        wide(background) / radius,
        margin / radius**2,
        ramp=None if ramp is None else ramp / radius**2,
    )


def _full_precision(
    simplex: Simplex,
    features: Tensor,
    labels: Tensor | None = None,
    background: Tensor | None = None,
    *,
    check: bool,
) -> torch.autocast:
    """Check the input; the returned context switches autocast off."""
    check_shapes(simplex, features, labels)
    if labels is not None and len(labels) == 0:
        raise DeepSimplexError("at least 1 sample", "an empty batch", "drop empty batches")
    if background is not None:
        check_shapes(simplex, background)
    if check:
        check_values(simplex, features, labels)
        if background is not None:
            check_values(simplex, background)
    return torch.autocast(features.device.type, enabled=False)
