"""The conformal promises, by simulation with bands on both sides, and everything around them.

Scores drawn uniformly on (0, 1) make the share of new knowns kept exactly 1 − threshold, so
a simulation needs no test sample. Bands are 3 standard errors of the known distribution.
"""

from __future__ import annotations

import json
import math

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from deepsimplex.calibration import Threshold, conformal_threshold
from deepsimplex.errors import DeepSimplexError

SCORE = st.sampled_from([-math.inf, -3.0, -1.0, -0.0, 0.0, 0.25, 1.0, 2.0, math.inf])


def kept_shares(n, draws, seed, **options):
    rng = np.random.default_rng(seed)
    return np.array(
        [1 - conformal_threshold(rng.random(n), 0.95, **options).values[0] for _ in range(draws)]
    )


@pytest.mark.parametrize(("n", "k"), [(19, 1), (38, 1), (39, 2), (99, 5), (100, 5), (998, 49)])
def test_mean_promise_holds_and_is_not_wasteful(n, k):
    shares = kept_shares(n, draws=3000, seed=n)
    law = beta(n + 1 - k, k)
    assert law.mean() >= 0.95
    assert shares.mean() == pytest.approx(law.mean(), abs=3 * law.std() / math.sqrt(3000))


@pytest.mark.parametrize("n", [25, 100, 1000])
def test_a_single_draw_may_fall_short_of_the_mean_promise(n):
    below = (kept_shares(n, draws=3000, seed=n) < 0.95).mean()
    k = oracles.mean_rank(n, 950)
    exact = binom.cdf(k - 1, n, 0.05)
    assert 0.27 < exact < 0.49
    assert below == pytest.approx(exact, abs=3 * math.sqrt(exact * (1 - exact) / 3000))


@pytest.mark.parametrize(("n", "confidence"), [(45, 0.9), (100, 0.9), (500, 0.9), (200, 0.99)])
def test_pac_promise_holds_and_is_not_wasteful(n, confidence):
    options = {"guarantee": "pac", "confidence": confidence}
    held = (kept_shares(n, draws=1500, seed=n, **options) >= 0.95).mean()
    k = oracles.pac_rank(n, 0.05, confidence)
    exact = binom.sf(k - 1, n, 0.05)
    assert exact >= confidence > binom.sf(k, n, 0.05)
    assert held == pytest.approx(exact, abs=3 * math.sqrt(exact * (1 - exact) / 1500))


def two_classes(rng, n):
    """Class 1 is often taken for class 0, and then with a low score: (scores, true, predicted)."""
    true = rng.integers(0, 2, n)
    lost = (true == 1) & (rng.random(n) < 0.2)
    return rng.random(n) + np.where(lost, 0.0, 2.0), true, np.where(lost, 0, true)


def test_by_predicted_class_keeps_its_promise_and_by_true_class_breaks_it():
    rng = np.random.default_rng(11)
    kept: dict[str, list[np.ndarray]] = {"predicted": [], "true": []}
    for _ in range(300):
        scores, true, predicted = two_classes(rng, 400)
        limits = {
            "predicted": conformal_threshold(scores, 0.95, predicted=predicted, classes=2),
            "true": conformal_threshold(scores, 0.95, predicted=true, classes=2),
        }
        scores, _, predicted = two_classes(rng, 4000)
        for name, threshold in limits.items():
            accepted = threshold.accept(scores, predicted)
            kept[name].append(np.array([accepted[predicted == c].mean() for c in (0, 1)]))
    mean = {name: np.mean(shares, axis=0) for name, shares in kept.items()}
    error = np.std(kept["predicted"], axis=0) / math.sqrt(300)
    # A group of about 200 wastes less than 1/200.
    assert (mean["predicted"] > 0.95 - 3 * error).all()
    assert (mean["predicted"] < 0.955 + 3 * error).all()
    assert mean["true"][0] < 0.82
    assert mean["true"].mean() < 0.92


@pytest.mark.parametrize(
    ("guarantee", "needed", "keep"),
    [
        ("mean", 19, 0.95),
        ("mean", 9, 0.9),
        ("mean", 999, 0.999),
        ("mean", 1, 0.3),
        ("mean", 3, 0.7),
        ("pac", 45, 0.95),
        ("pac", 22, 0.9),
        ("pac", 1, 0.1),
    ],
)
def test_small_samples_keep_everything_and_say_so(guarantee, needed, keep):
    scores = np.arange(float(needed))
    if needed > 1:
        small = conformal_threshold(scores[1:], keep, guarantee=guarantee)
        assert small.values == (-math.inf,)
        assert small.accept([-1e300, -math.inf]).all()
        assert "everything is kept" in small.meaning()
        assert f"at least {needed} " in small.meaning()
    enough = conformal_threshold(scores, keep, guarantee=guarantee)
    assert enough.values == (0.0,)
    assert "everything" not in enough.meaning()


@given(st.integers(1, 3000), st.integers(1, 999))
def test_mean_rank_is_exact(n, thousandths):
    k = oracles.mean_rank(n, thousandths)
    # The j-th smallest of 1 … n is j, so the limit names its own rank.
    limit = conformal_threshold(np.arange(1, n + 1), thousandths / 1000).values[0]
    assert limit == (k or -math.inf)


