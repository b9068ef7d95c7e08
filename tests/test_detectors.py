"""Scores after training: the plumbing on a stand-in, the numbers on the real pytorch-ood.

The real library needs the full torch (torchvision imports nowhere else): `results/ood-tests.txt`
is the log of these tests where it is.
"""

import dataclasses
import json
import logging
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
import toys
from safetensors.torch import load as from_safetensors
from scipy.stats import multivariate_normal

from deepsimplex import OpenSetClassifier, detector_table, detectors, inference, metrics
from deepsimplex.cli import run
from deepsimplex.compare import running
from deepsimplex.data.augment import Views
from deepsimplex.data.protocols import digits_trial
from deepsimplex.detector_table import DETECTORS
from deepsimplex.detectors import check_score, fit_detector, linear_head, restore_detector
from deepsimplex.errors import DeepSimplexError, MissingExtraError, ModelFileError
from deepsimplex.fitting import fit_model
from deepsimplex.frozen import compute_features
from deepsimplex.lanes import drive
from deepsimplex.methods import METHODS, build_method, settings_for
from deepsimplex.model import Model, _pack
from deepsimplex.recipes import digits_recipe

try:
    import pytorch_ood

    MISSING = ""
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch
    MISSING = str(error)
real = pytest.mark.skipif(bool(MISSING), reason=f"pytorch-ood does not import: {MISSING}")

CLASSES = ["cat", "dog", "eel"]
HEADED = [name for name, row in DETECTORS.items() if row.head]
LIBRARY = [name for name, row in DETECTORS.items() if row.kind]


class KNN:
    """A stand-in: distance to the k-th nearest row, by loops."""

    def __init__(self, encoder, k):
        self.k = k

    def fit_features(self, rows, labels):
        if len(rows) < self.k:
            raise ValueError("too few")
        self.rows = unit(rows.numpy())
        return self

    def predict_features(self, rows):
        return torch.from_numpy(kth_distance(rows.numpy(), self.rows, self.k))


def unit(rows):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def kth_distance(rows, fitted, k):
    return np.array([sorted(np.linalg.norm(row - fitted, axis=1))[k - 1] for row in unit(rows)])


@pytest.fixture
def stand_in(monkeypatch):
    library = types.ModuleType("pytorch_ood")
    library.detector = types.ModuleType("pytorch_ood.detector")
    library.detector.KNN = KNN
    monkeypatch.setitem(sys.modules, "pytorch_ood", library)
    monkeypatch.setitem(sys.modules, "pytorch_ood.detector", library.detector)


@pytest.fixture
def no_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_ood", None)


@pytest.fixture(scope="module")
def data():
    return toys.tensors(*toys.pictures(90))


def fitted(data, method="dsc", epochs=4, **options):
    return fit_model(*data, CLASSES, toys.quick(method, epochs), **options)


@pytest.fixture(scope="module")
def models(data):
    return {name: fitted(data, name) for name in ("softmax", "dsc")}


def strange():
    return torch.from_numpy(toys.unknown_pictures(30).transpose(0, 3, 1, 2).copy())


# Names


def test_an_unknown_name_lists_what_exists(models):
    with pytest.raises(DeepSimplexError) as caught:
        check_score(models["dsc"].method, "mahalonobis")
    assert "among distance, cosine, dot (its own) or max_logit" in str(caught.value)
    assert "did you mean 'mahalanobis'?" in str(caught.value)
    for name in DETECTORS:
        assert name in str(caught.value)


