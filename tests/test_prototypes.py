"""Anchors, prototypes and reciprocal points: losses and scores against loops."""

import dataclasses
import math

import numpy as np
import oracles
import pytest
import torch
import toys

from deepsimplex import inference
from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.methods import METHODS, build_method
from deepsimplex.methods.arpl_cs import ARPLCSSettings
from deepsimplex.methods.base import Batch
from deepsimplex.methods.prototypes import (
    CACSettings,
    GCPLSettings,
    ReciprocalSettings,
    adversarial_logits,
    adversarial_loss,
    anchor_loss,
    point_distances,
    prototype_loss,
    reciprocal_logits,
    reciprocal_loss,
    rejection,
)


def made(classes=4, dim=5, count=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    points = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    return features, torch.arange(count) % classes, points


def lists(features, labels, points):
    return features.numpy(), labels.tolist(), points.numpy()


def test_losses_against_loops():
    features, labels, points = made()
    arrays = lists(features, labels, points)
    radius = torch.tensor(0.3, dtype=torch.float64)
    value = prototype_loss(features, labels, points, 0.7, 0.2)
    assert float(value) == pytest.approx(oracles.gcpl(*arrays, 0.7, 0.2), rel=1e-12)
    value = reciprocal_loss(features, labels, points, radius, 0.7, 0.2)
    assert float(value) == pytest.approx(oracles.rpl(*arrays, 0.3, 0.7, 0.2), rel=1e-12)
    # With R = 2 the hinge is off for some images and on for others.
    for r in (0.3, 2.0):
        value = adversarial_loss(
            features, labels, points, torch.tensor(r, dtype=torch.float64), 0.7, 0.2
        )
        assert float(value) == pytest.approx(oracles.arpl(*arrays, r, 0.7, 0.2), rel=1e-12)
    logits, labels, anchors = 5 * made(4, 4)[0], labels, 10 * torch.eye(4, dtype=torch.float64)
    value = anchor_loss(logits, labels, anchors, 0.1)
    expected = oracles.cac(*lists(logits, labels, anchors), 0.1)
    assert float(value) == pytest.approx(expected, rel=1e-12)


def outputs_of(method, count=20):
    generator = torch.Generator().manual_seed(3)
    return 2 * torch.randn(count, method.encoder.features, generator=generator).double()


def test_scores_against_loops():
    cac = build_method("cac", "mlp", (6,), 4)
    z = 4 * made(4, 4, 20)[0]
    cac.centres.copy_(made(4, 4, seed=5)[2] + 10 * torch.eye(4))
    gamma = oracles.cac_rejection(z.numpy(), cac.centres.double().numpy())
    assert np.allclose(cac.class_scores(z, "rejection"), -gamma, rtol=1e-12)
    assert np.allclose(cac.knownness(z, "rejection"), -gamma.min(1), rtol=1e-12)
    centres = cac.centres.double().numpy()
    far = np.array([[oracles.squared_distance(a, c) ** 0.5 for c in centres] for a in z.numpy()])
    assert np.allclose(cac.class_scores(z, "distance"), -far, rtol=1e-12)
    assert np.allclose(cac.knownness(z, "distance"), -far.min(1), rtol=1e-12)
    gcpl = build_method("gcpl", "mlp", (6,), 4, GCPLSettings(temperature=0.5)).double()
    f = outputs_of(gcpl)
    logits = {"gcpl": lambda f, p: -oracles.mean_squares(f, p), "rpl": oracles.mean_squares}
    logits["arpl"] = lambda f, p: oracles.mean_squares(f, p) - f @ p.T
    for name, plain in (("gcpl", "distance"), ("rpl", "max_logit"), ("arpl", "max_logit")):
        settings = gcpl.settings if name == "gcpl" else ReciprocalSettings(name, 0.5)
        method = build_method(name, "mlp", (6,), 4, settings).double()
        z = logits[name](f.numpy(), method.points.detach().numpy())
        assert set(method.scores) == {plain, "max_probability"}
        with torch.no_grad():
            assert np.allclose(method.class_scores(f, plain), z, rtol=1e-12)
            assert np.allclose(method.knownness(f, plain), z.max(1), rtol=1e-12)
            log_p = 2 * z - np.log(np.exp(2 * z).sum(1, keepdims=True))
            assert np.allclose(method.knownness(f, "max_probability"), log_p.max(1), atol=1e-12)


def test_arpl_cs_scores_as_arpl():
    images = torch.randint(0, 255, (20, 1, 8, 8), dtype=torch.uint8)
    method = build_method("arpl-cs", "small", (1, 8, 8), 4, ARPLCSSettings(0.5)).eval()
    with torch.no_grad():
        method.points.mul_(10)
        f = method(images).double()
        points = method.points.detach().double().numpy()
        z = oracles.mean_squares(f.numpy(), points) - f.numpy() @ points.T
        assert np.allclose(method.class_scores(f, "max_logit"), z, rtol=1e-12)
        assert np.allclose(method.knownness(f, "max_logit"), z.max(1), rtol=1e-12)
        log_p = 2 * z - np.log(np.exp(2 * z).sum(1, keepdims=True))
        assert np.allclose(method.class_scores(f, "max_probability"), log_p, atol=1e-12)
        assert np.allclose(method.knownness(f, "max_probability"), log_p.max(1), atol=1e-12)


# CAC


def test_at_its_anchor_an_image_is_wholly_known():
    classes, alpha = 5, 10.0
    anchors = alpha * torch.eye(classes, dtype=torch.float64)
    logits = anchors.clone().requires_grad_()
    loss = anchor_loss(logits, torch.arange(classes), anchors, 0.1)
    away = alpha * math.sqrt(2)
    loss.backward()
    expected = math.log1p((classes - 1) * math.exp(-away))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9)
    assert logits.grad.isfinite().all()
    cac = build_method("cac", "mlp", (6,), classes)
    assert torch.equal(cac.knownness(anchors, "rejection"), torch.zeros(classes).double())
    assert (cac.class_scores(anchors, "rejection").argmax(1) == torch.arange(classes)).all()


