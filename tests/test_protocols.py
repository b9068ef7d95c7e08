"""Trials: published splits, honest parts, audited background."""

import numpy as np
import pytest
from PIL import Image

from deepsimplex.data import background as backgrounds
from deepsimplex.data import protocols
from deepsimplex.data.background import OVERLAPS, load_background
from deepsimplex.data.protocols import (
    BENCHMARKS,
    Trial,
    benchmark_trial,
    clean_trial,
    digests,
    leave_out_trials,
    random_trials,
    repeated_trials,
    split_trial,
    splits,
)
from deepsimplex.data.resize import fit
from deepsimplex.data.sources import LabelledSet
from deepsimplex.errors import DeepSimplexError

SETS = {"cifar10": 10, "cifar100": 100, "mnist": 10, "svhn": 10, "tinyimagenet": 200}


def tiny_set(name, part, each=20):
    """A stand-in for an official set: every image its own noise."""
    random = np.random.default_rng([len(name), part == "test"])
    classes = tuple(f"{name}-{c}" for c in range(SETS[name]))
    if name == "mnist":
        classes = tuple("0123456789")
    labels = np.arange(each * len(classes)) % len(classes)
    shape = (28, 28, 1) if name == "mnist" else (32, 32, 3)
    images = random.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    return LabelledSet(name, images, labels.astype(np.int64), classes)


@pytest.fixture
def official(monkeypatch):
    """load_official from memory; the dictionary can be changed before use."""
    made = {}

    def load(name, part, root):
        return made.setdefault((name, part), tiny_set(name, part))

    monkeypatch.setattr(protocols, "load_official", load)
    monkeypatch.setattr(backgrounds, "load_official", load)
    protocols._prepared.cache_clear()
    yield made
    protocols._prepared.cache_clear()


