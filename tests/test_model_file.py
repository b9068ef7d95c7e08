"""The model file: whole or refused, in one line."""

import dataclasses
import json
import random
import re
import struct
import time

import numpy as np
import oracles
import pytest
import torch
import toys
from safetensors.torch import save_file

from deepsimplex import engine, inference
from deepsimplex.calibration import conformal_threshold
from deepsimplex.data.augment import ONE
from deepsimplex.errors import DeepSimplexError, ModelFileError
from deepsimplex.fitting import calibrate, fit_model
from deepsimplex.methods.base import Normalise
from deepsimplex.model import Model
from deepsimplex.recipes import Recipe


@pytest.fixture(scope="module")
def model():
    images, labels = toys.tensors(*toys.pictures(60))
    return fit_model(images, labels, ["cat", "dog", "eel"], toys.quick("dsc", 3), keep=0.9)


@pytest.fixture(scope="module")
def content(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    model.save(path)
    return path.read_bytes()


def metadata(content):
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["deepsimplex"])


def refused(path, content):
    path.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(ModelFileError) as caught:
        Model.load(path, "cpu")
    assert time.monotonic() - began < 5
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("expected ")
    return message


def test_the_metadata_says_all(content, model):
    record = metadata(content)
    assert record["classes"] == ["cat", "dog", "eel"]
    assert record["preprocessing"]["shape"] == [1, 8, 8]
    assert record["simplex"] == {"classes": 3, "dim": 2, "kind": "regular"}
    assert record["score"] == "distance"
    assert record["threshold"]["keep"] == 0.9
    assert record["recipe"]["backbone"] == "small"
    assert len(record["sha256"]) == 64
    assert {"format", "version", "radius"} <= set(record)


def test_the_same_model_gives_the_same_bytes(content, model, tmp_path):
    model.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content


def mutate(content, chance):
    kind = chance.choice(
        ["flip", "byte", "cut", "insert", "drop", "swap", "zero", "grow", "header"]
    )
    data, at = bytearray(content), chance.randrange(len(content))
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[at] = (data[at] + chance.randrange(1, 256)) % 256
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = chance.randbytes(chance.randrange(1, 50))
    elif kind == "drop":
        del data[at : at + chance.randrange(1, 50)]
    elif kind == "swap":
        data = data[at:] + data[:at]
    elif kind == "zero":
        data[at : at + 64] = bytes(64)
    elif kind == "grow":
        data += chance.randbytes(chance.randrange(1, 100))
    else:
        data[:8] = struct.pack("<Q", chance.choice([0, 1, 8, 1 << 20, 1 << 40, (1 << 64) - 1]))
    return bytes(data)


def test_five_hundred_mutations_are_refused(content, tmp_path):
    chance = random.Random(11)
    tried = 0
    while tried < 500:
        mutant = mutate(content, chance)
        if mutant == content:
            continue
        refused(tmp_path / "m", mutant)
        tried += 1


def test_what_is_not_a_model_is_named(content, tmp_path):
    path = tmp_path / "m"
    assert "an empty file" in refused(path, b"")
    assert "something else" in refused(path, b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "truncated or altered" in refused(path, content[:-1])
    save_file({"w": torch.ones(3)}, path, {"format": "pt"})
    assert "a deepsimplex model" in refused(path, path.read_bytes())
    with pytest.raises(ModelFileError, match="No such file"):
        Model.load(tmp_path / "absent")
    with pytest.raises(ModelFileError, match="Is a directory"):
        Model.load(tmp_path)


def forge(model, monkeypatch, path, **changes):
    """A file with other metadata and a checksum that is right."""
    original = json.dumps

    def altered(record, **settings):
        if isinstance(record, dict) and "sha256" in record:
            record = {**record, **changes}
        return original(record, **settings)

    with monkeypatch.context() as patch:
        patch.setattr("deepsimplex.model.json.dumps", altered)
        model.save(path)
    return path.read_bytes()


def test_a_newer_format_is_told_from_a_broken_file(model, monkeypatch, tmp_path):
    content = forge(model, monkeypatch, tmp_path / "m", format=2, version="9.9")
    assert "format 2 of version 9.9" in refused(tmp_path / "m", content)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {}},
        {"recipe": None},
        {"recipe": {"method": "dsc", "settings": {}, "backbone": "small", "epochs": -1}},
        {"recipe": {"method": "os.system", "settings": {}}},
        {"recipe": {"method": "dsc", "settings": {"loss": 5, "wd": 1}}},
        {"preprocessing": {"shape": [1, 8]}},
        {"preprocessing": {"shape": [10**9, 10**6, 8]}},
        {"preprocessing": {"shape": "abc"}},
        {"preprocessing": {}},
        {"classes": ["a", "b"]},
        {"classes": 7},
        {"classes": [f"c{i}" for i in range(3000)]},
        {"labels": "not a dtype"},
        {"score": "rm -rf"},
        {"radius": "wide"},
        {"radius": -1.0},
        {"format": True},
        {"classes": ["a", "a", "b"]},
        {"classes": [["a"], ["b"], ["c"]]},
        {"labels": "<U1", "classes": ["cat", "dog", "eel"]},
        {"labels": "<i8", "classes": [0, 1, 1.5]},
        {"preprocessing": {"shape": [1, 8, 10**30], "pixels": True}},
        {"threshold": {"values": "x"}},
        {"threshold": [1]},
    ],
)
def test_hostile_metadata_with_a_right_checksum(model, monkeypatch, tmp_path, changes):
    refused(tmp_path / "m", forge(model, monkeypatch, tmp_path / "m", **changes))


