"""Files from elsewhere, safely: pickles that run nothing, archives that keep to their folder."""

from __future__ import annotations

import gzip
import math
import pickletools
import re
import secrets
import shutil
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from deepsimplex.errors import DeepSimplexError

PICKLE_BYTES = 512 * 2**20
PICKLE_STEPS = 2_000_000
PICKLE_DEPTH = 8
CHUNK = 2**20

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HOSTILE = "do not open it by other means; fetch it anew from its official address"
# What zipfile, tarfile, gzip and zlib, or our own machine, raise for damaged files.
_DAMAGE: tuple[type[Exception], ...] = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, Warning),
)
_LEAVES = (str, bytes, bytearray, int, float, type(None), np.ndarray, np.generic)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = re.compile(
    "(BIN)?INT[12]?|LONG1?|BINFLOAT|(SHORT_)?BIN(STRING|(UNICODE|BYTES)8?)|BYTEARRAY8"
)


class _Refused(Exception):
    """What a pickle holds that it must not."""


class _Name(Enum):
    """What a pickle may name. The names stand for themselves: nothing is imported or called."""

    ARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    NEW_ARRAY = "numpy.core.multiarray._reconstruct"
    SCALAR = "numpy.core.multiarray.scalar"
    FROM_BUFFER = "numpy.core.numeric._frombuffer"
    ENCODE = "_codecs.encode"


@dataclass
class _Kind:
    """A dtype in the making: first its letter and size, then its byte order."""

    dtype: np.dtype


def load_pickle(file: IO[bytes], name: str = "the pickle") -> Any:
    """What a pickle of numeric arrays in dicts, lists and tuples says.

    Not Python's unpickler with a filter but a small machine without a call instruction, so a
    hostile pickle has nothing to run. Strings of Python 2 are read as latin-1.
    """
    data = file.read(PICKLE_BYTES + 1)
    try:
        with _naming(f"a whole pickle in {name}"):
            return _checked(_Machine(data).run())
    except _Refused as refused:
        expected = f"only arrays of numbers in plain containers in {name}"
        raise DeepSimplexError(expected, str(refused), _HOSTILE) from None


