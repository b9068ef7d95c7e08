"""OpenSetClassifier as scikit-learn and its users know it."""

import warnings

import numpy as np
import pytest
import toys
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from deepsimplex import OpenSetClassifier, engine, estimator, recipes
from deepsimplex.errors import DeepSimplexError, ModelFileError


@parametrize_with_checks(
    [OpenSetClassifier(epochs=60), OpenSetClassifier(method="softmax", epochs=60)]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([OpenSetClassifier(), OpenSetClassifier(method="dsc-softmax", epochs=60)])
def test_more_scikit_learn_checks(estimator, check):
    check(estimator)


def quick(**settings):
    return OpenSetClassifier(**{"epochs": 20, "random_state": 0, **settings})


def test_vectors_end_to_end():
    X, y = toys.vectors(120)
    classifier = quick().fit(X, y)
    assert classifier.score(X, y) > 0.95
    assert classifier.classes_.tolist() == [0, 1, 2]
    assert classifier.decision_function(X).shape == (120, 3)
    # knownness is the best class score, and the threshold is never reached
    assert np.array_equal(classifier.decision_function(X).max(1), classifier.score_samples(X))
    assert classifier.threshold_ == -np.inf


def test_keep_none_never_rejects():
    X, y = toys.vectors(90)
    classifier = quick().fit(X, y)
    far = np.full((5, 6), 1e6)
    assert set(classifier.predict(far)) <= {0, 1, 2}


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 3)])
def test_images_end_to_end(shape):
    channels = shape[2] if len(shape) == 3 else 1
    images, labels = toys.pictures(120, channels=channels)
    X = images.reshape(len(images), *shape)
    names = np.array(["ant", "bee", "cow"])[labels]
    classifier = quick(keep=0.9).fit(X, names)
    fresh, fresh_labels = toys.pictures(120, channels=channels, seed=8)
    predicted = classifier.predict(fresh.reshape(-1, *shape))
    right = predicted == np.array(["ant", "bee", "cow"])[fresh_labels]
    assert right.mean() > 0.75
    unknown = toys.unknown_pictures(60, channels=channels).reshape(-1, *shape)
    assert (classifier.predict(unknown) == "unknown").mean() > 0.5
    assert np.isfinite(classifier.threshold_)
    scores = classifier.score_samples(unknown)
    assert np.array_equal(classifier.predict(unknown) == "unknown", scores < classifier.threshold_)


def test_wrong_shapes_are_told():
    images, labels = toys.pictures(30)
    classifier = quick(epochs=1).fit(images, labels)
    for bad in (images[:, :, :5], images[0]):
        with pytest.raises(DeepSimplexError, match=r"X of shape \(n, 8, 8, 1\).*X\[None\]"):
            classifier.predict(bad)
    colours = np.repeat(images, 3, 3)
    with pytest.raises(DeepSimplexError, match=r"\(30, 3, 8, 8\), with the channels before"):
        quick().fit(colours.transpose(0, 3, 1, 2), labels)
    with pytest.raises(DeepSimplexError, match="X of shape"):
        quick().fit(np.zeros((4, 2, 2, 2, 2)), [0, 1, 0, 1])
    with pytest.raises(DeepSimplexError, match="fit float32"):
        quick().fit(np.full((4, 2), 1e300), [0, 1, 0, 1])
    for bad in (images[:, :4], images.astype(np.float32)):
        with pytest.raises(DeepSimplexError, match="background like X"):
            quick().fit(images, labels, background=bad)
    with pytest.raises(ValueError, match="background contains NaN"):
        quick().fit(images / 255, labels, background=images * np.nan)
    with pytest.raises(ValueError, match="0 sample"):
        quick().fit(images, labels, background=images[:0])
    with pytest.raises(NotFittedError):
        quick().predict(images)
    with pytest.raises(NotFittedError):
        quick().save("nowhere")


def test_background_is_pushed_away():
    images, labels = toys.pictures(120)
    guarded = quick().fit(images, labels, background=toys.unknown_pictures(80, seed=2))
    assert guarded.model_.recipe.method == "dsc-blend"
    plain = quick(method="dsc-blend").fit(images, labels)
    unseen = toys.unknown_pictures(40, seed=3)
    assert guarded.score_samples(unseen).mean() < plain.score_samples(unseen).mean() - 0.05


@pytest.mark.parametrize(
    ("classes", "unknown"),
    [
        ([0, 1, 2], -1),
        ([-1, 0, 1], -2),
        ([-5, -1, 3], -6),
        ([0.0, 1.0, 2.0], -1),
        (["a", "b", "c"], "unknown"),
        (np.array([0, 1, 255], np.uint8), -1),
        (np.array([0, 1, 2], np.uint64), -1),
        (np.array([-128, -1, 5], np.int8), -129),
    ],
)
def test_the_unknown_label_is_never_a_class(classes, unknown):
    images, labels = toys.pictures(120)
    classifier = quick(keep=0.5).fit(images, np.array(classes)[labels])
    assert classifier.unknown_label_ == unknown
    predicted = classifier.predict(images)
    assert unknown in predicted.tolist()
    assert set(predicted.tolist()) <= {*classes, unknown}


