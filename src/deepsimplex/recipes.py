"""Every number that training needs, as frozen dataclasses, and the defaults by input shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from deepsimplex.data.augment import Views
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import method_row, settings_for, settings_kept
from deepsimplex.methods.base import NUMBERS, WHOLE_NUMBERS, check_choices


@dataclass(frozen=True)
class Recipe:
    """One training, completely said. Equal recipes on equal data give equal weights."""

    method: str = "dsc"
    settings: Any = None  # the method's own settings; None takes its row's
    backbone: str = "auto"
    epochs: int = 100
    batch_size: int = 128
    background_batch: int = 128
    optimiser: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9  # β₁ for AdamW
    nesterov: bool = True
    weight_decay: float = 5e-4
    clip: float | None = 1.0  # largest norm of a step's gradient (docs/decisions/0007)
    warmup: float = 0.05  # share of all steps with a linearly rising rate; cosine to 0 after
    restarts: int = 0  # times the cosine begins again
    average: float = 0.0  # decay of a running average of the weights, which is kept; 0: the last
    augment: str = "none"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    mirror: bool = False  # score the mean output of an image and its mirror image
    shift: int = 0  # and of both moved by so many pixels, in eight directions
    deterministic: bool = False
    calibration: float = 0.2  # share of the known training images held out for the threshold
    seed: int = 0

    def __post_init__(self) -> None:
        row = method_row(self.method)
        if self.settings is None:
            object.__setattr__(self, "settings", row.settings)
        if type(self.settings) is not type(row.settings):
            raise DeepSimplexError(
                f"{type(row.settings).__name__} for method {self.method!r}",
                type(self.settings).__name__,
                "give settings=None, or the method's own",
            )
        check_choices(self)
        for name, least, most in (
            ("epochs", 0, 10**9),
            ("batch_size", 2, 10**9),
            ("background_batch", 1, 10**9),
            ("restarts", 0, 10**9),
            ("shift", 0, 10**9),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, WHOLE_NUMBERS) or not least <= value <= most:
                raise DeepSimplexError(
                    f"{name} as a whole number from {least} to {most}", repr(value), "change it"
                )
            object.__setattr__(self, name, int(value))
        for name, low, high in (
            ("learning_rate", 0.0, math.inf),
            ("momentum", 0.0, 1.0),
            ("weight_decay", 0.0, math.inf),
            ("warmup", 0.0, 1.0),
            ("average", 0.0, 1.0),
            ("calibration", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not isinstance(value, NUMBERS) or not low <= value < high:
                raise DeepSimplexError(
                    f"{name} from {low:g} to below {high:g}", repr(value), "change it"
                )
            object.__setattr__(self, name, float(value))
        if self.learning_rate == 0.0:
            raise DeepSimplexError("a learning_rate above 0", "0, which learns nothing", "raise it")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise DeepSimplexError("clip above 0, or None", repr(self.clip), "change it")

    @property
    def views(self) -> Views:
        return Views(self.mirror, self.shift)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Recipe:
        known = {field.name for field in dataclasses.fields(Recipe)}
        extra = sorted(set(record) - known)
        own = {field.name for field in dataclasses.fields(method_row(record["method"]).settings)}
        extra += [f"settings.{name}" for name in sorted(set(record["settings"]) - own)]
        if extra:
            raise DeepSimplexError(
                "a recipe of this version",
                f"unknown fields {extra}",
                "use the version that wrote it",
            )
        settings = settings_kept(record["method"], record["settings"])
        return Recipe(**{**record, "settings": settings})


def learning_rate(recipe: Recipe, base: float, step: int, total: int) -> float:
    """Linear warm-up over the first share of steps, then half a cosine to 0 at `total`.

    With restarts, that many more half cosines of equal length, each from the full rate.
    """
    warm = recipe.warmup * total
    if step < warm:
        return base * (step + 1) / (warm + 1)
    cycles = recipe.restarts + 1
    through = cycles * (step - warm) / max(1.0, total - warm)
    part = 1.0 if step >= total else through % 1
    return base * 0.5 * (1 + math.cos(math.pi * part))


def digits_recipe(method: str, seed: int = 0) -> Recipe:
    """scikit-learn's 8×8 digits with the small net.

    `deepsimplex demo`; a few seconds a training on two cores; the numbers it reaches are in
    results/demo-digits.json.
    """
    rate = method_row(method).rate or 0.03
    return Recipe(
        method=method, backbone="small", epochs=30, batch_size=64, learning_rate=rate, seed=seed
    )


SMALL = 28
"""Up to so many pixels a side the small net and its recipe are taken."""


def default_method(shape: tuple[int, ...], background: bool) -> str:
    """The member of the simplex family that did best where it was screened (docs/decisions/0012).

    With background images eq. 7 + eq. 4; without, eq. 4 for small images, whose nets see few steps,
    and for vectors, which were not screened; eq. 7 for larger images.
    """
    if background:
        return "dsc-blend"
    return "dsc" if len(shape) == 1 or max(shape[1:]) <= SMALL else "dsc-softmax"


AT_LENGTH: dict[str, Any] = {
    "epochs": 600,
    "weight_decay": 1e-4,
    "nesterov": False,
    "warmup": 20 / 600,
    "clip": None,
}
"""20 epochs of warming up, then half a cosine; plain SGD, little decay, no clipping."""


SHIFT = 2
"""By so many pixels an image of 29 to 64 is moved (docs/decisions/0012)."""


def moved(recipe: Recipe) -> Recipe:
    """Scored by the mean output of an image and of it moved in eight directions, where training
    moves, and of their mirror images, where it mirrors.
    """
    shift = SHIFT if "crop" in recipe.augment else 0
    return dataclasses.replace(recipe, mirror="flip" in recipe.augment, shift=shift)


WITH_BACKGROUND = 160
"""Epochs of larger images beside a background: of 70 and 210 the more was better; as many as there
was time to measure.
"""


def default_recipe(
    method: str,
    shape: tuple[int, ...],
    seed: int = 0,
    images: int | None = None,
    background: bool = False,
    pixels: bool = True,
) -> Recipe:
    """What `train` and OpenSetClassifier use for input of this shape when nothing is said.

    Method "auto" is `default_method`. A few small images make few steps an epoch: they get more
    epochs, 400 steps in all. Larger ones are trained as the strongest published baseline is, but in
    one cosine, with a background as the benchmarks are but longer, and up to 64 pixels scored by
    many views (docs/decisions/0012). Where there are no `pixels` to augment the benchmarks' recipe
    stays.
    """
    method = default_method(shape, background) if method == "auto" else method
    rate = method_row(method).rate
    if len(shape) == 1:
        return Recipe(
            method=method, backbone="mlp", batch_size=64, learning_rate=rate or 0.03, seed=seed
        )
    if max(shape[1:]) <= SMALL:
        recipe = digits_recipe(method, seed)
        steps = max(1, (images or 10**9) // recipe.batch_size)
        return dataclasses.replace(recipe, epochs=max(recipe.epochs, -(-400 // steps)))
    recipe = Recipe(
        method=method, learning_rate=rate or 0.1, augment="crop", weight_decay=5e-4, seed=seed
    )
    if not pixels:
        return recipe
    if background:
        recipe = dataclasses.replace(recipe, epochs=WITH_BACKGROUND)
    else:
        recipe = dataclasses.replace(recipe, augment="strong+crop", **AT_LENGTH)
    sides = sorted(shape[1:])
    return moved(recipe) if sides[0] > SMALL and sides[1] <= 64 else recipe


def long_on_cpu(shape: tuple[int, ...], recipe: Recipe, device: str) -> bool:
    """Whether a training of samples of this shape wants a GPU and has none."""
    larger = len(shape) == 3 and max(shape[1:]) > SMALL
    return device == "cpu" and larger and recipe.epochs >= WITH_BACKGROUND


def changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with what is asked otherwise; an image that training does not move is not moved
    to be scored either, unless that is asked.
    """
    still = {"shift": 0} if "crop" not in changes.get("augment", "crop") else {}
    return dataclasses.replace(recipe, **still | changes)