class _Machine:
    """Interprets the opcodes that arrays, numbers, text, dicts, lists and tuples need."""

    def __init__(self, data: bytes) -> None:
        if len(data) > PICKLE_BYTES:
            raise _Refused(f"more than {PICKLE_BYTES >> 20} MiB")
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        # Honest arrays lie in the file, at most once as text and once decoded.
        self.bytes_left = 2 * len(data)

    def run(self) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self.data)):
            if count == PICKLE_STEPS:
                raise _Refused(f"more than {PICKLE_STEPS} opcodes")
            self.step(opcode.name, argument)
        return self.stack.pop()

    def step(self, op: str, argument: Any) -> None:
        stack = self.stack
        if op in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif op == "MARK":
            self.marks.append(len(stack))
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op in _TUPLES:
            stack.append(tuple(self.pop(_TUPLES[op])))
        elif op in ("APPEND", "APPENDS"):
            items = self.pop(1 if op == "APPEND" else None)
            stack[-1].extend(items)  # a list's, or a bytearray's of small numbers
        elif op in ("SETITEM", "SETITEMS"):
            items = self.pop(2 if op == "SETITEM" else None)
            if not all(isinstance(key, str | bytes | int) for key in items[::2]):
                raise _Refused("a key that is neither text nor a number")  # hashes may take ever
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif op in ("GLOBAL", "STACK_GLOBAL"):
            words = argument.split(" ") if op == "GLOBAL" else self.pop(2)
            stack.append(_named(".".join(words)))
        elif op == "REDUCE":
            stack.append(self.make(*self.pop(2)))
        elif op == "BUILD":
            self.build(stack[-2], stack.pop())
        elif _VALUES.fullmatch(op):
            stack.append(argument)
        elif op not in ("PROTO", "FRAME", "STOP"):
            raise _Refused(f"the opcode {op} {'' if argument is None else _shown(str(argument))}")

    def pop(self, count: int | None) -> list[Any]:
        """The last `count` values, or those since the last mark."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if start < 0:
            raise IndexError("nothing on the stack")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def make(self, name: Any, arguments: Any) -> Any:
        """What the reductions of NumPy (and, for bytes, of Python) would have called."""
        match name, arguments:
            case _Name.NEW_ARRAY, (_Name.ARRAY, (0,), "b" | b"b"):
                return np.ndarray((0,), "b")
            case _Name.DTYPE, (str(code), *_) if re.fullmatch("b1|[iu][1248]|f[248]", code):
                return _Kind(np.dtype(code))
            case _Name.SCALAR, (_Kind() as kind, data):
                return np.frombuffer(self.content((), kind, data), kind.dtype)[0]
            case _Name.FROM_BUFFER, (data, _Kind() as kind, shape, "C" | "F" as order):
                flat = np.frombuffer(self.content(shape, kind, data), kind.dtype)
                return flat.reshape(shape, order=order)
            case _Name.ENCODE, (str(text), "latin1" | "latin-1"):
                return self.spend(text.encode("latin-1"))
        said = name.value if isinstance(name, _Name) else "no function"
        raise _Refused(f"a call of {said} that no array of numbers needs")

    def build(self, target: Any, state: Any) -> None:
        match target, state:
            case np.ndarray(), (_, shape, _Kind() as kind, fortran, data):
                made = (1, shape, kind.dtype, bool(fortran), self.content(shape, kind, data))
                target.__setstate__(made)  # type: ignore[arg-type]
            case _Kind(), (int(), "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0):
                target.dtype = target.dtype.newbyteorder(order)
            case _:
                raise _Refused("a state that no array of numbers has")

    def content(self, shape: Any, kind: _Kind, data: Any) -> bytes:
        """The bytes of an array, of the length that its shape asks for."""
        content = data.encode("latin-1") if isinstance(data, str) else bytes(memoryview(data))
        self.spend(content)
        if not all(type(n) is int and n >= 0 for n in shape):
            raise _Refused("an array with a shape of other than whole numbers")
        if math.prod(shape) * kind.dtype.itemsize != len(content):
            raise _Refused(f"{len(content)} bytes for an array of {kind.dtype} {shape}"[:120])
        return content

    def spend(self, content: bytes) -> bytes:
        """Against one text that is made into array after array."""
        self.bytes_left -= len(content)
        if self.bytes_left < 0:
            raise _Refused("arrays larger than the file")
        return content


def _named(name: str) -> _Name:
    try:
        return _Name(name.replace("numpy._core.", "numpy.core.", 1))
    except ValueError:
        raise _Refused(f"the global {_shown(name)}") from None


def _checked(value: Any) -> Any:
    """Refuse deep and circular nesting, and anything left half made."""
    level = [value]
    for _ in range(PICKLE_DEPTH):
        inner = {id(x): x for x in level if isinstance(x, dict | list | tuple)}
        if not all(id(x) in inner or isinstance(x, _LEAVES) for x in level):
            raise _Refused("a function, a class or a dtype as a value")
        level = [y for x in inner.values() for y in (x.values() if isinstance(x, dict) else x)]
    if level:
        raise _Refused(f"containers nested more than {PICKLE_DEPTH} deep")
    return value


@contextmanager
def _naming(expected: str) -> Iterator[None]:
    """One error that names the file for all that a damaged one may set off."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, DeepSimplexError):
            raise
        got = f"one that cannot be read ({type(error).__name__}: {_shown(str(error))})"
        raise DeepSimplexError(expected, got, "fetch it anew") from None


def _shown(name: str) -> str:
    """Words from elsewhere, fit for a one-line message."""
    return ascii(name)[1:-1][:100]


@dataclass(frozen=True)
class Limits:
    """How much an archive may hold before it is taken for a bomb."""

    members: int = 250_000
    size: int = 4 * 2**30  # all members together, unpacked
    ratio: int = 100  # unpacked to packed, beyond the first `free` bytes
    free: int = 64 * 2**20


LIMITS = Limits()


def members(path: Path, limits: Limits = LIMITS) -> dict[str, int]:
    """Name and size of every file in a .zip, .tar or .tar.gz, all of them found harmless."""
    return {name: size for name, size, _ in _entries(path, limits)}