def test_rejection_does_not_round_to_ties():
    """d = (1, 60) and (1, 61): softmin rounds to 1 in float64, what it lacks does not."""
    far = rejection(torch.tensor([[1.0, 60.0], [1.0, 61.0]], dtype=torch.float64))
    wanted = [math.exp(-59), math.exp(-60)]
    assert far[:, 0].tolist() == pytest.approx(wanted, rel=1e-9, abs=0)
    random = 30 * torch.rand(200, 6, dtype=torch.float64)
    assert torch.equal(rejection(random).argmin(1), random.argmin(1))


def test_cac_ends_its_training_around_the_means_of_the_correct():
    images, labels = toys.tensors(*toys.pictures(90))
    method = fit_model(images, labels, list("abc"), toys.quick("cac", 15), device="cpu").method
    with torch.no_grad():
        logits = method(images)
    right = logits.argmax(1) == labels
    means = torch.stack([logits[right & (labels == c)].mean(0) for c in range(3)])
    assert torch.allclose(method.centres, means, atol=1e-5)
    assert not torch.allclose(method.centres, 10 * torch.eye(3), atol=0.1)


def test_float32_logits_do_not_tie():
    """Far from every centre, or from the border, single precision would round scores alike."""
    method = build_method("cac", "mlp", (6,), 3)
    rows = torch.tensor([[10.0, 0.0, 0.0], [10.0, -30.0, -30.0], [10.0, -40.0, -40.0]])
    known = method.knownness(rows, "rejection")
    assert known.dtype == torch.float64
    assert known.min() < known.max() <= 0
    softmax = build_method("softmax", "mlp", (6,), 3)
    near = torch.tensor([[25.0, 0.0, 0.0], [30.0, 0.0, 0.0]])
    for score in ("max_probability", "neg_entropy", "energy", "max_logit"):
        low, high = softmax.knownness(near, score).tolist()
        assert low < high, score


@pytest.mark.parametrize("name", ["rpl", "arpl", "arpl-cs"])
def test_the_radius_of_open_space_begins_at_0(name):
    assert not build_method(name, "small", (1, 8, 8), 3).radius.any()


def test_simplex_vertices_as_anchors_give_dsc_unsquared():
    features, labels, _ = made(5, 4)
    centres = oracles.simplex_centres(5, 4, "regular")
    anchors = torch.from_numpy(centres)
    with_term = anchor_loss(features, labels, anchors, 1.0)
    without = anchor_loss(features, labels, anchors, 0.0)
    own = oracles.own_squared(features.numpy(), labels.tolist(), centres)
    assert float(with_term - without) == pytest.approx(np.mean(np.sqrt(own)), rel=1e-9)


