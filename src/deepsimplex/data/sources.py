"""Where images come from: scikit-learn's digits, arrays in .npz, a folder a class, a table."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepsimplex.data.cache import REMEDY, Progress, open_cache, remembered
from deepsimplex.data.folders import TABLES, UNKNOWN, Listing, list_images
from deepsimplex.data.pictures import BadPictureError, bad_pictures, look, shown, try_images
from deepsimplex.errors import DeepSimplexError

DEFAULT_SIZE = 28
"""Photographs are scaled to so many pixels: trained in minutes on a CPU; --size asks for more."""
OWN_SIZES = range(8, 64 + 1)
"""Image files that are all of one size keep it, if their short side has so many pixels."""


@dataclass(frozen=True)
class LabelledSet:
    """Images (n, h, w, c) uint8 or float, or vectors (n, p); labels index `classes`, −1 unknown."""

    source: str
    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    said: str = ""  # how a folder or table was understood
    skipped: tuple[str, ...] = ()  # bad files left out, as asked

    @property
    def names(self) -> np.ndarray:
        """The class name of each image; "unknown" for label −1."""
        return np.array([*self.classes, UNKNOWN])[self.labels]

    def known_only(self) -> LabelledSet:
        """Without the images that are only for evaluation; no copy where these come last."""
        keep = self.labels >= 0
        count = int(keep.sum())
        chosen = slice(count) if keep[:count].all() else keep
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


def load_data(
    source: str,
    *,
    part: str = "train",
    size: int | None = None,
    channels: int | None = None,
    on_bad: str = "fail",
    cache: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> LabelledSet:
    """`digits`, a .npz file, a folder with one folder a class, or a table of path and label.

    `part` chooses train, val or test where a source has parts. The others are for image files:
    `size` and `channels` are enforced if given, else read off the images; bad files are all named
    in one error, or with on_bad="skip" left out; with a `cache` folder they are decoded once, by
    `workers` processes, and the images are memory-mapped.
    """
    check_on_bad(on_bad)
    if source == "digits":
        return _digits_part(part)
    path = Path(source)
    if path.is_dir() or (path.suffix.lower() in TABLES and path.is_file()):
        listing = list_images(path).part(part)
        if size is None or channels is None:
            found = _shape(listing, cache)
            size, channels = size or found[0], channels or found[1]
        if cache is None:
            images, kept = _read(listing, size, channels, on_bad)
        else:
            images, kept = open_cache(
                listing.files,
                size,
                channels,
                cache,
                workers=workers or len(os.sched_getaffinity(0)),
                on_bad=on_bad,
                progress=progress,
            )
        return _labelled(listing, images, kept)
    if path.suffix == ".npz" and path.is_file():
        return _load_npz(path, part)
    got = "a file of another kind" if path.exists() else "nothing of that name"
    raise DeepSimplexError(
        f"'digits', a .npz file, a .csv table or a folder of class folders at {source!r}",
        got,
        "check the path",
    )


def check_on_bad(on_bad: str) -> None:
    if on_bad not in ("fail", "skip"):
        raise DeepSimplexError("on_bad 'fail' or 'skip'", repr(on_bad), "choose one")


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
    """(n, h, w, c) or (n, h, w) → (n, c, h, w), uint8 or float32; vectors (n, p) as float64."""
    array = images
    if images.ndim == 2 or images.dtype != np.uint8:
        array = images.astype(np.float64 if images.ndim == 2 else np.float32)
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim == 4:
        array = array.transpose(0, 3, 1, 2)
    # torch wants to be able to write; a memory map of ours may not be written.
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def _digits_part(part: str) -> LabelledSet:
    data = load_digits()
    chosen = hold_out(data.labels, 0.25, seed=0)[part == "test"]
    return replace(data, images=data.images[chosen], labels=data.labels[chosen])


def _read(listing: Listing, size: int, channels: int, on_bad: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in memory, and which of the files they are."""
    images, bad = try_images(listing.files, size, channels)
    if bad and (on_bad == "fail" or len(bad) == len(images)):
        raise bad_pictures([(listing.files[index], reason) for index, reason in bad], REMEDY)
    kept = np.setdiff1d(np.arange(len(images)), [index for index, _ in bad])
    return (images[kept] if bad else images), kept


