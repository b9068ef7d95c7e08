"""Hostile pickles run nothing; hostile archives are refused by name and leave nothing behind."""

import gzip
import io
import os
import pickle
import shutil
import struct
import tarfile
import warnings
import zipfile
from contextlib import suppress

import numpy as np
import pytest

from deepsimplex.data import packed
from deepsimplex.data.packed import Limits, extract, load_pickle, members, read_members
from deepsimplex.errors import DeepSimplexError

SMALL = Limits(members=50, size=100_000, ratio=50, free=20_000)


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


PLAIN = {
    "data": np.arange(24, dtype=np.uint8).reshape(4, 6),
    b"turned": np.arange(6, dtype="<i4").reshape(2, 3).T,
    "big": np.array([1, 2, 515], dtype=">u2"),
    "floats": np.array([[0.5, -1e300]]),
    "flags": np.array([True, False]),
    "none": np.zeros((0, 3), np.float32),
    "labels": [0, 1, 255, 256, 70_000, -1, 2**70],
    "mixed": (1.5, None, True, "ä", b"\xff\x00", [], {}, (), ["a", ("b",)]),
    "one": np.float64(0.25),
    7: np.int64(-3),
}


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_plain_things_come_back(protocol):
    plain = {k: v for k, v in PLAIN.items() if k != "none" or protocol > 2}
    data = pickle.dumps(plain, protocol)
    assert same(load_pickle(io.BytesIO(data)), pickle.loads(data))


def test_the_names_of_numpy_1():
    data = pickle.dumps(PLAIN, 3).replace(b"numpy._core.", b"numpy.core.")
    assert b"numpy.core.multiarray" in data
    assert same(load_pickle(io.BytesIO(data)), pickle.loads(pickle.dumps(PLAIN, 3)))


def test_an_array_that_occurs_twice_is_one():
    array = np.arange(5)
    first, second = load_pickle(io.BytesIO(pickle.dumps([array, array])))
    assert first is second