@pytest.mark.parametrize("classes", [[0, 1, 2], [-1, 0, 5], [0.5, 1.5, 2.5], ["ä", "b", "日本"]])
def test_class_labels_keep_their_type(classes, tmp_path):
    images, labels = toys.tensors(*toys.pictures(30))
    fit_model(images, labels, classes, toys.quick("softmax", 1)).save(tmp_path / "m")
    again = Model.load(tmp_path / "m", "cpu").classes
    assert again.tolist() == classes
    assert again.dtype == np.asarray(classes).dtype


@pytest.mark.parametrize("by", ["all", "predicted"])
def test_thresholds_survive(model, by, tmp_path):
    images = toys.tensors(*toys.pictures(12, seed=4))[0]
    few = calibrate(model, images, 0.95, by=by)  # too few: keeps everything, −inf in the file
    few.save(tmp_path / "m")
    assert Model.load(tmp_path / "m", "cpu").threshold == few.threshold
    assert few.threshold.values[0] == -np.inf


def test_decisions_have_reasons(model):
    images = toys.tensors(*toys.pictures(3, seed=4))[0]
    strict = calibrate(model, toys.tensors(*toys.pictures(200, seed=6))[0], 0.9)
    limit = -strict.threshold.values[0]
    for decision in strict.decide(images):
        value = -decision.knownness
        verdict = decision.nearest if decision.known else "UNKNOWN"
        assert decision.known == (value <= limit)
        assert decision.reason == (
            f"{verdict}: nearest '{decision.nearest}' at {value:.2f}, limit {limit:.2f}"
        )
    assert "no limit" in dataclasses.replace(model, threshold=None).decide(images)[0].reason


def test_what_was_seen_is_remembered(model, tmp_path):
    images = toys.tensors(*toys.pictures(60))[0]
    model.save(tmp_path / "m")
    again = Model.load(tmp_path / "m", "cpu")
    assert again.was_seen(images).all()
    assert not again.was_seen(toys.tensors(*toys.pictures(60, seed=3))[0]).any()


class Spy:
    """Which images reached training, normalisation and calibration."""

    def __init__(self, monkeypatch):
        self.trained = self.normalised = self.scored = None
        train, fit, scores = engine.training, Normalise.fit, inference.scores

        def spy_train(method, data, *rest, **more):
            self.trained = data.images
            return train(method, data, *rest, **more)

        def spy_fit(layer, images):
            self.normalised = images
            return fit(layer, images)

        def spy_scores(method, images, *rest, **more):
            self.scored = images
            return scores(method, images, *rest, **more)

        monkeypatch.setattr(engine, "training", spy_train)
        monkeypatch.setattr(Normalise, "fit", spy_fit)
        monkeypatch.setattr(inference, "scores", spy_scores)


def rows(images):
    return {image.numpy().tobytes() for image in images}


@pytest.mark.parametrize("given", [False, True])
def test_calibration_images_train_nothing(monkeypatch, given):
    images, labels = toys.tensors(*toys.pictures(60))
    apart = toys.tensors(*toys.pictures(30, seed=2))[0] if given else None
    spy = Spy(monkeypatch)
    fit_model(
        images, labels, list("abc"), toys.quick("dsc", 1), keep=0.5, calibration=apart, device="cpu"
    )
    assert rows(spy.trained) == rows(spy.normalised)
    assert not rows(spy.trained) & rows(spy.scored)
    if given:
        assert rows(spy.trained) == rows(images)
        assert rows(spy.scored) == rows(apart)
    else:
        assert rows(spy.trained) | rows(spy.scored) == rows(images)
        assert len(spy.scored) == 12