def benchmark_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """The common protocol of the open-set benchmarks at 32 and 64 pixels.

    `deepsimplex compare cifar10`: OSRCI net, 100 epochs, batch 128, SGD 0.9 at 0.1, decay 5e-4,
    cosine; the numbers it reaches are in results/paper-table1.json and paper-rivals.json.
    """
    return Recipe(
        method=method,
        backbone="osrci-flat" if method_row(method).flat else "osrci",
        learning_rate=method_row(method).rate or 0.1,
        weight_decay=5e-4,
        augment=augment,
        seed=seed,
    )


def long_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """The benchmark recipe at length, with RandAugment, after published softmax baselines.

    500 epochs, decay 1e-3, and the score of an image and its mirror image together where the
    benchmark mirrors in training (docs/decisions/0012).
    """
    return dataclasses.replace(
        benchmark_recipe(method, f"rand+{augment}".removesuffix("+none"), seed),
        epochs=500,
        weight_decay=1e-3,
        mirror="flip" in augment,
    )


def strong_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """The strongest published softmax baseline as its authors' code has it (Vaze et al. 2022).

    `AT_LENGTH` in three half cosines, with their RandAugment (at CIFAR's strength) before crops and
    mirrors.
    """
    augment = f"strong+{augment}".removesuffix("+none")
    return dataclasses.replace(benchmark_recipe(method, augment, seed), restarts=2, **AT_LENGTH)