@given(st.integers(1, 120), st.sampled_from([0.5, 0.8, 0.9, 0.95]), st.sampled_from([0.5, 0.9]))
@settings(max_examples=60)
def test_pac_rank_is_the_largest(n, keep, confidence):
    k = oracles.pac_rank(n, 1 - keep, confidence)
    scores = np.arange(1, n + 1)
    limit = conformal_threshold(scores, keep, guarantee="pac", confidence=confidence).values[0]
    assert limit == (k or -math.inf)


def test_pac_is_stricter_than_mean_and_grows_with_confidence():
    scores = np.arange(500.0)
    limits = [
        conformal_threshold(scores, 0.95, guarantee="pac", confidence=c).values[0]
        for c in (0.9, 0.99, 0.999)
    ]
    assert limits == sorted(limits, reverse=True)
    assert len(set(limits)) == 3
    assert limits[0] < conformal_threshold(scores, 0.95).values[0]


@given(st.lists(SCORE, min_size=1, max_size=60), st.sampled_from([0.5, 0.8, 0.95]), st.data())
def test_ties_are_kept_and_order_does_not_matter(scores, keep, data):
    threshold = conformal_threshold(scores, keep)
    rejected = sum(score < threshold.values[0] for score in scores)
    k = oracles.mean_rank(len(scores), round(1000 * keep))
    assert rejected <= max(k - 1, 0)
    assert not threshold.accept(scores).all() or k <= scores.count(min(scores))
    shuffled = data.draw(st.permutations(scores))
    assert conformal_threshold(shuffled, keep) == threshold


def test_heavy_ties_only_keep_more():
    # Scores 0 (6 %) and 1: the limit is 0 and keeps all when k = 5 of 99 zeros are there.
    rng = np.random.default_rng(2)
    limits = [conformal_threshold(rng.random(99) >= 0.06, 0.95).values[0] for _ in range(3000)]
    share = np.where(np.array(limits) == 0, 1.0, 0.94)
    few = binom.cdf(4, 99, 0.06)
    assert set(limits) == {0.0, 1.0}
    assert share.mean() == pytest.approx(1 - 0.06 * few, abs=3 * 0.06 * 0.5 / math.sqrt(3000))
    assert 1 - 0.06 * few > 0.97
    assert conformal_threshold([7.0] * 1000, 0.95).accept([7.0, 6.9]).tolist() == [True, False]


@given(st.lists(st.tuples(SCORE, st.integers(0, 3)), min_size=1, max_size=80))
def test_each_predicted_class_is_calibrated_on_its_own(pairs):
    scores, predicted = [s for s, _ in pairs], [p for _, p in pairs]
    threshold = conformal_threshold(scores, 0.8, predicted=predicted, classes=5)
    assert threshold.by == "predicted"
    assert threshold.counts == tuple(predicted.count(c) for c in range(5))
    for c in range(5):
        own = [s for s, p in pairs if p == c]
        alone = conformal_threshold(own, 0.8).values[0] if own else -math.inf
        assert threshold.values[c] == alone
    limits = [threshold.values[p] for p in predicted]
    assert threshold.limit_for(predicted).tolist() == limits
    expected = [s >= limit for s, limit in zip(scores, limits, strict=True)]
    assert threshold.accept(scores, predicted).tolist() == expected


def test_one_limit_for_all_asks_for_no_classes():
    threshold = conformal_threshold(np.arange(20.0), 0.9)
    assert threshold == Threshold((1.0,), "all", 0.9, "mean", 0.9, (20,))
    assert threshold.accept([0.9, 1.0, 1.1]).tolist() == [False, True, True]
    assert threshold.accept([0.9, 1.0], [5, 7]).tolist() == [False, True]
    assert threshold.limit_for([4, 0, 9]).tolist() == [1.0, 1.0, 1.0]
    assert threshold.accept([]).shape == (0,)


def test_meaning_is_one_sentence_that_names_the_promise():
    scores, predicted = np.arange(60.0), np.r_[np.zeros(50, int), np.full(10, 2)]
    mean = conformal_threshold(scores, 0.95).meaning()
    assert "at least 95 %, on average over draws" in mean
    assert "60 were used" in mean
    pac = conformal_threshold(scores, 0.95, guarantee="pac", confidence=0.8).meaning()
    assert pac.startswith("With 80 % confidence")
    by = conformal_threshold(scores, 0.95, predicted=predicted, classes=3).meaning()
    assert "predicted as each class" in by
    assert "2 of 3 classes (number 1, 2) keep everything" in by
    named = conformal_threshold(scores, 0.95, predicted=predicted, classes=3).meaning(["a", 5, "b"])
    assert named == by.replace("number 1, 2", "5, b")
    assert "at least 19 images" in by
    for sentence in (mean, pac, by):
        assert sentence.endswith(".")
        assert ". " not in sentence


