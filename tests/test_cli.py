"""The command line as a person meets it: output, errors, exit codes."""

import csv
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from PIL import Image

from deepsimplex import __version__, commands, own
from deepsimplex.cli import run
from deepsimplex.recipes import Recipe


def start(*words):
    return subprocess.run(
        [sys.executable, "-m", "deepsimplex.cli", *words], capture_output=True, text=True
    )


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("train", "--help")])
def test_answers_in_half_a_second_without_torch(words):
    best = 9.0
    for _ in range(5):
        began = time.perf_counter()
        result = start(*words)
        best = min(best, time.perf_counter() - began)
    assert result.returncode == 0
    assert best <= 0.5
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from deepsimplex.cli import run; run(sys.argv[1:]); "
            "print('torch' in sys.modules, 'numpy' in sys.modules)",
            *words,
        ],
        capture_output=True,
        text=True,
    )
    assert loaded.stdout.splitlines()[-1] == "False False"


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"deepsimplex {__version__}\n"


@pytest.mark.parametrize(
    ("group", "listed"), [("paper", "table1"), ("data", "get"), ("bench", "loss")]
)
def test_a_group_alone_lists_its_commands(group, listed, capsys):
    assert run([group]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert any(line.split()[:1] == [listed] for line in out.splitlines())


def test_help_documents_the_exit_codes(capsys):
    run(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "0 done",
        "1 bad value, data",
        "2 no such command",
        "130 interrupted",
        "143 terminated",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["trian"], 2, "'train'"),
        (["train", "digits", "--ephocs", "3", "--out", "x"], 2, "--epochs"),
        (["train", "digits", "--out", "x", "--epochs", "many"], 2, "'--epochs'"),
        (["train", "digits", "--out", "x", "--epochs", "-1"], 2, "'--epochs'"),
        (["train", "digits"], 2, "--out"),
        (["predict", "m", "i", "--json", "--csv"], 2, "exclude each other"),
        (["train", "digits", "--out", "OUT", "--method", "dcs"], 1, "did you mean 'dsc'?"),
        (["train", "digits", "--out", "OUT", "--backbone", "reznet18"], 1, "resnet18"),
        (["train", "digits", "--out", "OUT", "--keep", "1.5"], 1, "keep"),
        (["train", "digits", "--out", "OUT", "--guarantee", "sure"], 1, "guarantee"),
        (["train", "digits", "--out", "OUT", "--known", "1,eleven"], 1, "eleven"),
        (["train", "digits", "--out", "OUT", "--score", "depth"], 1, "distance, cosine, dot"),
        (["train", "digits", "--out", "OUT", "--augment", "blur"], 1, "crop+flip"),
        (["train", "digits", "--out", "OUT", "--device", "tpu9"], 1, "device 'auto'"),
        (["train", "/nowhere", "--out", "OUT"], 1, "nothing of that name"),
        (["train", "digits", "--out", "OUT", "--background", "/nowhere"], 1, "background"),
        (["evaluate", "/nowhere", "digits"], 1, "a model file at /nowhere"),
        (["predict", "/nowhere", "digits"], 1, "a model file at /nowhere"),
    ],
)
def test_mistakes_get_one_line_and_a_suggestion(words, code, said, capsys, tmp_path):
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    assert run(words) == code
    error = capsys.readouterr().err
    assert error.startswith("deepsimplex: ")
    assert error.count("\n") == 1
    assert said in error
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder to train on: three classes and some unknowns, as PNG files."""
    return picture_folder(tmp_path_factory.mktemp("images"), 0)


def test_a_damaged_model_of_a_finished_run_is_made_again(tmp_path, capsys):
    out = tmp_path / "my run"
    words = ["train", "digits", "--out", str(out), "--epochs", "1", "--device", "cpu"]
    assert run(words) == 0
    assert f"predict '{out}' IMAGES\n" in capsys.readouterr().out
    model = out / "model.safetensors"
    whole = model.read_bytes()
    for left in (whole[:500], None):
        model.write_bytes(left) if left else model.unlink()
        assert run(words) == 1
        assert "results.json; the same command makes the model again" in capsys.readouterr().err
    (out / "results.json").unlink()
    assert run(words) == 0
    assert model.read_bytes() == whole


def test_the_bar_knows_the_epochs_before_the_first_ends(tmp_path, monkeypatch):
    seen, bar = [], commands.training
    monkeypatch.setattr(commands, "training", lambda t, **how: seen.append(how) or bar(t, **how))
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--epochs", "2"]
    assert run([*words, "--device", "cpu"]) == 0
    assert seen == [{"epochs": 2}]


def test_a_training_that_learned_nothing_is_told(tmp_path, capsys):
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--epochs", "1", "--device", "cpu"]
    assert run([*words, "--learning-rate", "1e-9"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no better than naming one class always" in out
    assert run([*words[:3], str(tmp_path / "other"), *words[4:]]) == 0
    assert "no better than" not in capsys.readouterr().out


def test_what_a_folder_lacks_and_a_net_needs_is_told(folder, tmp_path, capsys):
    import shutil

    shutil.copytree(folder, tmp_path / "images")
    (tmp_path / "images" / "dog").mkdir()
    words = ["--epochs", "1", "--device", "cpu"]
    assert run(["train", str(tmp_path / "images"), "--out", str(tmp_path / "a"), *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no images in dog, taken for no class" in out
    more = ["--backbone", "resnet18", "--out", str(tmp_path / "b")]
    assert run(["train", str(folder), *more, *words]) == 1
    assert "--size says how large a folder's are" in capsys.readouterr().err
    assert run(["estimate", str(folder), "--leave-out", "3", "--out", str(tmp_path / "c")]) == 1
    assert "got 3; add some, or lower --leave-out" in capsys.readouterr().err


@pytest.fixture(scope="module")
def test_folder(tmp_path_factory):
    """Other images of the same classes."""
    return picture_folder(tmp_path_factory.mktemp("test"), 9)


def picture_folder(root, seed):
    images, labels = toys.pictures(150, size=12, channels=3, seed=seed)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = root / ("ant", "bee", "cow")[label] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    (root / "unknown").mkdir()
    for i, image in enumerate(toys.unknown_pictures(30, size=12, channels=3, seed=seed + 1)):
        Image.fromarray(image).save(root / "unknown" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "animals"
    result = start("train", str(folder), "--out", str(out), "--epochs", "20", "--keep", "0.9")
    assert result.returncode == 0, result.stderr
    assert "3 known classes (ant, bee, cow)" in result.stdout
    assert "120 to train, 30 held out" in result.stdout
    assert "Threshold:" in result.stdout
    return out


@pytest.mark.parametrize(
    ("size", "epochs", "told"), [(28, 160, False), (29, 159, False), (29, 160, True)]
)
def test_a_long_training_on_a_cpu_is_told(size, epochs, told, capsys):
    images, plan = torch.zeros(2, 3, size, 8), Recipe(epochs=epochs)
    for source, way in (("photos", "--size 28"), ("photos.npz", "fewer --epochs")):
        own.tell_cost(source, images, plan, torch.device("cpu"))
        said = f"On a CPU this may take hours, and much less with {way} and another --out.\n"
        assert capsys.readouterr().out == (said if told else "")
    own.tell_cost("photos", images, plan, torch.device("cpu"), freeze=True)
    own.tell_cost("photos", images, plan, torch.device("cuda"))
    own.tell_cost("vectors.npz", torch.zeros(2, 100), plan, torch.device("cpu"))
    assert capsys.readouterr().out == ""


def test_evaluate_a_folder_with_unknowns(test_folder, trained, capsys):
    assert run(["evaluate", str(trained), str(test_folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["known"], record["unknown"], record["left_out"]) == (150, 30, 0)
    assert record["accuracy"] > 0.9
    assert record["auroc"] > 0.8
    assert run(["evaluate", str(trained / "model.safetensors"), str(test_folder)]) == 0
    text = capsys.readouterr().out
    assert "150 known and 30 unknown images" in text
    assert "AUROC" in text


def test_images_trained_on_are_left_out_of_the_evaluation(folder, trained, tmp_path, capsys):
    assert run(["evaluate", str(trained), str(folder)]) == 0
    text = capsys.readouterr().out
    assert "150 images were trained or calibrated on and are left out" in text
    assert "0 known and 30 unknown images" in text
    shutil.copytree(folder / "ant", tmp_path / "ant")
    assert run(["evaluate", str(trained), str(tmp_path)]) == 1
    assert "all trained or calibrated on" in capsys.readouterr().err


def test_unreadable_images_are_left_out_if_asked(folder, test_folder, trained, tmp_path, capsys):
    some = tmp_path / "some images" / "ant"
    shutil.copytree(test_folder / "ant", some)
    names = sorted(path.name for path in some.iterdir())
    (some / names[1]).write_text("no image")
    assert run(["predict", str(trained), str(some), "--csv"]) == 1
    said = capsys.readouterr()
    assert names[1] in said.err
    assert said.err.endswith("or leave them out with --on-bad skip\n")
    assert run(["predict", str(trained), str(some), "--csv", "--on-bad", "skip"]) == 0
    said = capsys.readouterr()
    shown = [Path(row["input"]).name for row in csv.DictReader(io.StringIO(said.out))]
    assert sorted(shown) == [name for name in names if name != names[1]]
    assert said.err.startswith("Left out, unreadable: ")
    assert names[1] in said.err
    assert run(["predict", str(trained), str(some / names[1]), "--on-bad", "skip"]) == 0
    assert run(["predict", str(trained), str(some), "--on-bad", "drop"]) == 1
    assert "on_bad 'fail' or 'skip'" in capsys.readouterr().err
    words = ["evaluate", str(trained), str(tmp_path / "some images"), "--on-bad", "skip"]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "Left out, unreadable: " in out
    assert names[1] in out
    assert run([*words, "--json"]) == 0
    (left,) = json.loads(capsys.readouterr().out)["unreadable"]
    assert left.endswith(names[1])


def test_predict_table_json_csv(folder, trained, capsys):
    inputs = [str(folder / "ant" / "0.png"), str(folder / "unknown")]
    assert run(["predict", str(trained), *inputs]) == 0
    table = capsys.readouterr().out
    assert "nearest" in table
    assert "UNKNOWN: nearest" in table
    assert run(["predict", str(trained), *inputs, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 31
    assert lines[0]["input"] == inputs[0]
    for line in lines:
        rejected = line["distance"] > line["threshold"]
        assert line["label"] == ("unknown" if rejected else line["nearest"])
        assert f"at {line['distance']:.2f}, limit {line['threshold']:.2f}" in line["reason"]
    assert run(["predict", str(trained), *inputs, "--csv"]) == 0
    text = capsys.readouterr().out
    assert "\r" not in text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["label"] for row in rows] == [line["label"] for line in lines]
    assert [row["input"] for row in rows] == [line["input"] for line in lines]


def test_predict_refuses_what_does_not_fit(trained, tmp_path, capsys):
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    floats = tmp_path / "floats.npz"
    np.savez(floats, X=np.zeros((2, 12, 12, 3)))
    (tmp_path / "empty").mkdir()
    for given, words in (
        (bad, "bad.png"),
        ("digits", "uint8 pixels of shape (3, 12, 12), as trained; got uint8 of shape (1, 8, 8)"),
        (floats, "got float64 of shape (3, 12, 12)"),
        (tmp_path / "empty", "images in"),
        (tmp_path / "absent.png", "got nothing"),
    ):
        assert run(["predict", str(trained), str(given)]) == 1
        assert words in capsys.readouterr().err


def test_image_files_need_a_square_model_of_pixels(tmp_path, capsys):
    images, labels = toys.pictures(40)
    picture = tmp_path / "p.png"
    Image.fromarray(images[0, :, :, 0]).save(picture)
    for name, X in (("wide", images[:, :, :6]), ("float", images / 255.0)):
        np.savez(tmp_path / f"{name}.npz", X=X, y=labels)
        out = str(tmp_path / name)
        assert run(["train", str(tmp_path / f"{name}.npz"), "--out", out, "--epochs", "1"]) == 0
        assert run(["predict", out, str(picture)]) == 1
        assert "as trained; got image files; give a .npz file" in capsys.readouterr().err
        words = ["--out", str(tmp_path / "x"), "--background", str(tmp_path)]
        assert run(["train", str(tmp_path / f"{name}.npz"), *words]) == 1
        assert "square images of bytes to stand against" in capsys.readouterr().err


def test_background_reaches_the_training(folder, tmp_path, capsys):
    words = [
        "--epochs",
        "8",
        "--background",
        str(folder / "unknown"),
        "--set",
        "background_weight=4",
    ]
    reached = {}
    for name, more in (("plain", words[:2]), ("guarded", words)):
        out = str(tmp_path / name)
        method = ["--method", "dsc-blend"] if name == "plain" else []  # the default with one
        assert run(["train", str(folder), "--out", out, "--no-reject", *method, *more]) == 0
        assert ("30 background" in capsys.readouterr().out) == (name == "guarded")
        assert run(["predict", out, str(folder / "unknown"), "--json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        reached[name] = np.mean([json.loads(line)["dot"] for line in lines])
    assert reached["guarded"] < reached["plain"] - 0.02
    run(["train", str(folder), "--out", str(tmp_path / "s"), "--method", "softmax", *words[2:4]])
    assert "no background for method 'softmax'" in capsys.readouterr().err
    assert run(["train", str(folder), "--out", str(tmp_path / "t"), "--set", "margins=1"]) == 1
    assert "settings of 'dsc'" in capsys.readouterr().err


def test_known_images_are_no_background(folder, tmp_path, capsys):
    """Else the threshold would be set by images that were trained on."""
    first = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    words = ["train", str(folder), "--epochs", "1", "--out", str(tmp_path / "x")]
    assert run([*words, "--background", str(first)]) == 1
    assert "expected background that is none of the known images" in capsys.readouterr().err
    mixed = tmp_path / "mixed"
    shutil.copytree(first, mixed)
    Image.fromarray(np.full((8, 8, 3), 77, np.uint8)).save(mixed / "new.png")
    assert run([*words, "--background", str(mixed)]) == 0
    out = capsys.readouterr().out
    assert f"Left out of the background: {len(list(first.iterdir()))} of the known images." in out
    assert ", 1 background" in out


def test_background_trained_on_is_left_out(folder, test_folder, tmp_path, capsys):
    words = ["--epochs", "1", "--background", str(test_folder / "unknown")]
    assert run(["train", str(folder), "--out", str(tmp_path / "run"), *words]) == 0
    capsys.readouterr()
    assert run(["evaluate", str(tmp_path / "run"), str(test_folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["known"], record["unknown"], record["left_out"]) == (150, 0, 30)


def test_other_data_is_another_run(tmp_path, capsys):
    for seed in (0, 1):
        X, y = toys.vectors(60, seed=seed)
        np.savez(tmp_path / "v.npz", X=X, y=y)
        code = run(
            ["train", str(tmp_path / "v.npz"), "--out", str(tmp_path / "run"), "--epochs", "1"]
        )
        assert code == seed
    assert "a different set of images or labels" in capsys.readouterr().err


def test_names_with_brackets_are_shown(tmp_path, capsys):
    X, y = toys.vectors(60)
    np.savez(tmp_path / "v.npz", X=X, y=np.array(["[red]", ":smile:", "[/]"])[y])
    out = str(tmp_path / "run")
    assert run(["train", str(tmp_path / "v.npz"), "--out", out, "--epochs", "1"]) == 0
    assert "(:smile:, [/], [red])" in capsys.readouterr().out
    assert run(["predict", out, str(tmp_path / "v.npz")]) == 0
    assert "nearest '[red]'" in capsys.readouterr().out


def test_bad_values_leave_no_folder(tmp_path, capsys):
    out = tmp_path / "run"
    for words in (
        ["--keep", "nan"],
        ["--keep", "1"],
        ["--radius", "nan"],
        ["--by", "class"],
        ["--backbone", "foo"],
        ["--score", "foo"],
        ["--augment", "foo"],
        ["--device", "mps"],
        ["--device", "meta"],
        ["--method", "entropic"],  # without the background it needs
        ["--method", "softmax", "--background", "photographs"],  # with one it has no use for
    ):
        assert run(["train", "digits", "--out", str(out), *words]) == 1
        assert capsys.readouterr().err.count("\n") == 1
        assert not out.exists()


def test_closed_output_and_no_arguments():
    closed = subprocess.run(
        f"{sys.executable} -m deepsimplex.cli doctor --device cpu >&-",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert (closed.returncode, closed.stderr) == (0, "")
    assert start().stdout.startswith("Usage: deepsimplex")


def test_a_bug_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("deepsimplex.demo.doctor", lambda device: 1 / 0)
    assert run(["doctor"]) == 70
    assert "a bug: ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setenv("DEEPSIMPLEX_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(["doctor"])


def test_vectors_from_npz(tmp_path, capsys):
    X, y = toys.vectors(120)
    np.savez(tmp_path / "v.npz", X=X, y=np.array(["a", "b", "c"])[y])
    out = str(tmp_path / "run")
    assert (
        run(["train", str(tmp_path / "v.npz"), "--out", out, "--known", "a,b", "--epochs", "20"])
        == 0
    )
    capsys.readouterr()
    fresh, labels = toys.vectors(120, seed=4)
    np.savez(tmp_path / "t.npz", X=fresh, y=np.array(["a", "b", "c"])[labels])
    assert run(["evaluate", out, str(tmp_path / "t.npz"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["known"], record["unknown"]) == (80, 40)
    np.savez(tmp_path / "new.npz", X=X[:3])
    assert run(["predict", out, str(tmp_path / "new.npz"), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    Image.new("L", (8, 8)).save(tmp_path / "p.png")
    assert run(["predict", out, str(tmp_path / "p.png")]) == 1
    assert "vectors of shape (6,), as trained; got image files" in capsys.readouterr().err


def test_no_reject_keeps_everything(tmp_path, capsys):
    X, y = toys.vectors(60)
    np.savez(tmp_path / "v.npz", X=X, y=y)
    out = str(tmp_path / "run")
    assert (
        run(["train", str(tmp_path / "v.npz"), "--out", out, "--no-reject", "--epochs", "2"]) == 0
    )
    assert "60 to train, 0 held out" in capsys.readouterr().out
    assert run(["predict", out, str(tmp_path / "v.npz"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["threshold"] is None and line["label"] != "unknown" for line in lines)


def test_only_knowns_or_only_unknowns(tmp_path, capsys):
    X, y = toys.vectors(90)
    np.savez(tmp_path / "v.npz", X=X, y=y)
    out = str(tmp_path / "run")
    assert run(["train", str(tmp_path / "v.npz"), "--out", out, "--epochs", "5"]) == 0
    capsys.readouterr()
    np.savez(tmp_path / "k.npz", X=toys.vectors(90, seed=4)[0], y=y)
    assert run(["evaluate", out, str(tmp_path / "k.npz"), "--json"]) == 0
    assert {"accuracy", "known_kept"} <= set(json.loads(capsys.readouterr().out))
    np.savez(tmp_path / "u.npz", X=X + 9, y=np.full(90, -1))
    assert run(["evaluate", out, str(tmp_path / "u.npz"), "--json"]) == 0
    assert "unknown_rejected" in json.loads(capsys.readouterr().out)
    assert run(["evaluate", out, str(tmp_path / "u.npz")]) == 0
    assert "rejected" in capsys.readouterr().out


def test_the_demo_in_small(tmp_path, capsys):
    out = tmp_path / "demo"
    assert run(["demo", "--out", str(out), "--epochs", "3", "--trials", "2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "Data:",
        "Device:",
        "accuracy",
        "AUROC",
        "OSCR",
        "FPR@95",
        "dsc",
        "softmax",
    ):
        assert words in text
    assert "kept" in text
    assert text.count("→") == 4
    record = json.loads((out / "results.json").read_text())
    assert len(record["trials"]["dsc"]) == len(record["trials"]["softmax"]) == 2
    assert (out / "dsc-0" / "model.safetensors").exists()
    with np.load(out / "scores.npz") as scores:
        assert len(scores.files) == 2 * (2 + 3) + 2 * (2 + 4)
        assert (scores["dsc-1.label"] == -1).sum() == record["trials"]["dsc"][1]["counts"][
            "unknown test"
        ]


@pytest.mark.slow
def test_the_demo_keeps_its_promises(tmp_path):
    """99.0 and 97.0 at least, and above softmax. Its time is in results/demo-digits.json."""
    assert run(["demo", "--out", str(tmp_path)]) == 0
    tables = json.loads((tmp_path / "results.json").read_text())["methods"]
    assert tables["dsc"]["accuracy"]["mean"] >= 0.99
    assert tables["dsc"]["auroc"]["mean"] >= 0.97
    assert tables["dsc"]["auroc"]["mean"] > tables["softmax"]["auroc"]["mean"]


@pytest.mark.parametrize("found", [None, "here"])
def test_doctor(found, monkeypatch, capsys):
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: found if name == "pytorch_ood" else original(name, *rest),
    )
    assert run(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "all is well" in text
    said = "installed" if found else "not installed (optional)"
    assert f"  pytorch-ood  {said}\n" in text
