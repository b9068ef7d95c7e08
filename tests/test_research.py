"""compare, estimate, check and data get, end to end on small official files."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import test_archives as files
import torch
import toys
from PIL import Image
from safetensors.torch import load_file, save_file

from deepsimplex import own, recipes, research
from deepsimplex.backbones import build_backbone
from deepsimplex.cli import run
from deepsimplex.data.sources import to_tensor
from deepsimplex.methods import METHODS
from deepsimplex.model import Model
from deepsimplex.tables import rows


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """MNIST, Fashion-MNIST and CIFAR-10 in their official layouts, with stripes to learn."""
    root = tmp_path_factory.mktemp("official")
    for folder in ("MNIST/raw", "FashionMNIST/raw"):
        for seed, stem in enumerate(("train", "t10k")):
            images, labels = toys.pictures(200, classes=10, size=28, seed=seed)
            where = root / folder
            where.mkdir(parents=True, exist_ok=True)
            (where / f"{stem}-images-idx3-ubyte").write_bytes(files.idx(images[..., 0]))
            (where / f"{stem}-labels-idx1-ubyte").write_bytes(files.idx(labels.astype(np.uint8)))
    cifar = root / "cifar-10-batches-py"
    cifar.mkdir()
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        images, labels = toys.pictures(40, classes=10, size=32, channels=3, seed=seed)
        flat = images.transpose(0, 3, 1, 2).reshape(40, -1)
        (cifar / name).write_bytes(files.python_2_batch(flat, labels.tolist()))
    return root


def test_rows_that_need_a_background_ask_for_it(tmp_path, capsys):
    words = ["compare", "mnist", "--methods", "softmax,entropic,oe", "--data-root", str(tmp_path)]
    assert run(words) == 1
    assert "expected a background for entropic, oe; got none" in capsys.readouterr().err


def test_all_rows_on_digits(tmp_path, monkeypatch, capsys):
    few = {name: METHODS[name] for name in ("softmax", "entropic", "dsc")}
    monkeypatch.setattr(research, "METHODS", few)
    words = ["compare", "digits", "--methods", "all", "--trials", "1", "--epochs", "1"]
    assert run([*words, "--out", str(tmp_path / "runs"), "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "compare-digits-arpl.json").read_text())
    assert list(record["methods"]) == list(few)
    used = {name: runs[0]["background"] for name, runs in record["methods"].items()}
    assert used == {"softmax": False, "entropic": True, "dsc": False}
    assert "With background photographs, which they need: entropic." in record["notes"]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_compare_end_to_end(name, root, tmp_path, capsys):
    words = ["compare", name, "--methods", "softmax,dsc", "--trials", "1", "--epochs", "1"]
    words += ["--data-root", str(root), "--out", str(tmp_path / "runs")]
    words += ["--results", str(tmp_path / "results"), "--device", "cpu"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "First trial" in text
    assert "Track: without background" in text
    stem = tmp_path / "results" / f"compare-{name}-arpl"
    record = json.loads(stem.with_suffix(".json").read_text())
    assert set(record["methods"]) == {"softmax", "dsc"}
    for results in record["methods"].values():
        assert set(results[0]["auroc_by_score"]) >= {results[0]["score"]}
        assert results[0]["counts"]["unknown classes"] == 4
    with np.load(stem.with_suffix(".npz")) as scores:
        assert {"dsc-0.label", "dsc-0.distance", "softmax-0.max_logit"} <= set(scores.files)
    table = list(csv.DictReader(io.StringIO(stem.with_suffix(".csv").read_text())))
    assert float(table[1]["auroc"]) == record["methods"]["dsc"][0]["auroc"]
    assert "| softmax |" in stem.with_suffix(".md").read_text()
    before = record["methods"]["dsc"][0]["seconds"]
    assert run(words) == 0  # again: everything is found finished
    again = json.loads(stem.with_suffix(".json").read_text())
    assert again["methods"]["dsc"][0]["seconds"] == before


def test_another_comparison_is_written_beside_the_first(tmp_path, capsys):
    words = ["compare", "digits", "--out", str(tmp_path / "runs"), "--results", str(tmp_path)]
    first, other = (["--epochs", "1", "--trials", "1", "--methods", m] for m in ("softmax", "dsc"))
    stem = tmp_path / "compare-digits-arpl"
    assert run([*words, *first]) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("compare-*")}
    assert len(before) == 4
    capsys.readouterr()
    assert run([*words, *other]) == 0
    text = capsys.readouterr().out
    assert f"{stem}.json holds another comparison and stays as it is." in text
    assert f"Written: {stem}-2.json" in text
    assert {path: path.read_bytes() for path in before} == before
    for suffix in ("npz", "md", "csv"):
        assert b"dsc" in Path(f"{stem}-2.{suffix}").read_bytes()
    assert run([*words, *other]) == 0  # again: its own record is replaced
    assert run([*words, *first]) == 0
    assert len(list(tmp_path.glob("compare-*"))) == 8
    Path(f"{stem}.json").write_text("[]")  # not one of ours: left alone
    assert run([*words, *other[:3], "2", *other[4:]]) == 0  # more trials
    assert Path(f"{stem}.json").read_text() == "[]"
    record = json.loads(Path(f"{stem}-3.json").read_text())
    assert len(record["methods"]["dsc"]) == 2


def test_other_views_are_another_comparison(tmp_path):
    about = {"trial": "digits/arpl/0", "seed": 0, "epochs": 1, "score": "dot"}

    def record(**views):
        return {"methods": {"dsc": [about | views]}}

    stem, beside = tmp_path / "compare", tmp_path / "compare-2"
    (tmp_path / "compare.json").write_text(json.dumps(record()))  # of before there were views
    assert research._place(record(mirror=False, shift=0), stem) == stem
    assert research._place(record(mirror=False, shift=2), stem) == beside
    assert research._place(record(mirror=True, shift=0), stem) == beside


def test_compare_on_digits_with_a_background_folder(tmp_path, capsys):
    for i, image in enumerate(toys.unknown_pictures(6)):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{i}.png")
    words = [
        "compare",
        "digits",
        "--trial",
        "1",
        "--trial",
        "3",
        "--epochs",
        "1",
        "--splits",
        "neal",
        "--methods",
        "dsc,softmax,entropic",
    ]
    words += ["--background", str(tmp_path), "--out", str(tmp_path / "o")]
    assert run([*words, "--results", str(tmp_path / "r")]) == 0
    text = capsys.readouterr().out
    assert "6 background" in text
    assert "Not using the background: softmax." in text
    record = json.loads(next((tmp_path / "r").glob("*.json")).read_text())
    assert [r["trial"] for r in record["methods"]["dsc"]] == ["digits/neal/1", "digits/neal/3"]
    assert record["methods"]["dsc"][0]["background"]
    assert record["methods"]["entropic"][0]["counts"]["background"] == 6  # not photographs
    assert not record["methods"]["softmax"][0]["background"]


def test_compare_on_own_data(tmp_path, capsys):
    images, labels = toys.pictures(80, classes=5)
    np.savez(tmp_path / "own.npz", X=images, y=labels)
    words = ["compare", str(tmp_path / "own.npz"), "--trials", "2", "--epochs", "1"]
    more = ["--out", str(tmp_path / "o"), "--results", str(tmp_path / "r")]
    assert run([*words, *more]) == 1
    assert "own data with --splits random" in capsys.readouterr().err
    assert run([*words, *more, "--splits", "random", "--seed", "4"]) == 0
    record = json.loads((tmp_path / "r" / "compare-own-random.json").read_text())
    assert len(record["methods"]["softmax"]) == 2
    last = record["methods"]["softmax"][1]
    # A trial by its number is that trial.
    alone = [*words[:2], "--epochs", "1", "--splits", "random", "--seed", "4", "--trial", "1"]
    assert run([*alone, "--out", str(tmp_path / "p"), "--results", str(tmp_path / "q")]) == 0
    found = json.loads((tmp_path / "q" / "compare-own-random.json").read_text())
    (one,) = found["methods"]["softmax"]
    assert (one["trial"], one["auroc"]) == (last["trial"], last["auroc"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "mnist", "--data-root", "/nowhere"], "data get mnist"),
        (["compare", "imagenet"], "a benchmark among"),
        (["compare", "digits", "--methods", "softmax,dcs"], "did you mean 'dsc'"),
        (["compare", "digits", "--splits", "osrci"], "splits among"),
        (["compare", "digits", "--on-bad", "drop"], "on_bad 'fail' or 'skip'"),
        (["data", "get", "mnits"], "mnist"),
        (["check", "/nowhere"], "/nowhere"),
        (["estimate", "/nowhere", "--out", "x"], "nothing of that name"),
    ],
)
def test_mistakes(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(words) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_differences_are_paired():
    def result(value):
        names = ("accuracy", "auroc", "oscr", "fpr95", "macro_f1", "known_kept", "unknown_rejected")
        return dict.fromkeys(names, value) | {
            "score": "s",
            "auroc_by_score": {"s": value, "t": value / 2},
            "seconds": 3.0,
        }

    record = {"methods": {"a": [result(0.5), result(0.7)], "b": [result(0.6), result(0.9)]}}
    heading, body = rows(record)
    first, _, second, other = body
    place = heading.index("Δ AUROC")
    assert first[place] == ""
    assert second[place] == "+15.0 ± 7.1"
    assert second[heading.index("AUROC")] == "75.0 ± 21.2"
    assert (other[0].strip(), other[2]) == ("by t", "37.5 ± 10.6")


def test_estimate_leaves_each_class_out(tmp_path, capsys):
    images, labels = toys.pictures(160, classes=4)
    np.savez(tmp_path / "own.npz", X=images, y=np.array(["a", "b", "c", "d"])[labels])
    words = ["estimate", str(tmp_path / "own.npz"), "--out", str(tmp_path / "e"), "--epochs", "12"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "Expect about: AUROC" in text
    folds = json.loads((tmp_path / "e" / "estimate.json").read_text())["folds"]
    assert len(folds) == 4
    for fold in folds:
        assert fold["counts"]["known classes"] == 3
        assert fold["counts"]["unknown test"] == 40
        assert fold["accuracy"] > 0.9
    assert {fold["method"] for fold in folds} == {"dsc"}
    assert run([*words, "--leave-out", "3"]) == 1
    assert "5 or more classes" in capsys.readouterr().err


def test_estimate_with_a_background_trains_by_the_default_for_one(tmp_path, capsys):
    images, labels = toys.pictures(160, classes=4)
    np.savez(tmp_path / "own.npz", X=images, y=np.array(["a", "b", "c", "d"])[labels])
    words = ["estimate", str(tmp_path / "own.npz"), "--epochs", "6", "--leave-out", "2"]
    assert run([*words, "--background", "photographs", "--out", str(tmp_path / "e")]) == 0
    folds = json.loads((tmp_path / "e" / "estimate.json").read_text())["folds"]
    assert {(fold["method"], fold["background"]) for fold in folds} == {("dsc-blend", True)}
    np.savez(tmp_path / "vectors.npz", X=np.random.default_rng(0).normal(size=(160, 5)), y=labels)
    words[1] = str(tmp_path / "vectors.npz")
    assert run([*words, "--background", "photographs", "--out", str(tmp_path / "v")]) == 1
    assert "expected square images of bytes" in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_estimate_refuses_before_it_trains(tmp_path, capsys):
    images, labels = toys.pictures(160, classes=4)
    np.savez(tmp_path / "own.npz", X=images, y=labels)
    words = ["estimate", str(tmp_path / "own.npz"), "--method", "softmax", "--epochs", "2"]
    words += ["--out", str(tmp_path / "e")]
    assert run([*words, "--background", "photographs"]) == 1
    assert "no background for method 'softmax'" in capsys.readouterr().err
    assert run([*words, "--score", "distance"]) == 1
    assert "expected a score among max_logit" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()
    assert run([*words, "--score", "joined"]) == 0
    folds = json.loads((tmp_path / "e" / "estimate.json").read_text())["folds"]
    assert {fold["score"] for fold in folds} == {"joined"}


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--out", "t"],
        ["estimate", "--out", "e"],
        ["compare", "--splits", "random", "--trials", "1", "--out", "o", "--results", "r"],
    ],
    ids=lambda words: words[0],
)
def test_what_larger_images_cost_on_a_cpu_is_told(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "WITH_BACKGROUND", 1)
    data = folder_of(*toys.pictures(40, classes=4, size=29), tmp_path / "data")
    assert run([words[0], str(data), *words[1:], "--epochs", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("On a CPU this may take hours, and much less with --size 28") == 1


def test_trainings_at_once_are_those_that_are_to_be_done(tmp_path):
    words = ["compare", "digits", "--trials", "1", "--epochs", "1", "--at-once", "5"]
    words += ["--device", "cpu", "--out", str(tmp_path / "o"), "--results", str(tmp_path)]
    for methods in ("softmax,cac", "softmax,cac,gcpl"):
        assert run([*words, "--methods", methods]) == 0
    record = json.loads((tmp_path / "compare-digits-arpl-2.json").read_text())
    (found,) = zip(*record["methods"].values(), strict=True)
    assert [one["trainings at once"] for one in found] == [2, 2, 1]


def folder_of(images, labels, place):
    for image, label in zip(images, labels, strict=True):
        folder = place / "abcd"[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / f"{len(list(folder.iterdir()))}.png")
    return place


def test_estimate_trains_as_train_does(tmp_path, capsys):
    data = folder_of(*toys.pictures(120, classes=4), tmp_path / "data")
    weights = tmp_path / "small.safetensors"
    for path, seed in ((weights, 1), (tmp_path / "other.safetensors", 2)):
        torch.manual_seed(seed)
        save_file(build_backbone("small", (1, 12, 12)).state_dict(), path)
    ways = ["--size", "12", "--backbone", "small", "--weights", str(weights), "--freeze"]
    ways += ["--known", "d,b,a", "--epochs", "2", "--keep", "0.8", "--set", "head=linear"]
    ways += ["--batch-size", "7", "--learning-rate", "0.01"]
    assert run(["train", str(data), *ways, "--out", str(tmp_path / "t")]) == 0
    assert run(["estimate", str(data), *ways, "--out", str(tmp_path / "e")]) == 0
    assert "3 trainings of dsc, 2 epochs each" in " ".join(capsys.readouterr().out.split())
    train, fold = (
        json.loads((tmp_path / where / "recipe.json").read_text()) for where in ("t", "e/without-0")
    )
    assert fold["recipe"] == train["recipe"]
    assert train["recipe"]["settings"]["head"] == "linear"
    assert (train["recipe"]["batch_size"], train["recipe"]["learning_rate"]) == (7, 0.01)
    for name in ("keep", "weights", "freeze"):
        assert fold["data"][name] == train["data"][name]
    model = Model.load(tmp_path / "e/without-0/model.safetensors", "cpu")
    assert model.shape == (1, 12, 12)
    frozen, given = model.method.encoder.backbone.state_dict(), load_file(weights)
    assert all(torch.equal(frozen[name], tensor) for name, tensor in given.items())
    ways[5] = str(tmp_path / "other.safetensors")
    assert run(["estimate", str(data), *ways, "--out", str(tmp_path / "e")]) == 1
    assert "a different file of weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["estimate"], ["compare", "--splits", "random", "--trials", "1", "--size", "9"]],
    ids=lambda w: w[0],
)
def test_too_few_images_for_a_threshold_are_told(words, tmp_path, capsys):
    data = folder_of(*toys.pictures(60, classes=4), tmp_path / "data")
    words = [words[0], str(data), *words[1:], "--epochs", "1", "--out", str(tmp_path / "runs")]
    words += ["--results", str(tmp_path / "results")] if "compare" in words else []
    assert run(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a threshold that keeps 95 % needs 19 images to calibrate" in text


def test_a_benchmark_has_its_own_size(tmp_path, capsys):
    assert run(["compare", "digits", "--size", "16", "--out", str(tmp_path / "r")]) == 1
    assert "no --size for digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["estimate"], ["compare", "--splits", "random", "--trials", "1"]], ids=lambda w: w[0]
)
def test_bad_images_of_own_data_are_named_or_left_out(words, tmp_path, capsys):
    data = tmp_path / "data"
    folder_of(*toys.pictures(80, classes=4), data)
    (data / "a" / "bad.png").write_text("no image")
    words = [words[0], str(data), *words[1:], "--epochs", "1", "--out", str(tmp_path / "runs")]
    words += ["--results", str(tmp_path / "results")] if "compare" in words else []
    for extra, said in (([], "bad.png"), (["--on-bad", "drop"], "on_bad 'fail' or 'skip'")):
        assert run([*words, *extra]) == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "runs").exists()
    assert run([*words, "--on-bad", "skip"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Left out, unreadable: " in text
    assert "bad.png" in text


@pytest.mark.parametrize(
    ("size", "parts", "said"),
    [
        (7, False, "28×28 pixels, dsc, 134 epochs"),
        (8, False, "8×8 pixels, dsc, 134 epochs"),
        (32, False, "32×32 pixels, dsc-softmax, 600 epochs"),
        (65, False, "28×28 pixels, dsc, 134 epochs"),
        (9, True, "9×9 pixels, dsc, 134 epochs"),
    ],
)
def test_check_says_what_train_takes(size, parts, said, tmp_path, capsys):
    """200 images of known classes, and others that train does not take."""
    data, place = tmp_path / "data", tmp_path / "data/train" if parts else tmp_path / "data"
    folder_of(*toys.pictures(200, classes=4, size=size), place)
    folder_of(*toys.pictures(300, classes=1, size=size, seed=2), tmp_path / "other")
    (tmp_path / "other" / "a").rename(place / "unknown")
    if parts:
        folder_of(*toys.pictures(90, classes=4, size=40, seed=3), data / "test")
    assert run(["check", str(data)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == f"If nothing is said, train takes {said}."
    images = to_tensor(own.known_data(str(data), None, None, "fail")[1].images)
    plain = {"method": "auto", "settings": {}, "seed": 0, "freeze": False, "changes": {}}
    recipe = own.recipe_for(images, False, **plain)
    side = f"{images.shape[2]}×{images.shape[3]}"
    assert said == f"{side} pixels, {recipe.method}, {recipe.epochs} epochs"


def test_check_says_whether_to_train(tmp_path, capsys):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for i, image in enumerate(toys.pictures(12, size=12, seed=len(name) + ord(name[0]))[0]):
            Image.fromarray(image[..., 0]).save(tmp_path / name / f"{i}.png")
    assert run(["check", str(tmp_path)]) == 0
    assert "train" in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / "bee" / "bad.png").write_text("no image")
    assert run(["check", str(tmp_path)]) == 1
    assert "bad.png" in capsys.readouterr().out
    assert run(["check", str(tmp_path), "--json"]) == 1
    assert "bad.png" in json.dumps(json.loads(capsys.readouterr().out))
    assert run(["train", str(tmp_path), "--out", str(tmp_path / "r"), "--epochs", "1"]) == 1
    assert "bad.png" in capsys.readouterr().err
    skip = ["--out", str(tmp_path / "r"), "--epochs", "1", "--on-bad", "skip"]
    assert run(["train", str(tmp_path), *skip]) == 0
    assert "bad.png" in capsys.readouterr().out


def test_a_frozen_backbone_from_the_command_line(tmp_path, capsys):
    images, labels = toys.pictures(60, size=16, channels=3)
    np.savez(tmp_path / "v.npz", X=images, y=labels)
    train = ["train", str(tmp_path / "v.npz"), "--epochs", "30", "--device", "cpu"]
    words = ["--out", str(tmp_path / "frozen"), "--freeze", "--set", "head=linear"]
    assert run([*train, *words]) == 0
    log = (tmp_path / "frozen" / "log.jsonl").read_text().splitlines()
    assert len(log) == 30
    assert run(["predict", str(tmp_path / "frozen"), str(tmp_path / "v.npz"), "--json"]) == 0
    capsys.readouterr()
    bad = ["--out", str(tmp_path / "x"), "--weights", str(tmp_path / "v.npz")]
    assert run([*train, *bad]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert run([*train, "--out", str(tmp_path / "y"), "--freeze", "--augment", "crop"]) == 1
    assert "augment" in capsys.readouterr().err
