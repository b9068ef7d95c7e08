"""Margins and spreads against slow loops, pytorch-metric-learning, and what must hold of them."""

import dataclasses
import math

import numpy as np
import oracles
import pytest
import torch
import toys
from torch import nn

from deepsimplex import layers
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import build_method, settings_for
from deepsimplex.methods.base import Batch
from deepsimplex.methods.margins import (
    Margin,
    MarginSettings,
    Sphere,
    SphereSettings,
    Spread,
    SpreadSettings,
    annealing,
    beyond,
    closeness,
    cosines,
    energy,
    psi,
    regularity,
)

CLASSES, WIDTH = 4, 3
ANGLES = torch.linspace(0, math.pi, 2001, dtype=torch.float64)


class Given(nn.Module):
    """An encoder that hands its input on."""

    features = WIDTH

    def forward(self, images):
        return images


def method(kind, settings):
    torch.manual_seed(0)
    return kind(Given(), CLASSES, settings).double()


def batch(step=0, seed=0, count=40):
    generator = torch.Generator().manual_seed(seed)
    features = 2 * torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return Batch(features, torch.arange(count) % CLASSES, None, step)


def arrays(net, given):
    weight = next(p for p in net.parameters() if p.shape == (CLASSES, WIDTH))
    return given.images.numpy(), given.labels.tolist(), weight.detach().numpy()


# Values


@pytest.mark.parametrize(
    ("kind", "target"), [("cosine", oracles.cosface_target), ("angle", oracles.arcface_target)]
)
def test_cosface_and_arcface_against_loops(kind, target):
    net, given = method(Margin, MarginSettings(kind, 0.6, 7.0)), batch()
    features, labels, weight = arrays(net, given)
    beyond_pi = [
        oracles.angle(f, weight[y]) + 0.6 > math.pi for f, y in zip(features, labels, strict=True)
    ]
    assert any(beyond_pi)  # both branches are seen
    assert not all(beyond_pi)
    expected = oracles.margin_softmax(features, labels, weight, lambda t: target(t, 0.6), 7.0)
    assert float(net.loss(given).detach()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [0, 100, 10**6])
def test_sphereface_against_loops(m, step):
    net, given = method(Sphere, SphereSettings(m=m)), batch(torch.tensor(step))
    ease = max(5.0, 1000 / (1 + 0.12 * step))
    expected = oracles.margin_softmax(
        *arrays(net, given), lambda t: oracles.sphereface_target(t, m, ease)
    )
    assert float(net.loss(given).detach()) == pytest.approx(expected, rel=1e-6)


def test_uniformface_against_loops():
    net = method(Sphere, SphereSettings(uniform=0.8, rate=0.3))
    plain = method(Sphere, SphereSettings())
    centres = np.zeros((CLASSES, WIDTH))
    for seed in (1, 2):
        given = batch(seed=seed)
        features, labels, _ = arrays(net, given)
        centres = oracles.moved_centres(centres, features, labels, 0.3)
        value = float(net.loss(given).detach() - plain.loss(given).detach())
        assert value == pytest.approx(0.8 * oracles.uniformface_term(centres), rel=1e-9)
        assert np.allclose(net.centres, centres, rtol=1e-12)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_spreads_against_loops(power):
    weight = batch(count=7).images
    rows = weight.numpy()
    assert float(regularity(weight)) == pytest.approx(oracles.regularface_term(rows), rel=1e-9)
    for half in (False, True):
        expected = oracles.hyperspherical_energy(rows, power, half)
        assert float(energy(weight, power, half)) == pytest.approx(expected, rel=1e-9)


def test_spread_adds_its_terms_to_cross_entropy():
    images, labels = toys.tensors(*toys.pictures(12))
    settings = SpreadSettings(regular=0.3, output=0.7, hidden=1.1, power=1)
    torch.manual_seed(0)
    net = build_method("mhe", "small", (1, 8, 8), 3, settings)
    torch.manual_seed(0)
    plain = build_method("softmax", "small", (1, 8, 8), 3)
    head = net.head.weight.detach().numpy()
    hidden = [
        m.weight.detach().flatten(1).numpy()
        for m in net.encoder.modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    ]
    assert len(hidden) > 2
    energies = [oracles.hyperspherical_energy(w, 1, True) for w in hidden]
    expected = 0.3 * oracles.regularface_term(head) + 1.1 * sum(energies) / len(energies)
    expected += 0.7 * oracles.hyperspherical_energy(head, 1)
    given = Batch(images, labels, None, 0)
    value = float(net.loss(given).detach() - plain.loss(given).detach())
    assert value == pytest.approx(expected, rel=1e-4)


