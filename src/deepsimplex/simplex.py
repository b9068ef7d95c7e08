"""The geometry: vertices of a regular simplex as a formula, never as a C×d matrix (eqs. 1–3).

With m = V−1 coordinates for V vertices, t = Σf over those m coordinates and

    v_1 = m^−½·1,   v_j = κ·1 + η·e_{j−1}  (2 ≤ j ≤ V),                              eq. 1
    κ = −(1 + √V) / m^{3/2},   η = √(V / m),                                          eq. 2

every dot product is f·v_1 = t·m^−½ or f·v_j = κt + ηf_{j−1}: O(d) a sample for all classes at
once, and the nearest vertex is an argmax over the feature itself and one comparison. Everything
here is at unit radius; a radius u (eq. 3, s_j = u·v_j) is a unit of length, see
docs/decisions/0001-radius-is-a-unit.md. Classes are counted from 0: class 0 sits at v_1.

Pure functions `f(simplex, features, …)` check nothing that would make a GPU wait; the methods of
`Simplex` check their input and call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from deepsimplex.errors import DeepSimplexError

Kind = Literal["regular", "truncated", "doubled"]

# Elements handled at a time: 8 MiB of float32 keeps the working copies far below the features
# of a million-class batch and never splits an ordinary one.
_CHUNK = 1 << 21

# The largest (C−1)² for which a dimension-augmentation module is proposed: 1.6 GB of float32.
DAM_WEIGHTS = 400_000_000


class Nearest(NamedTuple):
    """Label of the nearest centre and the distance to it, both (n,)."""

    label: Tensor
    distance: Tensor


@dataclass(frozen=True)
class Simplex:
    """C class centres in R^d at unit radius.

    `regular`   the C-vertex simplex, zero-padded to d ≥ C−1: the largest margin for C classes.
    `truncated` the first C of the d+1 vertices in R^d: the authors' code; d+1−C vertices stay
                free for later classes.
    `doubled`   S ∪ −S with the d+1 vertices of R^d: up to 2d+2 centres, largest cosine 1/d.
    """

    classes: int
    dim: int
    kind: Kind = "regular"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise DeepSimplexError(
                f"kind to be one of {', '.join(get_args(Kind))}", repr(self.kind), "choose one"
            )
        for name in ("classes", "dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise DeepSimplexError(f"{name} to be an int", repr(value), "pass a whole number")
            object.__setattr__(self, name, int(value))
        if self.classes < 2:
            raise DeepSimplexError(
                "at least 2 classes",
                f"{self.classes}",
                "a simplex needs a second class to be far from",
            )
        least = 2 if self.kind == "doubled" else 1
        if self.dim < least:
            raise DeepSimplexError(
                f"dim of {least} or more for kind {self.kind!r}",
                f"{self.dim}",
                "use wider features",
            )
        if self.classes > self.capacity:
            raise _too_narrow(self.classes, self.dim, self.kind)

    @property
    def vertices(self) -> int:
        """V, the vertices of the underlying simplex."""
        return self.classes if self.kind == "regular" else self.dim + 1

    @property
    def span(self) -> int:
        """m = V−1, the coordinates the vertices live in; the other d−m are zero."""
        return self.vertices - 1

    @property
    def capacity(self) -> int:
        """How many centres this kind offers in R^d."""
        return 2 * self.dim + 2 if self.kind == "doubled" else self.dim + 1

    @property
    def free(self) -> int:
        """Centres that later classes can take without moving the present ones."""
        return 0 if self.kind == "regular" else self.capacity - self.classes

    @property
    def largest_cosine(self) -> float:
        """Largest cosine between two of the used centres: −1/(V−1), or 1/d once S meets −S."""
        if self.classes > self.vertices:
            return 1 / self.dim
        return -1 / self.span

    @property
    def margin(self) -> float:
        """Smallest distance between two of the used centres, √(2 − 2·largest cosine)."""
        return math.sqrt(2 - 2 * self.largest_cosine)

    def centres(self, labels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """v_y for each label: (n,) → (n, d)."""
        _check_labels(self, labels, None)
        return centres(self, labels, dtype)

    def centroid(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Tensor:
        """Mean of the used centres, (d,); zero for `regular`."""
        return centroid(self, dtype, device)

    def dot_products(self, features: Tensor) -> Tensor:
        """f·v_j: (n, d) → (n, C)."""
        _check_features(self, features)
        return dot_products(self, features)

    def squared_distances(self, features: Tensor) -> Tensor:
        """‖f − v_j‖²: (n, d) → (n, C)."""
        _check_features(self, features)
        return squared_distances(self, features)

    def own_squared_distance(self, features: Tensor, labels: Tensor) -> Tensor:
        """‖f_i − v_{y_i}‖²: (n, d), (n,) → (n,)."""
        _check_features(self, features)
        _check_labels(self, labels, len(features))
        return own_squared_distance(self, features, labels)

    def own_distance(self, features: Tensor, labels: Tensor) -> Tensor:
        """‖f_i − v_{y_i}‖: (n, d), (n,) → (n,); its gradient at the centre itself is 0."""
        return length(self.own_squared_distance(features, labels))

    def nearest(self, features: Tensor) -> Nearest:
        """The nearest centre and the distance to it: (n, d) → (n,), (n,)."""
        _check_features(self, features)
        index = nearest_index(self, features)
        return Nearest(index, length(own_squared_distance(self, features, index)))


def constants(vertices: int) -> tuple[float, float, float]:
    """(m^−½, κ, η) of eqs. 1 and 2 for V vertices."""
    m = vertices - 1
    return m**-0.5, -(1 + math.sqrt(vertices)) / m**1.5, math.sqrt(vertices / m)


def dot_products(simplex: Simplex, features: Tensor) -> Tensor:
    """f·v_1 = t·m^−½, f·v_j = κt + ηf_{j−1}, and their negatives for −S: (n, d) → (n, C)."""
    f = wide(features)[:, : simplex.span]
    first, kappa, eta = constants(simplex.vertices)
    t = f.sum(1, keepdim=True)
    positive = min(simplex.classes, simplex.vertices)
    dots = torch.cat([first * t, torch.add(kappa * t, f[:, : positive - 1], alpha=eta)], 1)
    if simplex.classes > positive:
        dots = torch.cat([dots, -dots[:, : simplex.classes - positive]], 1)
    return dots


def squared_distances(simplex: Simplex, features: Tensor) -> Tensor:
    """‖f − v_j‖²: (n, d) → (n, C).

    ‖f‖² + 1 − 2f·v_j is accurate except close to a vertex, and only the nearest can be close:
    that one entry is replaced by the subtracted form.
    """
    f = wide(features)
    expanded = f.square().sum(1, keepdim=True) + 1 - 2 * dot_products(simplex, f)
    nearest = expanded.detach().argmin(1)
    exact = own_squared_distance(simplex, f, nearest)
    return expanded.scatter(1, nearest[:, None], exact[:, None])


def own_squared_distance(simplex: Simplex, features: Tensor, labels: Tensor) -> Tensor:
    """‖f_i − v_{y_i}‖², coordinate by coordinate: (n, d), (n,) → (n,)."""
    return _by_rows(lambda f, y: _own_squared_distance(simplex, f, y), features, labels)


def _own_squared_distance(simplex: Simplex, features: Tensor, labels: Tensor) -> Tensor:
    # Subtract first, square after, and subtract each constant as a high and a low part: near the
    # vertex the first subtraction is exact, the second restores what rounding the constant lost.
    f, m = wide(features), simplex.span
    own, rest_high, rest_low, own_high, own_low = _coordinates(simplex, labels, f)
    difference = (f[:, :m] - rest_high) - rest_low
    own_difference = (f.gather(1, own) - own_high) - own_low
    total = difference.scatter(1, own, own_difference).square().sum(1)
    if simplex.dim > m:
        total = total + f[:, m:].square().sum(1)
    return total


def nearest_index(simplex: Simplex, features: Tensor) -> Tensor:
    """argmin_j ‖f − v_j‖ = argmax_j f·v_j (equal norms): (n, d) → (n,); carries no gradient."""
    return _by_rows(lambda f: _nearest_index(simplex, f), features.detach())


def _nearest_index(simplex: Simplex, features: Tensor) -> Tensor:
    f = wide(features)[:, : simplex.span]
    first, kappa, eta = constants(simplex.vertices)
    t = f.sum(1)
    positive = min(simplex.classes, simplex.vertices)
    largest, index = f[:, : positive - 1].max(1)
    best = kappa * t + eta * largest
    index = torch.where(first * t >= best, 0, index + 1)
    best = torch.maximum(best, first * t)
    negative = simplex.classes - positive
    if negative > 0:
        index = torch.where(-first * t > best, positive, index)
        best = torch.maximum(best, -first * t)
    if negative > 1:
        smallest, opposite = f[:, : negative - 1].min(1)
        index = torch.where(-kappa * t - eta * smallest > best, opposite + positive + 1, index)
    return index


def centres(simplex: Simplex, labels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """v_y for each label: (n,) → (n, d)."""
    out = torch.zeros(len(labels), simplex.dim, dtype=dtype, device=labels.device)
    own, rest_high, rest_low, own_high, own_low = _coordinates(simplex, labels, out)
    out[:, : simplex.span] = rest_high + rest_low
    return out.scatter(1, own, own_high + own_low)


def centroid(
    simplex: Simplex, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """(1/C)Σ_j v_j over the used centres, (d,)."""
    out = torch.zeros(simplex.dim, dtype=torch.float64, device=device)
    if simplex.kind == "regular":
        return out.to(dtype)
    first, kappa, eta = constants(simplex.vertices)
    used, sign = simplex.classes, 1.0
    if used > simplex.vertices:  # all of S sums to 0: what is left is minus the first few
        used, sign = used - simplex.vertices, -1.0
    if used < simplex.vertices:
        out += first + (used - 1) * kappa
        out[: used - 1] += eta
    return (sign / simplex.classes * out).to(dtype)


def centroid_squared_distance(simplex: Simplex, features: Tensor) -> Tensor:
    """‖f − centroid‖²: (n, d) → (n,)."""
    f = wide(features)
    if simplex.kind == "regular":
        return f.square().sum(1)
    return (f - centroid(simplex, f.dtype, f.device)).square().sum(1)


def length(squared: Tensor) -> Tensor:
    """√x with gradient 0, not ∞, at 0."""
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1).sqrt(), 0)


def wide(features: Tensor) -> Tensor:
    """float32 or float64 as they are; half precisions widened to float32."""
    return features if features.dtype in (torch.float32, torch.float64) else features.float()


def _coordinates(
    simplex: Simplex, labels: Tensor, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where each label's vertex has its own coordinate, and the values there and elsewhere.

    → index (n, 1), then rest high, rest low, own high, own low, each (n, 1) in the dtype of
    `like`. v_1 has no own coordinate: index 0 with the value of the rest serves.
    """
    first, kappa, eta = constants(simplex.vertices)
    labels = labels.long()[:, None]
    negative = labels >= simplex.vertices
    base = labels - simplex.vertices * negative
    is_first = base == 0
    sign = 1 - 2 * negative.to(like.dtype)

    def parts(at_first: float, otherwise: float) -> tuple[Tensor, Tensor]:
        (fh, fl), (oh, ol) = (
            split_constant(at_first, like.dtype),
            split_constant(otherwise, like.dtype),
        )
        high = torch.full_like(sign, oh).masked_fill(is_first, fh) * sign
        low = torch.full_like(sign, ol).masked_fill(is_first, fl) * sign
        return high, low

    rest, own = parts(first, kappa), parts(first, kappa + eta)
    return ((base - 1).clamp_min(0), *rest, *own)