def whole_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """The benchmark recipe without dropout, on the mean of the last map."""
    return dataclasses.replace(benchmark_recipe(method, augment, seed), backbone="osrci-whole")


def strong_whole_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """The strong recipe without dropout, on the mean of the last map (docs/decisions/0012)."""
    return dataclasses.replace(strong_recipe(method, augment, seed), backbone="osrci-whole")


def moved_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """The strong recipe without dropout, scored by many views."""
    return moved(strong_whole_recipe(method, augment, seed))


def once_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """`moved_recipe` in one half cosine (docs/decisions/0012)."""
    return dataclasses.replace(moved_recipe(method, augment, seed), restarts=0)


def whole_moved_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """The benchmark recipe without dropout, longer, scored by many views: for a background."""
    recipe = moved(whole_recipe(method, augment, seed))
    return dataclasses.replace(recipe, epochs=WITH_BACKGROUND)


def faint_recipe(method: str, augment: str, seed: int = 0) -> Recipe:
    """`whole_recipe` with mild RandAugment and a background_weight of 0.1: for a background that is
    little like the unknowns, photographs beside digits (docs/decisions/0012).
    """
    recipe = whole_recipe(method, f"rand+{augment}".removesuffix("+none"), seed)
    if "background_weight" not in {field.name for field in dataclasses.fields(recipe.settings)}:
        raise DeepSimplexError(
            "a method with a background_weight for the recipe 'faint'",
            repr(method),
            "choose another recipe, or a row of the simplex family",
        )
    settings = settings_for(method, {"background_weight": 0.1})
    return dataclasses.replace(recipe, settings=settings)


BENCHMARK_RECIPES: dict[str, Callable[..., Recipe]] = {
    "common": benchmark_recipe,
    "whole": whole_recipe,
    "long": long_recipe,
    "strong": strong_recipe,
    "strong-whole": strong_whole_recipe,
    "moved": moved_recipe,
    "once": once_recipe,
    "whole-moved": whole_moved_recipe,
    "faint": faint_recipe,
}
"""By name, `paper table1 --recipe`: (method, augment, seed) → recipe."""