def test_a_missing_library_is_said_before_training(data, no_library, tmp_path, capsys):
    with pytest.raises(MissingExtraError, match=r"extra 'ood'.*pip install"):
        fitted(data, epochs=10**9, score="knn")
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--score", "vim"]
    assert run(words) == 1
    assert 'pip install "deepsimplex[ood]"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    words = ["compare", "digits", "--out", str(tmp_path / "run"), "--score", "knn"]
    assert run([*words, "--results", str(tmp_path)]) == 1
    assert "extra 'ood'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_help_imports_neither_torch_nor_the_library():
    code = (
        "import sys; from deepsimplex.cli import run; run(['train', '--help']); "
        "print({'torch', 'pytorch_ood'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "set()"
    assert "--score" in shown.stdout


# W and b


def test_the_linear_head_of_softmax_and_dsc(models, data):
    softmax, dsc = (models[name].method for name in ("softmax", "dsc"))
    found = linear_head(softmax)
    assert found.score == "max_logit"
    assert torch.allclose(found.weight, softmax.head.weight.double(), atol=1e-12)
    assert torch.allclose(found.bias, softmax.head.bias.double(), atol=1e-12)
    found = linear_head(dsc)
    assert found.score == "dot"
    vertices = dsc.simplex.centres(torch.arange(3), torch.float64)
    assert torch.allclose(found.weight, vertices @ dsc.head.fc.weight.double(), atol=1e-12)
    features = compute_features(dsc, data[0]).double()
    scores = inference.scores(dsc, data[0], "dot")[0]
    assert torch.allclose(features @ found.weight.T + found.bias, scores, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "linear"),
    [
        ("dsc", {"head": "dam"}, False),
        ("dsc-literal", {}, True),
        ("dsc-authors", {}, True),
        ("dsc-turned", {}, False),
        ("c2ae", {}, True),
        ("contrastive", {}, False),
    ],
)
def test_only_a_linear_head_is_one(name, changes, linear, stand_in):
    settings = settings_for(name, changes)
    method = build_method(name, "small", (1, 8, 8), 3, settings)
    before = torch.get_rng_state()
    assert (linear_head(method) is not None) == linear
    assert torch.equal(torch.get_rng_state(), before)
    assert method.encoder.shape == (1, 8, 8)
    if not linear:
        sys.modules["pytorch_ood"].detector.ViM = object
        recipe = dataclasses.replace(toys.quick(name, 10**9), settings=settings)
        with pytest.raises(
            DeepSimplexError, match=r"W f \+ b of the features, for the score 'vim'"
        ):
            fit_model(*toys.tensors(*toys.pictures(30)), CLASSES, recipe, score="vim")


def test_a_linear_head_is_found_by_few_images(monkeypatch):
    """A method that paints each image once a class would paint for minutes."""
    method = build_method("c2ae", "small", (1, 8, 8), 3)
    painted, paint = [], type(method).paint

    def counted(self, features, told):
        painted.append(len(features))
        return paint(self, features, told)

    monkeypatch.setattr(type(method), "paint", counted)
    found = linear_head(method)
    assert torch.allclose(found.weight, method.head.weight.double(), atol=1e-12)
    assert torch.allclose(found.bias, method.head.bias.double(), atol=1e-12)
    assert sum(painted) < 50
    with torch.no_grad():
        assert torch.equal(linear_head(method).weight, found.weight)
    with torch.inference_mode():
        assert torch.equal(linear_head(method).weight, found.weight)
        inner = build_method("dsc", "small", (1, 8, 8), 3)
        assert linear_head(inner).score == "dot"


# Without the library


