"""Scores after training: a detector by name around any trained method.

A detector sees what the network makes of an image, a feature vector f = encoder(x) or logits z,
and gives a knownness; the class stays the method's own. The logits are class scores of the form
z = W f + b, by the first score of the method that is so (for DSC f·v_j, W = V·W_head): the
energy of −distances is largest between the centres, where unknowns lie. A method without such a
score lends its default one, and cannot have the detectors that work on W and b.

Most detectors are pytorch-ood's (the extra `ood`), fitted here on the training images and flipped,
as theirs grow with strangeness. What was fitted on is kept as tensors and fitted to again when a
model is loaded: nothing is pickled. Fits and scores are computed on the CPU, in float64 where the
library allows it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex import inference
from deepsimplex.data.augment import ONE, Views
from deepsimplex.detector_table import CALLS, DETECTORS, Logits, Parts, Row
from deepsimplex.errors import DeepSimplexError, MissingExtraError, meant
from deepsimplex.frozen import compute_features
from deepsimplex.methods.base import Encoder, Method

MOST = 2**25
"""Numbers that a detector keeps of the training set, 128 MiB; beyond it a share of each class."""

ROWS = 1024
"""Images or vectors at a time."""

# Linear maps up to this relative error; the probe runs in float64, a method may round to float32.
_AFFINE = 1e-4


@dataclass(frozen=True, eq=False)
class Detector:
    """A detector fitted to a method: what it kept of the training images, and how it scores."""

    name: str
    method: Method
    score: str  # the method's, which the logits are
    rows: Tensor  # f (n, d) or z (n, C) of training images, float32; (0, 0) if nothing is fitted
    labels: Tensor  # (n,)
    inner: Any
    views: Views = ONE  # f and z are means over them; ODIN sees one

    def knownness(self, images: Tensor) -> Tensor:
        """Raw images (n, …) → (n,), higher = more known; float64 on the CPU.

        The network runs once more a view than for the classes alone, three times for ODIN. What the
        library cannot put a number on is as strange as can be: −∞.
        """
        where = next(self.method.parameters()).device
        self.method.eval()
        found = [torch.zeros(0, dtype=torch.float64)]
        for rows in images.split(ROWS):
            if DETECTORS[self.name].sees == "images":
                rows = rows.to(where, self.method.encoder.normalise.std.dtype)
            else:
                rows = _seen(self.name, self.method, self.score, rows, views=self.views)
            found.append(-_strangeness(self.name, self.inner, rows))
        scores = torch.cat(found)
        return torch.where(scores.isnan(), -torch.inf, scores)


def fit_detector(
    name: str,
    method: Method,
    images: Tensor,
    labels: Tensor,
    classes: int,
    *,
    cache: Path | None = None,
    views: Views = ONE,
) -> Detector:
    """The detector `name` fitted to training images (n, …) and their labels 0…C−1.

    Of a large set it keeps a share of every class, drawn once; see MOST. `cache` is where the
    features of a frozen backbone may lie already.
    """
    row, pixels = DETECTORS[name], images.dtype == torch.uint8
    if not row.fitted:
        nothing = torch.zeros(0, 0), labels[:0]
        return restore_detector(name, method, *nothing, classes, pixels, views=views)
    width = classes if row.sees == "logits" else method.encoder.features
    chosen = _share(labels, max(1, MOST // width))
    score = _logits(method).score
    rows = _seen(name, method, score, images[chosen], cache, views=views).float()
    return restore_detector(name, method, rows, labels[chosen], classes, pixels, views=views)


def restore_detector(
    name: str,
    method: Method,
    rows: Tensor,
    labels: Tensor,
    classes: int,
    pixels: bool,
    *,
    views: Views = ONE,
) -> Detector:
    """The detector as it was when these rows (n, d) were kept: the same fit, the same scores."""
    row, width = DETECTORS[name], method.encoder.features
    kind = _library_class(name, row)
    _check_kept(row, rows, labels, width, classes)
    found = _need_head(name, method) if row.head else _logits(method)
    weight, bias = found.weight.to(row.dtype), found.bias.to(row.dtype)
    std = method.encoder.normalise.std.flatten().tolist()
    units = tuple(255.0 if pixels else value for value in std)
    logits = Logits(method, found.score)
    parts = Parts(len(rows), width, classes, weight, bias, logits, units)
    try:
        with _exact(row):
            inner = row.build(kind, parts)
            if row.fitted:
                getattr(inner, CALLS[row.sees][0])(_shaped(row, rows), labels)
        if row.fitted and not _strangeness(name, inner, rows[:ROWS]).isfinite().all():
            raise ValueError("scores of these very images that are not finite")
    except (ValueError, AssertionError, RuntimeError, IndexError) as error:
        raise DeepSimplexError(
            f"training images that {name!r} can be fitted to",
            " ".join(str(error).split())[:200] or type(error).__name__,
            "give more images of every class, or choose another score",
        ) from None
    return Detector(name, method, found.score, rows, labels, inner, views)


def check_score(method: Method, score: str) -> None:
    """A score of the method's own, or a detector that this method and this machine can run."""
    if score in method.scores:
        return
    if score not in DETECTORS:
        known = [*method.scores, *DETECTORS]
        own, others = ", ".join(method.scores), [n for n in DETECTORS if n not in method.scores]
        raise DeepSimplexError(
            f"a score among {own} (its own) or {', '.join(others)} (detectors)",
            repr(score),
            meant(score, known, "choose one of them"),
        )
    if score == "energy" and {*method.scores} <= {"distance", "max_probability"}:
        raise DeepSimplexError(
            "logits for the score 'energy'",
            "distances, whose energy is largest between the centres",
            "choose another, e.g. nearest or neg_entropy",
        )
    row = DETECTORS[score]
    _library_class(score, row)
    if row.head and not any(p.is_meta for p in method.parameters()):
        _need_head(score, method)


