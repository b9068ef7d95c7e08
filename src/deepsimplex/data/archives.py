"""The official sets, read from a data root in the layout of their official downloads."""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from deepsimplex.data.packed import load_pickle, members, read_members
from deepsimplex.data.sources import LabelledSet
from deepsimplex.errors import DeepSimplexError

PARTS = ("train", "test")
DIGITS = tuple("0123456789")
FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = tuple(_FINE.split())
CIFAR_FOLDERS = {"cifar-10-python": "cifar-10-batches-py", "cifar-100-python": "cifar-100-python"}
DEBIAN_FASHION = "/usr/share/datasets/fashion-mnist"  # of the package dataset-fashion-mnist
TINY = "tiny-imagenet-200"
MAT_BYTES = 2**30
MAT_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4"}
MOST_IMAGES = 2_000_000  # more than any of these sets, and little enough to allocate

# Images (n, h, w, c), labels (n,), class names.
Read = tuple[np.ndarray, np.ndarray, tuple[str, ...]]


@dataclass(frozen=True)
class Official:
    """A set: where its files are published, where below a root they may lie, how they are read."""

    address: str
    places: tuple[str, ...]
    read: Callable[[Path, str], Read]


class _Absent(Exception):
    """A place that does not hold the part; carries the path that is missing."""


class _Bad(Exception):
    """A file that is not what it should be: path, what was expected, what came."""


