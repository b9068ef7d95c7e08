"""Background images by name, with an audit of what was left out because it overlaps.

Background may hold none of the classes it stands against. For each pair of sets the overlapping
classes are an explicit list here, and the unknown classes of a trial leave it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deepsimplex.data.archives import load_official
from deepsimplex.data.folders import image_files
from deepsimplex.data.pictures import read_images
from deepsimplex.data.resize import fit
from deepsimplex.errors import DeepSimplexError

# Background names and the official set behind each; only training images are used.
NAMED = {"cifar100": "cifar100", "tinyimagenet32": "tinyimagenet", "300k": "300k"}

PHOTOGRAPHS = "photographs"
"""Patches of the two photographs that come with scikit-learn: the one background always at hand."""

# (background, knowns) → classes left out of the background. A pair that is not here is refused.
OVERLAPS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cifar100", "cifar10"): ("bus", "pickup_truck"),
    ("tinyimagenet", "cifar10"): (
        *("n02814533", "n03100240", "n03670208", "n04285008", "n03977966"),  # automobiles
        *("n01855672", "n02002724", "n02056570", "n02058221"),  # birds
        *("n02123045", "n02123394", "n02124075"),  # cats
        *("n02085620", "n02094433", "n02099601", "n02099712", "n02106662", "n02113799"),  # dogs
        *("n01641577", "n01644900"),  # frogs
        *("n03662601", "n03447447"),  # boats
        *("n03796401", "n04146614"),  # moving van, school bus
    ),
    **{
        (background, known): ()
        for background in ("cifar100", "tinyimagenet")
        for known in ("mnist", "fashion-mnist", "svhn", "digits")
    },
}


@dataclass(frozen=True)
class Background:
    """Images (n, size, size, c) with the class each has in its own set ("" if unlabelled)."""

    name: str
    source: str
    images: np.ndarray
    classes: np.ndarray
    audit: dict[str, Any]

    def without(self, unknown: frozenset[tuple[str, str]]) -> tuple[np.ndarray, dict[str, Any]]:
        """The images less those of a trial's unknown classes, (set, class); and the audit."""
        names = sorted(name for source, name in unknown if source == self.source)
        keep = ~np.isin(self.classes, names)
        left = {name: int((self.classes == name).sum()) for name in names}
        audit = self.audit | {"unknown classes left out": {k: v for k, v in left.items() if v}}
        return self.images[keep], audit | {"images": int(keep.sum())}


def load_background(name: str, root: Path, *, against: str, size: int, channels: int) -> Background:
    """Background by name or folder, fitted, less the classes that overlap with `against`."""
    if name == PHOTOGRAPHS:
        images = patches(size, channels)
        about = {"name": name, "note": "patches of a palace on a lake and of a flower"}
        return Background(name, name, images, np.full(len(images), ""), about)
    if name not in NAMED:
        return _from_folder(Path(name), size, channels)
    source = NAMED[name]
    if source == "300k":
        dropped: tuple[str, ...] = ()
        note = "unlabelled; cleaned of CIFAR's classes by its authors"
    elif (source, against) in OVERLAPS:
        dropped = OVERLAPS[source, against]
        note = "classes left out by list"
    else:
        raise DeepSimplexError(
            f"a list of overlapping classes for background {name!r} against {against!r}",
            "none",
            "use 300k, a folder of your own, or add the pair to data/background.py",
        )
    data = load_official(source, "train", root)
    classes = np.array([*data.classes, ""])[data.labels]
    keep = ~np.isin(classes, dropped)
    audit = {"name": name, "note": note, "overlapping classes left out": list(dropped)}
    images = fit(data.images[keep] if dropped else data.images, size, channels)
    return Background(name, source, images, classes[keep], audit)


def background_beside(
    name: str, root: Path, against: str, shape: tuple[int, ...], pixels: bool
) -> Background:
    """Background beside one's own images of `shape` (h, w, c), fitted to them."""
    if not pixels or len(shape) != 3 or shape[0] != shape[1]:
        raise DeepSimplexError(
            "square images of bytes to stand against a background",
            f"{'bytes' if pixels else 'numbers'} of shape {shape}",
            "leave the background out",
        )
    return load_background(name, root, against=against, size=shape[0], channels=shape[2])


def patches(size: int, channels: int, count: int = 2000) -> np.ndarray:
    """`count` squares of scikit-learn's photographs at three scales: (count, size, size, c)."""
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    found = np.empty((count, size, size, 3), np.uint8)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    for number, patch in enumerate(found):
        picture = photographs[number % len(photographs)]
        side = min(size * (1, 2, 4)[number % 3], *picture.size)
        left, top = (int(random.integers(0, room - side + 1)) for room in picture.size)
        square = picture.crop((left, top, left + side, top + side))
        patch[:] = np.asarray(square.resize((size, size), Image.Resampling.BOX))
    return fit(found, size, channels)


def _from_folder(folder: Path, size: int, channels: int) -> Background:
    if not folder.is_dir():
        raise DeepSimplexError(
            f"background among {', '.join((*NAMED, PHOTOGRAPHS))}, or a folder of images",
            f"{str(folder)!r}",
            "check the name or the path",
        )
    files = image_files(folder)
    if not files:
        raise DeepSimplexError(f"images in {folder}", "none", "check the path")
    audit = {"name": str(folder), "note": "a folder of the user's: not audited by class"}
    images = read_images(files, size, channels)
    return Background(str(folder), str(folder), images, np.full(len(files), ""), audit)