def test_an_unknown_label_of_ones_own():
    images, labels = toys.pictures(120)
    mixed = quick(keep=0.5, unknown_label="none of these").fit(images, labels)
    assert set(map(type, mixed.predict(images).tolist())) == {int, str}
    numbers = quick(keep=0.5, unknown_label=-1).fit(images, np.array(["a", "b", "c"])[labels])
    assert set(map(type, numbers.predict(images).tolist())) == {int, str}
    flags = quick(keep=0.5).fit(images, labels > 0)
    assert set(map(type, flags.predict(images).tolist())) == {bool, str}
    with pytest.raises(DeepSimplexError, match="an unknown_label that is no class"):
        quick(keep=0.5, unknown_label=2).fit(images, labels)
    with pytest.raises(DeepSimplexError, match="an unknown_label that is no class"):
        quick(keep=0.5).fit(images, np.array(["unknown", "b", "c"])[labels])


def test_thresholds_by_predicted_class_and_pac():
    images, labels = toys.pictures(600)
    by_class = quick(keep=0.8, by="predicted", epochs=5).fit(images, labels)
    assert by_class.threshold_.shape == (3,)
    assert len(set(by_class.threshold_)) == 3
    mean = quick(keep=0.8, epochs=5).fit(images, labels)
    pac = quick(keep=0.8, epochs=5, guarantee="pac").fit(images, labels)
    assert pac.threshold_ < mean.threshold_  # the stricter promise keeps more
    with pytest.raises(DeepSimplexError, match="guarantee"):
        quick(keep=0.8, guarantee="sure").fit(images, labels)
    with pytest.raises(DeepSimplexError, match="by 'all' or 'predicted'"):
        quick(keep=0.8, by="class").fit(images, labels)


def test_too_few_to_calibrate_is_said():
    images, labels = toys.pictures(30)
    with pytest.warns(UserWarning, match="everything is kept"):
        classifier = quick(keep=0.99, epochs=1).fit(images, labels)
    assert classifier.threshold_ == -np.inf


def test_the_calibration_images_are_not_trained_on(monkeypatch):
    images, labels = toys.pictures(60)
    seen = []
    original = engine.training

    def spy(method, data, *rest, **more):
        seen.append(len(data.labels))
        return original(method, data, *rest, **more)

    monkeypatch.setattr(engine, "training", spy)
    quick(keep=0.5, epochs=1).fit(images, labels)
    quick(epochs=1).fit(images, labels)
    assert seen == [48, 60]


def test_pipeline_grid_search_and_cross_validation():
    X, y = toys.vectors(90)
    pipeline = make_pipeline(StandardScaler(), quick(epochs=10))
    search = GridSearchCV(
        pipeline,
        {"opensetclassifier__keep": [None, 0.5], "opensetclassifier__epochs": [1, 10]},
        cv=2,
    ).fit(X, y)
    assert search.best_params_ == {"opensetclassifier__keep": None, "opensetclassifier__epochs": 10}
    assert cross_val_score(quick(epochs=10), X, y, cv=3).min() > 0.9
    copy = clone(quick(keep=0.9))
    assert copy.keep == 0.9


def test_the_radius_is_a_unit():
    """Training, decisions and the order of scores do not change; distances are scaled."""
    images, labels = toys.pictures(120)
    unit, large = (quick(keep=0.9, radius=u).fit(images, labels) for u in (1.0, 64.0))
    fresh = toys.pictures(60, seed=9)[0]
    for a, b in zip(
        unit.model_.method.state_dict().values(),
        large.model_.method.state_dict().values(),
        strict=True,
    ):
        assert a.equal(b)
    assert np.array_equal(unit.predict(fresh), large.predict(fresh))
    assert np.allclose(64 * unit.score_samples(fresh), large.score_samples(fresh), rtol=1e-12)
    assert large.threshold_ == pytest.approx(64 * unit.threshold_)
    dot = quick(knownness="dot", radius=3.0, epochs=2).fit(images, labels)
    one = quick(knownness="dot", epochs=2).fit(images, labels)
    assert np.allclose(9 * one.score_samples(fresh), dot.score_samples(fresh), rtol=1e-12)
    with pytest.raises(DeepSimplexError, match="a radius above 0"):
        quick(radius=-1).fit(images, labels)


@pytest.mark.parametrize("keep", [None, 0.9])
def test_save_and_load(tmp_path, keep):
    images, labels = toys.pictures(120)
    names = np.array(["ant", "bee", "cow"])[labels]
    classifier = quick(keep=keep, radius=5.0).fit(images, names)
    classifier.save(tmp_path / "model.safetensors")
    again = OpenSetClassifier.load(tmp_path / "model.safetensors")
    assert np.array_equal(again.predict(images), classifier.predict(images))
    assert np.array_equal(again.score_samples(images), classifier.score_samples(images))
    assert again.threshold_ == classifier.threshold_
    assert again.classes_.tolist() == ["ant", "bee", "cow"]
    refitted = clone(again).fit(images, names)  # a loaded classifier can be trained again
    assert refitted.score_samples(images).shape == (120,)
    X, y = toys.vectors()
    flat = quick().fit(X, y)
    flat.save(tmp_path / "flat")
    loaded = OpenSetClassifier.load(tmp_path / "flat")
    assert np.array_equal(loaded.decision_function(X), flat.decision_function(X))
    with pytest.raises(ValueError, match="6 features"):
        loaded.predict(X[:, :5])
    with pytest.raises(ModelFileError):
        OpenSetClassifier.load(tmp_path / "absent")


