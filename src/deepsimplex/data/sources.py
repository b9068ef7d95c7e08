"""Where images come from: scikit-learn's digits, arrays in .npz, a folder a class."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from deepsimplex.errors import DeepSimplexError

# Raster formats by allow-list; Pillow's other readers are never called.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
UNKNOWN_FOLDER = "unknown"
DEFAULT_SIZE = 64


@dataclass(frozen=True)
class LabelledSet:
    """Images (n, h, w, c) uint8 or float, or vectors (n, p); labels index `classes`, −1 unknown."""

    source: str
    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]

    @property
    def names(self) -> np.ndarray:
        """The class name of each image; "unknown" for label −1."""
        return np.array([*self.classes, UNKNOWN_FOLDER])[self.labels]

    def known_only(self) -> LabelledSet:
        """Without the images that are only for evaluation."""
        keep = self.labels >= 0
        return replace(self, images=self.images[keep], labels=self.labels[keep])


def load_data(
    source: str, *, part: str = "train", size: int | None = None, channels: int | None = None
) -> LabelledSet:
    """`digits`, a .npz file, or a folder with one folder a class.

    `part` chooses the train or test part where a source has both (digits, and .npz files with
    X_train, y_train, X_test, y_test). `size` and `channels` are for image files: given, they are
    enforced; else they are read off the images.
    """
    if source == "digits":
        return _digits_part(part)
    path = Path(source)
    if path.is_dir():
        return _load_folder(path, size, channels)
    if path.suffix == ".npz" and path.is_file():
        return _load_npz(path, part)
    got = "a file of another kind" if path.exists() else "nothing of that name"
    raise DeepSimplexError(
        f"'digits', a .npz file or a folder of class folders at {source!r}", got, "check the path"
    )


def load_digits() -> LabelledSet:
    """scikit-learn's bundled digits: 1797 images of 8×8, one channel, values 0…16."""
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    pixels = images.reshape(-1, 8, 8, 1).astype(np.uint8)
    return LabelledSet("digits", pixels, labels.astype(np.int64), tuple("0123456789"))


def hold_out(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (kept, held out): about `share` of each class, leaving at least one of it kept."""
    random = np.random.default_rng(seed)
    kept, held = [], []
    for c in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == c))
        count = min(round(share * len(members)), len(members) - 1)
        held.append(members[:count])
        kept.append(members[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(held))


def to_tensor(images: np.ndarray) -> Tensor:
    """(n, h, w, c) or (n, h, w) → (n, c, h, w); vectors as they are; floats as float32."""
    array = images if images.dtype == np.uint8 else images.astype(np.float32)
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim == 4:
        array = array.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(array))


def image_files(folder: Path) -> list[Path]:
    """Image files below a folder, by name; hidden files are passed over."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )


def read_images(paths: list[Path], size: int, channels: int) -> np.ndarray:
    """Decode, turn upright, scale the short side to `size`, cut the centre: (n, size, size, c)."""
    out = np.empty((len(paths), size, size, channels), np.uint8)
    bad = []
    for index, path in enumerate(paths):
        try:
            with Image.open(path, formats=FORMATS) as image:
                upright = ImageOps.exif_transpose(image)
                plain = upright.convert("L" if channels == 1 else "RGB")
                fitted = ImageOps.fit(plain, (size, size), Image.Resampling.BILINEAR)
            out[index] = np.asarray(fitted).reshape(size, size, channels)
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError):
            bad.append(str(path))
        except Image.DecompressionBombError:
            bad.append(f"{path} (too large)")
    if bad:
        raise DeepSimplexError(
            f"readable images ({', '.join(FORMATS)})",
            f"{len(bad)} that are not: {', '.join(bad)}",
            "repair or remove them",
        )
    return out


def _digits_part(part: str) -> LabelledSet:
    data = load_digits()
    chosen = hold_out(data.labels, 0.25, seed=0)[part == "test"]
    return replace(data, images=data.images[chosen], labels=data.labels[chosen])


def _load_folder(root: Path, size: int | None, channels: int | None) -> LabelledSet:
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = {folder.name: image_files(folder) for folder in folders}
    files = {name: paths for name, paths in files.items() if paths}
    classes = tuple(name for name in files if name != UNKNOWN_FOLDER)
    if not classes:
        raise DeepSimplexError(
            f"one folder of images a class below {root}",
            f"{len(folders)} folders, none with images of {', '.join(SUFFIXES)}",
            "put each class's images into a folder named after it",
        )
    paths, labels = [], []
    for name, members in files.items():
        paths += members
        labels += [-1 if name == UNKNOWN_FOLDER else classes.index(name)] * len(members)
    if size is None or channels is None:
        found_size, found_channels = _look(paths)
        size, channels = size or found_size, channels or found_channels
    return LabelledSet(str(root), read_images(paths, size, channels), np.array(labels), classes)


def _look(paths: list[Path]) -> tuple[int, int]:
    """Size and channels for a set: its own size if all agree and it is small; grey if all are."""
    sizes, grey = set(), True
    for path in paths:
        try:
            with Image.open(path, formats=FORMATS) as image:
                sizes.add(image.size)
                grey &= image.mode in ("1", "L", "I;16", "I", "F")
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
            continue  # named by read_images
    own = min(min(s) for s in sizes) if len(sizes) == 1 else DEFAULT_SIZE
    return min(own, DEFAULT_SIZE), 1 if grey else 3


def _load_npz(path: Path, part: str) -> LabelledSet:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DeepSimplexError(
            f"plain arrays in {path}", " ".join(str(error).split())[:120], "write it with np.savez"
        ) from None
    suffix = f"_{part}" if f"X_{part}" in arrays else ""
    if f"X{suffix}" not in arrays:
        raise DeepSimplexError(
            f"arrays X and y (or X_train, y_train, X_test, y_test) in {path}",
            f"{', '.join(arrays) or 'none'}",
            "write it with np.savez(path, X=images, y=labels)",
        )
    images = arrays[f"X{suffix}"]
    if images.ndim not in (2, 3, 4) or images.dtype.kind not in "uif" or len(images) == 0:
        raise DeepSimplexError(
            "X of numbers, shaped (n, p), (n, h, w) or (n, h, w, c)",
            f"{images.dtype} {images.shape}",
            "reshape it",
        )
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise DeepSimplexError(f"finite X in {path}", "NaN or infinity", "clean the array")
    if images.ndim == 3:
        images = images[..., None]
    names = arrays.get(f"y{suffix}")
    if names is None:
        return LabelledSet(str(path), images, np.full(len(images), -1), ())
    if names.shape != (len(images),):
        raise DeepSimplexError(f"y of shape ({len(images)},)", f"{names.shape}", "one label each")
    text = names.astype(str)
    unknown = np.isin(text, (UNKNOWN_FOLDER, "-1"))
    classes, labels = np.unique(text[~unknown], return_inverse=True)
    indices = np.full(len(text), -1)
    indices[~unknown] = labels
    return LabelledSet(str(path), images, indices, tuple(classes.tolist()))
