"""Rows that paint images: C2AE, CROSR, GDFR."""

import math

import numpy as np
import oracles
import pytest
import torch
import toys

from deepsimplex import engine, inference
from deepsimplex.backbones import build_backbone
from deepsimplex.batches import TrainingSet
from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.frozen import compute_features
from deepsimplex.methods import build_method
from deepsimplex.methods.base import Batch, Encoder
from deepsimplex.methods.c2ae import C2AESettings
from deepsimplex.methods.crosr import CROSRSettings
from deepsimplex.methods.gdfr import GDFRSettings
from deepsimplex.methods.openmax import OpenMax, OpenMaxSettings, all_distances
from deepsimplex.methods.softmax import Softmax, SoftmaxSettings
from deepsimplex.methods.turned import turned
from deepsimplex.methods.weibull import openmax_logits, tail_probability, unknown_odds


def fresh(name, settings=None, channels=1):
    torch.manual_seed(0)
    method = build_method(name, "small", (channels, 8, 8), 3, settings).double().eval()
    images = toys.tensors(*toys.pictures(90, channels=channels))[0]
    method.encoder.normalise.fit(images)
    return method


def batch(channels=1):
    return Batch(*toys.tensors(*toys.pictures(12, channels=channels)), None, torch.tensor(0))


def array(tensor):
    return tensor.detach().numpy()


class Snapshots:
    """A keeper that remembers the state after each stage."""

    def __init__(self):
        self.kept = []

    def load(self):
        return None

    def save(self, checkpoint):
        self.kept.append(checkpoint.tensors)

    def log(self, record):
        pass

    def due(self):
        return False

    def stopping(self):
        return None


def painted_by_loops(method, features, told):
    layers = [(array(m.weight), array(m.bias)) for m in (method.scale, method.shift)]
    codes = [oracles.c2ae_code(f, j, *layers) for f, j in zip(array(features), told, strict=True)]
    return array(method.decoder(torch.from_numpy(np.array(codes))))


def test_c2ae_losses_and_errors():
    method, sample = fresh("c2ae", C2AESettings(match=0.7)), batch()
    labels = sample.labels.tolist()
    x, features = array(method.encoder.normalise(sample.images)), method.encoder(sample.images)
    torch.manual_seed(4)
    order = torch.rand(12).argsort().tolist()
    assert any(labels[k] == labels[i] for i, k in enumerate(order))  # some weigh nothing
    own = painted_by_loops(method, features, labels)
    wrong = painted_by_loops(method, features, [labels[k] for k in order])
    torch.manual_seed(4)
    value = float(method.decoding_loss(sample).detach())
    assert value == pytest.approx(oracles.c2ae_loss(x, labels, order, own, wrong, 0.7), rel=1e-9)
    outputs = method(sample.images)
    for j in range(3):
        expected = np.abs(x - painted_by_loops(method, features, [j] * 12)).mean((1, 2, 3))
        assert np.allclose(array(outputs[:, 3 + j]), expected)
    known = array(method.knownness(outputs, "reconstruction"))
    assert np.allclose(known, -array(outputs)[:, 3:].min(1))
    logits = array(method.head(features))
    assert np.allclose(array(method.class_scores(outputs, "reconstruction")), logits)


def test_c2ae_of_one_class_has_no_wrong_targets():
    method, sample = fresh("c2ae"), batch()
    same = Batch(sample.images, torch.ones_like(sample.labels), None, sample.step)
    errors = method(sample.images)[:, 3 + 1]
    loss = method.decoding_loss(same).detach()
    assert float(loss) == pytest.approx(0.9 * float(errors.detach().mean()), rel=1e-9)


def test_c2ae_without_conditions_paints_the_same_for_all():
    method = fresh("c2ae")
    with torch.no_grad():
        for layer, value in ((method.scale, 1.0), (method.shift, 0.0)):
            layer.weight.zero_()
            layer.bias.fill_(value)
        errors = method(batch().images)[:, 3:]
        plain = method.decoder(method.encoder(batch().images))
    assert torch.equal(errors, errors[:, :1].expand(-1, 3))
    x = method.encoder.normalise(batch().images)
    assert torch.allclose(errors[:, 0], (x - plain).abs().mean((1, 2, 3)))


