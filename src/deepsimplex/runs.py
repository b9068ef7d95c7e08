"""A run is a folder: recipe, environment, log, checkpoint, model, results.

    recipe.json         what was asked, with a fingerprint of the data
    environment.json    versions, device, threads, code commit
    log.jsonl           a line an epoch, none twice
    checkpoint.safetensors, model.safetensors, results.json

Files are written beside, fsynced and renamed, so that kill −9 leaves the old one or the new one.
The same command goes on where it stopped; a lock keeps two processes apart.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

import deepsimplex
from deepsimplex.asked import completed, differences
from deepsimplex.engine import Checkpoint, Place
from deepsimplex.errors import RunError, Stopped
from deepsimplex.recipes import Recipe


def write_atomically(path: Path, content: bytes) -> None:
    """All of `content` or what was there before, whatever happens in between."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, record: Any) -> None:
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """A compressed .npz."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def fingerprint(*arrays: Tensor | np.ndarray | None) -> str:
    """SHA-256 of shapes, types and contents."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is None:
            digest.update(b"none")
            continue
        values = array.numpy(force=True) if isinstance(array, Tensor) else np.asarray(array)
        digest.update(f"{values.shape}{values.dtype.str}".encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    return digest.hexdigest()


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """What a number depends on beside its recipe."""
    import sklearn

    record: dict[str, Any] = {
        "deepsimplex": deepsimplex.__version__,
        "commit": code_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }
    if device is not None:
        record["device"] = str(device)
        if device.type == "cuda":
            record["gpu"] = torch.cuda.get_device_name(device)
    return record


def hardware(device: torch.device) -> str:
    """The GPU's name, or the CPU's cores."""
    about = environment(device)
    return str(about.get("gpu", about["cpu"]))


def command() -> str:
    """The command of this process as another machine would type it: without paths of this one."""
    words = ["deepsimplex", *sys.argv[1:]]
    own = {"--data-root": "DATA", "--out": None, "--results": None, "--figures": None}
    shown, at = [], 0
    while at < len(words):
        option, given, _ = words[at].partition("=")
        if option in own:
            if own[option] is not None:
                shown += [option, str(own[option])]
            at += 1 if given else 2
            continue
        shown.append(shlex.quote(words[at]))
        at += 1
    return " ".join(shown)


def code_commit() -> str | None:
    """The commit of the checkout this package runs from, "-dirty" if changed; None outside one.

    DEEPSIMPLEX_COMMIT says it where the code is a copy without its history.
    """
    if "DEEPSIMPLEX_COMMIT" in os.environ:
        return os.environ["DEEPSIMPLEX_COMMIT"]
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != here.parents[1]:
            return None  # installed below somebody else's repository
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


_open: list[Run] = []
"""Runs at work in this process: a signal stops them all."""
_handlers: dict[int, Any] = {}


def _listen(run: Run) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    if not _open:
        for number in (signal.SIGTERM, signal.SIGINT):
            _handlers[number] = signal.signal(number, _note)
    _open.append(run)


def _listen_no_more(run: Run) -> None:
    if run in _open:
        _open.remove(run)
    if not _open:
        for number, handler in _handlers.items():
            signal.signal(number, handler)
        _handlers.clear()


def _note(number: int, frame: FrameType | None) -> None:
    """Stop at the next step; a second signal acts at once."""
    for run in _open:
        run.signal = number
    signal.signal(number, _handlers[number])


class Run:
    """A run folder, open and locked for the length of a `with` block; the loop's keeper."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        data: dict[str, Any],
        checkpoint_seconds: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.device = device
        self.asked = json.loads(json.dumps({"recipe": recipe.to_json(), "data": data}))
        self.checkpoint_seconds = checkpoint_seconds
        self.signal: int | None = None
        self._saved_at = time.monotonic()
        self._lock: IO[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def model_path(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def results(self) -> dict[str, Any] | None:
        """What the finished run found; None while it is not finished."""
        path = self.folder / "results.json"
        return _read(path, "the same command finds them anew") if path.exists() else None

    def __enter__(self) -> Run:
        import fcntl  # POSIX only; the estimator does without run folders

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("wb")
        except OSError as error:
            raise RunError(
                f"to write the run folder {self.folder}",
                error.strerror or str(error),
                "choose another --out",
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RunError(
                f"{self.folder} to be free",
                "another process at work in it",
                "wait for it to end, or choose another --out",
            ) from None
        try:
            self._agree()
            if self.results is None:
                self._note_environment()
        except BaseException:
            self._lock.close()
            raise
        for left in self.folder.glob(".*.part"):
            left.unlink()  # of a process that was killed while it wrote
        self._log = (self.folder / "log.jsonl").open("ab")
        self._saved_at = time.monotonic()
        _listen(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _listen_no_more(self)
        for file in (self._log, self._lock):
            if file is not None:
                file.close()
        if self.signal is not None and kind is None:
            raise Stopped(self.signal)  # it came after the last step: obeyed now

    def _agree(self) -> None:
        """Write recipe.json, or see that the one here asks for the same."""
        path = self.folder / "recipe.json"
        if not path.exists():
            write_json(path, self.asked)
            return
        try:
            here = json.loads(path.read_text())
        except ValueError:
            raise RunError(f"a recipe in {path}", "a broken file", "choose another --out") from None
        here = completed(here)
        if here != self.asked:
            raise RunError(
                f"the recipe that {self.folder} was begun with",
                f"a different {_first(differences(here, self.asked))}",
                "choose another --out, or delete that folder to begin anew",
            )

    def _note_environment(self) -> None:
        """environment.json: of the first session, and of each later one that differs."""
        path = self.folder / "environment.json"
        now = environment(self.device)
        if not path.exists():
            write_json(path, now | {"resumed": []})
            return
        record = _read(path, "it is written anew")
        sessions = [{k: v for k, v in record.items() if k != "resumed"}, *record["resumed"]]
        if now != sessions[-1]:
            record["resumed"].append(now)
            write_json(path, record)

    # The loop's keeper: engine.Keeper

    def load(self) -> Checkpoint | None:
        """The last checkpoint; the log is cut back to it, so that no line comes twice."""
        assert self._log is not None
        path = self.folder / "checkpoint.safetensors"
        offset, checkpoint = 0, None
        if path.exists():
            try:
                with safe_open(path, framework="pt") as file:
                    names = file.keys()
                    tensors = {name: file.get_tensor(name) for name in names}
                    record = json.loads(file.metadata()["deepsimplex"])
                checkpoint = Checkpoint(Place(**record["place"]), tensors)
                offset = record["log"]
            except (SafetensorError, KeyError, TypeError, ValueError, OSError):
                raise RunError(
                    f"a checkpoint in {path}", "a broken file", "delete it to begin the run anew"
                ) from None
        if self._log.seek(0, os.SEEK_END) < offset:
            raise RunError(
                f"the log of {offset} bytes in {self.folder}", "a shorter one", "begin the run anew"
            )
        self._log.truncate(offset)
        return checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        assert self._log is not None
        self._log.flush()
        os.fsync(self._log.fileno())
        record = {"place": vars(checkpoint.place), "log": self._log.seek(0, os.SEEK_END)}
        content = to_safetensors(checkpoint.tensors, {"deepsimplex": json.dumps(record)})
        write_atomically(self.folder / "checkpoint.safetensors", content)
        self._saved_at = time.monotonic()

    def log(self, record: dict[str, Any]) -> None:
        assert self._log is not None
        self._log.write((json.dumps(record) + "\n").encode())
        self._log.flush()

    def due(self) -> bool:
        return time.monotonic() - self._saved_at >= self.checkpoint_seconds

    def stopping(self) -> int | None:
        return self.signal

    def finish(self, results: dict[str, Any]) -> None:
        """results.json: its presence means the run is complete."""
        write_json(self.folder / "results.json", results)


def _first(names: list[str], most: int = 3) -> str:
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def _read(path: Path, then: str) -> dict[str, Any]:
    """A file of a run folder, which is ours to write: a broken one can go."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RunError(f"JSON in {path}", "a broken file", f"delete it; {then}")
    return found
