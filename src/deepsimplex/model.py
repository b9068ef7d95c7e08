"""The trained thing: deciding with reasons, kept in one checksummed file.

The file is safetensors: weights, and metadata with class names, preprocessing, architecture,
simplex, score, threshold, calibration, recipe and version; where the score is a detector's, also
the features and labels of training images that it was fitted to. A SHA-256 over every byte (its
own 64 counted as zeros) stands in the metadata. Nothing is pickled; nothing in the file is run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

import deepsimplex
from deepsimplex import engine, inference
from deepsimplex.calibration import Threshold
from deepsimplex.data.augment import Views
from deepsimplex.detectors import Detector, check_score, restore_detector
from deepsimplex.errors import DeepSimplexError, MissingExtraError, ModelFileError
from deepsimplex.methods import build_method
from deepsimplex.methods.base import NUMBERS, Method
from deepsimplex.methods.dsc import DSC
from deepsimplex.recipes import Recipe
from deepsimplex.runs import write_atomically

FORMAT = 1
# A score's dimension as a power of the radius: a distance is a length, a dot product its square.
_LENGTHS = {"distance": 1, "dot": 2}
_MARK = b'"deepsimplex":"{\\"sha256\\":\\"'
_HEADER_LIMIT = 64 << 20
_SEEN = "seen.digests"
_KEPT = ("detector.rows", "detector.labels")  # what a detector is fitted to again


@dataclass(frozen=True)
class Decision:
    """What was decided about one image, and why."""

    known: bool
    nearest: Any  # the class it would be
    knownness: float
    limit: float  # accepted at or above it; −inf when nothing is rejected
    reason: str


@dataclass(frozen=True, eq=False)
class Verdicts:
    """What was decided about n images: class index, knownness, its limit, and whether it passed."""

    predicted: np.ndarray
    knownness: np.ndarray
    limits: np.ndarray

    @property
    def accepted(self) -> np.ndarray:
        return self.knownness >= self.limits


@dataclass(frozen=True, eq=False)
class Model:
    """Scores and thresholds are kept at unit radius and shown in units of `radius`."""

    method: Method
    recipe: Recipe
    classes: np.ndarray
    shape: tuple[int, ...]  # (c, h, w) of an image, (p,) of a feature vector
    score: str
    threshold: Threshold | None = None
    radius: float = 1.0
    unknown_label: Any = None  # the estimator's, if it was given one
    pixels: bool = True  # trained on uint8
    seen: np.ndarray = field(default_factory=lambda: np.zeros((0, 8), np.uint8))  # digests
    detector: Detector | None = None  # where `score` is not one of the method's own

    def __post_init__(self) -> None:
        names = self.classes.tolist() if self.classes.ndim == 1 else []
        if len(names) < 2 or len(set(names)) < len(names):
            raise DeepSimplexError("two or more different classes", f"{names}", "rename them")
        radius: Any = self.radius
        if not (isinstance(radius, NUMBERS) and 0 < radius < np.inf):
            raise DeepSimplexError("a radius above 0", repr(self.radius), "it is a unit of length")
        limits = () if self.threshold is None else self.threshold.values
        if len(limits) not in (0, 1, len(names)):
            raise DeepSimplexError(f"{len(names)} thresholds", f"{len(limits)}", "calibrate again")

    @property
    def unit(self) -> float:
        """What a score at unit radius is multiplied by before a person sees it."""
        return self._unit(self.score)

    @property
    def _class_score(self) -> str:
        """The method's score that classes are told apart by: a detector leaves that to it."""
        return self.score if self.detector is None else self.method.scores[0]

    def _unit(self, score: str) -> float:
        return self.radius ** _LENGTHS.get(score, 0)

    def scores(self, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Class scores (n, C) and knownness (n,) of raw images, in units of the radius."""
        name = self._class_score
        by_class, known = inference.scores(self.method, images, name, views=self.recipe.views)
        knownness = known[name] if self.detector is None else self.detector.knownness(images)
        return by_class.numpy() * self._unit(name), knownness.numpy() * self.unit

    def all_scores(self, images: Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Predictions (n,) and knownness (n,) by every score of the method, and the detector's."""
        by_class, known = inference.scores(
            self.method,
            images,
            self._class_score,
            self.method.scores,
            views=self.recipe.views,
        )
        if self.detector is not None:
            known[self.score] = self.detector.knownness(images)
        units = {name: values.numpy() * self._unit(name) for name, values in known.items()}
        return by_class.argmax(1).numpy(), units

    def by_views(self, views: Views) -> Model:
        """The same network by other views of an image and its method's score, not calibrated."""
        recipe = dataclasses.replace(self.recipe, **dataclasses.asdict(views))
        plain: Any = {"score": self._class_score, "detector": None, "threshold": None}
        return dataclasses.replace(self, recipe=recipe, **plain)

    def limits(self, predicted: np.ndarray) -> np.ndarray:
        """The threshold that applies to each prediction, in units of the radius: (n,) → (n,)."""
        if self.threshold is None:
            return np.full(len(predicted), -np.inf)
        return self.threshold.limit_for(predicted) * self.unit

    def judge(self, images: Tensor) -> Verdicts:
        """The nearest class of each image, and whether it is known enough to be called that."""
        by_class, knownness = self.scores(images)
        predicted = by_class.argmax(1)
        return Verdicts(predicted, knownness, self.limits(predicted))

    def decide(self, images: Tensor) -> list[Decision]:
        """`judge`, image by image, with reasons."""
        v = self.judge(images)
        decisions = []
        for j, value, limit, known in zip(
            v.predicted, v.knownness.tolist(), v.limits.tolist(), v.accepted.tolist(), strict=True
        ):
            reason = _reason(self.score, known, self.classes[j], value, limit)
            decisions.append(Decision(known, self.classes[j], value, limit, reason))
        return decisions

    def was_seen(self, images: Tensor) -> np.ndarray:
        """Which images were trained or calibrated on, by content: (n, …) → (n,) bool."""
        seen = {row.tobytes() for row in self.seen}
        return np.array([row.tobytes() in seen for row in digests(images)], dtype=bool)

    def save(self, path: str | Path) -> None:
        """One file, written beside and renamed."""
        write_atomically(Path(path), _pack(self))

    @staticmethod
    def load(path: str | Path, device: str = "auto") -> Model:
        """The model in the file, or a ModelFileError that says what is wrong with it."""
        where = engine.pick_device(device)
        model = _unpack(Path(path))
        model.method.to(where).eval()
        return model


def digests(images: Tensor) -> np.ndarray:
    """Eight bytes of a content hash of each image: (n, …) → (n, 8)."""
    rows = np.ascontiguousarray(images.numpy(force=True))
    found = [hashlib.blake2b(row.data, digest_size=8).digest() for row in rows]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 8).copy()


