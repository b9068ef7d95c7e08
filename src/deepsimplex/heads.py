"""What stands between a backbone's vector and the simplex: one linear map, or the paper's DAM.

Nothing follows the last layer of a head. Centres have negative coordinates, which a ReLU could
never reach, and a normalisation would cap the lengths that distances are made of.
"""

from __future__ import annotations

from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.simplex import DAM_WEIGHTS

HEADS = ("linear", "dam", "none")


class LinearHead(nn.Module):
    """W x + b; (n, in_features) → (n, out_features).

    Its outputs span at most in_features dimensions, so C centres are reached exactly only
    while in_features ≥ C−1.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        _check_widths(in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.fc = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


class DAM(nn.Module):
    """Dimension augmentation, W₂ relu(W₁ x + b₁) + b₂; (n, in_features) → (n, out_features).

    The ReLU between the layers is what lifts the rank above in_features. `hidden` is the width
    between them: out_features as in the paper, or less for a bottleneck of
    hidden·(in_features + out_features) weights.
    """

    def __init__(self, in_features: int, out_features: int, hidden: int | None = None) -> None:
        super().__init__()
        width = out_features if hidden is None else hidden
        _check_widths(in_features=in_features, out_features=out_features, hidden=width)
        self.in_features = in_features
        self.out_features = out_features
        self.hidden = hidden
        self.fc1 = nn.Linear(in_features, width)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(width, out_features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.relu(self.fc1(x)))
        return out


class NoHead(nn.Module):
    """The backbone's vector as it is; (n, d) → (n, d). The authors' code trains this way."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        _check_widths(in_features=in_features, out_features=out_features)
        if in_features != out_features:
            raise DeepSimplexError(
                "as many outputs as features for head 'none'",
                f"{in_features} features and {out_features} outputs",
                f"use head 'linear', or a simplex of dimension {in_features}",
            )
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return x


def build_head(
    kind: str, in_features: int, out_features: int, hidden: int | None = None
) -> LinearHead | DAM | NoHead:
    """The head called `kind`: "linear", "dam" or "none"; `hidden` makes a DAM's bottleneck."""
    if kind == "dam":
        return DAM(in_features, out_features, hidden)
    if hidden is not None and kind in HEADS:
        raise DeepSimplexError(
            f"no hidden width for head {kind!r}", str(hidden), "leave it out, or use head 'dam'"
        )
    if kind == "linear":
        return LinearHead(in_features, out_features)
    if kind == "none":
        return NoHead(in_features, out_features)
    raise DeepSimplexError(f"a head among {', '.join(HEADS)}", repr(kind), "pick one of them")


def choose_head(in_features: int, classes: int) -> str:
    """The head that can reach all centres of a regular simplex with `classes` vertices.

    "linear" while in_features ≥ C−1, then "dam" while its (C−1)² weights fit; beyond that no
    head is both exact and affordable, and the error says what is.
    """
    _check_widths(in_features=in_features)
    if classes < 2:
        raise DeepSimplexError("2 or more classes", str(classes), "add a second class")
    if in_features >= classes - 1:
        return "linear"
    if (classes - 1) ** 2 <= DAM_WEIGHTS:
        return "dam"
    doubled = (
        "the simplex kind 'doubled', "
        if in_features >= 2 and classes <= 2 * in_features + 2
        else ""
    )
    hidden = max(1, DAM_WEIGHTS // (in_features + classes - 1))
    raise DeepSimplexError(
        f"{classes - 1} or more features for {classes} classes, or a DAM of at most "
        f"{DAM_WEIGHTS:.0e} weights",
        f"{in_features} features and a DAM of {(classes - 1) ** 2:.1e} weights",
        f"use {doubled}a backbone with {classes - 1} features, or a bottleneck "
        f"DAM({in_features}, {classes - 1}, hidden={hidden}) or narrower",
    )


def _check_widths(**widths: int) -> None:
    for name, width in widths.items():
        if width < 1:
            raise DeepSimplexError(f"{name} of at least 1", str(width), "give a positive width")
