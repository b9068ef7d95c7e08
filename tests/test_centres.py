"""Center and contrastive-center loss against slow loops, and the rule that moves the centres."""

import numpy as np
import oracles
import pytest
import torch
import toys
from torch import nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.methods import build_method, settings_for
from deepsimplex.methods.base import Batch
from deepsimplex.methods.centres import (
    Centred,
    CentreSettings,
    center_term,
    contrastive_term,
    moved,
)

CLASSES, WIDTH = 4, 3


class Given(nn.Module):
    """An encoder that hands its input on."""

    features = WIDTH

    def forward(self, images):
        return images


def problem(seed=0, count=9):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    centres = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    return features, torch.arange(count) % (CLASSES - 1), centres  # the last class is absent


def method(**settings):
    torch.manual_seed(0)
    return Centred(Given(), CLASSES, CentreSettings(**settings)).double()


def cross_entropy(net, features, labels):
    logits = net.head(features).detach().tolist()
    return np.mean([oracles.cross_entropy_of(z, y) for z, y in zip(logits, labels, strict=True)])


@pytest.mark.parametrize("term", ["center", "contrastive"])
def test_loss_and_centres_after_two_batches(term):
    net = method(term=term, weight=0.7, rate=0.4, delta=0.3)
    centres = np.zeros((CLASSES, WIDTH))
    for seed in (0, 1):
        features, labels, _ = problem(seed)
        arrays = features.numpy(), labels.tolist()
        expected = cross_entropy(net, features, labels.tolist())
        if term == "center":
            expected += 0.7 * oracles.center_term(*arrays, centres)
        else:
            expected += 0.7 * oracles.contrastive_center_term(*arrays, centres, 0.3)
        value = net.loss(Batch(features, labels, None, 0))
        assert float(value.detach()) == pytest.approx(expected, rel=1e-10)
        centres = oracles.moved_centres(centres, *arrays, 0.4)
        assert np.allclose(net.centres, centres, rtol=1e-12)
    assert not net.centres[-1].any()  # no image, no step


def test_a_centre_moves_by_hand():
    centres = torch.tensor([[1.0, 0.0], [5.0, 5.0]])
    features = torch.tensor([[3.0, 0.0], [1.0, 6.0]])
    after = moved(centres, features, torch.tensor([0, 0]), 0.5)
    # Σ(c − f) = (−2, −6), over 1 + 2, halved
    assert torch.allclose(after, torch.tensor([[1 + 1 / 3, 1.0], [5.0, 5.0]]))


@pytest.mark.parametrize("term", ["center", "contrastive"])
def test_weight_zero_is_softmax(term):
    images, labels = toys.tensors(*toys.pictures(12))
    batch, weights = Batch(images, labels, None, 0), []
    settings = settings_for("center", {"term": term, "weight": 0.0})
    for name, own in (("softmax", None), ("center", settings)):
        torch.manual_seed(0)
        net = build_method(name, "small", (1, 8, 8), 3, own).train()
        loss = net.loss(batch)
        loss.backward()
        weights.append([loss.detach(), *(p.grad for p in net.parameters())])
    for a, b in zip(*weights, strict=True):
        assert torch.equal(a, b)


def test_center_loss_at_fixed_vertices_is_half_of_eq4():
    features, labels, _ = problem()
    vertices = oracles.simplex_vertices(CLASSES)
    value = center_term(features, labels, torch.from_numpy(vertices))
    expected = oracles.eq4(features.numpy(), labels.tolist(), vertices) / 2
    assert float(value) == pytest.approx(expected, rel=1e-12)


def test_contrastive_term_without_delta_knows_no_scale():
    features, labels, centres = problem()
    small = contrastive_term(features, labels, centres, 1e-12)
    assert contrastive_term(9 * features, labels, 9 * centres, 1e-12) == pytest.approx(small)
    assert contrastive_term(9 * features, labels, 9 * centres, 1.0) != pytest.approx(small)


def test_contrastive_gradient_against_the_dense_form():
    features, labels, centres = problem()
    one, two = features.clone().requires_grad_(), features.clone().requires_grad_()
    contrastive_term(one, labels, centres, 0.5).backward()
    squared = (two[:, None] - centres).square().sum(2)
    own = squared.gather(1, labels[:, None])[:, 0]
    (own / (squared.sum(1) - own + 0.5)).mean().div(2).backward()
    assert torch.allclose(one.grad, two.grad, rtol=1e-10)


def test_features_gather_round_their_centres():
    images, labels = toys.tensors(*toys.pictures(90))

    def scatter(weight):
        recipe = toys.quick("center", 20, settings={"weight": weight})
        net = fit_model(images, labels, list("abc"), recipe, device="cpu").method
        with torch.no_grad():
            features = net.encoder(images)
        means = torch.stack([features[labels == j].mean(0) for j in range(3)])
        between = (means - means.mean(0)).square().sum(1).mean()
        within = (features - means[labels]).square().sum(1).mean()
        return net, means, within / between

    free, (net, means, held) = scatter(0.0)[2], scatter(1.0)
    assert held < 0.5 * free
    assert (net.centres - means).norm(dim=1).max() < 0.1 * means.norm(dim=1).min()


def test_centres_are_no_parameters():
    net = method()
    assert "centres" in net.state_dict()
    assert "centres" not in dict(net.named_parameters())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"term": "centre"}, "term among center"),
        ({"weight": -1.0}, "weight of 0 or more"),
        ({"weight": float("nan")}, "weight of 0 or more"),
        ({"rate": 1.5}, "rate of 1 or less"),
        ({"delta": 0.0}, "delta above 0"),
    ],
)
def test_bad_settings(bad, words):
    with pytest.raises(DeepSimplexError, match=words):
        CentreSettings(**bad)