def _labelled(listing: Listing, images: np.ndarray, kept: np.ndarray) -> LabelledSet:
    labels = listing.labels[kept]
    lost = set(listing.labels.tolist()) - set(labels.tolist()) - {-1}
    if lost:
        raise DeepSimplexError(
            f"a readable image in each class of {shown(listing.root)}",
            f"none in {', '.join(listing.classes[label] for label in sorted(lost))}",
            "repair its images, or take the class away",
        )
    skipped = sorted(set(range(len(listing.files))) - set(kept.tolist()))
    said = listing.interpretation
    if listing.empty:
        said += f"; no images in {', '.join(map(shown, listing.empty))}, taken for no class"
    return LabelledSet(
        str(listing.root),
        images,
        labels,
        listing.classes,
        said,
        tuple(shown(listing.files[index]) for index in skipped),
    )


def _shape(listing: Listing, cache: Path | None) -> tuple[int, int]:
    """Size and channels for a set: its own size or DEFAULT_SIZE; grey if all are."""

    def answer() -> tuple[int, int]:
        sizes, grey = set(), True
        for path in listing.files:
            try:
                seen = look(path)
            except BadPictureError:
                continue  # named when it is read
            sizes.add(seen.size)
            grey &= seen.grey
        return side_of(sizes), 1 if grey else 3

    if cache is None:
        return answer()
    size, channels = remembered(listing.files, cache, f"shape in {OWN_SIZES}", answer)
    return size, channels


def side_of(sizes: Collection[tuple[int, int]]) -> int:
    """Pixels a side that files of these sizes are read at, if nothing is said."""
    own = min(next(iter(sizes))) if len(sizes) == 1 else 0
    return own if own in OWN_SIZES else DEFAULT_SIZE


def _load_npz(path: Path, part: str) -> LabelledSet:
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        objects = "Object arrays" in str(error)
        raise DeepSimplexError(
            f"plain arrays in {path}",
            "Python objects" if objects else "something else, or a damaged file",
            "convert labels with .astype(str)" if objects else "write it with np.savez",
        ) from None
    suffix = f"_{part}" if f"X_{part}" in arrays else ""
    if f"X{suffix}" not in arrays:
        raise DeepSimplexError(
            f"arrays X and y (or X_train, y_train, X_test, y_test) in {path}",
            f"{', '.join(arrays) or 'none'}",
            "write it with np.savez(path, X=images, y=labels)",
        )
    images = arrays[f"X{suffix}"]
    if images.ndim not in (2, 3, 4) or images.dtype.kind not in "uif" or images.size == 0:
        raise DeepSimplexError(
            "X of real numbers, shaped (n, p), (n, h, w) or (n, h, w, c), none of them 0",
            f"{images.dtype} {images.shape}",
            "convert it",
        )
    limit = np.finfo(np.float32).max
    if images.dtype.kind == "f" and not (np.abs(images) <= limit).all():
        raise DeepSimplexError(f"finite X in {path}", "NaN, infinity or over 3e38", "clean it")
    if images.ndim == 3:
        images = images[..., None]
    names = arrays.get(f"y{suffix}")
    if names is None:
        return LabelledSet(str(path), images, np.full(len(images), -1), ())
    if names.shape != (len(images),):
        raise DeepSimplexError(f"y of shape ({len(images)},)", f"{names.shape}", "one label each")
    whole = names.dtype.kind != "f" or (np.isfinite(names) & (names == np.floor(names))).all()
    if names.dtype.kind == "f" and whole:
        names = names.astype(np.int64)
    text = names.astype(str)
    if names.dtype.kind not in "iuUSb" or not whole or (text == "").any():
        raise DeepSimplexError(
            f"y of whole numbers or names in {path}",
            "empty, fractional or other",
            "name the classes",
        )
    unknown = np.isin(text, (UNKNOWN, "-1"))
    classes, labels = np.unique(text[~unknown], return_inverse=True)
    indices = np.full(len(text), -1)
    indices[~unknown] = labels
    return LabelledSet(str(path), images, indices, tuple(classes.tolist()))