def data_root(given: Path | None = None) -> Path:
    """The folder of the official sets: as given, else DEEPSIMPLEX_DATA, else a cache folder."""
    if given is not None:
        return Path(given)
    if named := os.environ.get("DEEPSIMPLEX_DATA"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "deepsimplex"


def official(name: str) -> Official:
    """The row of OFFICIAL, or an error that lists them."""
    if name not in OFFICIAL:
        raise DeepSimplexError(f"one of {', '.join(OFFICIAL)}", repr(name), "choose one of them")
    return OFFICIAL[name]


def load_official(name: str, part: str, root: Path | None = None) -> LabelledSet:
    """Images as stored, (n, h, w, c) uint8; labels index the official class names."""
    spec, root = official(name), data_root(root)
    if part not in PARTS or (name == "300k" and part == "test"):
        parts = "train" if name == "300k" else "train or test"
        raise DeepSimplexError(f"a part of {name}: {parts}", repr(part), "ask for one it has")
    absent = []
    for place in spec.places:
        try:
            images, labels, classes = spec.read(root / place, part)
        except _Absent as error:
            absent.append(str(error))
        except _Bad as error:
            path, expected, got = error.args
            remedy = f"delete it and run `deepsimplex data get {name}`"
            raise DeepSimplexError(f"{expected} in {path}", got, remedy) from None
        except OSError as error:
            remedy = "check the disk and who may read it"
            raise DeepSimplexError(
                f"readable files in {root / place}", str(error), remedy
            ) from None
        else:
            return LabelledSet(name, images, labels, classes)
    raise DeepSimplexError(
        f"the {part} part of {name} below {root}",
        f"none of {', '.join(absent)}",
        f"run `deepsimplex data get {name}`, or put there what {spec.address} offers",
    )


def _labels(values: object, count: int, classes: tuple[str, ...], path: Path) -> np.ndarray:
    """Labels as int64, one an image, each of them a class."""
    if isinstance(values, list):  # of a pickle: whole numbers, not whatever NumPy makes of lists
        values = np.array([v if type(v) is int else -1 for v in values], dtype=object)
    if not isinstance(values, np.ndarray) or values.shape != (count,):
        got = f"{np.shape(values)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise _Bad(path, f"{count} labels, one an image,", got)
    wrong = [v for v in values.tolist() if v not in range(len(classes))]
    if wrong:
        raise _Bad(path, f"labels from 0 to {len(classes) - 1}", f"{len(wrong)} others")
    return values.astype(np.int64)


def _read_mnist(folder: Path, part: str, classes: tuple[str, ...]) -> Read:
    stem = "train" if part == "train" else "t10k"
    images = _read_idx(_raw_or_gz(folder / f"{stem}-images-idx3-ubyte"), (28, 28))
    path = _raw_or_gz(folder / f"{stem}-labels-idx1-ubyte")
    return images[..., None], _labels(_read_idx(path, ()), len(images), classes, path), classes


def _raw_or_gz(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        raise _Absent(f"{path}[.gz]")
    return path if path.exists() else packed


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes after a big-endian header: 0, 0, 8 (uint8), the number of axes, the axes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if head != bytes([0, 0, 8, 1 + len(shape)]):
                raise _Bad(path, f"an idx file of bytes with {1 + len(shape)} axes", repr(head))
            axes = np.frombuffer(file.read(4 * (1 + len(shape))), ">i4").tolist()
            if tuple(axes[1:]) != shape or not axes or not 0 < axes[0] <= MOST_IMAGES:
                raise _Bad(path, f"axes (n, {', '.join(map(str, shape))})", str(axes))
            size = math.prod(axes)
            data = file.read(size + 1)
    except (EOFError, zlib.error, ValueError, gzip.BadGzipFile) as error:
        raise _Bad(path, "a whole file", f"{type(error).__name__}: {error}") from None
    if len(data) != size:
        got = f"{len(data)}" if len(data) < size else "more"
        raise _Bad(path, f"{size} bytes after the header", got)
    return np.frombuffer(data, np.uint8).reshape(axes)


def _read_cifar(
    place: Path, part: str, batches: Mapping[str, tuple[str, ...]], classes: tuple[str, ...]
) -> Read:
    """Pickled dicts: data (n, 3072), planes of red, green and blue; labels or fine_labels."""
    pairs = [_read_batch(path, file, classes) for path, file in _batches(place, batches[part])]
    images, labels = zip(*pairs, strict=True)
    return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels), classes


def _batches(place: Path, names: tuple[str, ...]) -> Iterator[tuple[Path, IO[bytes]]]:
    if place.suffix == ".gz":
        inside = CIFAR_FOLDERS[_need(place).name.removesuffix(".tar.gz")]
        content = dict(read_members(place, [f"{inside}/{name}" for name in names]))
        for name in names:
            yield place / name, io.BytesIO(content.pop(f"{inside}/{name}"))
        return
    for path in [_need(place / name) for name in names]:
        with path.open("rb") as file:
            yield path, file


def _read_batch(path: Path, file: IO[bytes], classes: tuple[str, ...]) -> list[np.ndarray]:
    batch = load_pickle(file, str(path))
    if not isinstance(batch, dict):
        raise _Bad(path, "a dict of data and labels", type(batch).__name__)
    named = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
    data = named.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        got = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else "none"
        raise _Bad(path, "data of uint8 (n, 3072)", got)
    images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = named.get("labels" if len(classes) == 10 else "fine_labels")
    return [images, _labels(labels, len(images), classes, path)]


def _read_svhn(folder: Path, part: str) -> Read:
    """X (32, 32, 3, n) and y (n, 1) from 1 to 10, where 10 is the digit 0."""
    path = _need(folder / f"{part}_32x32.mat")
    try:
        arrays = _read_mat(memoryview(path.read_bytes()))
    except (ValueError, LookupError, struct.error, zlib.error) as error:
        got = f"{type(error).__name__}: {error}"
        raise _Bad(path, "a whole MATLAB v5 file of whole numbers", got) from None
    images, digits = arrays.get("X", np.empty(0)), arrays.get("y", np.empty(0)).ravel()
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise _Bad(path, "X of uint8 (32, 32, 3, n)", f"{images.dtype} {images.shape}")
    if not np.isin(digits, range(1, 11)).all():
        raise _Bad(path, "labels y from 1 to 10", f"{np.unique(digits)[:12]}")
    images = np.ascontiguousarray(images.transpose(3, 0, 1, 2))
    return images, _labels(digits % 10, len(images), DIGITS, path), DIGITS


def _read_mat(data: memoryview) -> dict[str, np.ndarray]:
    """The arrays of a little-endian MATLAB v5 file by name.

    By hand, for SciPy's reader takes the process down with it when one byte, the type of the
    values, is wrong (1.17.1).
    """
    if data[:10] != b"MATLAB 5.0" or data[124:128] != b"\x00\x01IM":
        raise ValueError("no header of MATLAB 5.0")
    arrays = {}
    for kind, content in _mat_elements(data[128:]):
        if kind == 15:
            unpacked = zlib.decompressobj().decompress(content, MAT_BYTES)
            ((kind, content),) = _mat_elements(memoryview(unpacked))
        if kind != 14:
            raise ValueError(f"an element of kind {kind}")
        _, (_, axes), (_, name), (stored, values) = _mat_elements(content)
        shape = np.frombuffer(axes, "<i4")
        array = np.frombuffer(values, MAT_TYPES[stored])
        arrays[bytes(name).decode("latin-1")] = array.reshape(shape, order="F")
    return arrays


def _mat_elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Kind and content: after a tag of 8 bytes, or within it where 4 bytes suffice."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        start = at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if start + size > len(data):
            raise ValueError(f"{len(data) - start} of {size} bytes")
        yield kind, data[start : start + size]
        at = start + size if kind == 15 else -(-(start + size) // 8) * 8


def _read_tiny(place: Path, part: str) -> Read:
    """JPEGs in train/<wnid>/images and val/images; val_annotations.txt labels the latter."""
    _need(place)
    if place.suffix == ".zip":
        names = [n.removeprefix(f"{TINY}/") for n in members(place) if n.startswith(f"{TINY}/")]
    else:
        names = [p.relative_to(place).as_posix() for p in place.glob("train/*/images/*.JPEG")]
    train = sorted(n for n in names if re.fullmatch(r"train/[^/]+/images/[^/]+\.JPEG", n))
    classes = tuple(sorted({name.split("/")[1] for name in train}))
    number = {wnid: index for index, wnid in enumerate(classes)}
    if not train:
        raise _Bad(place, "train/<wnid>/images/*.JPEG", "none")
    if part == "train":
        labels = {name: number[name.split("/")[1]] for name in train}
    else:
        table = dict(_tiny_files(place, ["val/val_annotations.txt"])).popitem()[1]
        found = re.findall(r"^([\w.]+)\t(n\d+)\t", table.decode("latin-1"), re.MULTILINE)
        labels = {f"val/images/{file}": number.get(wnid, -1) for file, wnid in found}
        if not labels or len(labels) < len(table.splitlines()) or -1 in labels.values():
            path = place / "val/val_annotations.txt"
            raise _Bad(path, "another image and one of train's wnids in each line", "other lines")
    images = np.empty((len(labels), 64, 64, 3), np.uint8)
    at = {name: index for index, name in enumerate(labels)}
    bad = []
    for name, content in _tiny_files(place, labels):
        try:
            with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
                if image.size != (64, 64):
                    raise ValueError("of another size")
                images[at[name]] = np.asarray(image.convert("RGB"))  # some are grey
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            bad.append(name)
    if bad:
        raise _Bad(place, "JPEGs of 64×64", f"{len(bad)} others: {', '.join(bad[:20])}")
    return images, np.array([*labels.values()], np.int64), classes


def _tiny_files(place: Path, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    if place.suffix == ".zip":
        for name, content in read_members(place, [f"{TINY}/{name}" for name in names]):
            yield name.removeprefix(f"{TINY}/"), content
        return
    for name in names:
        yield name, _need(place / name).read_bytes()


def _read_300k(path: Path, part: str) -> Read:
    try:
        images = np.load(_need(path), mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _Bad(path, "a whole .npy file", " ".join(str(error).split())[:80]) from None
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise _Bad(path, "uint8 (n, 32, 32, 3)", f"{images.dtype} {images.shape}")
    return images, np.full(len(images), -1, np.int64), ()


def _need(path: Path) -> Path:
    if not path.exists():
        raise _Absent(path)
    return path


_TEN = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_HUNDRED = {"train": ("train",), "test": ("test",)}
OFFICIAL = {
    "mnist": Official(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ("MNIST/raw", "mnist"),
        partial(_read_mnist, classes=DIGITS),
    ),
    "fashion-mnist": Official(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ("FashionMNIST/raw", "fashion-mnist", DEBIAN_FASHION),
        partial(_read_mnist, classes=FASHION),
    ),
    "cifar10": Official(
        "https://www.cs.toronto.edu/~kriz/",
        ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
        partial(_read_cifar, batches=_TEN, classes=CIFAR10),
    ),
    "cifar100": Official(
        "https://www.cs.toronto.edu/~kriz/",
        ("cifar-100-python", "cifar-100-python.tar.gz"),
        partial(_read_cifar, batches=_HUNDRED, classes=CIFAR100),
    ),
    "svhn": Official("http://ufldl.stanford.edu/housenumbers/", ("svhn", "."), _read_svhn),
    "tinyimagenet": Official("http://cs231n.stanford.edu/", (TINY, f"{TINY}.zip"), _read_tiny),
    "300k": Official(
        "https://people.eecs.berkeley.edu/~hendrycks/", ("300K_random_images.npy",), _read_300k
    ),
}