def test_c2ae_decodes_what_stays_frozen_and_best_by_the_true_label():
    images, labels = toys.tensors(*toys.pictures(90))
    torch.manual_seed(0)
    method = build_method("c2ae", "small", (1, 8, 8), 3)
    method.encoder.normalise.fit(images)
    keeper = Snapshots()
    plan = toys.quick("c2ae", 20)
    engine.train(method, TrainingSet(images, labels), plan, device="cpu", keeper=keeper)
    between, end = keeper.kept
    for name, tensor in between.items():
        moved = name.startswith(("method.scale", "method.shift", "method.decoder"))
        assert torch.equal(tensor, end[name]) != moved or "num_batches" in name, name
    errors = inference.outputs(method, images)[:, 3:]
    by_label = torch.stack([errors[labels == y].mean(0) for y in range(3)])
    assert (by_label.diag()[:, None] <= by_label).all()
    assert by_label.argmin(1).tolist() == [0, 1, 2]


def test_crosr_loss_and_score():
    method, sample = fresh("crosr", CROSRSettings(reconstruction=0.4, tail=5)), batch()
    labels = sample.labels.tolist()
    outputs = method(sample.images)
    logits, latents = array(outputs[:, :3]), array(outputs[:, 3:])
    features = array(method.encoder(sample.images))
    weight, bias = array(method.lateral.weight), array(method.lateral.bias)
    assert np.allclose(latents, np.maximum(features @ weight.T + bias, 0))
    x = array(method.encoder.normalise(sample.images))
    painted = array(method.decoder(outputs[:, 3:]))
    expected = oracles.crosr_loss(logits, labels, x, painted, 0.4)
    assert float(method.loss(sample).detach()) == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():  # a head that is right about most
        towards = 50 * (class_means(features, labels) - features.mean(0))
        method.head.weight.copy_(torch.from_numpy(towards))
        method.head.bias.copy_(torch.from_numpy(-towards @ features.mean(0)))
        method.fit_detector(lambda: iter([sample]))
        outputs = method(sample.images)
    logits = array(outputs[:, :3])
    unit = oracles.crosr_unit(logits, latents)
    assert float(method.unit) == pytest.approx(unit, rel=1e-9)
    far = oracles.crosr_distances(logits, latents, labels, unit, 3)
    w = tail_probability(torch.from_numpy(far), method.tails)
    assert float(w.amax()) > 0
    known = unknown_odds(openmax_logits(outputs[:, :3], w, 10))
    assert np.allclose(array(method.knownness(outputs, "openmax")), array(known), rtol=1e-4)
    assert np.allclose(array(method.knownness(outputs, "max_logit")), logits.max(1))


def test_crosr_tails_and_probabilities_against_loops():
    """An image is its row of [y, z]: two of three logits are re-weighted, tails hold three."""
    torch.manual_seed(0)
    settings = CROSRSettings(latent=2, tail=3, alpha=2)
    method = build_method("crosr", "small", (1, 8, 8), 3, settings).double()
    method.forward = lambda images: images
    random, labels = np.random.default_rng(0), np.arange(90) % 3
    logits = random.normal(size=(90, 3)) + 2 * np.eye(3)[labels]
    latents = 0.1 * random.gamma(2, size=(90, 2)) + 0.1 * labels[:, None]
    rows = torch.from_numpy(np.concatenate([logits, latents], 1))
    sample = Batch(rows, torch.from_numpy(labels), None, torch.tensor(0))
    method.fit_detector(lambda: iter([sample]))
    unit = oracles.crosr_unit(logits, latents)
    assert float(method.unit) == pytest.approx(unit, rel=1e-9)
    right = logits.argmax(1) == labels
    assert 60 < right.sum() < 90
    far = oracles.crosr_distances(logits, latents, labels.tolist(), unit, 3)
    for j, (tau, scale, shape) in enumerate(method.tails.tolist()):
        largest = sorted(far[right & (labels == j), j])[-3:]
        assert tau == pytest.approx(largest[0], rel=1e-5)  # the means are float32
        best = oracles.weibull_likelihood(largest, tau, scale, shape)
        for by in (0.02, -0.02):
            moved = scale + by * scale / shape
            assert oracles.weibull_likelihood(largest, tau, scale, shape * (1 + by)) < best
            assert oracles.weibull_likelihood(largest, tau, moved, shape) < best
    new = random.normal(size=(30, 3)) + 3 * np.eye(3)[np.arange(30) % 3]
    painted = 0.4 * random.random((30, 2))
    outputs = np.concatenate([new, painted], 1)
    # Means of the training rows, distances of the new ones.
    means = [
        np.concatenate([logits, unit * latents], 1)[right & (labels == j)].mean(0) for j in range(3)
    ]
    known = array(method.knownness(torch.from_numpy(outputs), "openmax"))
    some = 0
    for row, z, value in zip(np.concatenate([new, unit * painted], 1), new, known, strict=True):
        d = [math.sqrt(oracles.squared_distance(row, mean)) for mean in means]
        w = [
            oracles.weibull_cdf(x, *tail) for x, tail in zip(d, method.tails.tolist(), strict=True)
        ]
        some += 0.01 < w[int(np.argmax(z))] < 0.99
        p = oracles.openmax(z, w, 2)[0]
        assert value == pytest.approx(math.log((1 - p) / p), abs=1e-3)
    assert some > 3  # not all are wholly in or out