@pytest.mark.parametrize("family", ["arpl", "neal"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_published_lists(family, name):
    trials = splits(family, name)
    sizes = {"tinyimagenet": (20, 180), "cifar+10": (4, 10), "cifar+50": (4, 50)}.get(name, (6, 4))
    assert len(trials) == 5
    for trial in trials:
        assert (len(set(trial["known"])), len(set(trial["unknown"]))) == sizes
        if not name.startswith("cifar+"):
            assert not set(trial["known"]) & set(trial["unknown"])


def test_trials_that_repeat_are_known():
    assert repeated_trials("arpl", "svhn") == repeated_trials("arpl", "cifar10") == [1]
    assert repeated_trials("arpl", "mnist") == []
    assert repeated_trials("neal", "cifar+50") == [1, 2, 3, 4]
    assert repeated_trials("arpl", "cifar+10") == []  # the unknowns differ


def test_neal_lists_against_the_paper():
    assert [t["unknown"] for t in splits("neal", "cifar10")] == [
        [3, 6, 7, 8],
        [1, 2, 4, 6],
        [2, 3, 4, 9],
        [0, 1, 2, 6],
        [4, 5, 6, 9],
    ]


def test_a_benchmark_trial(official, tmp_path):
    trial = benchmark_trial("cifar10", "arpl", 0, tmp_path, calibration=0.25)
    assert trial.classes == tuple(f"cifar10-{c}" for c in (0, 6, 4, 9, 1, 7))
    assert trial.counts() == {
        "known classes": 6,
        "unknown classes": 4,
        "train": 90,
        "calibration": 30,
        "known test": 120,
        "unknown test": 80,
        "background": 0,
    }
    train = official["cifar10", "train"]
    held = set(digests(trial.calibration[0]))
    assert not held & set(digests(trial.train[0]))
    for images, labels, source in (
        (*trial.train, train),
        (*trial.calibration, train),
        (*trial.known_test, official["cifar10", "test"]),
    ):
        names = dict(zip(digests(source.images), source.names, strict=True))
        assert [trial.classes[y] for y in labels] == [names[key] for key in digests(images)]
    assert set(trial.unknown_names) == {f"cifar10-{c}" for c in (2, 3, 5, 8)}


def test_mnist_enters_as_rgb_at_32(official, tmp_path):
    trial = benchmark_trial("mnist", "neal", 1, tmp_path)
    assert trial.train[0].shape[1:] == (32, 32, 3)
    assert np.array_equal(trial.train[0][..., 0], trial.train[0][..., 2])
    assert trial.classes == tuple("035789")


def test_cifar_plus_takes_unknowns_from_cifar100(official, tmp_path):
    extra = load_background("cifar100", tmp_path, against="cifar10", size=32, channels=3)
    trial = benchmark_trial("cifar+10", "arpl", 0, tmp_path, background=extra)
    unknown = {f"cifar100-{c}" for c in splits("arpl", "cifar+10")[0]["unknown"]}
    assert set(trial.unknown_names) == unknown
    kept = set(digests(trial.background))
    source = official["cifar100", "train"]
    of_unknown = source.images[np.isin(source.names, list(unknown))]
    assert not kept & set(digests(of_unknown))
    assert len(trial.background) == 90 * 20
    assert set(trial.audit["background"]["unknown classes left out"]) == unknown


def test_overlapping_classes_leave_the_background(official, tmp_path, monkeypatch):
    monkeypatch.setitem(OVERLAPS, ("cifar100", "cifar10"), ("cifar100-3", "cifar100-99"))
    extra = load_background("cifar100", tmp_path, against="cifar10", size=32, channels=1)
    assert extra.images.shape == (98 * 20, 32, 32, 1)
    assert not set(extra.classes) & {"cifar100-3", "cifar100-99"}
    assert extra.audit["overlapping classes left out"] == ["cifar100-3", "cifar100-99"]
    with pytest.raises(DeepSimplexError, match="a list of overlapping classes"):
        load_background("cifar100", tmp_path, against="tinyimagenet", size=32, channels=3)
    with pytest.raises(DeepSimplexError, match="background among cifar100"):
        load_background("cifar", tmp_path, against="cifar10", size=32, channels=3)


def test_photographs_as_background(tmp_path):
    extra = load_background("photographs", tmp_path, against="digits", size=8, channels=1)
    assert (extra.images.shape, extra.images.dtype) == ((2000, 8, 8, 1), np.uint8)
    assert extra.images.std() > 40
    again = load_background("photographs", tmp_path, against="digits", size=8, channels=1)
    assert np.array_equal(extra.images, again.images)
    assert len(np.unique(extra.images.reshape(2000, -1), axis=0)) > 1900
    assert backgrounds.patches(600, 3, count=3).shape == (3, 600, 600, 3)


def test_a_folder_as_background(tmp_path):
    with pytest.raises(DeepSimplexError, match="images in"):
        load_background(str(tmp_path), tmp_path, against="x", size=8, channels=3)
    Image.new("RGB", (20, 30), (9, 8, 7)).save(tmp_path / "a.png")
    extra = load_background(str(tmp_path), tmp_path, against="x", size=8, channels=3)
    assert extra.images.shape == (1, 8, 8, 3)
    assert "not audited" in extra.audit["note"]


def test_identical_images_leave_the_training_side(official, tmp_path):
    train, test = tiny_set("cifar10", "train"), tiny_set("cifar10", "test")
    hundred = tiny_set("cifar100", "train")
    train.images[0] = test.images[0]  # class 0, known, also in the known test
    train.images[6] = test.images[2]  # class 6, known, equal to an unknown test image
    hundred.images[5] = test.images[3]  # background equal to an unknown test image
    hundred.images[7] = train.images[10]  # and to a training image
    official["cifar10", "train"], official["cifar10", "test"] = train, test
    official["cifar100", "train"] = hundred
    extra = load_background("cifar100", tmp_path, against="cifar10", size=32, channels=3)
    trial = benchmark_trial("cifar10", "arpl", 0, tmp_path, background=extra, calibration=0.0)
    assert len(trial.train[1]) == 118
    tested = {*digests(trial.known_test[0]), *digests(trial.unknown_test)}
    assert not tested & {*digests(trial.train[0]), *digests(trial.background)}
    assert not set(digests(trial.train[0])) & set(digests(trial.background))
    repeats = trial.audit["repeats"]
    assert sorted(r["equal to"] for r in repeats["train"]) == ["known test", "unknown test"]
    assert sorted(r["equal to"] for r in repeats["background"]) == ["train", "unknown test"]


def test_an_unknown_class_among_the_known_is_refused():
    images, labels = np.zeros((2, 4, 4, 1), np.uint8), np.arange(2)
    part = images, labels
    with pytest.raises(DeepSimplexError, match="a among both"):
        Trial("t", ("a", "b"), part, part, part, images, ("a", "c"))
    with pytest.raises(DeepSimplexError, match="a among both"):
        clean_trial("t", ("a", "b"), part, part, part, images, ("a", "c"))


def test_own_data():
    data = tiny_set("svhn", "train")
    known = random_trials(data, 4, seed=3)
    assert known == random_trials(data, 4, seed=3) != random_trials(data, 4, seed=4)
    assert all(len(set(names)) == 6 for names in known)
    folds = leave_out_trials(data, 3, seed=0)
    assert [len(fold) for fold in folds] == [7, 7, 7, 9]
    left = [set(data.classes) - set(fold) for fold in folds]
    assert set.union(*left) == set(data.classes)
    assert sum(len(names) for names in left) == 10  # each class once
    trial = split_trial(data, known[0], name="own", seed=1)
    counts = trial.counts()
    assert (counts["train"], counts["calibration"], counts["known test"]) == (72, 18, 30)
    few = LabelledSet("two", data.images[:4], np.array([0, 1, 0, 1]), ("a", "b"))
    with pytest.raises(DeepSimplexError, match="3 or more classes"):
        random_trials(few, 1, seed=0)


def test_bad_requests(tmp_path):
    for family, name in (("osrci", "mnist"), ("arpl", "imagenet")):
        with pytest.raises(DeepSimplexError, match="splits among"):
            splits(family, name)
    with pytest.raises(DeepSimplexError, match="trial from 0 to 4"):
        benchmark_trial("cifar10", "arpl", 7, tmp_path)


def test_fit_resizes_and_changes_channels():
    ramp = np.arange(28, dtype=np.uint8)[None, :, None, None] * np.ones((2, 1, 28, 1), np.uint8)
    out = fit(ramp, 32, 3)
    assert out.shape == (2, 32, 32, 3)
    assert np.array_equal(out[..., 0], out[..., 1])
    assert (np.diff(out[0, :, 0, 0].astype(int)) >= 0).all()
    colour = np.zeros((1, 8, 8, 3), np.uint8)
    colour[..., 1] = 100
    assert (fit(colour, 8, 1) == 59).all()
    assert fit(colour, 8, 3) is colour