@given(st.lists(SCORE | st.floats(allow_nan=False), min_size=1, max_size=50), st.booleans())
def test_json_round_trip_is_strict_and_exact(scores, by_class):
    options = {"predicted": [i % 3 for i in range(len(scores))], "classes": 4} if by_class else {}
    threshold = conformal_threshold(scores, 0.8, guarantee="mean", confidence=0.7, **options)
    text = json.dumps(threshold.to_json(), allow_nan=False)
    assert Threshold.from_json(json.loads(text)) == threshold


@pytest.mark.parametrize(
    "change",
    [
        {"values": "many"},
        {"values": [math.nan]},
        {"values": []},
        {"values": [1.0, 2.0]},
        {"values": None},
        {"values": [[1.0]]},
        {"counts": [-1]},
        {"counts": [math.inf]},
        {"counts": {}},
        {"by": "class"},
        {"by": ["all"]},
        {"keep": 1.0},
        {"keep": "often"},
        {"confidence": 0},
        {"guarantee": None},
    ],
    ids=str,
)
def test_damaged_records_are_refused(change):
    record = conformal_threshold(np.arange(30.0), 0.9).to_json()
    with pytest.raises(DeepSimplexError):
        Threshold.from_json(record | change)
    for key in record:
        with pytest.raises(DeepSimplexError, match="as to_json writes it"):
            Threshold.from_json({k: v for k, v in record.items() if k != key})
    with pytest.raises(DeepSimplexError):
        Threshold.from_json([])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_torch_and_numpy_agree_and_a_float32_score_ties_with_itself(dtype):
    scores = torch.linspace(-3, 0, 77).exp().to(dtype)
    predicted = torch.arange(77) % 2
    expected = conformal_threshold(
        scores.double().numpy(), 0.9, predicted=predicted.numpy(), classes=2
    )
    threshold = conformal_threshold(
        scores.requires_grad_(), 0.9, predicted=predicted.to(torch.uint8), classes=2
    )
    assert threshold == expected
    # ⌊40·0.1⌋ = 4 and ⌊39·0.1⌋ = 3: the limits themselves are kept, 3 and 2 below them not.
    assert threshold.accept(scores, predicted).sum() == 77 - 3 - 2
    assert threshold.accept(scores.detach(), predicted).dtype == np.bool_


def test_inputs_are_left_alone():
    scores, predicted = np.arange(50.0)[::-1].copy(), np.arange(50) % 3
    scores.flags.writeable = predicted.flags.writeable = False
    conformal_threshold(scores, 0.9)
    conformal_threshold(scores, 0.9, predicted=predicted, classes=3).accept(scores, predicted)
    np.testing.assert_array_equal(scores, np.arange(50.0)[::-1])


GLOBAL = conformal_threshold(np.arange(30.0), 0.9)
BY_CLASS = conformal_threshold(np.arange(30.0), 0.9, predicted=np.arange(30) % 2, classes=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: conformal_threshold([1.0], 0.0), "keep strictly between 0 and 1; got 0.0"),
        (lambda: conformal_threshold([1.0], 1), "keep strictly"),
        (lambda: conformal_threshold([1.0], math.nan), "keep strictly"),
        (lambda: conformal_threshold([1.0], "0.9"), "keep strictly"),
        (lambda: conformal_threshold([1.0], 0.9, confidence=1.0), "confidence strictly"),
        (lambda: conformal_threshold([1.0], 0.9, guarantee="sure"), "one of mean, pac"),
        (lambda: conformal_threshold([], 0.9), "1 or more scores"),
        (lambda: conformal_threshold([1.0, math.nan], 0.9), "without NaN; got 1 NaN of 2"),
        (lambda: conformal_threshold([[1.0]], 0.9), r"shape \(1, 1\)"),
        (lambda: conformal_threshold([[1.0], [1.0, 2.0]], 0.9), r"numbers of shape \(n,\)"),
        (lambda: conformal_threshold(["a"], 0.9), "numbers of shape"),
        (lambda: conformal_threshold([1.0], 0.9, predicted=[0]), "number of classes"),
        (lambda: conformal_threshold([1.0], 0.9, predicted=[0], classes=0), "number of classes"),
        (lambda: conformal_threshold([1.0], 0.9, predicted=[2], classes=2), "from 2 to 2"),
        (lambda: conformal_threshold([1.0], 0.9, predicted=[-1], classes=2), "0 … 1"),
        (lambda: conformal_threshold([1.0], 0.9, predicted=[0.5], classes=2), "float64"),
        (lambda: conformal_threshold([1.0], 0.9, predicted=[0, 1], classes=2), "got 1 and 2"),
        (lambda: GLOBAL.accept([math.nan]), "without NaN"),
        (lambda: GLOBAL.accept(1.0), r"shape \(\)"),
        (lambda: BY_CLASS.accept([1.0]), "predicted, for limits"),
        (lambda: BY_CLASS.accept([1.0], [2]), "0 … 1"),
        (lambda: BY_CLASS.accept([1.0, 2.0], [0]), "of one length; got 2 and 1"),
        (lambda: BY_CLASS.limit_for([-1]), "nearest class"),
        (lambda: Threshold((0.0, 1.0), "all", 0.9, "mean", 0.9, (3, 3)), "one value and one"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(DeepSimplexError, match=message):
        call()