def class_means(features, labels):
    return np.array([features[np.array(labels) == y].mean(0) for y in range(3)])


def test_crosr_without_latents_is_openmax():
    images, labels = toys.tensors(*toys.pictures(90))
    model = fit_model(images, labels, list("abc"), toys.quick("crosr", 15), device="cpu")
    crosr = model.method
    plain = OpenMax(crosr.encoder, 3, OpenMaxSettings())
    plain.head.load_state_dict(crosr.head.state_dict())

    def passes():
        return iter([Batch(images, labels, None, torch.tensor(0))])

    with torch.no_grad():
        plain.fit_tails(passes)
        full = crosr.knownness(crosr(images), "openmax")
        crosr.unit.zero_()
        crosr.fit_tails(passes)
        assert torch.equal(crosr.tails, plain.tails)
        alone = crosr.knownness(crosr(images), "openmax")
        assert torch.equal(alone, plain.knownness(plain(images), "openmax"))
        assert not torch.allclose(alone, full)


def test_crosr_ends_its_training_with_tails_that_hold_most_of_the_knowns():
    images, labels = toys.tensors(*toys.pictures(120))
    method = fit_model(images, labels, list("abc"), toys.quick("crosr", 15), device="cpu").method
    assert float(method.unit) not in (0, 1)
    with torch.no_grad():
        joint = method._joint(method(images))
    w = tail_probability(all_distances(joint, method.means.double(), "euclid"), method.tails)
    own = w.gather(1, labels[:, None])
    assert own.median() < 0.1
    assert (w.sum(1, keepdim=True) - own > 1.9).all()


def test_crosr_paints_better_than_the_mean_image():
    images, labels = toys.tensors(*toys.pictures(90))
    method = fit_model(images, labels, list("abc"), toys.quick("crosr", 15), device="cpu").method
    with torch.no_grad():
        x = method.encoder.normalise(images)
        error = (x - method.decoder(method(images)[:, 3:])).square().mean()
    assert error < 0.5 * x.var()


def test_crosr_with_dead_latents_is_finite():
    method, sample = fresh("crosr"), batch()
    with torch.no_grad():
        method.lateral.bias.fill_(-1e6)
        method.fit_detector(lambda: iter([sample]))
        assert float(method.unit) == 0
        assert method.knownness(method(sample.images), "openmax").isfinite().all()


