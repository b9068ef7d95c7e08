"""A user's own images as a list: which file, which class, which part. Nothing is decoded here.

    DATA/cat/1.png   DATA/dog/…   DATA/unknown/…      a folder a class
    DATA/train/cat/…   DATA/val/…   DATA/test/…       a folder a part, in it a folder a class
    path,label[,part]                                 a CSV file, also with ; or tabs

Classes are those that can be trained on: of train/ where there are parts. What test/ has beyond
them, and everything in unknown/, is unknown (−1) and only for evaluation.
"""

from __future__ import annotations

import csv
import io
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepsimplex.data.pictures import SUFFIXES, shown
from deepsimplex.errors import DeepSimplexError

UNKNOWN = "unknown"
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Listing:
    """Files of a set, part by part, in each the knowns before the unknowns."""

    root: Path
    files: tuple[Path, ...]
    labels: np.ndarray  # (n,) int64, indices of `classes`; −1 unknown
    classes: tuple[str, ...]
    parts: tuple[str, ...]  # "train", "val" or "test"; "" where the set has no parts
    interpretation: str  # one line, to be printed
    empty: tuple[str, ...] = ()  # class folders without images
    passed_over: tuple[tuple[str, str], ...] = ()  # (why, path)

    def part(self, name: str) -> Listing:
        """The files of one part; all where the set has none."""
        if not any(self.parts):
            return self
        chosen = [index for index, part in enumerate(self.parts) if part == name]
        if not chosen:
            raise DeepSimplexError(
                f"a {name} part in {shown(self.root)}",
                f"only {', '.join(dict.fromkeys(self.parts))}",
                f"add {name} images, or name another set",
            )
        return self.take(chosen)

    def take(self, indices: Sequence[int] | np.ndarray) -> Listing:
        return Listing(
            self.root,
            tuple(self.files[i] for i in indices),
            self.labels[np.asarray(indices, dtype=np.int64)],
            self.classes,
            tuple(self.parts[i] for i in indices),
            self.interpretation,
            self.empty,
            self.passed_over,
        )


def list_images(source: Path) -> Listing:
    """A folder or a table."""
    if source.is_dir():
        return list_folder(source)
    if source.suffix.lower() not in TABLES or not source.is_file():
        got = "a file of another kind" if source.exists() else "nothing of that name"
        raise DeepSimplexError(
            f"a folder of class folders or a .csv table at {str(source)!r}", got, "check the path"
        )
    return list_csv(source)


def image_files(folder: Path) -> list[Path]:
    """Image files below a folder, by name; hidden ones are passed over, links are followed."""
    return [folder / name for kind, name in _walk(folder, None) if kind == "image"]


def list_folder(root: Path) -> Listing:
    """A folder a class, or train/, val/ and test/ with a folder a class in each."""
    images, folders, passed = [], [], []
    for kind, name in _walk(root, Path(os.path.realpath(root))):
        if kind == "image":
            images.append(name.split("/"))
        elif kind == "folder":
            folders.append(name)
        else:
            passed.append((kind, name))
    holding = sorted({names[0] for names in images if len(names) > 1} - {UNKNOWN})
    named = [name for name in holding if name.lower() in PARTS]
    if 1 < len(named) < len(holding):
        raise DeepSimplexError(
            f"either parts (train/, val/, test/) or classes in {shown(root)}",
            f"both: {', '.join(map(shown, holding[:12]))}",
            "move the class folders into train/, or the parts elsewhere",
        )
    # A lone train/ among others is a class: of vehicles, say.
    depth = 1 if named and named == holding else 0
    rows = []
    for names in images:
        path = root.joinpath(*names)
        if depth and names[0] == UNKNOWN:
            rows.append(("test", UNKNOWN, path))
        elif len(names) < depth + 2:
            passed.append(("image outside a class folder", "/".join(names)))
        else:
            part = PARTS[names[0].lower()] if depth else ""
            rows.append((part, names[depth], path))
    full = {"/".join(names[: depth + 1]) for names in images if len(names) > depth + 1}
    empty = [f for f in folders if f.count("/") == depth and f not in full and f != UNKNOWN]
    if all(label == UNKNOWN for _, label, _ in rows):
        raise DeepSimplexError(
            f"one folder of images a class below {shown(root)}",
            _instead(len(empty), sum(len(names) == 1 for names in images)),
            "put each class's images into a folder named after it",
        )
    shape = "a folder a class"
    if depth:
        shape = f"{_spoken([f'{name}/' for name in named])} folder{'s' * (len(named) > 1)}"
    return _listing(root, rows, shape, empty, passed)


def _instead(folders: int, loose: int) -> str:
    """What a folder without classes holds."""
    if loose:
        return f"{counted(loose, 'image')} in no class folder"
    return f"{counted(folders, 'folder')}, none with images of {', '.join(SUFFIXES)}"


