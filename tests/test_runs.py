"""Run folders: locks, atomic files, kill −9, SIGTERM."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import toys
from safetensors.torch import load_file

from deepsimplex import runs
from deepsimplex.engine import Checkpoint, Place
from deepsimplex.errors import RunError, Stopped
from deepsimplex.recipes import Recipe
from deepsimplex.runs import (
    Run,
    code_commit,
    environment,
    fingerprint,
    write_atomically,
)


def test_atomic_write_replaces_or_leaves(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_two_processes_are_kept_apart(tmp_path):
    with Run(tmp_path / "run", Recipe(), {}) as run:
        assert run.results is None
        script = (
            "import sys; from deepsimplex.runs import Run; from deepsimplex.recipes import Recipe\n"
            "try:\n    Run(sys.argv[1], Recipe(), {}).__enter__()\n"
            "except Exception as error:\n    print(error)"
        )
        other = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True
        )
        assert "another process at work" in other.stdout
    with Run(tmp_path / "run", Recipe(), {}):
        pass  # free again


def test_another_recipe_is_refused_and_named(tmp_path):
    with Run(tmp_path, Recipe(), {"keep": 0.9}):
        pass
    with pytest.raises(
        RunError,
        match=r"different data\.keep \(0\.9 there, 0\.8 asked\), "
        r"recipe\.epochs \(100 there, 3 asked\), "
        r'recipe\.settings\.loss \("squared" there, "softmax" asked\);',
    ):
        Run(
            tmp_path,
            Recipe.from_json({**Recipe().to_json(), "epochs": 3, "settings": {"loss": "softmax"}}),
            {"keep": 0.8},
        ).__enter__()
    with Run(tmp_path, Recipe(), {"keep": 0.9}):
        pass
    told = json.loads((tmp_path / "recipe.json").read_text())
    del told["recipe"]["shift"]  # of a version that had one view only
    (tmp_path / "recipe.json").write_text(json.dumps(told))
    with Run(tmp_path, Recipe(), {"keep": 0.9}):
        pass
    with pytest.raises(RunError, match=r"a different recipe\.shift"):
        Run(tmp_path, Recipe(shift=2), {"keep": 0.9}).__enter__()
    other = Recipe(shift=2, epochs=7, seed=3, momentum=0.5, mirror=True)
    with pytest.raises(RunError) as told:
        Run(tmp_path, other, {"keep": 0.9}).__enter__()
    assert "a different recipe.epochs (100 there, 7 asked), recipe.mirror" in str(told.value)
    assert "recipe.momentum (0.9 there, 0.5 asked), 2 more; choose" in str(told.value)
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(RunError, match="a broken file"):
        Run(tmp_path, Recipe(), {"keep": 0.9}).__enter__()


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    tensors = {"method.w": torch.ones(2), "rng.cpu": torch.get_rng_state()}
    with Run(tmp_path, Recipe(), {}) as run:
        run.load()
        run.log({"epoch": 1})
        run.save(Checkpoint(Place(0, 1, 0), tensors))
        run.log({"epoch": 2})
    with Run(tmp_path, Recipe(), {}) as run:
        saved = run.load()
        assert saved.place == Place(0, 1, 0)
        assert torch.equal(saved.tensors["method.w"], torch.ones(2))
        run.log({"epoch": 2, "again": True})
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"epoch": 1}, {"epoch": 2, "again": True}]
    (tmp_path / "checkpoint.safetensors").write_bytes(b"rubbish")
    with Run(tmp_path, Recipe(), {}) as run, pytest.raises(RunError, match="a broken file"):
        run.load()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="choose another --out"):
        Run(tmp_path / "file" / "run", Recipe(), {}).__enter__()


def test_fingerprints_see_contents_shapes_and_types():
    array = np.arange(6, dtype=np.int32)
    prints = {
        fingerprint(array),
        fingerprint(array.reshape(2, 3)),
        fingerprint(array.astype(np.int64)),
        fingerprint(array + 1),
        fingerprint(array, None),
        fingerprint(),
    }
    assert len(prints) == 6
    assert fingerprint(torch.from_numpy(array)) == fingerprint(array)


def test_a_changed_tree_is_called_dirty(tmp_path, monkeypatch):
    package = tmp_path / "src" / "deepsimplex"
    package.mkdir(parents=True)
    (package / "runs.py").write_text("1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr("deepsimplex.runs.__file__", str(package / "runs.py"))
    clean = code_commit()
    assert len(clean) == 40
    (package / "runs.py").write_text("2\n")
    assert code_commit() == f"{clean}-dirty"


def test_each_session_that_differs_is_noted(tmp_path, monkeypatch):
    for threads in (2, 2, 3):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        with Run(tmp_path, Recipe(), {}):
            pass
    record = json.loads((tmp_path / "environment.json").read_text())
    assert record["threads"] == 2
    assert [session["threads"] for session in record["resumed"]] == [3]


def test_what_a_killed_process_left_is_swept(tmp_path):
    (tmp_path / ".checkpoint.safetensors.77.part").write_bytes(b"half")
    with Run(tmp_path, Recipe(), {}):
        pass
    assert not list(tmp_path.glob(".*.part"))


@pytest.fixture
def restored_sigint():
    """Python's own handler: a shell's background job starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_is_obeyed(tmp_path, number):
    before = signal.getsignal(number)
    run = Run(tmp_path, Recipe(), {}).__enter__()
    signal.raise_signal(number)
    run.finish({"fine": True})
    with pytest.raises(Stopped) as stopped:
        run.__exit__(None, None, None)
    assert stopped.value.signal == number
    assert run.results == {"fine": True}
    assert signal.getsignal(number) == before