def test_gdfr_losses():
    method, sample = fresh("gdfr", GDFRSettings(turn=0.3), channels=2), batch(channels=2)
    net, autoencoder = method.encoder.backbone.net, method.encoder.backbone.autoencoder
    torch.manual_seed(6)
    moved, turn = turned(sample.images)
    assert len(turn.unique()) > 1

    def features(images):
        x = method.encoder.normalise(images)
        return net(torch.cat([x, autoencoder(x)], 1))

    logits, turns = method.head(features(sample.images)), method.turn_head(features(moved))
    arrays = array(logits), sample.labels.tolist(), array(turns), turn.tolist()
    torch.manual_seed(6)
    value = float(method.loss(sample).detach())
    assert value == pytest.approx(oracles.gdfr_loss(*arrays, 0.3), rel=1e-6)
    x = method.encoder.normalise(sample.images)
    expected = ((array(x) - array(autoencoder(x))) ** 2).mean()
    assert float(method.pixel_loss(sample).detach()) == pytest.approx(expected, rel=1e-6)
    p = np.exp(arrays[0]) / np.exp(arrays[0]).sum(1, keepdims=True)
    outputs = method(sample.images)
    for score, known in (("max_logit", arrays[0]), ("max_probability", np.log(p))):
        assert np.allclose(array(method.class_scores(outputs, score)), known)
        assert np.allclose(array(method.knownness(outputs, score)), known.max(1))


@pytest.mark.parametrize("same", [False, True])
def test_gdfr_whose_reconstructions_say_nothing_is_softmax(same):
    """A = 0, or A(x) = x: the first layer's two halves are one."""
    method, sample = fresh("gdfr", GDFRSettings(turn=0.0), channels=2), batch(channels=2)
    generator = method.encoder.backbone.autoencoder[1]
    if same:
        method.encoder.backbone.autoencoder = torch.nn.Identity()
    else:
        with torch.no_grad():
            generator.paint.weight.zero_()
            generator.paint.bias.zero_()
    net = build_backbone("small", (2, 8, 8)).double()
    weights = method.encoder.backbone.net.state_dict()
    name = next(n for n, w in weights.items() if w.ndim == 4)
    assert weights[name].shape[1] == 4
    halves = weights[name].split(2, 1)
    net.load_state_dict({**weights, name: sum(halves) if same else halves[0]})
    softmax = Softmax(Encoder(net, net.features, (2, 8, 8)), 3, SoftmaxSettings()).double().eval()
    softmax.encoder.normalise.load_state_dict(method.encoder.normalise.state_dict())
    softmax.head.load_state_dict(method.head.state_dict())
    assert torch.allclose(method(sample.images), softmax(sample.images), atol=1e-10)
    ours, theirs = method.loss(sample).detach(), softmax.loss(sample).detach()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def test_gdfr_features_are_those_of_its_encoder():
    method, sample = fresh("gdfr").float(), batch()
    features = compute_features(method, sample.images)  # what detectors see
    assert method.encoder.shape == (1, 8, 8)
    assert torch.allclose(method.head(features), method(sample.images), atol=1e-5)


@pytest.mark.parametrize("name", ["c2ae", "crosr", "gdfr"])
@pytest.mark.parametrize(("net", "shape"), [("mlp", (6,)), ("small", (1, 6, 6))])
def test_there_must_be_pictures(name, net, shape):
    with pytest.raises(DeepSimplexError, match="images of 8×8 or more"):
        build_method(name, net, shape, 3)


def test_only_square_images_turn():
    with pytest.raises(DeepSimplexError, match="square images"):
        build_method("gdfr", "small", (1, 8, 10), 3)


@pytest.mark.parametrize("name", ["c2ae", "crosr", "gdfr"])
def test_features_of_a_frozen_backbone_are_refused(name):
    images, labels = toys.tensors(*toys.pictures(20))
    with pytest.raises(DeepSimplexError, match="images"):
        fit_model(images, labels, list("abc"), toys.quick(name, 1), device="cpu", freeze=True)


@pytest.mark.parametrize(
    ("settings", "bad", "words"),
    [
        (C2AESettings, {"match": 1.0}, "match between"),
        (C2AESettings, {"learning_rate": 0.0}, "learning_rate between"),
        (CROSRSettings, {"latent": 0}, "latent as a whole number"),
        (CROSRSettings, {"tail": 1}, "tail as a whole number"),
        (CROSRSettings, {"alpha": True}, "alpha as a whole number"),
        (CROSRSettings, {"reconstruction": 0.0}, "reconstruction above"),
        (GDFRSettings, {"turn": -1.0}, "turn of 0"),
        (GDFRSettings, {"latent": 2.5}, "latent as a whole number"),
        (GDFRSettings, {"learning_rate": "fast"}, "learning_rate between"),
    ],
)
def test_bad_settings(settings, bad, words):
    with pytest.raises(DeepSimplexError, match=words):
        settings(**bad)
