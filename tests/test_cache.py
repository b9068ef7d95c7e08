"""Decode once: the same pixels, found again, whole or not there, whoever else is building."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from deepsimplex.data import cache as module
from deepsimplex.data.cache import open_cache, remembered
from deepsimplex.data.pictures import read_images
from deepsimplex.errors import DeepSimplexError


@pytest.fixture
def files(tmp_path):
    random = np.random.default_rng(0)
    root = tmp_path / "set"
    root.mkdir()
    paths = []
    for i in range(40):
        paths.append(root / f"{i:02d} é.png")
        Image.fromarray(random.integers(0, 256, (20, 16, 3), dtype=np.uint8)).save(paths[-1])
    return paths


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "decoded"


@pytest.fixture
def split(monkeypatch):
    """Processes at once, however small the set."""
    monkeypatch.setattr(module, "FIRST", 8)
    monkeypatch.setattr(module, "PAYS", -1.0)


def listed(folder):
    return sorted(path.suffix for path in folder.iterdir())


def test_the_same_pixels_once(files, folder, monkeypatch):
    seen = []
    images, kept = open_cache(
        files, 12, 3, folder, workers=1, progress=lambda done, total: seen.append((done, total))
    )
    assert isinstance(images, np.memmap)
    assert np.array_equal(images, read_images(files, 12, 3))
    assert kept.tolist() == list(range(40))
    assert seen[-1] == (40, 40)
    assert listed(folder) == [".json", ".lock", ".npy"]
    with pytest.raises(ValueError, match="read-only"):
        images[0] = 0
    monkeypatch.setattr(module, "_build", None)  # not called again
    again, _ = open_cache([str(f) for f in files], 12, 3, folder, workers=1)
    assert np.array_equal(again, images)
    monkeypatch.chdir(files[0].parent)  # nor for other ways to write the same paths
    open_cache([file.name for file in files], 12, 3, folder, workers=1)


def test_processes_give_the_same(files, folder, split):
    seen = []
    images, _ = open_cache(
        files, 12, 1, folder, workers=2, progress=lambda done, total: seen.append(done)
    )
    assert np.array_equal(images, read_images(files, 12, 1))
    assert seen == sorted(seen)
    assert seen[-1] == 40


def test_any_change_is_another_key(files, folder):
    names = [str(file) for file in files]
    keys = {module._key(names, "images", 12, 3), module._key(names, "images", 13, 3)}
    keys.add(module._key(names[1:], "images", 12, 3))
    keys.add(module._key(names[::-1], "images", 12, 3))
    os.utime(files[5], ns=(1, 1))
    keys.add(module._key(names, "images", 12, 3))
    files[6].write_bytes(files[6].read_bytes() + b"\0")
    keys.add(module._key(names, "images", 12, 3))
    files[7].unlink()
    keys.add(module._key(names, "images", 12, 3))
    assert len(keys) == 7


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_images(files, folder, workers, split, monkeypatch):
    for index in (0, 3, 17, 39):
        files[index].write_bytes(b"no image")
    files[20].unlink()
    bad = (0, 3, 17, 20, 39)
    with pytest.raises(DeepSimplexError, match="5 that are not") as caught:
        open_cache(files, 12, 3, folder, workers=workers)
    for index in bad:
        assert f"{files[index].name} (" in str(caught.value)
    monkeypatch.setattr(module, "_build", None)  # what was good need not be decoded again
    images, kept = open_cache(files, 12, 3, folder, workers=workers, on_bad="skip")
    assert kept.tolist() == [i for i in range(40) if i not in bad]
    assert np.array_equal(images, read_images([files[i] for i in kept], 12, 3))
    with pytest.raises(DeepSimplexError, match="5 that are not"):
        open_cache(files, 12, 3, folder, workers=workers)


def test_nothing_but_bad_images(files, folder):
    for file in files:
        file.write_bytes(b"")
    with pytest.raises(DeepSimplexError, match="40 that are not"):
        open_cache(files, 12, 3, folder, workers=1, on_bad="skip")
    assert listed(folder) == [".lock"]


@pytest.mark.parametrize("harm", ["cut", "empty", "other", "no record", "bad record", "shape"])
def test_damaged_caches_are_built_anew(files, folder, harm):
    open_cache(files, 12, 3, folder, workers=1)
    (target,) = folder.glob("*.npy")
    (record,) = folder.glob("*.json")
    if harm == "cut":
        os.truncate(target, target.stat().st_size - 1)
    elif harm == "empty":
        os.truncate(target, 0)
    elif harm == "other":
        target.write_bytes(b"something else")
    elif harm == "no record":
        record.unlink()
    elif harm == "bad record":
        record.write_text(json.dumps({"bad": 7}))
    else:
        np.save(target, np.zeros((3, 12, 12, 3), np.uint8))
    images, _ = open_cache(files, 12, 3, folder, workers=1)
    assert np.array_equal(images, read_images(files, 12, 3))


BUILD = """
import sys, pathlib
from deepsimplex.data import cache
cache.FIRST, cache.PAYS = 8, -1.0
files = sorted(pathlib.Path(sys.argv[1]).iterdir())
images, kept = cache.open_cache(files, 300, 3, pathlib.Path(sys.argv[2]), workers=2,
    progress=lambda done, total: print(done, flush=True))
