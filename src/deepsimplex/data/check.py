"""Is a set fit to train on? Everything is read, nothing is written, each finding names its files.

Three weights: "stop" (training would fail, or its evaluation would mislead), "warning" (look
before you train), "note" (handled; good to know).
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepsimplex.calibration import least_sample
from deepsimplex.data.folders import UNKNOWN, Listing, counted
from deepsimplex.data.pictures import BadPictureError, decode, hushed, look, shown
from deepsimplex.data.sources import hold_out, side_of

FEW = 10  # images a class, below which neither training nor calibration means much
EXTREME = 4.0  # long side / short side, above which the centre cut keeps less than a quarter
SHOWN = 5  # names a finding when printed; the JSON has all


@dataclass(frozen=True)
class Finding:
    kind: str
    weight: str  # "stop", "warning" or "note"
    text: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What `check` found; to_json() is complete, lines() are for a person."""

    source: str
    interpretation: str
    images: int
    classes: dict[str, int]  # readable images by class, all parts together
    trained: int  # readable images of known classes that are trained on
    side: int  # and the pixels a side that they are read at, if nothing is said
    findings: tuple[Finding, ...]
    verdict: str
    next: str

    @property
    def fit(self) -> bool:
        return all(finding.weight != "stop" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fit": self.fit}

    def lines(self) -> list[str]:
        counts = [f"{name} {count}" for name, count in self.classes.items()]
        out = [
            f"{self.source}: {self.interpretation}",
            f"{self.images} images: {_short(counts, 12)}",
        ]
        for finding in self.findings:
            files = f": {_short(finding.files, SHOWN)}" if finding.files else ""
            out.append(f"{finding.weight}: {finding.text}{files}")
        return [*out, f"Verdict: {self.verdict}", f"Next: {self.next}"]


@dataclass(frozen=True)
class _Seen:
    """One file, read to the end."""

    bad: str = ""
    size: tuple[int, int] = (0, 0)
    grey: bool = False
    notes: tuple[str, ...] = ()
    content: bytes = b""  # hash of the file
    pixels: bytes = b""  # hash of what it shows


def check(
    listing: Listing,
    *,
    share: float = 0.0,
    keep: float = 0.5,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read every file of the listing; progress(done, all).

    Told if the `share` that training holds out is too small for a threshold that keeps `keep`.
    """
    seen: list[_Seen] = []
    with hushed, ThreadPoolExecutor(workers) as pool:
        for one in pool.map(_see, listing.files):
            seen.append(one)
            if progress:
                progress(len(seen), len(listing.files))
    good = [index for index, one in enumerate(seen) if not one.bad]
    names = [shown(path) for path in listing.files]
    labels = [listing.classes[label] if label >= 0 else UNKNOWN for label in listing.labels]
    findings = [
        *_unreadable(names, seen),
        *_classes(listing, good),
        *_held_out(listing, good, share, keep),
        *_duplicates(listing, names, labels, seen, good),
        *_shapes(names, seen, good),
        *_notes(names, seen, good),
        *_passed_over(listing),
    ]
    order = ("stop", "warning", "note")
    findings.sort(key=lambda finding: order.index(finding.weight))
    counts, whole = Counter(labels[index] for index in good), not any(listing.parts)
    classes = {name: counts[name] for name in listing.classes}
    if counts[UNKNOWN]:
        classes[UNKNOWN] = counts[UNKNOWN]
    return Report(
        shown(listing.root),
        listing.interpretation,
        len(names),
        classes,
        len(_trained(listing, good)),
        side_of({seen[i].size for i in good if listing.parts[i] == "train" or whole}),
        tuple(findings),
        *_verdict(listing.root, findings),
    )


def _see(path: Path) -> _Seen:
    try:
        header = look(path)
        image, notes = decode(path)
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
    except BadPictureError as error:
        return _Seen(bad=error.reason)
    except OSError as error:
        return _Seen(bad=error.strerror or str(error))
    pixels = hashlib.sha256(f"{image.mode}{image.size}".encode())
    pixels.update(np.asarray(image).data)
    return _Seen("", header.size, header.grey, notes, content, pixels.digest())


def _unreadable(names: list[str], seen: list[_Seen]) -> Iterable[Finding]:
    bad = tuple(f"{name} ({one.bad})" for name, one in zip(names, seen, strict=True) if one.bad)
    if bad:
        yield Finding("unreadable", "stop", counted(len(bad), "unreadable image"), bad)


def _classes(listing: Listing, good: list[int]) -> Iterable[Finding]:
    trained = _trained(listing, good)
    if not trained:
        yield Finding("parts", "stop", "no images to train on")
    counts = Counter(listing.classes[listing.labels[index]] for index in trained)
    if len(listing.classes) < 2:
        yield Finding("classes", "stop", "1 class, where 2 or more are needed")
    if none := tuple(name for name in listing.classes if not counts[name]):
        text = f"{counted(len(none), 'class', 'classes')} without a readable image to train on"
        yield Finding("empty class", "stop", text, none)
    if few := [f"{name} ({n})" for name, n in sorted(counts.items()) if n < FEW]:
        text = f"{counted(len(few), 'class', 'classes')} of fewer than {FEW} images to train on"
        yield Finding("tiny class", "warning", text, tuple(few))
    if listing.empty:
        empty = tuple(map(shown, listing.empty))
        text = f"{counted(len(empty), 'class folder')} without images, taken for no class"
        yield Finding("empty folder", "warning", text, empty)


def _trained(listing: Listing, good: list[int]) -> list[int]:
    return [i for i in good if listing.parts[i] in ("train", "") and listing.labels[i] >= 0]


def _held_out(listing: Listing, good: list[int], share: float, keep: float) -> Iterable[Finding]:
    trained = _trained(listing, good)
    if not trained or not share:
        return
    held, needed = len(hold_out(listing.labels[trained], share, 0)[1]), least_sample(keep)
    if held < needed:
        text = f"{counted(len(trained), 'image')} leave {held} to calibrate: a threshold that "
        text += f"keeps {100 * keep:g} % needs {needed}, and without one nothing is rejected"
        yield Finding("few images", "warning", text)


def _duplicates(
    listing: Listing, names: list[str], labels: list[str], seen: list[_Seen], good: list[int]
) -> Iterable[Finding]:
    """Groups that show the same pixels, by the worst thing about them."""
    groups = defaultdict(list)
    for index in good:
        groups[seen[index].pixels].append(index)
    found = defaultdict(list)
    for group in groups.values():
        if len(group) < 2:
            continue
        same = "the same file" if len({seen[i].content for i in group}) == 1 else "the same pixels"
        if len({listing.parts[i] for i in group}) > 1:
            where = "parts"
        else:
            where = "classes" if len({labels[i] for i in group}) > 1 else "within"
        found[where].append(f"{' = '.join(names[i] for i in group)} ({same})")
    texts = {
        "parts": ("stop", "in more than one part, so that a test would flatter"),
        "classes": ("warning", "in more than one class"),
        "within": ("warning", "more than once in its class"),
    }
    for where, (weight, text) in texts.items():
        if there := tuple(found[where]):
            yield Finding(
                f"duplicates: {where}", weight, f"{counted(len(there), 'picture')} {text}", there
            )


def _shapes(names: list[str], seen: list[_Seen], good: list[int]) -> Iterable[Finding]:
    sizes = Counter(seen[index].size for index in good)
    if len(sizes) > 1:
        small, large = min(sizes, key=math.prod), max(sizes, key=math.prod)
        text = f"{len(sizes)} sizes, from {small[0]}×{small[1]} to {large[0]}×{large[1]}"
        yield Finding("mixed sizes", "note", f"{text}: each is scaled and cut in its centre")
    extreme = [i for i in good if max(seen[i].size) > EXTREME * min(seen[i].size)]
    if extreme:
        files = tuple(f"{names[i]} ({seen[i].size[0]}×{seen[i].size[1]})" for i in extreme)
        text = f"{counted(len(files), 'image')} so long that the centre shows less than a quarter"
        yield Finding("extreme aspect", "warning", text, files)
    grey = sum(seen[index].grey for index in good)
    if 0 < grey < len(good):
        text = f"{grey} of {len(good)} images are grey: all are read in colour"
        yield Finding("mixed channels", "note", text)


def _notes(names: list[str], seen: list[_Seen], good: list[int]) -> Iterable[Finding]:
    """How pictures were handled; notes that count frames go together."""
    by_note = defaultdict(list)
    for index in good:
        for note in seen[index].notes:
            by_note["first of several frames" if "frames" in note else note].append(names[index])
    for note, files in sorted(by_note.items()):
        yield Finding("handled", "note", f"{counted(len(files), 'image')} {note}", tuple(files))


def _passed_over(listing: Listing) -> Iterable[Finding]:
    by_reason = defaultdict(list)
    for why, name in listing.passed_over:
        by_reason[why].append(shown(name))
    for why, files in by_reason.items():
        yield Finding("passed over", "note", f"passed over, {why}: {len(files)}", tuple(files))


def _verdict(root: Path, findings: Sequence[Finding]) -> tuple[str, str]:
    name = shown(root.resolve().stem) or "run"
    train = f"deepsimplex train {shlex.quote(shown(root))} --out {shlex.quote(f'runs/{name}')}"
    stops = [finding for finding in findings if finding.weight == "stop"]
    warnings = sum(finding.weight == "warning" for finding in findings)
    if not stops:
        return f"fit, with {counted(warnings, 'warning')}" if warnings else "fit to train", train
    verdict = f"not fit: {'; '.join(finding.text for finding in stops)}"
    if [finding.kind for finding in stops] == ["unreadable"]:
        return verdict, f"repair or remove them, or leave them out: {train} --on-bad skip"
    return verdict, f"mend this, then: deepsimplex check {shlex.quote(shown(root))}"


def _short(items: Sequence[str], most: int) -> str:
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")