def test_scores_know_no_margin():
    outputs = batch().images
    for kind, settings in (
        (Margin, MarginSettings(scale=7.0)),
        (Margin, MarginSettings("angle", scale=7.0)),
        (Sphere, SphereSettings()),
    ):
        net = method(kind, settings)
        features, _, weight = arrays(net, batch())
        cosine = np.array([[math.cos(oracles.angle(f, w)) for w in weight] for f in features])
        scale = 7.0 if kind is Margin else np.linalg.norm(features, axis=1, keepdims=True)
        for score, expected in (("cosine", cosine), ("logit", scale * cosine)):
            assert np.allclose(net.class_scores(outputs, score).detach(), expected)
            assert np.allclose(net.knownness(outputs, score).detach(), expected.max(1))


# Against a library


@pytest.mark.parametrize("name", ["CosFaceLoss", "ArcFaceLoss", "SphereFaceLoss"])
def test_pytorch_metric_learning_agrees(name):
    library = pytest.importorskip("pytorch_metric_learning.losses")
    given = batch()
    if name == "CosFaceLoss":
        net = method(Margin, MarginSettings("cosine", 0.35, 16.0))
        theirs = library.CosFaceLoss(CLASSES, WIDTH, margin=0.35, scale=16.0)
    elif name == "ArcFaceLoss":
        net = method(Margin, MarginSettings("angle", 0.5, 16.0))
        theirs = library.ArcFaceLoss(CLASSES, WIDTH, margin=math.degrees(0.5), scale=16.0)
    else:
        net = method(Sphere, SphereSettings(m=4, start=0.0, floor=0.0))
        theirs = library.SphereFaceLoss(CLASSES, WIDTH, margin=4, scale=1.0)
    theirs.double()
    theirs.W.data.copy_(net.weight.data.T)
    gradients, values = [], []
    for loss, weight in (
        (lambda f: net.loss(Batch(f, given.labels, None, 0)), net.weight),
        (lambda f: theirs(f, given.labels), theirs.W),
    ):
        features = given.images.clone().requires_grad_()
        value = loss(features)
        value.backward()
        values.append(value.detach())
        gradients.append((features.grad, weight.grad))
    assert torch.allclose(*values, rtol=1e-6)
    if name == "ArcFaceLoss":  # theirs is the true gradient, ours the one of the authors' code
        return
    assert torch.allclose(gradients[0][0], gradients[1][0], rtol=1e-4, atol=1e-8)
    assert torch.allclose(gradients[0][1], gradients[1][1].T, rtol=1e-4, atol=1e-8)


def test_pytorch_metric_learnings_regularface_agrees():
    library = pytest.importorskip("pytorch_metric_learning.regularizers")
    weight = batch(count=7).images
    values, gradients = [], []
    for term in (regularity, library.RegularFaceRegularizer()):
        given = weight.clone().requires_grad_()
        value = term(given)
        value.backward()
        values.append(value.detach())
        gradients.append(given.grad)
    assert torch.allclose(*values, rtol=1e-9)
    assert torch.allclose(*gradients, rtol=1e-6, atol=1e-12)


# What must hold


