"""Decode once: image files become one memory-mapped uint8 array, found again by their manifest.

    KEY.npy    the images (n, size, size, channels), a plain NumPy file
    KEY.json   how many files there were, and which of them are bad
    KEY.lock   held by the one who builds; others wait and find it done
    KEY.part   an unfinished KEY.npy; renamed when whole, so that a crash leaves no half cache

KEY is a hash of the files' names (below their common folder), sizes and times, and of the
settings. Nothing is ever written beside the images.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from deepsimplex.data.pictures import BadPictureError, bad_pictures, hushed, read_picture, shown
from deepsimplex.errors import DeepSimplexError

VERSION = 1
REMEDY = "repair or remove them, or leave them out (train and evaluate: --on-bad skip)"
Progress = Callable[[int, int], None]  # images done, images in all
TOKEN = struct.Struct("q")
TOKENS = 4096  # 32 KiB: they all fit into a pipe, so nobody has to feed it
FIRST = 64  # decoded before processes are started, to see whether that pays
PAYS = 1.0  # seconds of work left, above which it does


def open_cache(
    files: Sequence[Path],
    size: int,
    channels: int,
    folder: Path,
    *,
    workers: int,
    on_bad: str = "fail",
    progress: Progress | None = None,
) -> tuple[np.memmap, np.ndarray]:
    """Images (k, size, size, channels), read-only, and which of the n files they are, (k,).

    Bad files: on_bad="fail" names them all in one error; "skip" leaves them out. Either way the
    rest is decoded only once.
    """
    if on_bad not in ("fail", "skip"):
        raise DeepSimplexError("on_bad 'fail' or 'skip'", repr(on_bad), "choose one")
    if not files or size < 1 or channels not in (1, 3):
        raise DeepSimplexError(
            "files, a size of 1 or more, 1 or 3 channels",
            f"{len(files)} files, size {size}, {channels} channels",
            "choose others",
        )
    names = [os.fspath(file) for file in files]
    target = folder / f"{_key(names, 'images', size, channels)}.npy"
    shape = (len(names), size, size, channels)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = _existing(target, shape)
        if found is None:
            with _alone(target.with_suffix(".lock")):
                found = _existing(target, shape)  # by whoever we waited for
                if found is None:
                    _build(target, names, shape, workers, progress or (lambda done, total: None))
                    found = _existing(target, shape)
    except OSError as error:
        raise DeepSimplexError(
            f"to keep {math.prod(shape) / 1e9:.3g} GB of decoded images in {shown(folder)}",
            error.strerror or str(error),
            "make room there, or choose another cache folder",
        ) from None
    assert found is not None
    images, bad = found
    if bad and on_bad == "fail":
        raise bad_pictures([(files[index], reason) for index, reason in bad], REMEDY)
    return images, np.setdiff1d(np.arange(len(names)), [index for index, _ in bad])


def remembered(
    files: Sequence[Path], folder: Path, question: str, answer: Callable[[], Any]
) -> Any:
    """answer(), which is JSON, found again as long as no file changes."""
    path = folder / f"{_key([os.fspath(file) for file in files], question)}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    value = answer()
    with contextlib.suppress(OSError):  # a memory that fails is asked again
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(value).encode())
    return value


def _key(names: list[str], *settings: object) -> str:
    """SHA-256 over names, sizes, times and settings; a stat a file and nothing else."""
    # Letters in common, cut back to a folder: a hundred times quicker than os.path.commonpath.
    above = os.path.commonprefix(names).rfind("/") + 1  # noqa: RUF071
    lines = [f"{VERSION} {PIL.__version__} {settings}"]
    for name in names:
        try:
            status = os.stat(name)
            lines.append(f"{name[above:]}\0{status.st_size}\0{status.st_mtime_ns}")
        except (OSError, ValueError):
            lines.append(f"{name[above:]}\0missing")
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:32]


def _existing(
    target: Path, shape: tuple[int, ...]
) -> tuple[np.memmap, list[tuple[int, str]]] | None:
    """A whole cache, or None; a damaged one is as good as none."""
    try:
        record = json.loads(target.with_suffix(".json").read_text())
        bad = [(int(index), str(reason)) for index, reason in record["bad"]]
        images = np.load(target, mmap_mode="r", allow_pickle=False)
        if images.shape == (shape[0] - len(bad), *shape[1:]) and images.dtype == np.uint8:
            return images, bad
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass
    return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(
    target: Path, names: list[str], shape: tuple[int, ...], workers: int, progress: Progress
) -> None:
    part = target.with_suffix(".part")
    row = math.prod(shape[1:])
    header = _header(shape)
    try:
        with part.open("wb+") as file:
            descriptor = file.fileno()
            os.posix_fallocate(descriptor, 0, len(header) + math.prod(shape))  # full disks: now
            bad = _decode_all(descriptor, len(header), names, shape, workers, progress)
            if len(bad) == len(names):
                raise bad_pictures([(Path(names[index]), reason) for index, reason in bad])
            lost = {index for index, _ in bad}
            kept = [index for index in range(len(names)) if index not in lost]
            for new, old in enumerate(kept):  # close the gaps
                if new != old:
                    content = os.pread(descriptor, row, len(header) + old * row)
                    os.pwrite(descriptor, content, len(header) + new * row)
            os.pwrite(descriptor, _header((len(kept), *shape[1:])), 0)
            os.truncate(descriptor, len(header) + len(kept) * row)
            os.fsync(descriptor)
        _write(target.with_suffix(".json"), json.dumps({"files": len(names), "bad": bad}).encode())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _header(shape: tuple[int, ...]) -> bytes:
    """Of a .npy file; NumPy leaves room, so that its length does not depend on the count."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    return stream.getvalue()