class Call:
    """Pickles as a call of `function`; `state` follows by BUILD."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.reduced


def text(word):
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def hostile(mark):
    """Name → (pickle that would create the file `mark`, or worse; words of the refusal)."""
    touch = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w').close() or 1"
    by_hand = {
        "GLOBAL os.system": b"cos\nsystem\n(" + text(touch) + b"tR.",
        "INST": b"(S'%s'\nios\nsystem\n." % touch.encode(),
        "OBJ": b"(cos\nsystem\n" + text(touch) + b"o.",
        "STACK_GLOBAL": b"\x80\x04" + text("os") + text("system") + b"\x93(" + text(touch) + b"tR.",
        "dotted STACK_GLOBAL": b"\x80\x04" + text("numpy") + text("f2py.os.system") + b"\x93.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n(" + text(touch) + b"t\x81.",
        "numpy.f2py": b"cnumpy.f2py.crackfortran\nmyeval\n(" + text(code) + b"tR.",
        "numpy.testing": b"cnumpy.testing._private.utils\nrunstring\n(" + text(code) + b"}tR.",
        "persistent id": b"Pos.system\n.",
        "binary persistent id": text("os.system") + b"Q.",
        "EXT1": b"\x80\x02\x82\x01.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "set": b"\x80\x04\x8f.",
        "POP hides it": b"cos\nsystem\n(" + text(touch) + b"tR0N.",
        "BUILD on a name": b"cnumpy\nndarray\n}" + text("x") + b"K\x01sb.",
        "call of text": text("os.system") + b"(tR.",
    }
    words = {
        "INST": "the opcode STRING",
        "dotted STACK_GLOBAL": r"the global numpy\.f2py\.os\.system",
        "numpy.f2py": r"the global numpy\.f2py\.crackfortran\.myeval",
        "numpy.testing": r"the global numpy\.testing\._private\.utils\.runstring",
        "NEWOBJ": r"the global subprocess\.Popen",
        "persistent id": r"the opcode PERSID os\.system",
        "binary persistent id": "the opcode BINPERSID",
        "EXT1": "the opcode EXT1",
        "EXT4": "the opcode EXT4",
        "NEXT_BUFFER": "the opcode NEXT_BUFFER",
        "set": "the opcode EMPTY_SET",
        "BUILD on a name": "a state that no array",
        "call of text": "a call of no function",
    }
    cases = {
        name: (data, words.get(name, r"the global os\.system")) for name, data in by_hand.items()
    }
    calls = {
        "os.system": (Call(os.system, touch), r"the global posix\.system"),
        "nested in an array's place": ({"data": [Call(os.system, touch)]}, r"posix\.system"),
        "eval": (Call(eval, code), r"the global (__builtin__|builtins)\.eval"),
        "exec": (Call(exec, code), r"the global (__builtin__|builtins)\.exec"),
        "getattr": (Call(getattr, "", "x"), r"the global (__builtin__|builtins)\.getattr"),
        "open": (Call(open, str(mark), "w"), r"the global (_?io|__builtin__|builtins)\.open"),
        "numpy.load": (Call(np.load, str(mark)), r"the global numpy\.load"),
        "numpy.memmap": (Call(np.memmap, str(mark), "u1", "w+", 0, 9), r"the global numpy\.memmap"),
        "numpy internals": (
            Call(np._core._internal._makenames_list, {}, False),
            r"the global numpy\._core\._internal",
        ),
        "copyreg": (
            Call(__import__("copyreg")._reconstructor, dict, object, None),
            r"copy_?reg\._reconstructor",
        ),
        "codecs.decode": (Call(__import__("_codecs").decode, b"", "zlib"), r"_codecs\.decode"),
        "encode to another": (Call(__import__("_codecs").encode, "x", "idna"), r"_codecs\.encode"),
        "object array": (np.array([Call(os.system, touch)], dtype=object), r"numpy\.dtype"),
        "object field": (np.zeros(1, [("a", "O")]), r"a call of numpy\.dtype"),
        "text array": (np.array(["a"]), r"a call of numpy\.dtype"),
        "a class": ([np.ndarray], "a function, a class or a dtype as a value"),
        "a dtype": ([np.dtype("u1")], "a function, a class or a dtype as a value"),
        "a subclass": (np.ma.masked_array([1]), r"the global numpy\.ma"),
        "complex": (1j, "complex"),
    }
    for name, (value, said) in calls.items():
        for protocol in (2, 4):
            cases[f"{name}, protocol {protocol}"] = (pickle.dumps(value, protocol), said)
    return cases


@pytest.mark.parametrize("name", sorted(hostile("x")))
def test_a_hostile_pickle_runs_nothing(name, tmp_path):
    mark = tmp_path / "touched"
    data, words = hostile(mark)[name]
    with pytest.raises(DeepSimplexError, match=words) as caught:
        load_pickle(io.BytesIO(data), "test_batch")
    assert "only arrays of numbers in plain containers in test_batch" in str(caught.value)
    assert "do not open it by other means" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not mark.exists()


def test_those_payloads_are_real(tmp_path):
    """Python's own unpickler falls for them, so the test above tests something."""
    for name in (
        "GLOBAL os.system",
        "STACK_GLOBAL",
        "numpy.f2py",
        "numpy.testing",
        "exec, protocol 2",
    ):
        mark = tmp_path / "touched"
        pickle.loads(hostile(mark)[name][0])
        assert mark.exists(), name
        mark.unlink()


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
BYTE = (
    b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)


def state(shape, data, dtype=BYTE):
    return ARRAY + b"(K\x01(" + shape + b"t" + dtype + b"\x89" + data + b"tb"


