"""OpenSetClassifier: scikit-learn's API over the whole package."""

from __future__ import annotations

import dataclasses
import warnings
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, from_numpy

from deepsimplex.data.sources import to_tensor
from deepsimplex.engine import pick_device
from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.methods import settings_for
from deepsimplex.model import Model
from deepsimplex.recipes import Recipe, changed, default_recipe, long_on_cpu

_OF_RECIPE = ("epochs", "batch_size", "learning_rate", "weight_decay", "augment", "shift")


class OpenSetClassifier(ClassifierMixin, BaseEstimator):
    """A classifier that may answer "unknown".

    X is (n, features), (n, h, w) or (n, h, w, c); uint8 pixels or any finite numbers.

    Parameters
    ----------
    method : a row of METHODS, or "auto": of the simplex family what does best for samples of this
        kind, with or without background (recipes.default_method).
    backbone : "auto" picks by the shape of X.
    keep : the share of new known samples to keep, e.g. 0.95; a part of the training data is then
        held out to set the threshold. None never rejects.
    guarantee : "mean" keeps the promise on average over calibration draws, "pac" with 90 %
        confidence for this one.
    by : "all" for one threshold, "predicted" for one a predicted class.
    knownness : the score to reject by: one of the method's, or a detector fitted to the training
        data, e.g. "joined" or "knn" (most need the extra `ood`); None takes the method's default.
    settings : changes to the method's own settings, e.g. {"loss": "softmax"}.
    unknown_label : what `predict` answers when it rejects; None takes −1 for numbers (one below
        the smallest label if −1 is a class) and "unknown" for names.
    radius : the unit of length of distances and thresholds; changes no decision.
    epochs, batch_size, learning_rate, weight_decay, augment : None takes the recipe's.
    shift : score the mean output of an image and of it moved by so many pixels in eight directions,
        0 for itself alone; None takes the recipe's, 2 for images of 29 to 64 pixels.

    Attributes
    ----------
    classes_, threshold_ (−inf when nothing is rejected; an array with by="predicted"),
    unknown_label_, model_, n_features_in_.
    """

    def __init__(
        self,
        method: str = "auto",
        backbone: str = "auto",
        *,
        keep: float | None = None,
        guarantee: str = "mean",
        by: str = "all",
        knownness: str | None = None,
        settings: dict[str, Any] | None = None,
        unknown_label: Any = None,
        radius: float = 1.0,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        augment: str | None = None,
        shift: int | None = None,
        calibration_size: float = 0.2,
        device: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.backbone = backbone
        self.keep = keep
        self.guarantee = guarantee
        self.by = by
        self.knownness = knownness
        self.settings = settings
        self.unknown_label = unknown_label
        self.radius = radius
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.augment = augment
        self.shift = shift
        self.calibration_size = calibration_size
        self.device = device
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, *, background: ArrayLike | None = None) -> Self:
        """Train on known classes; `background` are images of none of them, shaped like X."""
        samples, targets = validate_data(self, X, y, allow_nd=True, ensure_min_samples=2)
        check_classification_targets(targets)
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise DeepSimplexError("at least 2 classes", "1 class", "add samples of a second class")
        self.unknown_label_ = self._unknown_label()
        images = _tensor(samples)
        others = None
        if background is not None:
            others = _tensor(check_array(background, allow_nd=True, input_name="background"))
            if others.shape[1:] != images.shape[1:] or others.dtype != images.dtype:
                raise DeepSimplexError(
                    f"background like X, {samples.dtype} (n, {_times(samples.shape[1:])})",
                    f"{np.asarray(background).dtype} ({_times(np.shape(background))})",
                    "convert it",
                )
        recipe = self._recipe(images, others is not None)
        shape = tuple(images.shape[1:])
        if self.epochs is None and long_on_cpu(shape, recipe, pick_device(self.device).type):
            warnings.warn(
                f"{recipe.epochs} epochs on a CPU may take hours; epochs= takes fewer", stacklevel=2
            )
        model = fit_model(
            images,
            from_numpy(labels.astype(np.int64)),
            self.classes_,
            recipe,
            keep=self.keep,
            guarantee=self.guarantee,
            by=self.by,
            score=self.knownness,
            radius=self.radius,
            background=others,
            device=self.device,
        )
        return self._adopt(dataclasses.replace(model, unknown_label=self.unknown_label))

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The nearest class, or `unknown_label_` where knownness is below the threshold."""
        images = self._images(X)
        verdicts = self.model_.judge(images)
        labels = self.classes_[verdicts.predicted]
        if self.model_.threshold is None:
            return labels
        rejected = ~verdicts.accepted
        labels = labels.astype(_wide_enough(labels.dtype, self.unknown_label_))
        labels[rejected] = self.unknown_label_
        return labels

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Class scores (n, C), larger = nearer; for two classes their difference (n,)."""
        images = self._images(X)
        by_class, _ = self.model_.scores(images)
        return by_class[:, 1] - by_class[:, 0] if by_class.shape[1] == 2 else by_class

    def score_samples(self, X: ArrayLike) -> NDArray[np.float64]:
        """Knownness (n,), higher = more known; rejected below `threshold_`."""
        images = self._images(X)
        return self.model_.scores(images)[1]

    def save(self, path: str | Path) -> None:
        """The fitted model in one safetensors file."""
        check_is_fitted(self)
        self.model_.save(path)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Self:
        """A fitted classifier from a file that `save` or `deepsimplex train` wrote."""
        model = Model.load(path, device)
        recipe, threshold = model.recipe, model.threshold
        classifier = cls(
            recipe.method,
            recipe.backbone,
            keep=None if threshold is None else threshold.keep,
            guarantee="mean" if threshold is None else threshold.guarantee,
            by="all" if threshold is None else threshold.by,
            knownness=model.score,
            settings=dataclasses.asdict(recipe.settings),
            unknown_label=model.unknown_label,
            radius=model.radius,
            **{name: getattr(recipe, name) for name in _OF_RECIPE},
            calibration_size=recipe.calibration,
            device=device,
            random_state=recipe.seed,
        )
        classifier.classes_ = model.classes
        classifier.unknown_label_ = classifier._unknown_label()
        c, *rest = model.shape
        classifier.n_features_in_ = rest[0] if rest else c
        return classifier._adopt(model)

    def _adopt(self, model: Model) -> Self:
        self.model_ = model
        self.threshold_: float | NDArray[np.float64] = -np.inf
        if model.threshold is not None:
            values = np.array(model.threshold.values) * model.unit
            self.threshold_ = float(values[0]) if model.threshold.by == "all" else values
            if not np.isfinite(values).all():
                warnings.warn(model.threshold.meaning(model.classes), stacklevel=3)
        return self

    def _recipe(self, images: Tensor, background: bool) -> Recipe:
        seed = self.random_state
        if not isinstance(seed, Integral):
            seed = check_random_state(seed).randint(2**31 - 1)
        changes = {
            name: getattr(self, name) for name in _OF_RECIPE if getattr(self, name) is not None
        }
        changes |= {"calibration": self.calibration_size}
        if self.backbone != "auto":
            changes |= {"backbone": self.backbone}
        shape, pixels = tuple(images.shape[1:]), not images.is_floating_point()
        recipe = default_recipe(self.method, shape, int(seed), len(images), background, pixels)
        changes |= {"settings": settings_for(recipe.method, self.settings)}
        return changed(recipe, changes)

    def _unknown_label(self) -> Any:
        """The label of rejection: never one of the classes."""
        classes, label = self.classes_.tolist(), self.unknown_label
        if label is None and self.classes_.dtype.kind in "iuf":
            return min(classes) - 1 if -1 in classes else -1
        label = "unknown" if label is None else label
        if self.keep is not None and label in classes:
            raise DeepSimplexError(
                "an unknown_label that is no class", repr(label), "set unknown_label to another"
            )
        return label

    def _images(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        images = _tensor(validate_data(self, X, reset=False, allow_nd=True))
        if tuple(images.shape[1:]) != self.model_.shape:
            channels, *sides = self.model_.shape
            shape = (*sides, channels) if sides else (channels,)
            raise DeepSimplexError(
                f"X of shape (n, {_times(shape)}), like the training samples",
                f"({_times(np.shape(X))})",
                "a single one is X[None]; bring others to that shape",
            )
        if images.ndim == 4 and images.is_floating_point() == self.model_.pixels:
            kinds = ["numbers that are no bytes", "uint8 pixels 0…255"]
            raise DeepSimplexError(
                f"{kinds[self.model_.pixels]}, as fitted",
                kinds[not self.model_.pixels],
                "convert them to the kind and range of the training samples",
            )
        return images


def _wide_enough(dtype: np.dtype[Any], unknown: Any) -> np.dtype[Any]:
    """A type for the classes' labels and the label of rejection side by side."""
    other = np.asarray(unknown).dtype
    if dtype.kind in "iu" and other.kind in "iu":
        return np.dtype(np.int64 if dtype != np.uint64 else object)
    if (dtype.kind in "US" and other.kind in "US") or (dtype.kind == "f" and other.kind in "iuf"):
        return np.result_type(dtype, other)
    return np.dtype(object)


def _times(shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in shape)


def _tensor(X: np.ndarray) -> Tensor:
    """Channels-first tensor; numbers too large for float32 are refused, not made infinite."""
    if X.ndim > 4:
        raise DeepSimplexError(
            "X of shape (n, features), (n, h, w) or (n, h, w, c)", f"{X.shape}", "reshape it"
        )
    if X.ndim == 4 and X.shape[1] in (1, 3) and min(X.shape[2:]) > 4:
        raise DeepSimplexError(
            "X of shape (n, h, w, c)",
            f"({_times(X.shape)}), with the channels before the sides",
            "give X.transpose(0, 2, 3, 1)",
        )
    if X.dtype.kind == "f" and X.size and np.abs(X).max() > np.finfo(np.float32).max:
        raise DeepSimplexError("values that fit float32", "larger ones", "rescale X")
    return to_tensor(X)