@pytest.mark.parametrize("name", detector_table.LOGIT_SCORES)
def test_logit_scores_of_dsc(name, models, data, no_library):
    model = models["dsc"]
    z = inference.scores(model.method, data[0], "dot")[0].numpy()
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    expected = {
        "max_logit": z.max(1),
        "max_probability": log_p.max(1),
        "energy": np.log(np.exp(z).sum(1)),
        "neg_entropy": (np.exp(log_p) * log_p).sum(1),
    }[name]
    detector = fit_detector(name, model.method, *data, 3)
    assert detector.rows.numel() == 0
    assert np.allclose(detector.knownness(data[0]).numpy(), expected, atol=1e-12)
    # Softmax has these of its own, and they are the same.
    softmax = models["softmax"].method
    own = inference.scores(softmax, data[0], name)[1][name]
    assert torch.allclose(fit_detector(name, softmax, *data, 3).knownness(data[0]), own, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_scores_of_logits_and_of_features_say_something_for_every_row(name, data, no_library):
    images, labels = data
    settings = METHODS[name].settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = build_method(name, "small", tuple(images.shape[1:]), 3, settings)
    method.encoder.normalise.fit(images)
    if name in PAIRS:  # their centres are means of training features
        method = fit_model(images, labels, list("abc"), toys.quick(name, 1), device="cpu").method
    method.eval()
    for score in ("max_logit", "max_probability", "energy", "neg_entropy", "nearest"):
        if score in method.scores:
            continue
        if score == "energy" and name in ("gcpl", "basis", *PAIRS):
            with pytest.raises(DeepSimplexError, match="logits for the score 'energy'; got dist"):
                check_score(method, score)
            continue
        check_score(method, score)
        known = fit_detector(score, method, images, labels, 3).knownness(images)
        assert known.isfinite().all()
        assert known.std() > 1e-12 * known.abs().max()


PAIRS = ("contrastive", "triplet", "triplet-semihard")


@pytest.mark.parametrize("views", [Views(), Views(True), Views(False, 1), Views(True, 2)])
def test_nearest_and_joined_against_their_formulas(views, models, data, no_library):
    method, images = models["dsc"].method, strange()

    def features(of):
        looks = map(torch.from_numpy, oracles.views(of.numpy(), views.mirror, views.shift))
        every = [compute_features(method, look).double().numpy() for look in looks]
        return sum(every) / len(every)

    rows, bank = features(images), features(data[0])
    near = fit_detector("nearest", method, *data, 3, views=views)
    expected = -oracles.nearest(rows, bank, 5)
    assert np.allclose(near.knownness(images).numpy(), expected, atol=1e-6)
    head = linear_head(method)
    weight, bias = head.weight.double().numpy(), head.bias.double().numpy()
    both = fit_detector("joined", method, *data, 3, views=views)
    expected = oracles.joined(rows, bank, weight, bias, 5)
    assert np.allclose(both.knownness(images).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_joined_of_a_model_file_that_mirrors(data, no_library, tmp_path):
    plan = dataclasses.replace(toys.quick("softmax"), mirror=True)
    model = fit_model(*data, ["a", "b", "c"], plan, score="joined", keep=0.9, device="cpu")
    model.save(tmp_path / "m.safetensors")
    again = Model.load(tmp_path / "m.safetensors")
    assert again.detector.views.mirror
    for a, b in zip(model.scores(strange()), again.scores(strange()), strict=True):
        assert np.array_equal(a, b)
    turned = model.scores(strange().flip(-1))
    assert np.allclose(turned[1], model.scores(strange())[1], atol=1e-4)


def test_collapsed_classes_leave_finite_scores():
    rows = torch.eye(3, dtype=torch.float64).repeat_interleave(20, 0)
    weight, bias = torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    parts = detector_table.Parts(60, 3, 3, weight, bias, torch.nn.Identity(), (1.0,))
    both = detector_table.Joined(parts)
    both.fit_features(rows, torch.arange(3).repeat_interleave(20))
    strange = both.predict_features(torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0]]).double())
    assert strange.isfinite().all()
    assert strange[0] < strange[1]


def test_few_training_images_still_have_a_nearest(no_library):
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    near = detector_table.Nearest()
    near.fit_features(rows, torch.tensor([0, 1]))
    assert near.predict_features(rows).tolist() == [1.0, 1.0]  # of two, the farther


