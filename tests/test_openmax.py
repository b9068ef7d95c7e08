"""Weibull tails and OpenMax."""

import math

import numpy as np
import oracles
import pytest
import torch
import toys
from scipy import stats
from torch import nn

from deepsimplex import inference
from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.methods.base import Batch
from deepsimplex.methods.openmax import OpenMax, OpenMaxSettings, all_distances, euclid, eucos
from deepsimplex.methods.weibull import (
    NO_TAIL,
    fit_means_and_tails,
    fit_tails,
    no_tails,
    openmax_logits,
    tail_probability,
    unknown_odds,
)


def draws(count, scale=1.0, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).gamma(3, scale, count))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(("count", "tail"), [(400, 20), (60, 12), (15, 3), (3, 3)])
def test_a_tail_is_the_most_likely_weibull_of_the_largest_shifted_distances(scale, count, tail):
    distances = draws(count, scale)
    tau, lam, kappa = fit_tails([distances], 20)[0].tolist()
    largest = sorted(distances.tolist())[-tail:]
    assert tau == largest[0]
    best = oracles.weibull_likelihood(largest, tau, lam, kappa)
    for by in (0.01, -0.01):
        assert oracles.weibull_likelihood(largest, tau, lam, kappa * (1 + by)) < best
        step = by * lam / kappa
        assert oracles.weibull_likelihood(largest, tau, lam + step, kappa) < best


def test_scipys_own_fit_agrees_when_it_starts_near():
    distances = draws(300)
    tau, lam, kappa = fit_tails([distances], 20)[0].tolist()
    shifted = np.sort(distances.numpy())[-20:] + 10000 - tau
    shape, _, scale = stats.weibull_min.fit(shifted, kappa * 0.9, floc=0, scale=lam * 1.0001)
    assert shape == pytest.approx(kappa, rel=1e-5)
    assert scale == pytest.approx(lam, rel=1e-8)


def test_tail_probability_rises_from_zero_to_one():
    distances = draws(5000)
    tails = fit_tails([distances, 3 * distances], 20)
    far = torch.stack([torch.linspace(0, 60, 200, dtype=torch.float64)] * 2, 1)
    w = tail_probability(far, tails)
    for row, values in zip(far.tolist(), w.tolist(), strict=True):
        for d, value, tail in zip(row, values, tails.tolist(), strict=True):
            assert value == pytest.approx(oracles.weibull_cdf(d, *tail), abs=1e-9)
    assert (w.diff(dim=0) >= 0).all()
    own = tail_probability(distances[:, None].expand(-1, 2), tails)
    assert own[:, 0].median() < 0.05
    assert w[-1, 0] == 1
    extreme = tail_probability(torch.tensor([[0.0, 1e30]]), tails)
    assert extreme[0, 1] == 1
    beyond = torch.tensor([[5e4, 10001.0, 9e3]], dtype=torch.float64)
    assert tail_probability(torch.zeros(1, 1), beyond).item() == 0  # below the support


def test_small_and_empty_classes_have_a_tail_too():
    plenty, few = draws(100), draws(4, seed=1)
    two = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    tails = fit_tails([plenty, few, two, torch.zeros(1), torch.zeros(0)], 20)
    assert tails.shape == (5, 3)
    assert tails.dtype == torch.float64
    assert tails.isfinite().all()
    together = fit_tails([torch.cat([plenty, few, two, torch.zeros(1)])], 20)[0]
    for c in (2, 3, 4):
        assert torch.equal(tails[c], together)
    assert not torch.equal(tails[1], together)
    nothing = fit_tails([torch.zeros(0), torch.zeros(7)], 20)
    assert torch.equal(nothing, no_tails(2))
    assert nothing[0].tolist() == list(NO_TAIL)
    assert tail_probability(torch.tensor([[0.0, 1e6]]), nothing).abs().max() < 1e-20


def logits_and_weights():
    random = np.random.default_rng(0)
    return random.normal(1, 4, (12, 5)), random.random((12, 5))


@pytest.mark.parametrize("alpha", [1, 3, 5, 10])
def test_openmax_against_a_loop(alpha):
    z, w = logits_and_weights()
    moved = openmax_logits(torch.from_numpy(z), torch.from_numpy(w), alpha)
    expected = np.array([oracles.openmax(a, b, alpha) for a, b in zip(z, w, strict=True)])
    assert np.allclose(moved.softmax(1), expected)
    odds = np.log((1 - expected[:, 0]) / expected[:, 0])
    assert np.allclose(unknown_odds(moved), odds)
    assert unknown_odds(openmax_logits(torch.full((1, 5), 1e4), torch.zeros(1, 5), 5)) > 9999


def test_without_tails_or_alpha_openmax_is_the_energy():
    z, w = (torch.from_numpy(a) for a in logits_and_weights())
    assert torch.allclose(unknown_odds(openmax_logits(z, w, 0)), z.logsumexp(1))
    assert torch.allclose(unknown_odds(openmax_logits(z, 0 * w, 10)), z.logsumexp(1))