def read_members(path: Path, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the named files, in the order of the archive, in one pass over it."""
    wanted = set(names)
    for name, _, chunks in _entries(path, LIMITS):
        if name in wanted:
            wanted.remove(name)
            yield name, b"".join(chunks())
    if wanted:
        got = f"{len(wanted)} missing, {_shown(min(wanted))} the first"
        raise DeepSimplexError(f"{len(names)} files in {path}", got, "fetch the archive anew")


def extract(archive: Path, target: Path, limits: Limits = LIMITS) -> Path:
    """Unpack into a new folder `target`: whole, or not at all. Links and modes are not restored."""
    if target.exists():
        raise DeepSimplexError(f"a new folder {target}", "one that exists", "move it away first")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        for name, _, chunks in _entries(archive, limits):
            place = beside / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as file:
                file.writelines(chunks())
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


_Entry = tuple[str, int, Callable[[], Iterator[bytes]]]


def _entries(path: Path, limits: Limits) -> Iterator[_Entry]:
    """Each file's name, size and content; the content is read, if at all, before the next file."""
    with _naming(f"a whole archive in {path}"):
        with path.open("rb") as file:
            magic = file.read(2)
        yield from (_zip_entries if magic == b"PK" else _tar_entries)(path, _Gate(path, limits))


def _zip_entries(path: Path, gate: _Gate) -> Iterator[_Entry]:
    with zipfile.ZipFile(path) as archive:
        names = [gate.admit_zip(info) for info in archive.infolist()]
        for name, info in zip(names, archive.infolist(), strict=True):
            if not info.is_dir():
                yield name, info.file_size, partial(_chunks, path, archive.open, info)


def _tar_entries(path: Path, gate: _Gate) -> Iterator[_Entry]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = _Metered(gzip.GzipFile(fileobj=raw) if packed else raw, raw, gate)
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as archive:
            end = 0
            for info in archive:
                name = gate.admit_tar(info)
                if info.isreg():
                    yield name, info.size, partial(_chunks, path, archive.extractfile, info)
                end = archive.offset
        while stream.read(CHUNK):  # to the end, where gzip keeps its checksum
            pass
        # tarfile takes a broken header for the end of the archive.
        if stream.filled > end or stream.count < end + tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"no end mark after {_shown(gate.member)}")


class _Gate:
    """Lets members in by name, kind, number and size; refuses by name."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path, self.limits, self.packed = path, limits, path.stat().st_size
        self.seen: dict[str, bool] = {}  # name without case → whether it is a folder
        self.count = self.size = 0
        self.member = "the first header"

    def refuse(self, why: str) -> DeepSimplexError:
        expected = f"only plain files that stay in their folder in {self.path}"
        return DeepSimplexError(expected, f"{_shown(self.member)}: {why}", _HOSTILE)

    def admit_zip(self, info: zipfile.ZipInfo) -> str:
        self.member = info.orig_filename
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise self.refuse("a link" if kind == stat.S_IFLNK else "a device or pipe")
        if info.flag_bits & 1 or info.compress_type not in _METHODS:
            raise self.refuse("encrypted, or packed by another method than deflate")
        self.check_ratio(info.file_size, info.compress_size)
        return self.admit(info.orig_filename, info.is_dir(), info.file_size)

    def admit_tar(self, info: tarfile.TarInfo) -> str:
        self.member = info.name
        if info.issym() or info.islnk():
            raise self.refuse("a link")
        if info.sparse is not None or not (info.isreg() or info.isdir()):
            raise self.refuse("a device, pipe or sparse file")
        return self.admit(info.name, info.isdir(), info.size)

    def admit(self, name: str, folder: bool, size: int) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if re.search(r"^/|[\\:]|(^|/)\.\.(/|$)", name) or not (parts or folder):
            raise self.refuse("a name that may lead out of the folder")
        if not name.isprintable() or any(len(part.encode()) > 255 for part in parts):
            raise self.refuse("a name too long or with control characters")
        self.count += 1
        self.size += size
        if self.count > self.limits.members or self.size > self.limits.size:
            raise self.refuse(f"more members or bytes than {self.limits}")
        self.check_ratio(self.size, self.packed)
        key = unicodedata.normalize("NFC", "/".join(parts)).casefold()
        above = [key[:i] for i, letter in enumerate(key) if letter == "/"]
        if self.seen.get(key, folder) != folder or (key in self.seen and not folder):
            raise self.refuse("a name that came before")
        if not all(self.seen.setdefault(parent, True) for parent in above):
            raise self.refuse("a name below one that is a file")
        self.seen[key] = folder
        return "/".join(parts)

    def check_ratio(self, size: int, packed: int) -> None:
        if size > self.limits.free and size > self.limits.ratio * packed:
            raise self.refuse(f"{size} bytes packed in {packed}")


class _Metered:
    """A stream for tarfile that counts what comes out and stops a bomb while it unpacks."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, raw: IO[bytes], gate: _Gate) -> None:
        self.stream, self.raw, self.gate = stream, raw, gate
        self.count = self.filled = 0  # bytes out, and where the last that is not zero ended

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        if held := len(chunk.rstrip(b"\0")):
            self.filled = self.count + held
        self.count += len(chunk)
        self.gate.check_ratio(self.count, self.raw.tell())
        return chunk


def _chunks(path: Path, opened: Callable[[Any], Any], info: Any) -> Iterator[bytes]:
    with _naming(f"a whole archive in {path}"), opened(info) as file:
        while chunk := file.read(CHUNK):
            yield chunk