def test_energy_in_train_evaluate_predict(tmp_path, capsys):
    out = str(tmp_path / "run")
    words = ["train", "digits", "--known", "0,1,2", "--epochs", "1", "--out", out]
    assert run([*words, "--score", "energy"]) == 0
    assert run(["evaluate", out, "digits", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["auroc_by_score"]) == {"distance", "cosine", "dot", "energy"}
    assert record["auroc"] == record["auroc_by_score"]["energy"]
    assert run(["predict", out, "digits", "--csv"]) == 0
    assert capsys.readouterr().out.startswith("input,label,nearest,energy,threshold,reason")


def test_compare_by_a_detector(tmp_path, capsys):
    words = ["compare", "digits", "--methods", "softmax,dsc", "--trials", "1", "--epochs", "1"]
    words += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path), "--device", "cpu"]
    assert run([*words, "--score", "distance"]) == 1  # softmax has none: refused before training
    assert not (tmp_path / "runs").exists()
    assert run([*words, "--score", "energy"]) == 0
    record = json.loads((tmp_path / "compare-digits-arpl-energy.json").read_text())
    for results in record["methods"].values():
        assert results[0]["score"] == "energy"
        assert results[0]["auroc"] == results[0]["auroc_by_score"]["energy"]
    trial, recipe = digits_trial(0), dataclasses.replace(digits_recipe("dsc", 0), epochs=1)
    where = torch.device("cpu")
    donors = [tmp_path / "runs" / "dsc-0-energy"]
    job = running(trial, recipe, tmp_path / "x", where, keep=0.95, donors=donors)
    result = drive([job], where)[0]
    assert (result["score"], result["trained by"]) == ("distance", "runs/dsc-0-energy")
    job = running(trial, recipe, tmp_path / "y", where, keep=0.95)
    trained = drive([job], where)[0]
    assert {k: v for k, v in result.items() if k not in ("seconds", "trained by")} == {
        k: v for k, v in trained.items() if k not in ("seconds", "trained by")
    }
    borrowed, own = (tmp_path / name / "model.safetensors" for name in "xy")
    assert borrowed.read_bytes() == own.read_bytes()
    assert run(words) == 0  # by their own scores: trained, as no run without a score is there
    capsys.readouterr()
    assert run([*words, "--score", "joined"]) == 0
    record = json.loads((tmp_path / "compare-digits-arpl-joined.json").read_text())
    for method, results in record["methods"].items():
        assert results[0]["trained by"] == f"runs/{method}-0"
        assert results[0]["score"] == "joined"


def test_a_finished_run_is_scored_anew(tmp_path, capsys):
    words = ["train", "digits", "--known", "0,1,2", "--epochs", "1", "--seed", "3"]
    first, other, third = (str(tmp_path / name) for name in ("first", "other", "third"))
    assert run([*words, "--out", first]) == 0
    asked = ["--score", "energy", "--keep", "0.8", "--guarantee", "pac", "--radius", "64"]
    asked += ["--shift", "1"]
    assert run([*words, *asked, "--out", other, "--trained", first]) == 0
    assert f"The network of {first}, scored anew." in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "other" / "log.jsonl").read_bytes() == b""  # not an epoch of training
    assert run([*words, *asked, "--out", third]) == 0
    anew, whole = (Model.load(Path(folder) / "model.safetensors") for folder in (other, third))
    assert (tmp_path / "other/model.safetensors").read_bytes() == (
        tmp_path / "third/model.safetensors"
    ).read_bytes()
    assert (anew.score, anew.radius, anew.threshold) == ("energy", 64.0, whole.threshold)
    assert anew.recipe.views == anew.detector.views == Views(False, 1)
    told = json.loads((tmp_path / "other/results.json").read_text())["trained by"]
    assert told["run"] == first
    assert told["environment"] == json.loads((tmp_path / "first/environment.json").read_text())


