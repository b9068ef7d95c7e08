"""One image file to pixels, with every liberty taken on the way said in a short note.

    EXIF orientation   turned upright                          "turned by EXIF"
    palette            looked up                               "palette"
    transparency       laid on white                           "alpha on white"
    CMYK, LAB          to RGB, without a colour profile        "CMYK to RGB"
    16 bits a value    0…65535 → 0…255, rounded                "16-bit scaled"
    32 bits, floats    the narrowest of 0…1 (floats only), 0…255, 0…65535 that holds the picture
                       → 0…255; if none does, its own range    "float scaled from 0…1", …
    animation, pages   the first                               "first of 12 frames"

Nothing is clipped. A file that Pillow cannot read whole raises BadPictureError; no warning of
Pillow's escapes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from deepsimplex.errors import DeepSimplexError

# Raster formats by allow-list; Pillow's other readers are never called.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp"),
    *(".tif", ".tiff", ".pbm", ".pgm", ".pnm", ".ppm"),
)
GREY = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadPictureError(DeepSimplexError):
    """A file that is no whole picture of an allowed format."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(
            f"a readable image ({', '.join(FORMATS)})",
            f"{shown(path)} ({reason})",
            "repair or remove it",
        )
        self.path = Path(path)
        self.reason = reason


@dataclass(frozen=True)
class Look:
    """What a picture's header says, before it is decoded."""

    size: tuple[int, int]  # width, height as stored
    mode: str
    frames: int
    format: str
    grey: bool


def look(path: Path | str) -> Look:
    """Read the header only."""
    with _opened(path) as image:
        grey = image.mode in GREY or (image.mode == "P" and _grey_palette(image))
        return Look(image.size, image.mode, _frames(image), str(image.format), grey)


def decode(path: Path | str, least: int = 0) -> tuple[Image.Image, tuple[str, ...]]:
    """The whole picture, upright, in mode L or RGB, and the notes.

    With `least`, a JPEG may come at a half, quarter or eighth of its size, never below twice
    `least`: what libjpeg leaves out would have been averaged away.
    """
    with _opened(path) as image:
        if least:
            image.draft(None, (2 * least, 2 * least))
        deep = _sixteen_bits(image)
        # Pillow turns a TIFF while it loads it, and forgets that it did.
        turned = image.format == "TIFF" and _orientation(image) in TURNS
        image.load()
        plain, notes = _plain(image, deep)
        if (turn := TURNS.get(_orientation(image))) is not None:
            plain, turned = plain.transpose(turn), True
        if turned:
            notes.append("turned by EXIF")
        if (frames := _frames(image)) > 1:
            notes.append(f"first of {frames} frames")
        return plain, tuple(notes)


def read_picture(path: Path | str, size: int, channels: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Short side scaled to `size`, centre cut: uint8 (size, size, channels), and the notes."""
    if channels not in (1, 3):
        raise DeepSimplexError("1 or 3 channels of image files", f"{channels}", "choose 1 or 3")
    image, notes = decode(path, size)
    with _bad_is_named(path):
        mode = "L" if channels == 1 else "RGB"
        plain = image if image.mode == mode else image.convert(mode)
        fitted = ImageOps.fit(plain, (size, size), Image.Resampling.BILINEAR)
        return np.asarray(fitted).reshape(size, size, channels), notes


def read_images(paths: Sequence[Path], size: int, channels: int) -> np.ndarray:
    """All of them, (n, size, size, channels); all that are bad are named in one error."""
    images, bad = try_images(paths, size, channels)
    if bad:
        raise bad_pictures([(paths[index], reason) for index, reason in bad])
    return images


def try_images(
    paths: Sequence[Path], size: int, channels: int
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """The same, and (index, reason) of each bad file, whose rows mean nothing."""
    out = np.empty((len(paths), size, size, channels), np.uint8)
    bad = []
    with hushed:
        for index, path in enumerate(paths):
            try:
                out[index], _ = read_picture(path, size, channels)
            except BadPictureError as error:
                bad.append((index, error.reason))
    return out, bad


def bad_pictures(
    bad: Sequence[tuple[Path, str]], remedy: str = "repair or remove them"
) -> DeepSimplexError:
    """One error that names every bad file and what is wrong with it."""
    names = ", ".join(f"{shown(path)} ({reason})" for path, reason in bad)
    return DeepSimplexError(
        f"readable images ({', '.join(FORMATS)})", f"{len(bad)} that are not: {names}", remedy
    )


def shown(path: Path | str) -> str:
    """A path as one line that prints anywhere, whatever bytes it is made of."""
    text = os.fsencode(path).decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class _Hush:
    """No warning of Pillow's escapes, and a suspiciously large picture is an error.

    warnings.catch_warnings alone is not safe among threads, so they share one: the first to
    enter sets the filters, the last to leave puts the old ones back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", Image.DecompressionBombWarning)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._filters.__exit__(None, None, None)


hushed = _Hush()  # to hold around a loop; each picture is hushed by itself in any case


@contextlib.contextmanager
def _bad_is_named(path: Path | str) -> Iterator[None]:
    # Pillow answers broken bytes with whatever breaks first (struct.error, KeyError,
    # ZeroDivisionError, MemoryError, …): only "any exception" is a whole list of them.
    try:
        yield
    except BadPictureError:
        raise
    except Exception as error:
        raise BadPictureError(path, _reason(error)) from None


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[Image.Image]:
    with _bad_is_named(path), hushed, open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadPictureError(path, "not a regular file")
        if status.st_size == 0:
            raise BadPictureError(path, "empty file")
        with Image.open(file, formats=FORMATS) as image:
            yield image


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # else a pipe without a writer hangs


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, UnidentifiedImageError):
        return "no image of these formats"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return f"too large: more than {Image.MAX_IMAGE_PIXELS} pixels"
    if "truncated" in text.lower() or isinstance(error, EOFError):
        return "truncated"
    return shown(text[:80]) or type(error).__name__


