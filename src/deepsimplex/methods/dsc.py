"""The Deep Simplex Classifier: each class is sent to its vertex (eqs. 4–7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex import losses
from deepsimplex.errors import DeepSimplexError
from deepsimplex.heads import build_head, choose_head
from deepsimplex.methods.base import (
    ABOVE_0,
    Batch,
    Encoder,
    Method,
    Stage,
    check_choices,
    check_numbers,
    check_score,
    check_whole,
    known_and_background,
    one_stage,
    through_head,
)
from deepsimplex.simplex import Kind, Simplex, dot_products, length, squared_distances


@dataclass(frozen=True)
class DSCSettings:
    """What the paper leaves open, each with the reading we take (docs/decisions)."""

    # eq. 4, 6, 7, the authors' code, eq. 7 + blend · eq. 4, eq. 4 as printed at `radius`
    loss: Literal["squared", "hinge", "softmax", "authors", "blend", "literal"] = "squared"
    margin: float | Literal["auto"] = 0.5  # eqs. 5 and 6: m/u², or m/u in hinge-B and -C
    temperature: float = 1.0  # eq. 7
    label_smoothing: float = 0.0  # eq. 7
    blend: float = 1.0  # weight of eq. 4 beside eq. 7 (docs/decisions/0012)
    radius: float = 64.0  # the paper's u, for losses "literal" and "authors" alone
    background: Literal["centroid", "hinge-A", "hinge-B", "hinge-C"] = "centroid"
    background_weight: float = 1.0
    head: Literal["auto", "linear", "dam", "none"] = "auto"
    simplex: Kind = "regular"
    width: int | None = None  # dim of a truncated or doubled simplex after a head; C−1 if None
    hidden: int | None = None  # width between a DAM's two layers, its bottleneck; `width` if None

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(self, margin=0, temperature=ABOVE_0, background_weight=0)
        check_numbers(self, blend=0, radius=ABOVE_0, label_smoothing=0)
        check_whole(self, width=1, hidden=1)
        if self.label_smoothing >= 1:
            raise DeepSimplexError(
                "label_smoothing below 1", repr(self.label_smoothing), "change it"
            )
        if self.loss in ("hinge", "authors") and self.margin == "auto":
            raise DeepSimplexError(
                f"a number as margin for loss {self.loss!r}", "'auto'", "give the margin"
            )

    def unread(self) -> tuple[str, ...]:
        """Fields that this loss and this head do not look at."""
        soft, authors = self.loss in ("softmax", "blend"), self.loss == "authors"
        read = {
            "temperature": soft,
            "label_smoothing": soft,
            "blend": self.loss == "blend",
            "radius": self.loss in ("literal", "authors"),
            "margin": self.loss in ("hinge", "authors") or self.background != "centroid",
            "background": not authors,
            "background_weight": not authors,
            "width": self.head != "none",
            "hidden": self.head in ("auto", "dam"),
        }
        return tuple(name for name in read if not read[name])


class DSC(Method):
    """Features at unit radius; scores −distance, cosine and dot product to the nearest vertex.

    Eq. 7 leaves the features' length free, and the length tells how familiar an image is: its
    default score is the dot product. It has no distance: familiar features lie beyond their
    vertex and unknown ones nearer to it. The other losses pin the length and take the distance.
    The authors' code has another beside it, `relative` to the distances from all centres.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: DSCSettings) -> None:
        super().__init__()
        self.settings = settings
        self.scores = ("distance", "cosine", "dot")
        if settings.loss == "blend":
            self.scores = ("dot", "cosine", "distance")
        elif settings.loss == "softmax":
            self.scores = ("dot", "cosine")
        elif settings.loss == "authors":
            self.scores = ("distance", "cosine", "dot", "relative")
        width = settings.width or max(1, classes - 1)
        head: str = settings.head
        if head == "auto" and settings.hidden is not None:
            head = "dam"
        elif head == "auto":
            head = choose_head(encoder.features, classes) if settings.width is None else "linear"
        if head == "none":
            width = encoder.features
        self.simplex = Simplex(classes, width, settings.simplex)
        self.encoder = encoder
        self.head: nn.Module = build_head(head, encoder.features, width, settings.hidden)

    def forward(self, images: Tensor) -> Tensor:
        features = through_head(self.head, self.encoder(images))
        # As printed, the network works at radius u; scores and distances live at radius 1.
        return features / self.settings.radius if self._at_radius else features

    @property
    def _at_radius(self) -> bool:
        return self.settings.loss in ("literal", "authors")

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        return one_stage(self, self.loss, epochs)

    def loss(self, batch: Batch) -> Tensor:
        """Eq. 4, 6 or 7 on the knowns plus the background term; eq. 5 is squared + hinge."""
        features, background = known_and_background(self, batch)
        s, y, settings = self.simplex, batch.labels, self.settings
        if settings.loss == "authors":
            b = features[:0] if background is None else background
            margin = _number(settings.margin)
            known = losses.authors_loss(s, features, y, b, margin, check=False)
            return settings.radius**2 * known
        if settings.loss == "hinge":
            known = losses.hinge_loss(s, features, y, _number(settings.margin), check=False)
        elif settings.loss in ("softmax", "blend"):
            soft = settings.temperature, settings.label_smoothing
            known = losses.softmax_loss(s, features, y, *soft, check=False)
            if settings.loss == "blend":
                known = known + settings.blend * losses.simplex_loss(s, features, y, check=False)
        else:
            known = losses.simplex_loss(s, features, y, check=False)
        if background is not None:
            known = known + settings.background_weight * self._background(features, y, background)
        return settings.radius**2 * known if settings.loss == "literal" else known

    def _background(self, features: Tensor, labels: Tensor, background: Tensor) -> Tensor:
        if self.settings.background == "centroid":
            return losses.centroid_pull(self.simplex, background, check=False)
        reading: losses.Reading = self.settings.background[-1]  # type: ignore[assignment]
        return losses.pair_hinge(
            self.simplex,
            features,
            labels,
            background,
            self.settings.margin,
            reading=reading,
            check=False,
        )

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """−‖f − v_j‖, f·v_j / ‖f‖, f·v_j or −d_j² / ‖(d_1², …, d_C²)‖: one decision."""
        check_score(self, score)
        if score == "relative":
            squared = squared_distances(self.simplex, outputs)
            return -F.normalize(squared, dim=1)
        if score == "distance":
            return -length(squared_distances(self.simplex, outputs))
        dots = dot_products(self.simplex, outputs)
        if score == "dot":
            return dots
        norms = outputs.norm(dim=1, keepdim=True)
        return dots / norms.clamp_min(torch.finfo(norms.dtype).tiny)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)


def _number(margin: float | str) -> float:
    assert not isinstance(margin, str)  # refused by DSCSettings
    return margin