def test_a_run_of_another_training_is_not_scored_anew(tmp_path, capsys):
    words = ["train", "digits", "--known", "0,1,2", "--epochs", "1"]
    first, other = str(tmp_path / "first"), str(tmp_path / "other")
    assert run([*words, "--out", first]) == 0
    for more, reason in (
        (["--seed", "1"], "a different recipe.seed"),
        (["--method", "softmax"], "a different recipe.method"),
        (["--known", "0,1"], "a different set of images or labels, data.known"),
        (["--no-reject"], "a different data.keep"),
    ):
        assert run([*words, *more, "--out", other, "--trained", first]) == 1
        assert reason in capsys.readouterr().err
    assert run([*words, "--out", other, "--trained", str(tmp_path / "none")]) == 1
    assert "got no run" in capsys.readouterr().err
    odd = tmp_path / "odd"
    odd.mkdir()
    for text, reason in (
        ('{"recipe": {}, "data": "x"}', "got no run"),
        ('{"recipe": {}, "data": {}}', "set of images or labels"),
    ):
        (odd / "recipe.json").write_text(text)
        assert run([*words, "--out", other, "--trained", str(odd)]) == 1
        assert reason in capsys.readouterr().err
    (tmp_path / "first" / "results.json").unlink()
    assert run([*words, "--out", other, "--trained", first]) == 1
    assert "got one that is not finished" in capsys.readouterr().err
    assert not Path(other).exists()


def test_the_estimator_takes_a_detector():
    images, labels = toys.pictures(60)
    classifier = OpenSetClassifier(epochs=2, knownness="energy", keep=0.9, random_state=0)
    classifier.fit(images, labels)
    scores = classifier.score_samples(images)
    assert np.array_equal(classifier.predict(images) == -1, scores < classifier.threshold_)
    assert classifier.decision_function(images).shape == (60, 3)


# The stand-in: what is fitted, kept and read back


def test_fitted_on_the_training_images_alone(data, stand_in):
    model = fitted(data, score="knn", keep=0.9)
    images, _ = data
    assert len(model.detector.rows) == 90 - 18  # a fifth is held out
    features = {row.tobytes() for row in compute_features(model.method, images).numpy()}
    assert {row.tobytes() for row in model.detector.rows.numpy()} <= features
    k = 72 // (2 * 3)
    expected = kth_distance(
        compute_features(model.method, strange()).double().numpy(),
        unit(model.detector.rows.double().numpy()),
        k,
    )
    by_class, knownness = model.scores(strange())
    assert np.allclose(knownness, -expected, atol=1e-12)  # higher = more known
    own = dataclasses.replace(model, score="distance", detector=None)
    assert np.array_equal(by_class, own.scores(strange())[0])
    assert knownness.mean() < model.scores(images)[1].mean()


def test_a_file_scores_without_the_training_images(data, stand_in, tmp_path, monkeypatch):
    model = fitted(data, score="knn", keep=0.9)
    model.save(tmp_path / "m")
    again = Model.load(tmp_path / "m", "cpu")
    assert again.detector.name == "knn"
    for mine, its in zip(model.scores(strange()), again.scores(strange()), strict=True):
        assert np.array_equal(mine, its)
    assert [d.reason for d in again.decide(strange())] == [
        d.reason for d in model.decide(strange())
    ]
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()
    classifier = OpenSetClassifier.load(tmp_path / "m")
    assert classifier.knownness == "knn"
    monkeypatch.setitem(sys.modules, "pytorch_ood", None)
    with pytest.raises(MissingExtraError, match="extra 'ood'"):
        Model.load(tmp_path / "m", "cpu")