def test_everything_a_classifier_was_given_survives(tmp_path):
    images, labels = toys.pictures(60)
    given = {
        "keep": 0.6,
        "guarantee": "pac",
        "by": "predicted",
        "knownness": "cosine",
        "settings": {"loss": "hinge", "margin": 0.2},
        "unknown_label": 99,
        "epochs": np.int64(2),
        "batch_size": 7,
        "learning_rate": np.float32(0.25),
        "weight_decay": 0.125,
        "augment": "flip",
        "shift": 1,
        "calibration_size": 0.5,
        "random_state": 5,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few images: some classes keep everything
        classifier = OpenSetClassifier(**given).fit(images, labels)
        recipe = classifier.model_.recipe
        assert (recipe.epochs, recipe.batch_size, recipe.seed) == (2, 7, 5)
        assert (recipe.learning_rate, recipe.weight_decay) == (0.25, 0.125)
        assert (recipe.augment, recipe.shift, recipe.calibration) == ("flip", 1, 0.5)
        assert (recipe.settings.loss, recipe.settings.margin) == ("hinge", 0.2)
        assert sum(classifier.model_.threshold.counts) == 30
        classifier.save(tmp_path / "m")
        again = OpenSetClassifier.load(tmp_path / "m")
        for name, value in given.items():
            if name != "settings":
                assert getattr(again, name) == value, name
        assert again.unknown_label_ == 99
        refitted = clone(again).fit(images, labels)  # the same recipe gives the same weights
    assert np.array_equal(refitted.score_samples(images), classifier.score_samples(images))


def test_a_column_far_from_zero_loses_nothing():
    X, y = toys.vectors(120)
    assert quick().fit(X + 1e9, y).score(X + 1e9, y) > 0.95


def test_too_few_rows_to_hold_out_any():
    X, y = toys.vectors(6)
    with pytest.warns(UserWarning, match="everything is kept"):
        classifier = quick(keep=0.9, epochs=1).fit(X, y)
    assert classifier.threshold_ == -np.inf


def test_two_classes_give_one_column():
    X, y = toys.vectors(60, classes=2)
    classifier = quick().fit(X, y)
    decision = classifier.decision_function(X)
    assert decision.shape == (60,)
    assert np.array_equal(classifier.predict(X), (decision > 0).astype(int))


def test_rows_do_not_depend_on_their_neighbours():
    X, y = toys.vectors(90)
    classifier = quick().fit(X, y)
    alone = np.concatenate([classifier.score_samples(X[i : i + 1]) for i in range(20)])
    assert np.allclose(alone, classifier.score_samples(X)[:20], rtol=1e-9, atol=1e-9)


def test_fit_is_silent():
    X, y = toys.vectors(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(keep=0.8, epochs=2).fit(X, y)


def test_known_images_are_no_background():
    images, labels = toys.pictures(40)
    mixed = np.concatenate([toys.unknown_pictures(10), images[:3]])
    with pytest.raises(DeepSimplexError, match="none of the known images; got 3 of them"):
        OpenSetClassifier(epochs=1, device="cpu").fit(images, labels, background=mixed)


@pytest.mark.parametrize("bytes_first", [True, False])
def test_bytes_are_not_taken_for_fractions(bytes_first):
    """They would all be unknown, silently."""
    images, labels = toys.pictures(40)
    kinds = [images, (images / 255.0).astype(np.float32)]
    fitted, given = kinds if bytes_first else kinds[::-1]
    classifier = OpenSetClassifier(epochs=1, device="cpu", keep=None).fit(fitted, labels)
    assert len(classifier.predict(fitted)) == 40
    for ask in (classifier.predict, classifier.score_samples, classifier.decision_function):
        with pytest.raises(DeepSimplexError, match="as fitted"):
            ask(given)


def test_a_long_training_on_a_cpu_is_warned_of(monkeypatch):
    monkeypatch.setattr(recipes, "AT_LENGTH", recipes.AT_LENGTH | {"epochs": 160})
    monkeypatch.setattr(estimator, "fit_model", stopped)
    images = np.zeros((4, 29, 29), np.uint8)
    for device, epochs, told in (("cpu", None, 1), ("cpu", 700, 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pytest.raises(Stop):
                OpenSetClassifier(epochs=epochs, device=device).fit(images, [0, 1, 0, 1])
        assert [str(w.message) for w in seen] == told * [
            "160 epochs on a CPU may take hours; epochs= takes fewer"
        ]


class Stop(Exception):
    pass


def stopped(*arguments, **options):
    raise Stop