def test_without_margin_they_are_the_normalised_softmax():
    given = batch()
    plain = None
    for settings in (MarginSettings("cosine", 0.0, 9.0), MarginSettings("angle", 0.0, 9.0)):
        net = method(Margin, settings)
        logits = 9 * cosines(given.images, net.weight)
        plain = nn.functional.cross_entropy(logits, given.labels)
        assert float(net.loss(given).detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    net = method(Sphere, SphereSettings(m=1))
    logits = given.images @ nn.functional.normalize(net.weight).T
    plain = nn.functional.cross_entropy(logits, given.labels)
    # λ is float32
    assert float(net.loss(given).detach()) == pytest.approx(float(plain.detach()), rel=1e-6)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_psi_falls_without_a_jump(m):
    values = psi(ANGLES.cos(), m)
    steps = values.diff()
    assert (steps < 1e-12).all()
    assert steps.abs().max() < 1.001 * m * math.pi / 2000
    assert float(values[0]) == pytest.approx(1)
    assert float(values[-1]) == pytest.approx(1 - 2 * m)


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.0])
def test_arcface_target_falls_everywhere(margin):
    cosine = ANGLES.cos()
    assert (beyond(cosine, margin).diff() < 0).all()
    inside = ANGLES[1:-1][ANGLES[1:-1] + margin < math.pi]
    assert torch.allclose(beyond(inside.cos(), margin), (inside + margin).cos(), atol=1e-6)


def test_arcface_has_the_gradient_of_a_fixed_step_back():
    """s(p_j − [j = y]) for every cosine, p with the margin: the margin's size is a constant."""
    given = batch()
    net = method(Margin, MarginSettings("angle", 0.5, 9.0))
    cosine = cosines(given.images, net.weight)
    own = torch.arange(CLASSES) == given.labels[:, None]
    back = torch.where(own, cosine - beyond(cosine, 0.5), 0).detach()
    plain = nn.functional.cross_entropy(9 * (cosine - back), given.labels)
    expected = torch.autograd.grad(plain, net.weight)[0]
    assert torch.allclose(torch.autograd.grad(net.loss(given), net.weight)[0], expected)


def test_arcface_has_a_way_out_where_its_slope_is_0():
    """At θ = π − m to all weights the true gradient would not bring the own one nearer."""
    net = method(Margin, MarginSettings("angle", 0.5, 16.0))
    net.weight.data[:] = torch.eye(WIDTH, dtype=torch.float64)[0]
    angle = math.pi - 0.5
    feature = torch.eye(WIDTH, dtype=torch.float64)[:2].T @ torch.tensor(
        [[math.cos(angle)], [math.sin(angle)]], dtype=torch.float64
    )
    net.loss(Batch(feature.T, torch.tensor([1]), None, 0)).backward()
    towards = -(net.weight.grad @ feature)[:, 0]  # how far a step turns each weight to it
    assert towards[1] > 1
    assert (towards[torch.arange(CLASSES) != 1] < 0).all()


def test_gradients_are_finite_at_the_ends():
    labels = torch.tensor([0, 0, 0])
    for kind, settings in (
        (Margin, MarginSettings()),
        (Margin, MarginSettings("angle", 0.5)),
        (Sphere, SphereSettings(uniform=1.0)),
    ):
        net = method(kind, settings).float()
        own = net.weight.detach()[0]
        features = torch.stack([own, -own, 0 * own]).requires_grad_()
        net.loss(Batch(features, labels, None, 0)).backward()
        assert features.grad.isfinite().all()
        assert net.weight.grad.isfinite().all()


def test_the_margin_is_eased_in_by_their_steps_or_within_half_a_training():
    """Theirs takes 1658 steps, whatever comes after."""
    net, given = method(Sphere, SphereSettings()), batch(torch.tensor(0))

    def loss(step, total):
        at = dataclasses.replace(given, step=torch.tensor(step), total=total)
        return float(net.loss(at).detach())

    end = loss(10**6, None)
    assert loss(100, None) == loss(100, 28_000) == loss(100, 3400)
    assert loss(1657, 28_000) != end == loss(1659, 28_000)
    assert loss(10, 332) == pytest.approx(loss(100, None), rel=1e-3)  # ten of theirs at a time
    assert loss(164, 332) != end == loss(167, 332)


def test_annealing_follows_the_step():
    at = [float(annealing(torch.tensor(s), 1000.0, 0.12, 5.0)) for s in (0, 100, 1657, 1659, 10**6)]
    assert at[:2] == pytest.approx([1000, 1000 / 13])
    assert at[2] > 5
    assert at[3:] == [5, 5]


