"""Contrastive, triplet, marginal and range loss against loops, a library, and what must hold."""

import math

import numpy as np
import oracles
import pytest
import torch
import toys
from torch import nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.methods import build_method
from deepsimplex.methods.base import Batch
from deepsimplex.methods.pairs import (
    LOSSES,
    MarginalSettings,
    Pairs,
    PairSettings,
    RangeSettings,
    WithPairs,
    contrastive_loss,
    hard_triplet_loss,
    marginal_term,
    range_of_class,
    range_term,
    semihard_triplet_loss,
)

ORACLES = {
    "contrastive": oracles.contrastive,
    "hard": oracles.triplet_batch_hard,
    "semihard": oracles.triplet_semihard,
}


class Given(nn.Module):
    """An encoder that hands its input on: losses can be checked on features made by hand."""

    features = 5

    def forward(self, images):
        return images


def scattered(n=17, classes=4, spread=1.0, seed=0):
    """Features about class centres, classes of unequal size in no order, one with one image."""
    random = np.random.default_rng(seed)
    labels = np.append(random.integers(0, classes - 1, n - 1), classes - 1)
    random.shuffle(labels)
    features = random.normal(size=(classes, 5))[labels] + spread * random.normal(size=(n, 5))
    return torch.from_numpy(features), torch.from_numpy(labels)


def unit(features):
    return features / features.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("margin", [0.0, 0.2, 1.0])
def test_pair_losses_against_loops(loss, spread, margin):
    for seed in range(3):
        features, labels = scattered(spread=spread, seed=seed)
        features = unit(features)
        value = float(LOSSES[loss](features, labels, margin))
        expected = ORACLES[loss](features.numpy(), labels.tolist(), margin)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
def test_terms_against_loops(spread):
    features, labels = scattered(spread=spread)
    arrays = features.numpy(), labels.tolist()
    for numbers in ((1.2, 0.3, 1.0), (0.4, 0.1, 2.5)):
        value = float(marginal_term(features, labels, MarginalSettings(*numbers)))
        assert value == pytest.approx(oracles.marginal(*arrays, *numbers), rel=1e-9)
    for numbers in (
        (2, 1.0, 1.0, 2.0),
        (1, 3.0, 0.5, 1.0),
        (5, 0.1, 1.0, 1.0),
        (40, 1.0, 1.0, 1.0),
    ):
        value = float(range_term(features, labels, RangeSettings(*numbers)))
        assert value == pytest.approx(oracles.range_loss(*arrays, *numbers), rel=1e-9)


def test_against_pytorch_metric_learning():
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.losses import ContrastiveLoss, TripletMarginLoss
    from pytorch_metric_learning.miners import BatchHardMiner
    from pytorch_metric_learning.reducers import DoNothingReducer, MeanReducer

    plain = LpDistance(normalize_embeddings=False)
    for spread in (0.1, 1.0):
        features, labels = scattered(spread=spread)
        keep = labels < 3  # their miner asks every class for two images
        features, labels = unit(features)[keep].float(), labels[keep]
        mine = BatchHardMiner(distance=plain)(features, labels)
        theirs = TripletMarginLoss(margin=0.3, distance=plain, reducer=MeanReducer())
        expected = float(theirs(features, labels, mine))
        found = float(hard_triplet_loss(features, labels, 0.3, count=len(labels)))
        assert found == pytest.approx(expected, rel=1e-4)

        # Their terms are D and [m − D]₊; ours are the squares of these.
        theirs = ContrastiveLoss(0, 0.8, distance=plain, reducer=DoNothingReducer())
        parts = theirs(features, labels)
        pull, push = (parts[name]["losses"].square().mean() for name in ("pos_loss", "neg_loss"))
        expected = float(pull + push) / 2
        assert float(contrastive_loss(features, labels, 0.8)) == pytest.approx(expected, rel=1e-4)


def test_a_collapsed_net_pays_the_margin_and_has_finite_gradients():
    labels = torch.arange(12) % 3
    for loss in LOSSES:
        features = torch.full((12, 5), 5**-0.5, requires_grad=True)
        value = LOSSES[loss](features, labels, 0.25)
        value.backward()
        expected = 0.25**2 / 2 if loss == "contrastive" else 0.25
        assert float(value.detach()) == expected  # exactly: m for triplets, m²/2 for pairs
        assert features.grad.isfinite().all()
    features = torch.ones(12, 5, requires_grad=True)
    value = range_term(features, labels, RangeSettings()) + marginal_term(
        features, labels, MarginalSettings()
    )
    value.backward()
    assert features.grad.isfinite().all()


def test_classes_at_points_far_apart_cost_nothing():
    labels = torch.arange(8) % 2
    poles = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])[labels]
    for loss in LOSSES.values():
        assert float(loss(poles, labels, 1.0)) == 0
    assert float(marginal_term(3 * poles, labels, MarginalSettings())) == 0
    assert float(range_term(3 * poles, labels, RangeSettings())) == pytest.approx(0, abs=1e-10)