def repeated(images: Tensor, among: Tensor) -> np.ndarray:
    """Which images are, byte for byte, in another set too: (n, …), (m, …) → (n,)."""
    others = {row.tobytes() for row in digests(among)}
    return np.array([row.tobytes() in others for row in digests(images)], dtype=bool)


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
    tensors[_SEEN] = torch.from_numpy(model.seen)
    if model.detector is not None:
        kept = model.detector.rows, model.detector.labels
        tensors |= {name: t.contiguous() for name, t in zip(_KEPT, kept, strict=True)}
    record: dict[str, Any] = {
        "sha256": "0" * 64,
        "format": FORMAT,
        "version": deepsimplex.__version__,
        "classes": model.classes.tolist(),
        "labels": model.classes.dtype.str,
        "preprocessing": {
            "shape": list(model.shape),
            "input": "uint8 pixels 0…255" if model.pixels else "numbers as trained on",
            "normalisation": "by the network",
            "pixels": model.pixels,
        },
        "score": model.score,
        "radius": model.radius,
        "unknown_label": model.unknown_label,
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
        if record["format"] is True or record["format"] != FORMAT:
            raise ModelFileError(
                f"model format {FORMAT} in {path}",
                f"format {record['format']} of version {record['version']}",
                "use the deepsimplex that wrote it, or train again",
            )
        return _rebuild(record, tensors)
    except (ModelFileError, MissingExtraError):
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
    if max(shape) > 1 << 20:
        raise ValueError(f"an input of shape {shape}")
    classes = np.array(record["classes"], dtype=np.dtype(record["labels"]))
    if classes.tolist() != record["classes"]:
        raise ValueError("class names that do not fit their type")
    seen = tensors.pop(_SEEN).numpy()
    kept = [tensors.pop(name) for name in _KEPT if name in tensors]
    with torch.device("meta"):  # no memory is taken on the word of a header
        method = build_method(recipe.method, recipe.backbone, shape, len(classes), recipe.settings)
    method.load_state_dict(tensors, assign=True)
    if any(t.is_meta for t in (*method.parameters(), *method.buffers())):
        raise ValueError("weights missing")
    method.requires_grad_(False)
    score, threshold = record["score"], record["threshold"]
    pixels = bool(record["preprocessing"]["pixels"])
    check_score(method, score)
    detector = None
    if score not in method.scores:
        rows, labels = kept
        detector = restore_detector(
            score, method, rows, labels, len(classes), pixels, views=recipe.views
        )
    return Model(
        method,
        recipe,
        classes,
        shape,
        score,
        None if threshold is None else Threshold.from_json(threshold),
        record["radius"],
        record["unknown_label"],
        pixels,
        seen,
        detector,
    )
