"""The trained thing: fitted by a recipe, deciding with reasons, kept in one checksummed file.

The file is safetensors: weights, and metadata with class names, preprocessing, architecture,
simplex, score, threshold, calibration, recipe and version. A SHA-256 over every byte (its own 64
counted as zeros) stands in the metadata. Nothing is pickled; nothing in the file is run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

import deepsimplex
from deepsimplex import engine
from deepsimplex.backbones import resolve_backbone
from deepsimplex.batches import TrainingSet
from deepsimplex.calibration import Threshold, conformal_threshold
from deepsimplex.data.sources import hold_out
from deepsimplex.engine import Keeper
from deepsimplex.errors import DeepSimplexError, ModelFileError
from deepsimplex.methods import build_method
from deepsimplex.methods.base import Method, check_score
from deepsimplex.methods.dsc import DSC
from deepsimplex.recipes import Recipe
from deepsimplex.runs import write_atomically

FORMAT = 1
# A score's dimension as a power of the radius: a distance is a length, a dot product its square.
_LENGTHS = {"distance": 1, "dot": 2}
_MARK = b'"deepsimplex":"{\\"sha256\\":\\"'
_HEADER_LIMIT = 64 << 20


@dataclass(frozen=True)
class Decision:
    """What was decided about one image, and why."""

    known: bool
    nearest: Any  # the class it would be
    knownness: float
    limit: float  # accepted at or above it; −inf when nothing is rejected
    reason: str


@dataclass(frozen=True)
class Model:
    """Scores and thresholds are kept at unit radius and shown in units of `radius`."""

    method: Method
    recipe: Recipe
    classes: np.ndarray
    shape: tuple[int, ...]  # (c, h, w) of an image, (p,) of a feature vector
    score: str
    threshold: Threshold | None = None
    radius: float = 1.0

    @property
    def unit(self) -> float:
        """What a score at unit radius is multiplied by before a person sees it."""
        return self._unit(self.score)

    def _unit(self, score: str) -> float:
        return self.radius ** _LENGTHS.get(score, 0)

    def scores(self, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Class scores (n, C) and knownness (n,) of raw images, in units of the radius."""
        outputs = engine.outputs(self.method, images)
        by_class = self.method.class_scores(outputs, self.score).double().numpy()
        known = self.method.knownness(outputs, self.score).double().numpy()
        return by_class * self.unit, known * self.unit

    def all_scores(self, images: Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Predictions (n,) and knownness (n,) by every score of the method."""
        outputs = engine.outputs(self.method, images)
        predicted = self.method.class_scores(outputs, self.score).argmax(1).numpy()
        return predicted, {
            name: self.method.knownness(outputs, name).double().numpy() * self._unit(name)
            for name in self.method.scores
        }

    def limits(self, predicted: np.ndarray) -> np.ndarray:
        """The threshold that applies to each prediction, in units of the radius: (n,) → (n,)."""
        if self.threshold is None:
            return np.full(len(predicted), -np.inf)
        return self.threshold.limit_for(predicted) * self.unit

    def decide(self, images: Tensor) -> list[Decision]:
        by_class, knownness = self.scores(images)
        predicted = by_class.argmax(1)
        decisions = []
        for j, value, limit in zip(predicted, knownness, self.limits(predicted), strict=True):
            known, name = bool(value >= limit), self.classes[j]
            reason = _reason(self.score, known, name, float(value), float(limit))
            decisions.append(Decision(known, name, float(value), float(limit), reason))
        return decisions

    def save(self, path: str | Path) -> None:
        """One file, written beside and renamed."""
        write_atomically(Path(path), _pack(self))

    @staticmethod
    def load(path: str | Path, device: str = "auto") -> Model:
        """The model in the file, or a ModelFileError that says what is wrong with it."""
        model = _unpack(Path(path))
        model.method.to(engine.pick_device(device)).eval()
        return model


def fit_model(
    images: Tensor,
    labels: Tensor,
    classes: Sequence[Any] | np.ndarray,
    recipe: Recipe,
    *,
    keep: float | None = None,
    guarantee: str = "mean",
    by: str = "all",
    score: str | None = None,
    radius: float = 1.0,
    background: Tensor | None = None,
    calibration: tuple[Tensor, Tensor] | None = None,
    device: str = "auto",
    keeper: Keeper | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Model:
    """Train on raw images (n, …) with labels 0…C−1, then calibrate on knowns held out.

    With `keep` set, the threshold comes from `calibration` (images, labels) or, without it, from
    a share of the training images that the network then never sees. Unknowns play no part.
    """
    if radius <= 0 or not np.isfinite(radius):
        raise DeepSimplexError("a radius above 0", repr(radius), "it is the unit of length")
    names = np.asarray(classes)
    shape = tuple(images.shape[1:])
    recipe = dataclasses.replace(recipe, backbone=resolve_backbone(recipe.backbone, shape))
    if keep is not None and calibration is None:
        training, held = hold_out(labels.numpy(), recipe.calibration, recipe.seed)
        calibration = images[held], labels[held]
        images, labels = images[training], labels[training]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        method = build_method(recipe.method, recipe.backbone, shape, len(names), recipe.settings)
    score = score or method.scores[0]
    check_score(method, score)
    method.encoder.normalise.fit(images)
    data = TrainingSet(images, labels, background)
    engine.train(method, data, recipe, device=device, keeper=keeper, report=report)
    if len(shape) == 1:
        method.double()  # so that a row's scores do not depend on the rows beside it
    model = Model(method, recipe, names, shape, score, radius=radius)
    if keep is None or calibration is None:
        return model
    return calibrate(model, calibration[0], keep, guarantee=guarantee, by=by)


def calibrate(
    model: Model, images: Tensor, keep: float, *, guarantee: str = "mean", by: str = "all"
) -> Model:
    """The model with a reject threshold from known images it was not trained on."""
    if by not in ("all", "predicted"):
        raise DeepSimplexError("by 'all' or 'predicted'", repr(by), "choose one")
    by_class, knownness = dataclasses.replace(model, radius=1.0).scores(images)
    predicted = by_class.argmax(1) if by == "predicted" else None
    threshold = conformal_threshold(
        knownness, keep, predicted=predicted, classes=len(model.classes), guarantee=guarantee
    )
    return dataclasses.replace(model, threshold=threshold)


def _reason(score: str, known: bool, name: Any, value: float, limit: float) -> str:
    verdict = f"{name}" if known else "UNKNOWN"
    if score == "distance":
        text, bound = f"nearest '{name}' at {-value:.2f}", f"limit {-limit:.2f}"
    else:
        text = f"best '{name}' with {score.replace('_', ' ')} {value:.2f}"
        bound = f"limit {limit:.2f}"
    return f"{verdict}: {text}, {bound if np.isfinite(limit) else 'no limit'}"


def _pack(model: Model) -> bytes:
    tensors = {k: v.detach().cpu().contiguous() for k, v in model.method.state_dict().items()}
    record: dict[str, Any] = {
        "sha256": "0" * 64,
        "format": FORMAT,
        "version": deepsimplex.__version__,
        "classes": model.classes.tolist(),
        "labels": model.classes.dtype.str,
        "preprocessing": {"shape": list(model.shape), "range": "raw", "normalised": "in the net"},
        "score": model.score,
        "radius": model.radius,
        "threshold": None if model.threshold is None else model.threshold.to_json(),
        "recipe": model.recipe.to_json(),
    }
    if isinstance(model.method, DSC):
        record["simplex"] = dataclasses.asdict(model.method.simplex)
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    content = bytearray(to_safetensors(tensors, {"deepsimplex": text}))
    at = content.index(_MARK) + len(_MARK)
    content[at : at + 64] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def _unpack(path: Path) -> Model:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelFileError(
            f"a model file at {path}", error.strerror or str(error), "check the path"
        ) from None
    _check_bytes(path, content)
    try:
        tensors = from_safetensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        record = json.loads(header["__metadata__"]["deepsimplex"])
        if record["format"] != FORMAT:
            raise ModelFileError(
                f"model format {FORMAT} in {path}",
                f"format {record['format']} of version {record['version']}",
                "use the deepsimplex that wrote it, or train again",
            )
        return _rebuild(record, tensors)
    except ModelFileError:
        raise
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ModelFileError(
            f"a model of this version in {path}",
            " ".join(str(error).split())[:200],
            "use the deepsimplex that wrote it, or train again",
        ) from None


def _check_bytes(path: Path, content: bytes) -> None:
    """A whole, unaltered file of ours, before any of it is believed."""
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + min(size, _HEADER_LIMIT)]
    at = header.find(_MARK)
    if len(content) < 8 or not header.startswith(b"{") or at < 0:
        got = "an empty file" if not content else "something else, or only its beginning"
        raise ModelFileError(
            f"a deepsimplex model in {path}", got, "give a file that `train` or `save` wrote"
        )
    begin = 8 + at + len(_MARK)
    stated = content[begin : begin + 64]
    digest = hashlib.sha256(content[:begin])
    digest.update(b"0" * len(stated))
    digest.update(memoryview(content)[begin + len(stated) :])
    if digest.hexdigest().encode() != stated:
        raise ModelFileError(
            f"{path} to match its checksum",
            "a truncated or altered file",
            "copy it again from where it was made",
        )


def _rebuild(record: dict[str, Any], tensors: dict[str, Tensor]) -> Model:
    recipe = Recipe.from_json(record["recipe"])
    shape = tuple(int(size) for size in record["preprocessing"]["shape"])
    classes = np.array(record["classes"], dtype=np.dtype(record["labels"]))
    with torch.device("meta"):  # no memory is taken on the word of a header
        method = build_method(recipe.method, recipe.backbone, shape, len(classes), recipe.settings)
    method.load_state_dict(tensors, assign=True)
    method.requires_grad_(False)
    check_score(method, record["score"])
    threshold = record["threshold"]
    return Model(
        method,
        recipe,
        classes,
        shape,
        record["score"],
        None if threshold is None else Threshold.from_json(threshold),
        float(record["radius"]),
    )
