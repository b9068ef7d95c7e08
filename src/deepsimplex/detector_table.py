"""DETECTORS, the only table that knows every detector: what it sees, needs, and is built with.

Numbers are the papers' or pytorch-ood 0.4.0's defaults, written out: a model file is fitted to
again when it is loaded, and must give the scores it gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from deepsimplex.methods.base import Method
from deepsimplex.methods.softmax import LOGIT_SCORES, logit_knownness

ODIN: dict[str, float] = {"eps": 0.0014, "temperature": 1000.0}
"""ε in units of the input (Parts.units), and T; Liang et al. 2018."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What a detector may be built from; on the CPU but for `logits`."""

    count: int  # samples it is fitted on
    width: int  # length of f
    classes: int
    weight: Tensor  # W (C, d), empty where it is not asked for; in the detector's type
    bias: Tensor  # b (C,)
    logits: nn.Module  # raw images → z, with gradients
    units: tuple[float, ...]  # by channel: 255 for pixels, else a standard deviation

    @property
    def linear(self) -> nn.Linear:
        """f → W f + b."""
        # Not initialised: that would draw from the caller's random numbers.
        head = skip_init(nn.Linear, self.width, self.classes, dtype=self.weight.dtype)
        with torch.no_grad():
            head.weight.copy_(self.weight)
            head.bias.copy_(self.bias)
        return head.requires_grad_(False)

    @property
    def flat_linear(self) -> nn.Module:
        """(n, d, 1, 1) → W f + b, for detectors made for maps."""
        return nn.Sequential(nn.Flatten(), self.linear)

    @property
    def neighbours(self) -> int:
        """k = 50 as in Sun et al. 2022, but at most half a class, or strangers would count."""
        return max(1, min(50, self.count // (2 * self.classes)))


@dataclass(frozen=True)
class Row:
    """A detector: pytorch-ood's class, what it sees, what it needs, and how it is built."""

    kind: str
    sees: Literal["features", "maps", "logits", "images"]
    build: Callable[[Any, Parts], Any]
    about: str
    fitted: bool = True
    head: bool = False  # needs W and b
    call: str | None = None  # its method that scores, where the usual one will not do
    dtype: torch.dtype = torch.float64  # float32 where the library rounds to it on its way


class Logits(nn.Module):
    """Raw images → class scores by `score`; in float64, as T = 1000 eats digits."""

    def __init__(self, method: Method, score: str) -> None:
        super().__init__()
        self.method, self.score = method, score

    def forward(self, images: Tensor) -> Tensor:
        return self.method.class_scores(self.method(images), self.score).double()


class LogitScore:
    """max z, max log p, logΣe^z or −entropy of any method's logits; no library needed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def predict_logits(self, logits: Tensor) -> Tensor:
        return -logit_knownness(logits, self.name)


NEAR = 5
"""Which of the nearest training features is asked, where there are so many."""
SOME, FEW = 512, 128
"""Training features, at most, that units are taken from; rows at a time against all of them."""
LEAST = 1e-6
"""Of a unit, against the mean: collapsed classes leave nothing else."""


class Nearest:
    """1 − cosine of f with the k-th nearest training feature; no library needed."""

    def fit_features(self, rows: Tensor, labels: Tensor) -> None:
        self.bank = F.normalize(rows, dim=1)

    def predict_features(self, rows: Tensor, *, among_them: bool = False) -> Tensor:
        """(n, d) → (n,), a few at a time. A row that is `among_them` is not its own neighbour."""
        k = min(NEAR + among_them, len(self.bank))
        unit = F.normalize(rows, dim=1)
        found = [(few @ self.bank.T).topk(k, dim=1).values[:, -1] for few in unit.split(FEW)]
        return 1 - torch.cat([rows.new_zeros(0), *found])


class Joined:
    """−(max_j z_j − μ)/σ + (d − μ')/σ', z = W f + b, d by Nearest; μ and σ of training images.

    How much like a class, and how much like anything seen: each misses what the other finds.
    """

    def __init__(self, parts: Parts) -> None:
        self.weight, self.bias, self.near = parts.weight, parts.bias, Nearest()

    def fit_features(self, rows: Tensor, labels: Tensor) -> None:
        self.near.fit_features(rows, labels)
        some = rows[:: -(-len(rows) // SOME)]
        found = self._own(some), self.near.predict_features(some, among_them=True)
        self.units = [
            (v.mean(), torch.maximum(v.std(correction=0), LEAST * (1 + v.mean().abs())))
            for v in found
        ]

    def predict_features(self, rows: Tensor) -> Tensor:
        (middle, unit), (far, stray) = self.units
        near = self.near.predict_features(rows)
        return (near - far) / stray - (self._own(rows) - middle) / unit

    def _own(self, rows: Tensor) -> Tensor:
        return (rows @ self.weight.T + self.bias).amax(1)


def _is_weight(name: str) -> bool:
    return name == "weight"


DETECTORS: dict[str, Row] = {
    **{
        name: Row("", "logits", lambda _, __, name=name: LogitScore(name), about, fitted=False)  # type: ignore[misc]
        for name, about in zip(
            LOGIT_SCORES, ("max z", "max log p", "logΣe^z", "Σ p log p"), strict=True
        )
    },
    "nearest": Row(
        "", "features", lambda _, __: Nearest(), "cosine with the 5th nearest f of training"
    ),
    "joined": Row(
        "", "features", lambda _, p: Joined(p), "max z and nearest, standardised, added", head=True
    ),
    "knn": Row(
        "KNN", "features", lambda k, p: k(None, k=p.neighbours), "−distance to the k-th f/‖f‖"
    ),
    "mahalanobis": Row(
        "Mahalanobis", "features", lambda k, p: k(None), "−min_j (f−μ_j)ᵀΣ⁻¹(f−μ_j), one Σ"
    ),
    "gmm": Row(
        "GMM",
        "features",
        lambda k, p: k(None, reg=1e-6),
        "log Σ_j π_j N(f; μ_j, Σ_j), a Gaussian a class",
    ),
    "rmd": Row("RMD", "features", lambda k, p: k(None), "the same less that of one Gaussian"),
    "vim": Row(
        "ViM",
        "features",
        lambda k, p: k(None, d=p.width // 2, w=p.weight, b=p.bias),
        "logΣe^z − a‖P(f−o)‖, P onto the d/2 least directions",
        head=True,
    ),
    "react": Row(
        "ReAct",
        "maps",
        lambda k, p: k(None, p.flat_linear, percentile=0.9),
        "energy of f clipped at the 90th percentile",
        head=True,
    ),
    "vra": Row(
        "VRA",
        "maps",
        lambda k, p: k(None, p.flat_linear, lower_percentile=0.01, upper_percentile=0.99),
        "energy of f clipped between percentiles, by coordinate",
        head=True,
    ),
    "dice": Row(
        "DICE",
        "features",
        lambda k, p: k(None, w=p.weight, b=p.bias, p=0.9),
        "energy by the tenth of the weights that contribute most",
        head=True,
        dtype=torch.float32,
    ),
    "ash": Row(
        "ASH",
        "maps",
        lambda k, p: k(None, p.flat_linear, variant="ash-s", percentile=0.65),
        "energy of the largest 35 % of f, sharpened",
        fitted=False,
        head=True,
    ),
    "scale": Row(
        "SCALE",
        "maps",
        lambda k, p: k(None, p.flat_linear, percentile=0.65),
        "energy of f times e^(Σf/Σ largest 35 %)",
        fitted=False,
        head=True,
    ),
    "lts": Row(
        "LTS",
        "features",
        lambda k, p: k(None, p.linear, p=0.05),
        "energy of z scaled by (Σf/Σ largest f)²",
        fitted=False,
        head=True,
    ),
    "she": Row(
        "SHE", "features", lambda k, p: k(None, p.linear), "f·mean f of the class", head=True
    ),
    "nnguide": Row(
        "NNGuide",
        "features",
        lambda k, p: k(None, p.linear, k=min(10, p.count)),
        "energy × likeness to the 10 nearest",
        head=True,
        dtype=torch.float32,
    ),
    "pnml": Row(
        "PNML",
        "features",
        lambda k, p: k(None, p.linear),
        "−regret of learning x",
        head=True,
        dtype=torch.float32,
    ),
    "fdbd": Row(
        "fDBD",
        "features",
        lambda k, p: k(None, p.linear),
        "distance to decisions",
        head=True,
        dtype=torch.float32,
    ),
    "nci": Row(
        "NCI",
        "features",
        lambda k, p: k(None, p.linear),
        "cos(f − mean f, w_ŷ)",
        head=True,
        dtype=torch.float32,
    ),
    "gradnorm": Row(
        "GradNorm",
        "features",
        lambda k, p: k(p.linear, param_filter=_is_weight),
        "‖f‖₁ Σ_j |p_j − 1/C|",
        fitted=False,
        head=True,
        call="predict",
    ),
    "gen": Row("GEN", "logits", lambda k, p: k(None, gamma=0.1), "−Σ (p(1−p))^0.1", fitted=False),
    "kl_matching": Row("KLMatching", "logits", lambda k, p: k(None), "−min_j KL(p ‖ mean p of j)"),
    "odin": Row(
        "ODIN",
        "images",
        lambda k, p: k(p.logits, norm_std=[1 / unit for unit in p.units], **ODIN),
        "max softmax(z/T) after a step of ε up its gradient",
        fitted=False,
    ),
}

CALLS = {
    "features": ("fit_features", "predict_features"),
    "maps": ("fit_feature_maps", "predict_feature_maps"),
    "logits": ("fit_logits", "predict_logits"),
    "images": ("", "predict"),
}