def test_damaged_files_are_refused(data, stand_in, tmp_path):
    model = fitted(data, score="knn")
    path, detector = tmp_path / "m", model.detector
    model.save(path)
    whole = path.read_bytes()
    assert "detector.rows" in from_safetensors(whole)
    for at in (len(whole) // 3, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ModelFileError, match="checksum"):
            Model.load(path)
    wrong = [
        {"rows": detector.rows[:, :-1]},
        {"rows": detector.rows[:-1]},
        {"rows": detector.rows.double()},
        {"rows": detector.rows * torch.nan},
        {"rows": detector.rows[:0], "labels": detector.labels[:0]},
        {"labels": detector.labels + 1},
        {"labels": detector.labels - 1},
        {"labels": detector.labels.float()},
    ]
    for change in wrong:  # checksums that fit, contents that do not
        bad = dataclasses.replace(model, detector=dataclasses.replace(detector, **change))
        path.write_bytes(_pack(bad))
        with pytest.raises(ModelFileError, match="kept rows"):
            Model.load(path)
    path.write_bytes(_pack(dataclasses.replace(model, detector=None)))
    with pytest.raises(ModelFileError):
        Model.load(path)
    path.write_bytes(_pack(dataclasses.replace(model, score="distance")))
    assert Model.load(path).detector is None


def test_what_cannot_be_fitted_is_said(data, models, stand_in, monkeypatch):
    def refuse(self, rows, labels):
        raise ValueError("no")

    monkeypatch.setattr(KNN, "fit_features", refuse)
    with pytest.raises(DeepSimplexError, match=r"images that 'knn' can be fitted to; got no;"):
        fit_detector("knn", models["dsc"].method, *data, 3)


def test_a_large_set_keeps_a_share_of_every_class(data, models, stand_in, monkeypatch):
    labels = torch.tensor([0] * 1000 + [1] * 100 + [2])
    kept = detectors._share(labels, 110)
    assert torch.equal(kept, detectors._share(labels, 110))
    assert torch.bincount(labels[kept]).tolist() == [99, 9, 1]
    assert torch.equal(detectors._share(labels, 1101), torch.arange(1101))
    monkeypatch.setattr(detectors, "MOST", 30 * models["dsc"].method.encoder.features)
    detector = fit_detector("knn", models["dsc"].method, *data, 3)
    assert torch.bincount(detector.labels).tolist() == [10, 10, 10]


# The real library


def test_the_log_level_and_default_type_come_back(data, models):
    log = logging.getLogger("pytorch_ood")
    before = log.level, torch.get_default_dtype()
    fit_detector("energy", models["dsc"].method, *data, 3).knownness(data[0])
    assert (log.level, torch.get_default_dtype()) == before


@real
@pytest.mark.parametrize("method", ["softmax", "dsc"])
@pytest.mark.parametrize("name", LIBRARY)
def test_every_detector_scores_and_survives_the_file(name, method, models, data, tmp_path):
    model = models[method]
    before = torch.get_rng_state()
    detector = fit_detector(name, model.method, *data, 3)
    assert torch.equal(torch.get_rng_state(), before)
    model = dataclasses.replace(model, score=name, detector=detector)
    by_class, knownness = model.scores(data[0])
    assert np.isfinite(knownness).all()
    assert len(np.unique(knownness)) > 45
    own = dataclasses.replace(model, score=model.method.scores[0], detector=None)
    assert np.array_equal(by_class, own.scores(data[0])[0])  # the class stays the model's own
    model.save(tmp_path / "m")
    assert np.array_equal(Model.load(tmp_path / "m", "cpu").scores(data[0])[1], knownness)
    assert not any(p.grad is not None for p in model.method.parameters())


@real
@pytest.mark.parametrize("name", ["knn", "mahalanobis", "vim"])
def test_higher_is_more_known(name, models, data):
    for model in models.values():
        detector = fit_detector(name, model.method, *data, 3)
        fresh = toys.tensors(*toys.pictures(60, seed=5))[0]
        known, unknown = detector.knownness(fresh), detector.knownness(strange())
        assert metrics.auroc(known.numpy(), unknown.numpy()) > 0.8


@real
def test_knn_against_a_loop(models, data):
    method = models["dsc"].method
    detector = fit_detector("knn", method, *data, 3)
    rows = compute_features(method, strange()).double().numpy()
    expected = kth_distance(rows, unit(detector.rows.double().numpy()), 90 // 6)
    assert np.allclose(detector.knownness(strange()).numpy(), -expected, atol=1e-7)


@real
def test_odin_without_its_step_is_max_softmax(models, data, monkeypatch):
    model = models["softmax"]
    warm = fit_detector("odin", model.method, *data, 3)
    assert warm.inner.norm_std == [1 / 255]  # ε of pixels 0…1, and these are 0…255
    stepped = warm.knownness(data[0])
    monkeypatch.setitem(detector_table.ODIN, "eps", 0.0)
    monkeypatch.setitem(detector_table.ODIN, "temperature", 1.0)
    plain = fit_detector("odin", model.method, *data, 3).knownness(data[0])
    own = inference.scores(model.method, data[0], "max_probability")[1]["max_probability"].exp()
    assert torch.allclose(plain, own, atol=1e-7)
    monkeypatch.setitem(detector_table.ODIN, "temperature", 1000.0)
    still = fit_detector("odin", model.method, *data, 3).knownness(data[0])
    assert (stepped > still).float().mean() > 0.95  # the step goes towards the predicted class


@real
def test_mahalanobis_with_the_identity_at_the_vertices_is_the_distance():
    """Centres exactly at v_j and Σ = n·I: half the squared distance over n."""
    settings = settings_for("dsc", {"head": "none", "simplex": "truncated"})
    method = build_method("dsc", "small", (1, 8, 8), 3, settings).eval()
    d = method.encoder.features
    steps = torch.cat([torch.eye(d), -torch.eye(d)]) * d**0.5
    vertices = method.simplex.centres(torch.arange(3))
    rows = (vertices[:, None] + steps).reshape(-1, d)
    labels = torch.arange(3).repeat_interleave(2 * d)
    detector = restore_detector("mahalanobis", method, rows, labels, 3, True)
    images = strange()
    distance = inference.scores(method, images, "distance")[1]["distance"]
    found = detector.knownness(images)
    assert torch.allclose(found, -(distance**2) / (2 * len(rows)), rtol=1e-5)
    assert torch.equal(found.argsort(), distance.argsort())


@real
def test_mahalanobis_of_collapsed_classes():
    """Float32 leaves nothing of Σ⁻¹ here; against NumPy in float64."""
    method = build_method("dsc", "small", (1, 8, 8), 3).eval()
    d, random = method.encoder.features, np.random.default_rng(0)
    labels = np.arange(900) % 3
    means, few = random.normal(size=(3, d)), random.normal(size=(4, d))
    rows = means[labels] + random.normal(size=(900, 4)) @ few + 1e-3 * random.normal(size=(900, d))
    rows = torch.from_numpy(rows).float()
    detector = restore_detector("mahalanobis", method, rows, torch.from_numpy(labels), 3, True)
    x = rows.double().numpy()
    mu = np.stack([x[labels == j].mean(0) for j in range(3)])
    inverse = np.linalg.inv((x - mu[labels]).T @ (x - mu[labels]) + 1e-6 * np.eye(d))
    apart = x[:50, None] - mu
    expected = 0.5 * np.einsum("njd,de,nje->nj", apart, inverse, apart).min(1)
    found = detectors._strangeness("mahalanobis", detector.inner, rows[:50])
    assert np.allclose(found.numpy(), expected, rtol=1e-3)


@real
def test_gmm_against_scipy(models):
    net = models["softmax"].method
    random, d = np.random.default_rng(0), net.encoder.features
    labels = np.array([0] * 400 + [1] * 300 + [2] * 200)
    rows = 0.1 * random.normal(size=(900, d)) * (1 + labels[:, None]) + np.eye(3, d)[labels]
    rows = torch.from_numpy(rows).float()
    detector = restore_detector("gmm", net, rows, torch.from_numpy(labels), 3, True)
    x = rows.double().numpy()
    parts = []
    for j in range(3):
        own = x[labels == j]
        spread = np.cov(own.T, bias=True) + 1e-6 * np.eye(d)
        parts.append(np.log(len(own) / 900) + multivariate_normal(own.mean(0), spread).logpdf(x))
    found = detectors._strangeness("gmm", detector.inner, rows)
    assert np.allclose(-found.numpy(), np.logaddexp.reduce(parts), rtol=1e-6)


@real
@pytest.mark.parametrize("method", ["softmax", "dsc"])
def test_vim_react_scale_and_gradnorm_against_numpy(method, models):
    net = models[method].method
    head = linear_head(net)
    w, b = head.weight.numpy(), head.bias.numpy()
    # Features of a spread that ViM, which is float32 within, can tell apart.
    random, d = np.random.default_rng(0), w.shape[1]
    spread = np.geomspace(1, 0.1, d)
    seen, new = (np.abs(random.normal(size=(n, d))) * spread for n in (600, 30))
    rows, labels = torch.from_numpy(seen).float(), torch.arange(600) % 3
    seen = rows.double().numpy()

    def energy(f):
        return np.log(np.exp(f @ w.T + b).sum(1))

    origin = -np.linalg.pinv(w) @ b
    _, directions = np.linalg.eigh((seen - origin).T @ (seen - origin))
    least = directions[:, : seen.shape[1] - seen.shape[1] // 2]
    residual = [np.linalg.norm((f - origin) @ least, axis=1) for f in (seen, new)]
    alpha = (seen @ w.T + b).max(1).mean() / residual[0].mean()
    p = np.exp(new @ w.T + b - energy(new)[:, None])
    largest = np.sort(new, axis=1)[:, int(np.round(0.65 * d)) :]
    expected = {
        "scale": energy(new * np.exp(new.sum(1) / largest.sum(1))[:, None]),
        "vim": energy(new) - alpha * residual[1],
        "react": energy(np.minimum(new, np.percentile(seen, 90))),
        "gradnorm": np.abs(new).sum(1) * np.abs(p - 1 / 3).sum(1),
    }
    for name, values in expected.items():
        kept = (rows, labels) if DETECTORS[name].fitted else (rows[:0, :0], labels[:0])
        inner = restore_detector(name, net, *kept, 3, True).inner
        found = -detectors._strangeness(name, inner, torch.from_numpy(new)).numpy()
        assert np.allclose(found, values, rtol=1e-4, atol=1e-4), name


@real
@pytest.mark.parametrize("score", ["knn", "vim", "mahalanobis", "odin", "react"])
def test_the_command_line_with_the_real_library(score, tmp_path, capsys):
    out = str(tmp_path / "run")
    words = ["train", "digits", "--known", "0,1,2,3", "--epochs", "2", "--out", out]
    assert run([*words, "--score", score]) == 0
    assert run(["evaluate", out, "digits", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["auroc_by_score"]) == {"distance", "cosine", "dot", score}
    assert record["known_kept"] > 0.8
    assert run(["predict", out, "digits", "--json"]) == 0
    assert f'"{score}": ' in capsys.readouterr().out
    if score == "vim":
        words = ["train", "digits", "--out", str(tmp_path / "no"), "--set", "head=dam"]
        assert run([*words, "--score", score]) == 1
        assert "W f + b" in capsys.readouterr().err
        assert not (tmp_path / "no").exists()


@real
def test_vectors_and_the_estimator_with_the_real_library(tmp_path):
    X, y = toys.vectors(120)
    for name in ("knn", "odin", "vim"):
        classifier = OpenSetClassifier(epochs=5, knownness=name, keep=0.9, random_state=0)
        classifier.fit(X, y)
        scores = classifier.score_samples(X)
        assert scores.mean() > classifier.score_samples(X[::-1] * 0 + 30).mean() or name == "odin"
        classifier.save(tmp_path / name)
        again = OpenSetClassifier.load(tmp_path / name)
        assert np.array_equal(again.score_samples(X), scores)
        alone = np.concatenate([again.score_samples(X[i : i + 1]) for i in range(5)])
        assert np.allclose(alone, scores[:5], rtol=1e-4, atol=1e-5)


@real
def test_every_row_names_a_class_of_the_library():
    for row in DETECTORS.values():
        assert not row.kind or row.kind in pytorch_ood.detector.__all__