def needs_head(score: str | None) -> bool:
    """Whether the score is a detector that works on W and b; a method on "meta" cannot tell."""
    return score in DETECTORS and DETECTORS[score].head


@dataclass(frozen=True, eq=False)
class LinearHead:
    """z = W f + b: the score whose class scores they are, W (C, d) and b (C,)."""

    score: str
    weight: Tensor
    bias: Tensor


class Given(nn.Module):
    """In place of a backbone: features that were given, whatever the images."""

    rows: Tensor
    asked = 0

    def forward(self, images: Tensor) -> Tensor:
        self.asked += 1
        return self.rows


@torch.inference_mode(False)  # gradients, wherever this is called
def linear_head(method: Method) -> LinearHead | None:
    """z_j(f) = W f + b by the first score of the method that is so; float64, on the CPU.

    Tried halfway between points: a method need not say what it is made of. W is its gradient at
    one of them. None if no score of it is affine in the features of one view.
    """
    shape, d = method.encoder.shape, method.encoder.features
    # The copy sees blank images, and where its backbone was, these features.
    given = Given()
    rest = copy.deepcopy(method, {id(method.encoder): Encoder(given, d, shape)})
    rest.cpu().double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    ends = 10 * torch.randn(2, 4, d, generator=generator, dtype=torch.float64)
    at = ends[0, :1].clone().requires_grad_()

    def outputs(rows: Tensor) -> Tensor:
        given.rows = rows
        found: Tensor = rest(rows.new_zeros(1).expand(len(rows), *shape))
        return found

    first, second, halfway = (outputs(rows) for rows in (*ends, ends.mean(0)))
    if given.asked > 3:  # of each image it takes several views
        return None
    for score in method.scores:
        a, b, middle = (rest.class_scores(rows, score) for rows in (first, second, halfway))
        error, spread = ((a + b) / 2 - middle).abs().max(), (a - b).abs().max()
        # A score that is constant, as one from class means before training, is no head.
        if error < _AFFINE * spread:
            z = rest.class_scores(outputs(at), score)[0].double()
            weight = _gradients(z, at)
            return LinearHead(score, weight, (z - weight @ at[0]).detach())
    return None


def _gradients(values: Tensor, at: Tensor) -> Tensor:
    """∂z_j/∂f of z (C,) by f (1, d), many j at once: (C, d)."""
    found: list[Tensor] = []
    for j in torch.arange(len(values)).split(ROWS):
        chosen = F.one_hot(j, len(values)).to(values)
        found += torch.autograd.grad(values, at, chosen, retain_graph=True, is_grads_batched=True)
    return torch.cat(found)[:, 0]