def split_constant(value: float, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """value = high + low with high exact in `dtype`."""
    if dtype == torch.float64:
        return value, 0.0
    high = float(np.float32(value))
    return high, value - high


def _by_rows(function: Callable[..., Tensor], features: Tensor, *others: Tensor) -> Tensor:
    """function(features, …) a few rows at a time when the batch is huge."""
    rows = max(1, _CHUNK // max(1, features.shape[1]))
    if len(features) <= rows:
        return function(features, *others)
    pieces = zip(*(tensor.split(rows) for tensor in (features, *others)), strict=True)
    return torch.cat([function(*piece) for piece in pieces])


def check_shapes(simplex: Simplex, features: Tensor, labels: Tensor | None = None) -> None:
    """The checks that cost nothing on any device: types and shapes."""
    if not isinstance(features, Tensor):
        raise DeepSimplexError(
            "features as a torch.Tensor", type(features).__name__, "wrap them in torch.as_tensor"
        )
    if features.ndim != 2 or features.shape[1] != simplex.dim:
        raise DeepSimplexError(
            f"features of shape (n, {simplex.dim})",
            f"{tuple(features.shape)}",
            "make the last layer's width equal to the simplex's dim",
        )
    if not features.dtype.is_floating_point:
        raise DeepSimplexError(
            "floating-point features", f"{features.dtype}", "convert with .float()"
        )
    if labels is None:
        return
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.is_complex():
        got = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
        raise DeepSimplexError("labels as an integer torch.Tensor", got, "convert with .long()")
    if labels.shape != (len(features),):
        raise DeepSimplexError(
            f"labels of shape ({len(features)},)",
            f"{tuple(labels.shape)}",
            "give one label for each feature vector",
        )


def check_values(simplex: Simplex, features: Tensor, labels: Tensor | None = None) -> None:
    """Finite features and labels in 0 … C−1. Reads values, so a GPU is waited for."""
    if features.numel():
        # aminmax, unlike isfinite().all(), makes no copy: a NaN or an infinity shows in it.
        low, high = torch.aminmax(features.detach())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DeepSimplexError(
                "finite features",
                f"values from {float(low)} to {float(high)}",
                "look for a diverged network or a bad input image",
            )
    if labels is not None and labels.numel():
        smallest, largest = (int(v) for v in torch.aminmax(labels))
        if smallest < 0 or largest >= simplex.classes:
            raise DeepSimplexError(
                f"labels in 0 … {simplex.classes - 1}",
                f"{smallest if smallest < 0 else largest}",
                "number the classes from 0, without gaps",
            )


def _check_features(simplex: Simplex, features: Tensor) -> None:
    check_shapes(simplex, features)
    check_values(simplex, features)


def _check_labels(simplex: Simplex, labels: Tensor, count: int | None) -> None:
    stand_in = torch.empty(len(labels) if count is None else count, simplex.dim, device="meta")
    check_shapes(simplex, stand_in, labels)
    check_values(simplex, torch.empty(0, simplex.dim), labels)


def _too_narrow(classes: int, dim: int, kind: str) -> DeepSimplexError:
    need = classes - 1
    ways = [f"use features of width {need} or more"]
    if kind != "doubled" and dim >= 2 and classes <= 2 * dim + 2:
        ways.append("kind='doubled' (2d+2 centres, largest cosine 1/d)")
    if need**2 <= DAM_WEIGHTS:
        ways.append(f"put a DAM before the loss ({need}² = {need**2:,} weights)")
    else:
        ways.append(
            f"a DAM with a narrow hidden layer (the paper's needs {need}² = {need**2:.1e} weights)"
        )
    most = 2 * dim + 2 if kind == "doubled" else dim + 1
    return DeepSimplexError(
        f"at most {most} classes for dim {dim} with kind {kind!r}", f"{classes}", "; or ".join(ways)
    )