def test_positives_at_distance_0_give_0():
    labels = torch.zeros(6, dtype=torch.int64)
    features = unit(torch.ones(6, 4))
    assert float(contrastive_loss(features, labels, 1.0)) == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_one_class_or_no_pair_at_all_is_no_accident(loss):
    features = unit(scattered()[0].float()).requires_grad_()
    for labels in (torch.zeros(17, dtype=torch.int64), torch.arange(17)):
        value = LOSSES[loss](features, labels, 0.2)
        terms = range_term(features, labels, RangeSettings())
        terms = terms + marginal_term(features, labels, MarginalSettings())
        (grad,) = torch.autograd.grad(value + terms, features)
        assert value.isfinite()
        assert terms.isfinite()
        assert grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_order_of_images_and_names_of_classes_do_not_matter(loss):
    features, labels = scattered()
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    names = torch.tensor([7, 2, 9, 0])
    whole = {"count": 17} if loss == "hard" else {}  # in parts, which images meet is by their order
    a = LOSSES[loss](features, labels, 0.5, **whole)
    b = LOSSES[loss](features[order], names[labels[order]], 0.5, **whole)
    assert torch.allclose(a, b)
    a = range_term(features, labels, RangeSettings())
    assert torch.allclose(a, range_term(features[order], names[labels[order]], RangeSettings()))


@pytest.mark.parametrize(("classes", "each"), [(2, 8), (3, 5), (2, 11), (4, 21)])
def test_batch_hard_in_parts_leaves_no_image_out(classes, each):
    torch.manual_seed(0)
    labels = torch.arange(classes * each)[torch.randperm(classes * each)] % classes
    features = torch.randn(len(labels), 5, dtype=torch.float64, requires_grad=True)
    value = hard_triplet_loss(features, labels, 10.0)
    points = features.detach().numpy()
    expected = oracles.triplet_batch_hard(points, labels.tolist(), 10.0)
    assert float(value.detach()) == pytest.approx(expected)
    value.backward()
    assert (features.grad != 0).any(1).all()


def test_the_semihard_negative_by_hand():
    """Anchor at 0, positive at 0.5; negatives nearer, within and beyond the margin."""

    def value(*negatives):
        points = torch.tensor([0.0, 0.5, *negatives], dtype=torch.float64)[:, None]
        labels = torch.tensor([0, 0, *range(1, 1 + len(negatives))])
        return float(semihard_triplet_loss(points, labels, 1.0))

    # From 0: 0.25 − 0.36 + 1; from 0.5: 0.25 − 0.64 + 1 (the one at 0.6 is nearer than 0.5).
    assert value(0.6, 1.3) == pytest.approx((0.89 + 0.61) / 2)
    # From 0.5 all are nearer: the farthest, at 0.6.
    assert value(0.6, 0.55) == pytest.approx(((0.25 - 0.3025 + 1) + (0.25 - 0.01 + 1)) / 2)
    assert value(3.0) == 0


def test_the_range_is_a_harmonic_mean_of_the_largest():
    features, labels = scattered(n=30)
    d = (features[:, None] - features).square().sum(2)
    d[labels[:, None] != labels] = 0
    widest = d.amax(1)
    for c in labels.unique():
        own = labels == c
        largest = d[own].flatten().sort(descending=True).values[::2]  # each pair twice
        one, two, five = (range_of_class(features, labels, k)[own] for k in (1, 2, 5))
        assert torch.allclose(one, widest[own].max())  # k = 1: the largest range
        if own.sum() > 3:
            for k, value in ((2, two), (5, five)):
                assert torch.allclose(value, k / (1 / largest[:k]).sum())
                assert (value <= k * largest[k - 1]).all()  # at most k times the smallest
                assert (value >= largest[k - 1]).all()
        elif own.sum() == 1:
            assert (one == 0).all()


def test_equal_distances_count_each():
    """An equilateral triangle has its side three times among its ranges."""
    triangle = torch.eye(3, dtype=torch.float64)
    labels = torch.zeros(3, dtype=torch.int64)
    for k in (1, 2, 3):
        assert torch.allclose(range_of_class(triangle, labels, k), torch.tensor(2.0).double())


def test_predictions_come_from_class_means():
    torch.manual_seed(0)
    features, labels = scattered(spread=0.3)
    method = Pairs(Given(), 4, PairSettings("semihard")).double()
    method.head = nn.Identity()
    parts = [Batch(features[i : i + 6], labels[i : i + 6], None, 0) for i in range(0, 17, 6)]
    method.finish(lambda: parts)
    f = unit(features).numpy()
    means = np.stack([f[labels.numpy() == c].mean(0) for c in range(4)])
    assert np.allclose(method.means, means, atol=1e-6)
    expected = -np.linalg.norm(f[:, None] - means, axis=2)
    outputs = method(features)
    assert np.allclose(method.class_scores(outputs, "distance"), expected, atol=1e-6)
    assert np.allclose(method.knownness(outputs, "distance"), expected.max(1), atol=1e-6)