def _plain(image: Image.Image, deep: bool) -> tuple[Image.Image, list[str]]:
    """A copy in mode L or RGB, without transparency, 8 bits a value."""
    mode = image.mode
    if mode in ("I", "F") or mode.startswith("I;16"):
        return _scaled(np.asarray(image), deep)
    notes = ["16-bit scaled"] if deep else []
    if mode in ("P", "PA"):
        notes.append("palette")
    if mode in ("CMYK", "LAB"):
        notes.append(f"{mode} to RGB")
    grey = mode in GREY
    if image.has_transparency_data and (grey or mode in ("P", "PA", "RGB", "RGBA", "RGBa")):
        # Pillow knows premultiplied alpha only by way of its plain sister.
        image = image.convert("LA" if grey else "RGBA")
        alpha = image.getchannel("A")
        if alpha.getextrema() != (255, 255):
            notes.append("alpha on white")
            below = Image.new("L" if grey else "RGB", image.size, "white")
            below.paste(image.convert(below.mode), mask=alpha)
            return below, notes
    return image.convert("L" if grey else "RGB"), notes


def _scaled(values: np.ndarray, deep: bool) -> tuple[Image.Image, list[str]]:
    """16 and 32 bits a value, and floats, to 8 bits; the header of this file has the rule."""
    kind = "float" if values.dtype.kind == "f" else "32-bit"
    tops: tuple[int, ...] = (1, 255, 65535) if kind == "float" else (255, 65535)
    if deep or values.dtype.itemsize == 2:
        kind, tops = "16-bit", (65535,)
    wide = values.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("NaN or infinity among its pixels")
    top = next((top for top in tops if low >= 0 and high <= top), None)
    note = f"{kind} scaled" if kind == "16-bit" else f"{kind} scaled from 0…{top}"
    if top is None:
        note = f"{kind} scaled from its own range"
        wide = (wide - low) / max(high - low, np.finfo(float).tiny)
        top = 1
    return Image.fromarray(np.rint(wide * (255 / top)).astype(np.uint8)), [note]


def _sixteen_bits(image: Image.Image) -> bool:
    """Whether the file stores 16 bits a value: Pillow halves colour in silence."""
    tile = getattr(image, "tile", None)
    if not tile:
        return False
    depth = tile[0][3]
    if image.format == "PPM" and isinstance(depth, tuple):
        return isinstance(depth[-1], int) and depth[-1] > 255
    return ";16" in str(depth)


def _orientation(image: Image.Image) -> int:
    if not image.info and image.format != "TIFF":
        return 1  # quicker, for the many small files that have nothing to say
    try:
        value = image.getexif().get(ORIENTATION)
    except Exception:  # broken EXIF beside whole pixels: as if it were not there
        return 1
    return value if isinstance(value, int) else 1


def _frames(image: Image.Image) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception:  # a broken later frame does not spoil the first
        return 1


def _grey_palette(image: Image.Image) -> bool:
    colours = np.array(image.getpalette("RGB") or [0, 1, 2]).reshape(-1, 3)
    return bool((colours == colours[:, :1]).all())