def test_a_second_signal_acts_at_once(tmp_path, restored_sigint):
    run = Run(tmp_path, Recipe(), {}).__enter__()
    signal.raise_signal(signal.SIGINT)
    assert run.stopping() == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    run.__exit__(KeyboardInterrupt, None, None)


@pytest.mark.parametrize("first", [0, 1])
def test_a_signal_reaches_every_open_run(tmp_path, first):
    """Trainings side by side: whichever ends first, the others still hear, and all is put back."""
    before = signal.getsignal(signal.SIGTERM)
    runs = [Run(tmp_path / name, Recipe(), {}) for name in "ab"]
    for run in runs:
        run.__enter__()
    signal.raise_signal(signal.SIGTERM)
    assert [run.stopping() for run in runs] == [signal.SIGTERM] * 2
    for run in (runs[first], runs[1 - first]):
        with pytest.raises(Stopped):
            run.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == before
    with Run(tmp_path / "c", Recipe(), {}) as later, Run(tmp_path / "d", Recipe(), {}) as last:
        assert (later.stopping(), last.stopping()) == (None, None)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_environment_says_what_a_number_depends_on():
    record = environment(torch.device("cpu"))
    assert record["torch"] == torch.__version__
    assert record["device"] == "cpu"
    assert {"commit", "numpy", "python", "threads", "deepsimplex"} <= set(record)
    json.dumps(record)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set.npz"
    images, labels = toys.pictures(160)
    np.savez(path, X=images, y=labels)
    return path


def command(archive, out, *more):
    words = ["train", str(archive), "--out", str(out), "--epochs", "25", "--batch-size", "16"]
    words += ["--augment", "crop", "--checkpoint-seconds", "0", "--device", "cpu", *more]
    return [sys.executable, "-m", "deepsimplex.cli", *words]


def digest(out):
    """SHA-256 over every tensor of the final model."""
    total = hashlib.sha256()
    for name, tensor in sorted(load_file(out / "model.safetensors").items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(archive, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(archive, out), check=True, capture_output=True)
    return out


def check_log(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 26))
    return [line["loss"] for line in lines]


def test_a_run_folder_is_complete(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert {
        "recipe.json",
        "environment.json",
        "log.jsonl",
        "checkpoint.safetensors",
        "model.safetensors",
        "results.json",
    } <= names
    assert not [name for name in names if name.endswith(".part")]


def test_kill_nine_at_ten_random_points_changes_no_bit(archive, uninterrupted, tmp_path):
    out, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoint.safetensors"
    moments = random.Random(20)
    kills = 0
    while kills < 10:
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = subprocess.Popen(
            command(archive, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

        def going(before=before, process=process):
            there = checkpoint.exists() and checkpoint.stat().st_mtime_ns > before
            return there or process.poll() is not None

        wait_for(going)
        time.sleep(moments.uniform(0.0, 0.08))
        finished = process.poll() is not None
        process.kill()
        error = process.communicate()[1].decode()
        assert not finished, f"the training was over after {kills} kills: {error}"
        kills += 1
    subprocess.run(command(archive, out), check=True, capture_output=True)
    assert digest(out) == digest(uninterrupted)
    assert check_log(out) == check_log(uninterrupted)


def test_sigterm_writes_a_checkpoint_and_exits_143(archive, uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(archive, out, "--checkpoint-seconds", "3600"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (out / "log.jsonl").exists() and (out / "log.jsonl").stat().st_size > 0)
    assert not (out / "checkpoint.safetensors").exists()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "the same command goes on" in error
    assert "Traceback" not in error
    assert (out / "checkpoint.safetensors").exists()
    subprocess.run(command(archive, out), check=True, capture_output=True)
    assert digest(out) == digest(uninterrupted)
    check_log(out)
    again = subprocess.run(command(archive, out), check=True, capture_output=True, text=True)
    assert "Already finished" in again.stdout


@pytest.mark.parametrize("name", ["results.json", "environment.json"])
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_file_of_a_run_is_told(name, content, tmp_path):
    """It can go: everything else is still there."""
    with Run(tmp_path, Recipe(), {}) as run:
        if name == "results.json":
            run.finish({"accuracy": 1.0})
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=f"JSON in .*{name}; got a broken file; delete it; "):
        Run(tmp_path, Recipe(), {}).__enter__()
    (tmp_path / name).unlink()
    with Run(tmp_path, Recipe(), {}) as run:
        assert run.results is None


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["demo"], "deepsimplex demo"),
        (
            ["paper", "table1", "--rows", "eq. 7,softmax", "--data-root", "/a/b", "--trials", "2"],
            "deepsimplex paper table1 --rows 'eq. 7,softmax' --data-root DATA --trials 2",
        ),
        (["compare", "digits", "--out=/x", "--results", "/y"], "deepsimplex compare digits"),
        (["compare", "digits", "--out"], "deepsimplex compare digits"),
    ],
)
def test_a_record_names_its_command_without_paths_of_the_machine(words, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/deepsimplex", *words])
    assert runs.command() == shown


def test_hardware_is_the_gpu_where_there_is_one(monkeypatch):
    about = {"cpu": "2 cores"}
    monkeypatch.setattr(runs, "environment", lambda device: about)
    assert runs.hardware(torch.device("cpu")) == "2 cores"
    about["gpu"] = "H200"
    assert runs.hardware(torch.device("cuda")) == "H200"