def test_batch_hard_cannot_shrink_into_one_point():
    """However near to one another a net puts its images, the loss sees them apart."""
    features, labels = scattered()
    batch, far = Batch(features, labels, None, 0), 3 + features
    torch.manual_seed(0)
    hard = Pairs(Given(), 4, PairSettings("hard", margin=0.5)).double()
    plain = float(hard.loss(batch).detach())
    outputs = hard(features).detach()
    expected = hard.head(features).detach()
    expected = (expected - expected.mean(0)) / (expected.var(0, correction=0) + 1e-5).sqrt()
    assert torch.allclose(outputs, unit(expected))
    assert plain == pytest.approx(oracles.triplet_batch_hard(outputs.numpy(), labels.tolist(), 0.5))
    hard.norm.eps = 1e-30  # so that a thousandth of the spread is as good as all of it
    apart = float(hard.loss(batch).detach())
    hard.head.weight.data *= 1e-3
    for given in (features, far):
        shrunk = float(hard.loss(Batch(given, labels, None, 0)).detach())
        assert shrunk == pytest.approx(apart, rel=1e-9)
    assert [name for name, _ in hard.norm.named_parameters()] == []
    # In use, by the statistics of training: an image's place does not depend on those beside it.
    hard.eval()
    assert torch.allclose(hard(features)[:3], hard(features[:3]))


@pytest.mark.parametrize("settings", [MarginalSettings(), RangeSettings()])
def test_terms_stand_beside_cross_entropy(settings):
    features, labels = scattered()
    torch.manual_seed(0)
    method = WithPairs(Given(), 4, settings).double()
    batch = Batch(features, labels, None, 0)
    logits = method(features).detach()
    known = float(nn.functional.cross_entropy(logits, labels))
    f, y = features.numpy(), labels.tolist()
    if isinstance(settings, MarginalSettings):
        term = oracles.marginal(f, y, 1.2, 0.3, 1.0)
    else:
        term = oracles.range_loss(f, y, 2, 1.0, 0.02, 2.0)
    assert float(method.loss(batch).detach()) == pytest.approx(known + term, rel=1e-9)
    assert torch.equal(method.knownness(logits, "max_logit"), logits.amax(1))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: PairSettings(loss="hardest"), "loss among contrastive, hard, semihard"),
        (lambda: PairSettings(margin=-0.1), "margin of 0 or more"),
        (lambda: PairSettings(margin=math.nan), "margin of 0 or more"),
        (lambda: PairSettings(margin=True), "margin of 0 or more"),
        (lambda: MarginalSettings(threshold="1"), "threshold of 0 or more"),
        (lambda: MarginalSettings(weight=math.inf), "weight of 0 or more"),
        (lambda: RangeSettings(count=0), "count as a whole number"),
        (lambda: RangeSettings(count=1.5), "count as a whole number"),
        (lambda: RangeSettings(inter=-1), "inter of 0 or more"),
    ],
)
def test_bad_settings(build, words):
    with pytest.raises(DeepSimplexError, match=words):
        build()


@pytest.mark.parametrize("name", ["marginal", "range"])
def test_a_frozen_backbone_stays(name):
    images, labels = toys.tensors(*toys.pictures(40))
    plan = toys.quick(name, 2)
    torch.manual_seed(plan.seed)
    before = build_method(name, "small", (1, 8, 8), 3).encoder.backbone.state_dict()
    model = fit_model(images, labels, list("abc"), plan, device="cpu", freeze=True)
    for key, weight in model.method.encoder.backbone.state_dict().items():
        assert torch.equal(weight, before[key]), key


def test_the_range_is_not_rounded_by_autocast():
    features = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    features = (1 + 0.02 * features).requires_grad_()  # class means near one another
    labels = torch.arange(24) % 3
    settings = RangeSettings(intra=0.0)
    plain = torch.autograd.grad(range_term(features, labels, settings), features)[0]
    with torch.autocast("cpu", torch.bfloat16):
        value = range_term(features, labels, settings)
    cast = torch.autograd.grad(value, features)[0]  # as the engine does, outside
    assert plain.abs().max() > 0
    assert torch.allclose(plain, cast, rtol=1e-5, atol=1e-9)


def test_a_shorter_mean_of_two_views_is_judged_by_its_direction():
    method = build_method("triplet", "small", (1, 8, 8), 3)
    method.means.copy_(torch.randn(method.means.shape, generator=torch.Generator().manual_seed(2)))
    views = nn.functional.normalize(torch.randn(20, method.means.shape[1]), dim=1)
    half, whole = (method.class_scores(k * views, "distance") for k in (0.5, 1.0))
    assert torch.allclose(half, whole, atol=1e-6)