def list_csv(path: Path) -> Listing:
    """A table with columns path, label and perhaps part; others are passed over.

    Paths are taken from the table's folder. They may lead out of it (by .. or from /), since
    whoever wrote the table chose each file; how many do is said. An empty label, "unknown" and
    −1 are unknown.
    """
    header, *lines = _table(path)
    places = {name.strip().lower(): place for place, name in reversed([*enumerate(header)])}
    rows, wrong, missing, outside = [], [], [], 0
    folder = path.parent
    top = os.path.realpath(folder) + os.sep
    for number, cells in enumerate(lines, 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            wrong.append(f"line {number} has {len(cells)} columns, not {len(header)}")
            continue
        name = cells[places["path"]].strip()
        part = cells[places["part"]].strip().lower() if "part" in places else ""
        if part and part not in PARTS:
            wrong.append(f"line {number} has part {shown(part)!r}")
        file = folder / name
        if not name or "\0" in name or not file.is_file():
            missing.append(f"{shown(name) or 'no path'} (line {number})")
            continue
        outside += not os.path.realpath(file).startswith(top)
        label = cells[places["label"]].strip()
        rows.append((PARTS.get(part, ""), UNKNOWN if label in ("", "-1") else label, file))
    if wrong:
        raise DeepSimplexError(
            f"path, label and perhaps part (train, val, test) in each line of {shown(path)}",
            ", ".join(wrong),
            "correct them",
        )
    if missing:
        raise DeepSimplexError(
            f"files for all paths of {shown(path)}, as seen from its folder",
            f"{len(missing)} missing: {', '.join(missing)}",
            "correct the paths",
        )
    if len({bool(part) for part, _, _ in rows}) != 1:
        got = "some without" if rows else "no rows"
        raise DeepSimplexError(f"rows with a part in all or none of {shown(path)}", got, "add them")
    shape = f"table of {len(rows)} paths" + (f", {outside} outside its folder" if outside else "")
    return _listing(path, rows, shape, [], [])


def _table(path: Path) -> list[list[str]]:
    """Header and lines, with whichever of the three separators gives a header we know."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        for separator in (",", ";", "\t"):
            lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
            names = {name.strip().lower() for name in (lines or [[]])[0]}
            if {"path", "label"} <= names:
                return lines
        got = f"{shown(text[:60].partition(chr(10))[0])!r}"
    except OSError as error:
        got = error.strerror or str(error)
    except UnicodeDecodeError:
        got = "text that is not UTF-8"
    except csv.Error as error:
        got = f"a broken table: {error}"
    raise DeepSimplexError(
        f"columns path and label (and perhaps part) in {shown(path)}",
        got,
        "begin it with a line 'path,label'",
    )


def _listing(
    root: Path,
    rows: list[tuple[str, str, Path]],
    shape: str,
    empty: list[str],
    passed: list[tuple[str, str]],
) -> Listing:
    """Decide classes and labels of rows (part, class, file), and put it in words."""
    # One printable name, however the file system composed its accents.
    tidy = {name: unicodedata.normalize("NFC", shown(name)) for name in {row[1] for row in rows}}
    rows = [(part, tidy[name], path) for part, name, path in rows]
    order = ("train", "", "val", "test")
    of = {part: {name for p, name, _ in rows if p == part} - {UNKNOWN} for part in order}
    classes = sorted(of["train"] or of[""] or of["val"] or of["test"])
    if extra := sorted(of["val"] - set(classes)):
        raise DeepSimplexError(
            f"the classes of train in val of {shown(root)}",
            f"also {', '.join(map(shown, extra))}",
            "move them to test, where they count as unknown, or into train",
        )
    index = {name: number for number, name in enumerate(classes)}
    rows.sort(key=lambda row: (order.index(row[0]), row[1] not in index))
    said = [f"{shape}, {counted(len(classes), 'class', 'classes')}"]
    if extra := sorted(of["test"] - set(classes)):
        said.append(f"unknown, since only in test: {', '.join(map(shown, extra))}")
    if count := sum(name == UNKNOWN for _, name, _ in rows):
        said.append(f"{counted(count, 'image')} marked unknown, for evaluation only")
    if passed:
        counts = Counter(why for why, _ in passed)
        said.append("passed over: " + ", ".join(f"{n} × {why}" for why, n in counts.items()))
    return Listing(
        root,
        tuple(path for _, _, path in rows),
        np.array([index.get(name, -1) for _, name, _ in rows], dtype=np.int64),
        tuple(classes),
        tuple(part for part, _, _ in rows),
        "; ".join(said),
        tuple(empty),
        tuple(passed),
    )


def _walk(root: Path, inside: Path | None) -> Iterator[tuple[str, str]]:
    """(kind, path below root), by name: "image", "folder", or why it is passed over.

    With `inside`, links that lead out of that folder are not followed.
    """
    waiting: list[tuple[str, frozenset[tuple[int, int]], bool]] = [("", frozenset(), True)]
    linked = set()  # folders entered by a link: once each, so that links cannot multiply
    while waiting:
        name, above, is_folder = waiting.pop()
        if not is_folder:
            yield "image", name
            continue
        if name:
            yield "folder", name
        try:
            status = os.stat(root / name)
            with os.scandir(root / name) as entries:
                listed = sorted(entries, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            raise DeepSimplexError(
                f"to read the folder {shown(root / name)}",
                error.strerror or str(error),
                "see to its permissions",
            ) from None
        chain = above | {(status.st_dev, status.st_ino)}
        for entry in listed:
            path = f"{name}/{entry.name}" if name else entry.name
            kind = _kind(entry, inside)
            if kind == "folder" and entry.is_symlink():
                target = entry.stat()
                key = (target.st_dev, target.st_ino)
                if key in chain or key in linked:
                    kind = "link to a folder listed already"
                linked.add(key)
            if kind in ("image", "folder"):
                waiting.append((path, chain, kind == "folder"))
            else:
                yield kind, path


def _kind(entry: os.DirEntry[str], inside: Path | None) -> str:
    if entry.name.startswith("."):
        return "hidden"
    try:
        mode = entry.stat().st_mode if entry.is_symlink() else 0
    except OSError:
        return "broken link"
    if mode and inside and not Path(os.path.realpath(entry.path)).is_relative_to(inside):
        return "link out of the folder"
    if entry.is_dir():
        return "folder"
    if os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
        return "not an image by its name"
    return "image" if entry.is_file() else "not a regular file"


def _spoken(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def counted(number: int, one: str, many: str = "") -> str:
    """1 image, 2 images."""
    return f"{number} {one if number == 1 else many or one + 's'}"