def _write(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _decode_all(
    descriptor: int,
    offset: int,
    names: list[str],
    shape: tuple[int, ...],
    workers: int,
    progress: Progress,
) -> list[tuple[int, str]]:
    """Every row of the file; (index, reason) of each bad picture, in order."""
    bad = []
    began = time.perf_counter()
    for start in range(0, len(names), FIRST):
        stop = min(start + FIRST, len(names))
        bad += _rows(descriptor, offset, names, range(start, stop), shape)
        progress(stop, len(names))
        left = (time.perf_counter() - began) / stop * (len(names) - stop)
        if workers > 1 and left > PAYS:
            bad += _in_processes(descriptor, offset, names, stop, shape, workers, progress)
            break
    return sorted(bad)


def _rows(
    descriptor: int, offset: int, names: list[str], indices: range, shape: tuple[int, ...]
) -> list[tuple[int, str]]:
    bad = []
    row = math.prod(shape[1:])
    with hushed:
        for index in indices:
            try:
                pixels, _ = read_picture(names[index], shape[1], shape[3])
            except BadPictureError as error:
                bad.append((index, error.reason))
                continue
            if os.pwrite(descriptor, pixels.tobytes(), offset + index * row) != row:
                raise OSError("the disk took only a part of an image")
    return bad


def _in_processes(
    descriptor: int,
    offset: int,
    names: list[str],
    first: int,
    shape: tuple[int, ...],
    workers: int,
    progress: Progress,
) -> list[tuple[int, str]]:
    """The same in processes of our own, which import neither torch nor the caller's script.

    They take chunk numbers from one pipe, and answer a line a bad picture and a line a chunk on
    another. Threads would do on two cores; on many they would queue for the interpreter.
    """
    chunk = max(16, math.ceil((len(names) - first) / TOKENS))
    starts = list(range(first, len(names), chunk))
    bad, done = [], set()
    processes: list[subprocess.Popen[bytes]] = []
    take, give = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    hear, answer = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    with tempfile.TemporaryFile("w") as listed, take, give, hear, answer:
        json.dump(names, listed)
        listed.flush()
        give.write(b"".join(map(TOKEN.pack, starts)))
        give.close()
        task = json.dumps([descriptor, offset, listed.fileno(), chunk, shape])
        command = "from deepsimplex.data.cache import _work; _work()"
        try:
            for _ in range(min(workers, len(starts))):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-c", command, task],
                        stdin=take,
                        stdout=answer,
                        pass_fds=[descriptor, listed.fileno()],
                        start_new_session=True,  # Ctrl-C is ours to answer
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    )
                )
            take.close()
            answer.close()
            for line in hear:
                index, reason = json.loads(line)
                if reason is not None:
                    bad.append((index, reason))
                    continue
                done.add(index)
                progress(min(first + chunk * len(done), len(names)), len(names))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if lost := [start for start in starts if start not in done]:
        between = [names[lost[0]], names[min(lost[0] + chunk, len(names)) - 1]]
        raise DeepSimplexError(
            "processes that decode to the end",
            f"one that died between {' and '.join(map(shown, between))}",
            "look at these files with deepsimplex check; there may be too little memory",
        )
    return bad


def _work() -> None:
    """One such process."""
    descriptor, offset, listed, chunk, shape = json.loads(sys.argv[1])
    names = json.loads(os.pread(listed, os.fstat(listed).st_size, 0))
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
        while token := os.read(0, TOKEN.size):
            (start,) = TOKEN.unpack(token)
            chosen = range(start, min(start + chunk, len(names)))
            for bad in _rows(descriptor, offset, names, chosen, shape):
                os.write(1, f"{json.dumps(bad)}\n".encode())
            os.write(1, f"{json.dumps([start, None])}\n".encode())
