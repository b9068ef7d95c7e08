"""Centroids at basis vectors against loops, and at the points where the value is known."""

import math

import numpy as np
import oracles
import pytest
import torch
from torch import nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import Batch
from deepsimplex.methods.basis import Basis, BasisSettings, basis_loss


class Given(nn.Module):
    features = 6

    def forward(self, images):
        return images


def sphere(n=40, classes=6, dtype=torch.float64):
    features = torch.randn(n, classes, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return features / features.norm(dim=1, keepdim=True), torch.arange(n) % classes


@pytest.mark.parametrize("away", [0.0, 1 / 3, 2.0])
@pytest.mark.parametrize("classes", [2, 6])
def test_the_loss_against_loops(away, classes):
    features, labels = sphere(classes=classes)
    expected = oracles.basis(features.numpy(), labels.tolist(), away)
    assert float(basis_loss(features, labels, away)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_at_its_centroid_the_loss_is_minus_a_third_of_the_root_of_2(classes):
    features = torch.eye(classes, requires_grad=True)
    value = basis_loss(features, torch.arange(classes))
    value.backward()
    assert float(value.detach()) == pytest.approx(-math.sqrt(2) / 3, rel=1e-6)
    assert features.grad.isfinite().all()
    wrong = torch.eye(classes, requires_grad=True)  # a centroid, but another class's
    value = basis_loss(wrong, torch.arange(classes).roll(1))
    value.backward()
    assert float(value.detach()) > 0.9
    assert wrong.grad.isfinite().all()


def test_the_centroid_is_about_the_best_place_on_the_sphere():
    features, labels = sphere(2000)
    each = [float(basis_loss(features[i : i + 1], labels[i : i + 1])) for i in range(2000)]
    assert min(each) > -math.sqrt(2) / 3


def test_the_own_distance_is_right_near_the_centroid():
    """At 1e-5 from e_1, 2 − 2f_1 is 0 in float32; the loss and the score still see it."""
    f = torch.zeros(1, 6)
    f[0, 0], f[0, 1] = math.cos(1e-5), math.sin(1e-5)
    exact = oracles.basis([[math.cos(1e-5), math.sin(1e-5), 0, 0, 0, 0]], [0], 0.0)
    assert float(basis_loss(f, torch.tensor([0]), 0.0)) == pytest.approx(exact, rel=1e-5)
    method = Basis(Given(), 6, BasisSettings())
    assert float(-method.knownness(f, "distance")) == pytest.approx(exact, rel=1e-5)


def test_scores_against_their_formula():
    torch.manual_seed(0)
    method = Basis(Given(), 4, BasisSettings(away=0.7)).double()
    images, labels = torch.randn(9, 6, dtype=torch.float64), torch.arange(9) % 4
    outputs = method(images)
    f = outputs.detach().numpy()
    assert np.allclose(np.linalg.norm(f, axis=1), 1)
    expected = -np.linalg.norm(f[:, None] - np.eye(4), axis=2)
    scores = method.class_scores(outputs, "distance").detach()
    assert np.allclose(scores, expected)
    assert np.array_equal(scores.argmax(1), f.argmax(1))  # the nearest is the largest coordinate
    loss = float(method.loss(Batch(images, labels, None, 0)).detach())
    assert loss == pytest.approx(oracles.basis(f, labels.tolist(), 0.7), rel=1e-9)


@pytest.mark.parametrize("away", [-0.1, math.nan, "third", True])
def test_bad_settings(away):
    with pytest.raises(DeepSimplexError, match="away of 0 or more"):
        BasisSettings(away=away)