def test_the_hold_out_follows_the_seed(monkeypatch):
    images, labels = toys.tensors(*toys.pictures(60))
    held = []
    for seed in (0, 0, 1):
        spy = Spy(monkeypatch)
        fit_model(images, labels, list("abc"), toys.quick("dsc", 1, seed=seed), keep=0.5)
        held.append(rows(spy.scored))
    assert held[0] == held[1] != held[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep": 1.5}, "keep"),
        ({"keep": float("nan")}, "keep"),
        ({"keep": 0.9, "guarantee": "sure"}, "guarantee"),
        ({"keep": 0.9, "by": "class"}, "by 'all' or 'predicted'"),
        ({"radius": 0.0}, "a radius above 0"),
        ({"score": "depth"}, "a score among"),
        ({"background": torch.zeros(0, 1, 8, 8)}, "background images"),
        ({"background": torch.full((2, 1, 8, 8), float("nan"))}, "background images"),
        ({"background": torch.zeros(2, 1, 8, 8), "method": "softmax"}, "no background for"),
        ({"labels": torch.arange(60)}, "labels in 0 … 2"),
        ({"labels": torch.arange(60) - 1}, "labels in 0 … 2"),
        ({"classes": ["a", "a", "b"]}, "two or more different classes"),
    ],
)
def test_bad_requests_are_refused_before_training(monkeypatch, arguments, words):
    monkeypatch.setattr(engine, "training", lambda *a, **k: pytest.fail("it trained"))
    images, labels = toys.tensors(*toys.pictures(60))
    recipe = toys.quick(arguments.pop("method", "dsc"), 1)
    labels, classes = arguments.pop("labels", labels), arguments.pop("classes", list("abc"))
    with pytest.raises(DeepSimplexError, match=words):
        fit_model(images, labels, classes, recipe, **arguments)


def test_nothing_to_calibrate_on_keeps_everything(model):
    for by, count in (("all", 1), ("predicted", 3)):
        empty = calibrate(model, torch.zeros(0, 1, 8, 8, dtype=torch.uint8), 0.9, by=by)
        assert empty.threshold.values == (-np.inf,) * count
        assert re.search("everything is kept|keep everything", empty.threshold.meaning())


def test_a_mirrored_model_scores_the_mean_output(tmp_path):
    images, labels = toys.tensors(*toys.pictures(60))
    plan = toys.quick("dsc", 3, mirror=True)
    model = fit_model(images, labels, list("abc"), plan, device="cpu", keep=0.9)
    outputs = [inference.outputs(model.method, view) for view in (images, images.flip(3))]
    expected = model.method.class_scores((outputs[0] + outputs[1]) / 2, "distance")
    by_class, known = model.scores(images)
    assert np.allclose(by_class, expected, atol=1e-6)
    assert np.array_equal(model.all_scores(images.flip(3))[1]["distance"], known)
    model.save(tmp_path / "m.safetensors")
    assert np.array_equal(Model.load(tmp_path / "m.safetensors", "cpu").scores(images)[1], known)
    vectors, targets = (torch.from_numpy(part) for part in toys.vectors())
    for views in ({"mirror": True}, {"shift": 1}):
        with pytest.raises(DeepSimplexError, match="images to mirror"):
            fit_model(vectors, targets, list("abc"), Recipe(backbone="mlp", **views), device="cpu")


def test_a_model_of_moved_images_scores_the_mean_output(tmp_path):
    images, labels = toys.tensors(*toys.pictures(60))
    plan = toys.quick("dsc", 3, mirror=True, shift=2)
    model = fit_model(images, labels, list("abc"), plan, device="cpu", keep=0.9)
    looks = map(torch.from_numpy, oracles.views(images.numpy(), True, 2))
    total = sum(inference.outputs(model.method, look) for look in looks)
    expected = model.method.class_scores(total / 18, "distance")
    by_class, known = model.scores(images)
    assert np.allclose(by_class, expected, atol=1e-6)
    model.save(tmp_path / "m.safetensors")
    assert np.array_equal(Model.load(tmp_path / "m.safetensors", "cpu").scores(images)[1], known)
    again = calibrate(model, images, 0.9)
    wanted = conformal_threshold(expected.amax(1).numpy(), 0.9).values
    assert np.allclose(again.threshold.values, wanted, atol=1e-6)
    alone = model.by_views(ONE)
    assert alone.threshold is None
    outputs = inference.outputs(model.method, images)
    assert np.allclose(alone.scores(images)[0], model.method.class_scores(outputs, "distance"))
    with pytest.raises(DeepSimplexError, match="a shift below the image's 8 pixels"):
        fit_model(images, labels, list("abc"), toys.quick("dsc", 3, shift=8), device="cpu")