def given_logits(settings=None, classes=3):
    """An OpenMax whose images are its logits."""
    encoder = nn.Identity()
    encoder.features = classes
    method = OpenMax(encoder, classes, settings or OpenMaxSettings())
    method.head = nn.Identity()
    return method


def test_means_are_of_correct_samples_only():
    z = torch.tensor([[3.0, 0, 0], [5, 0, 0], [0, 9, 0], [0, 0, 4], [1, 0, 0]])
    labels = torch.tensor([0, 0, 0, 1, 1])  # the third is wrong; class 1 has none right, 2 no one
    batches = [Batch(z[:2], labels[:2], None, z[0]), Batch(z[2:], labels[2:], None, z[0])]
    means, tails = fit_means_and_tails(lambda: batches, lambda x: (x, x), 3, euclid, 20)
    assert means.tolist() == [[4, 0, 0], [0.5, 0, 2], [0, 0, 0]]
    assert torch.equal(tails, no_tails(3))  # two samples as far from their mean as each other
    assert means.dtype == torch.float32


@pytest.mark.parametrize("distance", ["euclid", "eucos"])
def test_the_scores_of_a_fitted_method(distance):
    random = np.random.default_rng(1)
    labels = np.arange(200) % 2  # class 2 has no sample
    z = random.normal(0, 1, (200, 3)) + 6 * np.eye(3)[labels]
    method = given_logits(OpenMaxSettings(tail=10, distance=distance, alpha=2)).double()
    batch = Batch(torch.from_numpy(z), torch.from_numpy(labels), None, torch.zeros(()))
    method.fit_tails(lambda: [batch])

    def far(a, b):
        length = math.sqrt(oracles.squared_distance(a, b))
        if distance == "euclid":
            return length
        norms = np.linalg.norm(a) * np.linalg.norm(b)
        return length / 200 + 1 - (a @ b / norms if norms else 0.0)

    right = z.argmax(1) == labels
    means = [z[right & (labels == c)].mean(0) for c in range(2)] + [np.zeros(3)]
    assert np.allclose(method.means, means)
    own = [far(a, means[y]) for a, y, ok in zip(z, labels, right, strict=True) if ok]
    kept = labels[right]
    by_class = [torch.tensor([d for d, y in zip(own, kept, strict=True) if y == c]) for c in (0, 1)]
    tails = fit_tails([*by_class, torch.zeros(0)], 10)
    assert torch.allclose(method.tails, tails, rtol=1e-3)
    test = random.normal(0, 4, (30, 3))
    w = np.array(
        [
            [oracles.weibull_cdf(far(a, m), *t) for m, t in zip(means, tails.tolist(), strict=True)]
            for a in test
        ]
    )
    p = np.array([oracles.openmax(a, b, 2)[0] for a, b in zip(test, w, strict=True)])
    outputs = torch.from_numpy(test)
    assert np.allclose(method.knownness(outputs, "openmax"), np.log((1 - p) / p), atol=1e-3)
    neal = [oracles.log_sum_exp(a * (1 - b)) for a, b in zip(test, w, strict=True)]
    assert np.allclose(method.knownness(outputs, "neal"), neal, atol=1e-3)
    assert np.allclose(method.knownness(outputs, "max_logit"), test.max(1))
    rows = torch.from_numpy(np.array(means))
    pairs = all_distances(outputs[:2], rows[:2], distance).diag()
    assert torch.allclose(pairs, (euclid if distance == "euclid" else eucos)(outputs[:2], rows[:2]))


def test_an_unfitted_method_scores_by_energy():
    method = given_logits()
    z = torch.randn(6, 3)
    assert torch.allclose(method.knownness(z, "openmax"), z.double().logsumexp(1))
    assert torch.allclose(method.knownness(z, "neal"), z.double().logsumexp(1))


def test_training_ends_with_tails_that_hold_most_of_the_knowns():
    images, labels = toys.tensors(*toys.pictures(120))
    model = fit_model(images, labels, list("abc"), toys.quick("openmax", 15), device="cpu")
    method = model.method
    z = inference.outputs(method, images).double()
    w = tail_probability(all_distances(z, method.means.double(), "euclid"), method.tails)
    own = w.gather(1, labels[:, None])
    assert own.median() < 0.1
    assert (w.sum(1, keepdim=True) - own > 1.9).all()  # far from both other classes


def test_bad_settings():
    for bad, words in (
        ({"tail": 1}, "tail as a whole number of 2"),
        ({"tail": 20.0}, "tail as a whole number of 2"),
        ({"alpha": -1}, "alpha as a whole number of 0"),
        ({"distance": "cosine"}, "distance among euclid, eucos"),
    ):
        with pytest.raises(DeepSimplexError, match=words):
            OpenMaxSettings(**bad)