def _seen(
    name: str,
    method: Method,
    score: str,
    images: Tensor,
    cache: Path | None = None,
    *,
    views: Views = ONE,
) -> Tensor:
    """What the detector sees of raw images: f (n, d) in float32 or z (n, C) in float64, CPU.

    Of several views of an image, their mean.
    """
    if DETECTORS[name].sees == "logits":
        return inference.scores(method, images, score, views=views)[0]
    each = views.of(images)
    features, count = compute_features(method, next(each), cache), 1
    for view in each:
        features, count = features + compute_features(method, view, cache), count + 1
    return features / count if count > 1 else features


def _strangeness(name: str, inner: Any, rows: Tensor) -> Tensor:
    """The library's score, higher = stranger: (n, …) → (n,), float64 on the CPU."""
    row = DETECTORS[name]
    score = getattr(inner, row.call or CALLS[row.sees][1])
    with _exact(row):
        found: Tensor = score(_shaped(row, rows))
    return found.detach().cpu().double()


def _shaped(row: Row, rows: Tensor) -> Tensor:
    if row.sees == "images":
        return rows
    rows = rows.to(row.dtype)
    return rows[:, :, None, None] if row.sees == "maps" else rows


@contextlib.contextmanager
def _exact(row: Row) -> Iterator[None]:
    """Within, new tensors have the row's type and the library keeps its remarks to itself.

    Mahalanobis makes its Σ in the default type. Where classes have collapsed, as DSC wants them
    to, float32 leaves nothing of Σ⁻¹ (docs/decisions/0013).
    """
    log, before = logging.getLogger("pytorch_ood"), torch.get_default_dtype()
    level = log.level
    log.setLevel(logging.ERROR)
    if row.sees != "images":  # the network keeps its own
        torch.set_default_dtype(row.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        log.setLevel(level)


def _library_class(name: str, row: Row) -> Any:
    if not row.kind:
        return None
    try:
        from pytorch_ood import detector
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch
        raise MissingExtraError(
            f"the extra 'ood' (pytorch-ood) for the score {name!r}",
            f"an import that failed ({' '.join(str(error).split())[:120]})",
            'pip install "deepsimplex[ood]" with the full torch, whose torchvision imports, '
            "or take a score of the method's own",
        ) from None
    return getattr(detector, row.kind)


def _logits(method: Method) -> LinearHead:
    """The method's linear head, or without W and b its first score but log p, whose energy is 0."""
    found = linear_head(method)
    first = next((name for name in method.scores if name != "max_probability"), method.scores[0])
    return found or LinearHead(first, torch.zeros(0, 0), torch.zeros(0))


def _need_head(name: str, method: Method) -> LinearHead:
    found = linear_head(method)
    if found is None:
        raise DeepSimplexError(
            f"logits that are W f + b of the features, for the score {name!r}",
            "a method without such a map",
            "choose a score that needs none, e.g. nearest, knn or mahalanobis",
        )
    return found


def _check_kept(row: Row, rows: Tensor, labels: Tensor, width: int, classes: int) -> None:
    expected = (classes if row.sees == "logits" else width) if row.fitted else 0
    fits = rows.ndim == 2 and rows.shape == (len(labels), expected) and labels.ndim == 1
    if not fits or (row.fitted and len(rows) == 0):
        raise ValueError(
            f"kept rows of shape {tuple(rows.shape)} with {tuple(labels.shape)} labels"
        )
    if len(rows) == 0:
        return
    whole = rows.dtype == torch.float32 and labels.dtype == torch.int64
    if not whole or not rows.isfinite().all() or labels.min() < 0 or labels.max() >= classes:
        raise ValueError("kept rows that are no finite numbers with labels of the classes")


def _share(labels: Tensor, most: int) -> Tensor:
    """Indices of all samples, or of an equal share of every class, at least one: (n,) → (m,)."""
    if len(labels) <= most:
        return torch.arange(len(labels))
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randperm(len(labels), generator=generator)
    by_class = mixed[labels[mixed].argsort(stable=True)]
    parts = by_class.split(torch.bincount(labels).tolist())
    return torch.cat([part[: max(1, len(part) * most // len(labels))] for part in parts]).sort()[0]