print("sum", int(images.sum(dtype="int64")))
"""


def build(files, folder):
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(files[0].parent), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_while_building(files, folder):
    process = build(files, folder)
    assert process.stdout.readline() == "8\n"
    process.kill()
    process.communicate()
    assert not list(folder.glob("*.npy"))
    images, _ = open_cache(files, 300, 3, folder, workers=1)
    assert np.array_equal(images, read_images(files, 300, 3))
    assert listed(folder) == [".json", ".lock", ".npy"]  # what it left was swept up


def test_interrupted_while_building(files, folder):
    process = build(files, folder)
    assert process.stdout.readline() == "8\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert error.count("Traceback") <= 1  # ours, none of the workers'
    assert ".part" not in listed(folder)


def test_builders_at_the_same_time(files, folder):
    processes = [build(files, folder) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert all(error == "" for _, error in outputs)
    expected = read_images(files, 300, 3).sum(dtype=np.int64)
    assert {out.splitlines()[-1] for out, _ in outputs} == {f"sum {expected}"}
    assert sum("8" in out.split() for out, _ in outputs) == 1  # only one of them decoded
    assert listed(folder) == [".json", ".lock", ".npy"]


def test_a_decoder_that_dies_is_told(files, folder, split, monkeypatch):
    monkeypatch.setattr(module, "sys", FakeSys())
    with pytest.raises(DeepSimplexError, match=r"one that died between .*08 é.png and"):
        open_cache(files, 12, 3, folder, workers=2)
    assert listed(folder) == [".lock"]


class FakeSys:
    executable = "/bin/false"
    path = ()


def test_a_full_disk_is_told_before_the_work(files, folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeepSimplexError, match="No space left on device; make room"):
        open_cache(files, 12, 3, folder, workers=1)
    assert listed(folder) == [".lock"]


def test_a_cache_folder_that_cannot_be(files, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DeepSimplexError, match="choose another cache folder"):
        open_cache(files, 12, 3, tmp_path / "file", workers=1)


@pytest.mark.parametrize(
    "change", [{"files": []}, {"size": 0}, {"channels": 2}, {"on_bad": "perhaps"}]
)
def test_bad_settings(files, folder, change):
    given = {"files": files, "size": 8, "channels": 3, "folder": folder, "workers": 1} | change
    with pytest.raises(DeepSimplexError):
        open_cache(**given)


def test_answers_are_remembered(files, folder):
    asked = []

    def answer():
        asked.append(1)
        return [12, 3]

    for _ in range(3):
        assert remembered(files, folder, "shape", answer) == [12, 3]
    assert len(asked) == 1
    os.utime(files[0], ns=(1, 1))
    remembered(files, folder, "shape", answer)
    assert len(asked) == 2


@pytest.mark.slow
def test_a_hundred_thousand_open_within_a_second(tmp_path, folder, monkeypatch):
    names = []
    for c in range(100):
        (tmp_path / "set" / f"class{c}").mkdir(parents=True)
        for i in range(1000):
            names.append(f"{tmp_path}/set/class{c}/{i:05d}.png")
            os.close(os.open(names[-1], os.O_CREAT | os.O_WRONLY))
    pixels = np.zeros(16, np.uint8).reshape(4, 4, 1)
    monkeypatch.setattr(module, "read_picture", lambda path, size, channels: (pixels, ()))
    open_cache(names, 4, 1, folder, workers=1)
    best = 9.0
    for _ in range(3):
        began = time.perf_counter()
        images, kept = open_cache(names, 4, 1, folder, workers=1)
        best = min(best, time.perf_counter() - began)
    assert len(images) == len(kept) == 100_000
    assert best <= 1.0