def test_spreads_at_the_simplex():
    for classes in (2, 3, 6, 10):
        vertices = torch.from_numpy(oracles.simplex_vertices(classes))
        at_best = -1 / (classes - 1)
        assert float(regularity(3 * vertices)) == pytest.approx(at_best)
        assert float(energy(3 * vertices, 2)) == pytest.approx((classes - 1) / (2 * classes))
        generator = torch.Generator().manual_seed(classes)
        other = torch.randn(vertices.shape, generator=generator, dtype=torch.float64)
        assert classes == 2 or float(regularity(other)) > at_best
        assert classes == 2 or float(energy(other, 2)) > (classes - 1) / (2 * classes)


def test_descent_of_each_spread_finds_the_simplex():
    for term in (
        regularity,
        lambda w: energy(w, 0),
        lambda w: energy(w, 1),
        lambda w: energy(w, 2),
    ):
        torch.manual_seed(1)
        weight = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([weight], 0.05)
        for step in range(400):
            optimiser.param_groups[0]["lr"] = 0.05 * (1 - step / 400)
            optimiser.zero_grad()
            term(weight).backward()
            optimiser.step()
        off = cosines(weight, weight).detach()[~torch.eye(4, dtype=torch.bool)]
        assert torch.allclose(off, torch.tensor(-1 / 3, dtype=torch.float64), atol=0.01)


def test_uniformface_pushes_the_closest_pair_most_and_rests_at_the_simplex():
    centres = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 8.0]], requires_grad=True)
    closeness(centres).backward()
    lengths = centres.grad.norm(dim=1)
    assert centres.grad[0, 0] > 0 > centres.grad[1, 0]  # descent parts them
    assert lengths[2] < lengths[:2].min()
    vertices = torch.from_numpy(oracles.simplex_vertices(5)).requires_grad_()
    closeness(vertices).backward()
    radial = (vertices.grad * vertices).sum(1, keepdim=True) * vertices
    assert torch.allclose(vertices.grad, radial, atol=1e-12)
    zero = torch.zeros(3, 2, requires_grad=True)
    closeness(zero).backward()
    assert not zero.grad.any()


def test_weight_zero_is_softmax():
    images, labels = toys.tensors(*toys.pictures(12))
    losses = []
    for name, settings in (("softmax", None), ("mhe", SpreadSettings())):
        torch.manual_seed(0)
        net = build_method(name, "small", (1, 8, 8), 3, settings).train()
        losses.append(net.loss(Batch(images, labels, None, 0)).detach())
    assert torch.equal(*losses)


def test_layers_without_room_are_left_out():
    net = build_method("mhe", "mlp", (1,), 3)
    shapes = [tuple(weight.shape) for weight in net.hidden()]
    assert shapes
    assert all(min(shape) > 1 for shape in shapes)
    net = method(Spread, settings_for("mhe"))
    assert net.hidden() == []  # an encoder without layers, as frozen ones are
    assert net.loss(batch()).isfinite()


def test_weights_that_a_loss_reads_are_told_to_the_convolutions(monkeypatch):
    told = layers._Beside(None)
    monkeypatch.setattr(layers, "_beside", told)
    net = build_method("mhe", "small", (1, 8, 8), 3)
    net.hidden()
    convolutions = [m.weight for m in net.encoder.modules() if isinstance(m, nn.Conv2d)]
    assert convolutions
    assert all(told.uses[weight.data_ptr()] == 1 for weight in convolutions)


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        (MarginSettings, {"kind": "sine"}, "kind among cosine, angle"),
        (MarginSettings, {"margin": -0.1}, "margin of 0 or more"),
        (MarginSettings, {"margin": 28.6}, "margin below π/2"),
        (MarginSettings, {"scale": 0.0}, "scale above 0"),
        (SphereSettings, {"m": 0}, "m as a whole number"),
        (SphereSettings, {"m": 2.5}, "m as a whole number"),
        (SphereSettings, {"floor": float("inf")}, "floor of 0 or more"),
        (SphereSettings, {"uniform": "much"}, "uniform of 0 or more"),
        (SphereSettings, {"rate": 2.0}, "rate of 1 or less"),
        (SpreadSettings, {"power": 3}, "power among 0, 1, 2"),
        (SpreadSettings, {"hidden": -1.0}, "hidden of 0 or more"),
    ],
)
def test_bad_settings(kind, bad, words):
    with pytest.raises(DeepSimplexError, match=words):
        kind(**bad)