BOMBS = {
    "deep list": (b"]" * 50_000 + b"a" * 49_999 + b".", "nested more than"),
    "deep tuple": (b")" + b"\x85" * 50_000 + b".", "nested more than"),
    "tuple as a key": (b"}" + b")" + b"\x85" * 50_000 + b"Ns.", "a key that is neither"),
    "a list in itself": (b"]q\x00h\x00a.", "nested more than"),
    "laughs": (b"]q\x00" + b"](h\x00h\x00eq\x00" * 60 + b".", "nested more than"),
    "memo index": (b"Nr\xff\xff\xff\xff.", None),
    "many opcodes": (b"](" + b"N" * 200_001 + b"e.", "more than 200000 opcodes"),
    "long bytes": (b"\x8e" + struct.pack("<Q", 2**60) + b"abc.", "cannot be read"),
    "long text": (b"X\xff\xff\xff\x7fabc.", "cannot be read"),
    "long bytearray": (b"\x96" + struct.pack("<Q", 2**40) + b"abc.", "cannot be read"),
    "big frame": (b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.", None),
    "big shape": (state(b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f", b"U\x01a") + b".", "1 bytes for an"),
    "negative shape": (state(b"J\xff\xff\xff\xff", b"U\x01a") + b".", "whole numbers"),
    "no bytes": (state(b"K\x01", b"N") + b".", "cannot be read"),
    "object dtype": (state(b"K\x01", b"]", b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR") + b".", "dtype"),
    "object flag": (state(b"K\x01", b"U\x01a", BYTE[:-4] + b"K\x3ftb") + b".", "a state that no"),
    "one text, many arrays": (
        b"](T" + struct.pack("<I", 9999) + b"a" * 9999 + b"q\x00" +
        state(b"M\x0f\x27", b"h\x00") * 50 + b"e.",
        "arrays larger than the file",
    ),
    "empty": (b"", "cannot be read"),
    "no stop": (b"]", "cannot be read"),
    "empty stack": (b".", "cannot be read"),
    "no memo": (b"h\x07.", "cannot be read"),
    "no mark": (b"e.", "cannot be read"),
    "odd items": (b"}(U\x01au.", "cannot be read"),
    "append to None": (b"NNa.", "cannot be read"),
    "no pickle": (b"\xff\xd8\xff\xe0 a picture", "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_damage(name, monkeypatch):
    monkeypatch.setattr(packed, "PICKLE_STEPS", 200_000)
    data, words = BOMBS[name]
    if words is None:  # Python's own would set gigabytes aside
        assert load_pickle(io.BytesIO(data)) is None
        return
    with pytest.raises(DeepSimplexError, match=words):
        load_pickle(io.BytesIO(data), "bomb")


def test_every_cut_of_a_pickle_is_an_error():
    data = pickle.dumps({"data": np.arange(12, dtype=np.uint8), "labels": [1, 2]}, 2)
    for end in range(len(data)):
        with pytest.raises(DeepSimplexError, match="a whole pickle in the pickle"):
            load_pickle(io.BytesIO(data[:end]))


def test_random_damage_never_escapes():
    random = np.random.default_rng(0)
    data = pickle.dumps({"data": np.arange(40, dtype=np.uint8), "labels": [1, 2]}, 2)
    for _ in range(1500):
        broken = bytearray(data)
        for at in random.integers(len(data), size=random.integers(1, 4)):
            broken[at] = random.integers(256)
        with suppress(DeepSimplexError):
            load_pickle(io.BytesIO(bytes(broken)))


def zipped(path, *entries, method=zipfile.ZIP_DEFLATED):
    """Entries: (name, content) or (name, content, mode)."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", method) as archive:
        warnings.simplefilter("ignore")  # of duplicate names
        for name, content, *mode in entries:
            info = zipfile.ZipInfo("placeholder")
            info.filename = name
            info.compress_type = method
            info.external_attr = (mode[0] if mode else 0o100644) << 16
            archive.writestr(info, content)
    return path


def tarred(path, *entries, kind="w:gz", form=tarfile.GNU_FORMAT):
    """Entries: (name, content) or (name, content, type) or (name, content, type, linkname)."""
    with tarfile.open(path, kind, format=form) as archive:
        for name, content, *more in entries:
            info = tarfile.TarInfo(name)
            info.type = more[0] if more else tarfile.REGTYPE
            info.linkname = more[1] if len(more) > 1 else ""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def altered(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(bytes(data))
    return path


GOOD = (("top/a.bin", bytes(range(200))), ("top/deep/b.txt", b"hello" * 10), ("./top/c", b""))
NOISE = np.random.default_rng(0).bytes(3000)
OUT, TWICE = "may lead out of the folder", "a name that came before"

NAMES = {
    "dots": ("../evil", OUT),
    "dots within": ("top/../../evil", OUT),
    "dots at the end": ("top/..", OUT),
    "absolute": ("/tmp/evil", OUT),
    "two slashes": ("//host/share/evil", OUT),
    "drive": ("C:/evil", OUT),
    "drive, relative": ("C:evil", OUT),
    "backslashes": ("..\\evil", OUT),
    "UNC": ("\\\\host\\share\\evil", OUT),
    "stream": ("top/a.bin:hidden", OUT),
    "control": ("top/e\x1b[2Jvil", "control characters"),
    "newline": ("top/evil\nname", "control characters"),
    "too long": ("top/" + "x" * 300, "too long"),
    "twice": ("top/a.bin", TWICE),
    "twice by a dot": ("top/./a.bin", TWICE),
    "twice but for case": ("TOP/A.BIN", TWICE),
    "file where a folder is": ("top/deep", TWICE),
    "folder where a file is": ("top/a.bin/evil", "below one that is a file"),
}


@pytest.mark.parametrize("make", [zipped, tarred], ids=["zip", "tar.gz"])
@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_refused(name, make, tmp_path):
    evil, words = NAMES[name]
    refused(make(tmp_path / "set.archive", *GOOD, (evil, b"evil")), tmp_path, words)


def refused(archive, tmp_path, words, limits=SMALL):
    target = tmp_path / "unpacked"
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(DeepSimplexError, match=words) as caught:
        extract(archive, target, limits)
    assert sorted(p.name for p in tmp_path.iterdir()) == before, "a refusal leaves nothing"
    assert str(archive) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(DeepSimplexError, match=words):
        members(archive, limits)
    return str(caught.value)


MANY = [(f"{i}", NOISE[i : i + 400]) for i in range(51)]
CASES = {
    "zip link": lambda p: zipped(p, *GOOD, ("link", b"/etc/passwd", 0o120777)),
    "zip device": lambda p: zipped(p, *GOOD, ("device", b"", 0o060644)),
    "zip pipe": lambda p: zipped(p, *GOOD, ("pipe", b"", 0o010644)),
    "zip encrypted": lambda p: flipped_flag(zipped(p, *GOOD)),
    "zip other method": lambda p: zipped(p, *GOOD, method=zipfile.ZIP_LZMA),
    "zip many": lambda p: zipped(p, *MANY),
    "zip ratio": lambda p: zipped(p, ("zeros", bytes(90_000))),
    "zip size": lambda p: zipped(p, ("a", NOISE * 20), ("b", NOISE * 20), method=0),
    "zip declared small": lambda p: altered(
        zipped(p, ("a", NOISE * 8)), struct.pack("<I", 24_000), struct.pack("<I", 500)
    ),
    "zip declared large": lambda p: altered(
        zipped(p, ("a", NOISE), method=0), struct.pack("<I", 3000), struct.pack("<I", 2**31)
    ),
    "zip NUL": lambda p: altered(zipped(p, ("a.txt?/../x", b"")), b"a.txt?", b"a.txt\0"),
    "zip two names": lambda p: renamed_locally(zipped(p, ("name.one", b"abc"))),
    "zip cut": lambda p: halved(zipped(p, *GOOD)),
    "zip altered": lambda p: flipped(zipped(p, ("a", NOISE), method=0), 500),
    "tar symbolic link": lambda p: tarred(p, *GOOD, ("link", b"", tarfile.SYMTYPE, "/etc")),
    "tar hard link": lambda p: tarred(p, *GOOD, ("link", b"", tarfile.LNKTYPE, "top/a.bin")),
    "tar link, then through it": lambda p: tarred(
        p, ("x", b"", tarfile.SYMTYPE, ".."), ("x/evil", b"evil")
    ),
    "tar device": lambda p: tarred(p, *GOOD, ("null", b"", tarfile.CHRTYPE)),
    "tar block device": lambda p: tarred(p, *GOOD, ("disk", b"", tarfile.BLKTYPE)),
    "tar pipe": lambda p: tarred(p, *GOOD, ("pipe", b"", tarfile.FIFOTYPE)),
    "tar sparse": lambda p: tarred(p, ("sparse", bytes(512), tarfile.GNUTYPE_SPARSE)),
    "tar many": lambda p: tarred(p, *MANY),
    "tar ratio": lambda p: tarred(p, ("zeros", bytes(90_000))),
    "tar size": lambda p: tarred(p, ("a", NOISE * 20), ("b", NOISE * 20)),
    "tar long name": lambda p: tarred(p, ("x" * 90_000, b"")),
    "tar pax header": lambda p: tarred(p, ("y" * 90_000, b""), form=tarfile.PAX_FORMAT),
    "tar absolute pax": lambda p: tarred(p, ("/" + "d/" * 99 + "e", b""), form=tarfile.PAX_FORMAT),
    "gzip of no tar": lambda p: p.write_bytes(gzip.compress(bytes(90_000))) and p,
    "tar.gz cut": lambda p: halved(tarred(p, ("a", NOISE))),
    "tar.gz altered": lambda p: flipped(tarred(p, ("a", NOISE)), 1500),
    "tar cut": lambda p: halved(tarred(p, ("a", NOISE * 5), kind="w")),
    "tar cut between": lambda p: (
        p.write_bytes(tarred(p, *GOOD, kind="w").read_bytes()[:1024]) and p
    ),
    "tar header altered": lambda p: flipped(tarred(p, *GOOD, kind="w"), 1024 + 3),
    "no archive": lambda p: p.write_bytes(b"<html>not found</html>") and p,
    "empty": lambda p: p.write_bytes(b"") or p,
}
WORDS = {
    "link": "link: a link",
    "device": "(device|null|disk): a device",
    "pipe": "pipe: a device",
    "encrypted": "encrypted",
    "other method": "another method than deflate",
    "many": "50: more members or bytes than",
    "ratio": "bytes packed in",
    "size": "b: more members or bytes than",
    "through it": "x: a link",
    "sparse": "sparse: a device, pipe or sparse file",
    "declared large": "a: (more members|2147483648 bytes packed)",
    "NUL": OUT,
    "long name": "bytes packed in",
    "pax header": "bytes packed in",
    "absolute pax": OUT,
    "no tar": "bytes packed in",
}


def flipped_flag(path):
    data = bytearray(path.read_bytes())
    for start, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        found = data.find(start)
        data[found + at] |= 1
    path.write_bytes(bytes(data))
    return path


def renamed_locally(path):
    path.write_bytes(path.read_bytes().replace(b"name.one", b"name.two", 1))
    return path


@pytest.mark.parametrize("name", CASES)
def test_archives_that_are_refused(name, tmp_path):
    words = next((said for key, said in WORDS.items() if name.endswith(key)), "a whole archive in")
    if name in ("zip declared small", "zip two names", "zip altered"):  # seen once it is read
        archive = CASES[name](tmp_path / "set.archive")
        with pytest.raises(DeepSimplexError, match=r"a whole archive in .* cannot be read"):
            extract(archive, tmp_path / "unpacked", SMALL)
        assert [p.name for p in tmp_path.iterdir()] == ["set.archive"]
        return
    refused(CASES[name](tmp_path / "set.archive"), tmp_path, words)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: zipped(p, ("top/", b"", 0o040755), *GOOD),
        lambda p: tarred(p, ("top", b"", tarfile.DIRTYPE), *GOOD),
        lambda p: tarred(p, *GOOD, kind="w"),
        lambda p: tarred(p, *GOOD, kind="w", form=tarfile.PAX_FORMAT),
    ],
    ids=["zip", "tar.gz", "tar", "pax tar"],
)
def test_good_archives(make, tmp_path):
    archive = make(tmp_path / "set.archive")
    assert members(archive) == {"top/a.bin": 200, "top/deep/b.txt": 50, "top/c": 0}
    assert dict(read_members(archive, ["top/deep/b.txt"])) == {"top/deep/b.txt": b"hello" * 10}
    target = extract(archive, tmp_path / "new" / "unpacked")
    assert (target / "top" / "a.bin").read_bytes() == bytes(range(200))
    assert sorted(p.name for p in target.parent.iterdir()) == ["unpacked"]
    assert not (target / "top" / "a.bin").stat().st_mode & 0o111
    with pytest.raises(DeepSimplexError, match=r"a new folder .* got one that exists"):
        extract(archive, target)
    with pytest.raises(DeepSimplexError, match=r"2 files in .*; got 1 missing, top/x the first"):
        list(read_members(archive, ["top/c", "top/x"]))


@pytest.mark.parametrize("make", [zipped, tarred], ids=["zip", "tar.gz"])
def test_random_damage_to_archives_never_escapes(make, tmp_path):
    random = np.random.default_rng(1)
    archive = make(tmp_path / "set.archive", *GOOD, ("noise", NOISE))
    whole = archive.read_bytes()
    if make is tarred:
        whole = gzip.decompress(whole)
    for turn in range(50):
        broken = bytearray(whole)
        for at in random.integers(len(whole), size=random.integers(1, 6)):
            broken[at] = random.integers(256)
        archive.write_bytes(broken)
        with suppress(DeepSimplexError):
            shutil.rmtree(extract(archive, tmp_path / f"unpacked{turn}"))
    assert [p.name for p in tmp_path.iterdir()] == ["set.archive"]


def test_an_archive_that_is_not_there(tmp_path):
    with pytest.raises(DeepSimplexError, match=r"a whole archive in .*FileNotFoundError"):
        members(tmp_path / "none.zip")