def test_centres_are_means_of_correctly_classified_logits():
    torch.manual_seed(1)  # weights that get some right and some wrong
    method = build_method("cac", "mlp", (6,), 3).eval()
    vectors, labels = (torch.from_numpy(a) for a in toys.vectors(30))
    labels = labels.clone()
    labels[labels == 2] = 0  # nothing is left of class 2
    with torch.no_grad():
        method.head.weight.mul_(20)
        method.settle(lambda: [Batch(v, y, None, 0) for v, y in zip_halves(vectors, labels)])
        logits = method(vectors).double()
    correct = logits.argmax(1) == labels  # anchors of one length: nearest = largest logit
    assert 0 < correct.sum() < 30
    for j in range(3):
        mine = correct & (labels == j)
        expected = logits[mine].mean(0) if mine.any() else 10 * torch.eye(3)[j].double()
        assert torch.allclose(method.centres[j].double(), expected, rtol=1e-5)
    assert torch.equal(method.centres[2], 10 * torch.eye(3)[2])


def zip_halves(vectors, labels):
    return zip(vectors.split(20), labels.split(20), strict=True)


# GCPL


def test_prototypes_of_one_length_are_a_linear_softmax():
    features, labels, points = made()
    points = 3 * points / points.norm(dim=1, keepdim=True)
    value = prototype_loss(features, labels, points, 0.7, 0.0)
    weights = 2 * points / (0.7 * features.shape[1])
    expected = torch.nn.functional.cross_entropy(features @ weights.T, labels)
    assert float(value) == pytest.approx(float(expected), rel=1e-12)


def test_the_prototype_term_on_simplex_vertices_is_eq4():
    features, labels, _ = made(5, 4)
    centres = oracles.simplex_centres(5, 4, "regular")
    points = torch.from_numpy(centres)
    term = prototype_loss(features, labels, points, 1.0, 1.0)
    term = term - prototype_loss(features, labels, points, 1.0, 0.0)
    eq4 = oracles.eq4(features.numpy(), labels.tolist(), centres)
    assert float(term) == pytest.approx(eq4 / (2 * 4), rel=1e-9)


def own_distance(weight):
    """Mean D_y of a trained net."""
    images, labels = toys.tensors(*toys.pictures(60))
    plan = toys.quick("gcpl", 10, settings={"weight": weight})
    plan = dataclasses.replace(plan, learning_rate=METHODS["gcpl"].rate)
    method = fit_model(images, labels, list("abc"), plan, device="cpu").method
    features = inference.outputs(method, images)
    with torch.no_grad():
        distances = point_distances(features, method.points) / features.shape[1]
    return float(distances.gather(1, labels[:, None]).mean())


def test_the_prototype_term_draws_images_to_their_prototype():
    assert own_distance(1.0) < 0.7 * own_distance(0.0)


# RPL and ARPL


def test_without_the_bound_features_run_away():
    features, labels, points = made(3, 4, 6)
    radius = torch.zeros((), dtype=torch.float64)

    def lengths(weight):
        """Mean ‖f‖ after 300 and 600 steps of descent by the features themselves."""
        f = features.clone().requires_grad_()
        for step in range(600):
            loss = reciprocal_loss(f, labels, points, radius, 1.0, weight)
            f = (f - torch.autograd.grad(loss, f)[0]).detach().requires_grad_()
            if step == 299:
                halfway = float(f.detach().norm(dim=1).mean())
        return halfway, float(f.detach().norm(dim=1).mean())

    halfway, end = lengths(0.0)
    assert end > 1.1 * halfway
    halfway, end = lengths(0.1)
    assert end == pytest.approx(halfway, rel=0.01)


def test_an_image_at_a_reciprocal_point_is_least_like_its_class():
    points = made()[2]
    logits = reciprocal_logits(points, points)
    assert (logits.argmin(1) == torch.arange(4)).all()
    assert (logits.diagonal() == 0).all()


def test_arpl_without_its_dot_products_is_rpl():
    features, _, points = made()
    dots = features @ points.T
    assert torch.allclose(
        adversarial_logits(features, points) + dots, reciprocal_logits(features, points)
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CACSettings(anchor=0.0), "anchor above 0"),
        (lambda: CACSettings(weight=-1.0), "weight of 0 or more"),
        (lambda: GCPLSettings(temperature=0.0), "temperature above 0"),
        (lambda: GCPLSettings(weight=math.nan), "weight of 0 or more"),
        (lambda: GCPLSettings(weight=True), "weight of 0 or more"),
        (lambda: ReciprocalSettings(loss="crpl"), "loss among rpl, arpl"),
        (lambda: ReciprocalSettings(weight="large"), "weight of 0 or more"),
    ],
)
def test_bad_settings(make, words):
    with pytest.raises(DeepSimplexError, match=words):
        make()
