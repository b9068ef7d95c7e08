"""Metrics against scikit-learn, against pair-by-pair loops, and against their own identities."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from deepsimplex import metrics
from deepsimplex.errors import DeepSimplexError

# Few distinct values, so that ties are the rule; zeros of both signs; both infinities.
SCORE = st.sampled_from([-math.inf, -2.5, -1.0, -0.0, 0.0, 1e-300, 0.5, 3.0, 1e300, math.inf])
SCORES = st.lists(SCORE, min_size=1, max_size=12)
PAIRWISE = [
    metrics.auroc,
    metrics.fpr_at,
    metrics.aupr_in,
    metrics.aupr_out,
    metrics.detection_accuracy,
]
by_name = pytest.mark.parametrize("metric", PAIRWISE, ids=lambda f: f.__name__)


def normal_scores(dtype, ties=False, n=4000):
    rng = np.random.default_rng(5)
    known, unknown = rng.normal(1, 1, n).astype(dtype), rng.normal(0, 2, n // 2).astype(dtype)
    return (known.round(1), unknown.round(1)) if ties else (known, unknown)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_agrees_with_sklearn(dtype, ties):
    known, unknown = normal_scores(dtype, ties)
    truth = np.r_[np.ones(len(known)), np.zeros(len(unknown))]
    scores = np.r_[known, unknown]
    for ours, theirs in [
        (metrics.auroc(known, unknown), roc_auc_score(truth, scores)),
        (metrics.aupr_in(known, unknown), average_precision_score(truth, scores)),
        (metrics.aupr_out(known, unknown), average_precision_score(1 - truth, -scores)),
    ]:
        assert ours == pytest.approx(theirs, abs=1e-12)
        assert type(ours) is float


@given(SCORES, SCORES, st.integers(1, 100))
def test_pairwise_metrics_equal_the_loops(known, unknown, hundredths):
    exact = pytest.approx
    assert metrics.auroc(known, unknown) == exact(oracles.auroc_by_pairs(known, unknown))
    ours = metrics.fpr_at(known, unknown, hundredths / 100)
    assert ours == exact(oracles.fpr_by_thresholds(known, unknown, hundredths))
    ours = metrics.aupr_in(known, unknown)
    assert ours == exact(oracles.average_precision_by_steps(known, unknown))
    flipped = [-u for u in unknown], [-k for k in known]
    ours = metrics.aupr_out(known, unknown)
    assert ours == exact(oracles.average_precision_by_steps(*flipped))
    ours = metrics.detection_accuracy(known, unknown)
    assert ours == exact(oracles.detection_by_thresholds(known, unknown))


@given(st.lists(st.tuples(SCORE, st.booleans()), min_size=1, max_size=12), SCORES)
def test_oscr_equals_pairs_and_curve_and_stays_below_its_bounds(knowns, unknown):
    known, correct = [k for k, _ in knowns], [c for _, c in knowns]
    ours = metrics.oscr(known, correct, unknown)
    assert ours == pytest.approx(oracles.auroc_by_pairs(known, unknown, correct))
    assert ours == pytest.approx(oracles.oscr_by_curve(known, correct, unknown))
    assert ours <= min(sum(correct) / len(correct), metrics.auroc(known, unknown))
    assert metrics.oscr(known, [True] * len(known), unknown) == metrics.auroc(known, unknown)
    assert metrics.oscr(known, [0] * len(known), unknown) == 0.0


@by_name
@given(known=SCORES, unknown=SCORES, data=st.data())
@settings(max_examples=40)
def test_order_of_images_and_monotone_maps_change_nothing(metric, known, unknown, data):
    value = metric(known, unknown)
    assert 0.0 <= value <= 1.0
    mixed = data.draw(st.permutations(known)), data.draw(st.permutations(unknown))
    assert metric(*mixed) == value
    # Each score's rank, pushed through an increasing map that rounding cannot flatten.
    ladder = sorted({*known, *unknown})
    climb = data.draw(st.sampled_from([lambda r: r**3 - 1e6, lambda r: -math.exp(-r / 2)]))
    moved = [[climb(ladder.index(s)) for s in scores] for scores in (known, unknown)]
    assert metric(*moved) == value


@given(SCORES, SCORES)
def test_auroc_of_the_swapped_sides_is_the_rest(known, unknown):
    assert metrics.auroc(known, unknown) + metrics.auroc(unknown, known) == pytest.approx(1.0)


def test_extremes():
    low, high = [0.0, 1.0], [2.0, 3.0, 4.0]
    assert metrics.auroc(high, low) == 1.0
    assert metrics.auroc(low, high) == 0.0
    assert metrics.auroc([7.0], [7.0, 7.0]) == 0.5
    assert metrics.fpr_at(high, low) == 0.0
    assert metrics.fpr_at(low, high) == 1.0
    assert metrics.detection_accuracy(high, low) == 1.0
    assert metrics.detection_accuracy(low, high) == 0.5
    assert metrics.aupr_in(high, low) == metrics.aupr_out(high, low) == 1.0
    assert metrics.auroc([math.inf, math.inf], [-math.inf, math.inf]) == 0.75


def test_scores_outside_the_unit_interval_are_not_squashed():
    known, unknown = -(np.arange(1000.0) ** 2), -(np.arange(500.0, 1500.0) ** 2)
    assert metrics.auroc(known, unknown) == pytest.approx(0.875, abs=1e-3)
    # One float64 step apart near 1: gone in float32, gone in a sigmoid.
    assert metrics.auroc([np.nextafter(1e9, 2e9)], [1e9]) == 1.0
    assert metrics.auroc(np.float32([0.1]), np.float64([0.1])) == 1.0


def test_fpr_counts_knowns_exactly():
    known = np.arange(20.0)
    # ⌈0.95·20⌉ = 19 knowns kept puts t at 1.
    assert metrics.fpr_at(known, [0.5, 1.0], 0.95) == 0.5
    assert metrics.fpr_at(np.arange(100.0), [92.5, 93.0], 0.07) == 0.5
    assert 0.07 * 100 > 7  # why the decimal is read as written
    assert metrics.fpr_at(known, [-1.0, 0.0], 1) == 0.5


def test_all_sizes_of_tie_groups_at_the_fpr_threshold():
    assert metrics.fpr_at([1.0] * 9 + [0.0], [1.0, 0.5, 0.0, -1.0], 0.9) == 0.25
    assert metrics.fpr_at([1.0] * 9 + [0.0], [1.0, 0.5, 0.0, -1.0], 0.91) == 0.75


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), min_size=1, max_size=20),
    st.booleans(),
)
def test_accuracy_and_macro_f1_agree_with_sklearn(pairs, names):
    labels, predicted = [y for y, _ in pairs], [p for _, p in pairs]
    unknown: int | str = -1
    expected = sum(y == p for y, p in pairs) / len(pairs)
    if names:
        labels, predicted = ([f"class {y}" for y in side] for side in (labels, predicted))
        unknown = "class -1"
    assert metrics.accuracy(labels, predicted) == expected
    classes = sorted({*labels, *predicted})
    if unknown not in classes:
        with pytest.raises(DeepSimplexError, match="unknown label"):
            metrics.macro_f1(labels, predicted, unknown)
        return
    theirs = f1_score(labels, predicted, average="macro", labels=classes, zero_division=0)
    assert metrics.macro_f1(labels, predicted, unknown) == pytest.approx(theirs)


def test_macro_f1_by_hand():
    # Class 0: 1 right, 2 true, 2 predicted → ½; unknown: 1, 2, 1 → ⅔; class 5: 0, 0, 1 → 0.
    ours = metrics.macro_f1([0, -1, -1, 0], [0, -1, 0, 5], -1)
    assert ours == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)
    objects = np.array(["cat", "unknown", "unknown"], dtype=object)
    assert metrics.macro_f1(objects, ["cat", "unknown", "cat"], "unknown") == pytest.approx(2 / 3)


@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=60)
def test_compactness_equals_the_loops(classes, dim, seed):
    rng = np.random.default_rng(seed)
    labels = np.r_[np.arange(classes), rng.integers(0, classes, 15)]
    features = 3 * rng.normal(size=(classes, dim))[labels] + rng.normal(size=(len(labels), dim))
    expected = oracles.compactness_by_loops(features, labels.tolist())
    ours = metrics.compactness(features, labels)
    for name, value in expected.items():
        assert getattr(ours, name) == pytest.approx(value, rel=1e-7, abs=1e-9), name


def simplex_vertices(classes):
    centred = np.eye(classes) - 1 / classes
    return centred / np.linalg.norm(centred, axis=1, keepdims=True)


def test_compactness_of_a_collapsed_simplex_far_from_the_origin():
    labels = np.repeat(np.arange(6), 50)
    ours = metrics.compactness(1e6 + simplex_vertices(6)[labels], [f"c{y}" for y in labels])
    assert ours.within == ours.nc1 == ours.ratio == 0.0
    assert ours.between == pytest.approx(1.0, abs=1e-9)
    assert ours.lengths == pytest.approx([1.0] * 6, abs=1e-9)
    assert ours.cosine_mean == pytest.approx(-0.2, abs=1e-9)
    assert max(ours.length_cv, ours.cosine_sd, ours.cosine_gap) < 1e-9


def test_nc1_looks_only_along_the_directions_that_tell_classes_apart():
    along, across = np.array([1.0, 1.0, 0.0]) / math.sqrt(2), np.array([0.0, 0.0, 0.5])
    places = np.array([-1.0, 0.25, 1.0])
    around = np.array([0.1 * along, -0.1 * along, across, -across])
    features = (places[:, None, None] * along + around).reshape(12, 3)
    ours = metrics.compactness(features, np.repeat([0, 1, 2], 4))
    assert ours.nc1 == pytest.approx((2 * 0.1**2 / 4) / places.var() / 3)
    assert ours.within == pytest.approx((2 * 0.1**2 + 2 * 0.5**2) / 4)


def test_compactness_does_not_depend_on_place_turn_or_order():
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 4, 200)
    features = simplex_vertices(4)[labels] + 0.3 * rng.normal(size=(200, 4))
    before = metrics.compactness(features, labels)
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    order = rng.permutation(200)
    after = metrics.compactness((2 * features @ turn + 7)[order], labels[order])
    assert after.within == pytest.approx(4 * before.within)
    assert after.lengths == pytest.approx([2 * x for x in before.lengths])
    for name in ("ratio", "nc1", "length_cv", "cosine_mean", "cosine_sd", "cosine_gap"):
        assert getattr(after, name) == pytest.approx(getattr(before, name)), name
    assert 0.05 < before.nc1 < 1.0


def test_compactness_of_a_dead_network():
    ours = metrics.compactness(np.full((6, 3), 0.1), [0, 0, 1, 1, 2, 2])
    assert (ours.within, ours.between, ours.ratio, ours.nc1) == (0.0, 0.0, math.inf, math.inf)
    assert math.isnan(ours.cosine_gap)
    assert math.isnan(ours.length_cv)


def test_compactness_needs_no_table_of_pairs():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(40_000, 16)).astype(np.float32), np.arange(40_000) % 500
    tracemalloc.start()
    ours = metrics.compactness(features, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 80 samples a class leave 79/80 of the variance. An n × C table would take 62 times.
    assert ours.within == pytest.approx(16 * 79 / 80, rel=0.01)
    assert peak < 8 * features.nbytes


def test_report_is_its_parts():
    known, unknown = normal_scores(np.float64)
    labels = np.arange(len(known)) % 6
    predicted = np.where(np.arange(len(known)) % 9 == 0, (labels + 1) % 6, labels)
    assert metrics.open_set_report(known, labels, predicted, unknown) == {
        "accuracy": metrics.accuracy(labels, predicted),
        "auroc": metrics.auroc(known, unknown),
        "oscr": metrics.oscr(known, labels == predicted, unknown),
        "fpr95": metrics.fpr_at(known, unknown, 0.95),
        "aupr_in": metrics.aupr_in(known, unknown),
        "aupr_out": metrics.aupr_out(known, unknown),
        "detection_accuracy": metrics.detection_accuracy(known, unknown),
    }


@by_name
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
def test_torch_and_numpy_agree(metric, dtype):
    known = torch.tensor([3.0, 5.5, 1.25, 7.0]).to(dtype)
    unknown = torch.tensor([3.0, 0.5, 2.0]).to(dtype)
    expected = metric(known.double().numpy(), unknown.double().numpy())
    if dtype.is_floating_point:
        known.requires_grad_()
    assert metric(known, unknown) == expected
    assert metric(known.tolist(), unknown) == expected


def test_torch_labels_and_features():
    labels, predicted = torch.tensor([0, 1, -1]), torch.tensor([0, 1, 1])
    assert metrics.accuracy(labels, predicted) == pytest.approx(2 / 3)
    assert metrics.macro_f1(labels, predicted.numpy(), -1) == pytest.approx((1 + 2 / 3) / 3)
    assert metrics.oscr(torch.ones(3), labels == predicted, torch.zeros(2)) == pytest.approx(2 / 3)
    features = torch.eye(3, dtype=torch.bfloat16, requires_grad=True)
    assert metrics.compactness(features, labels).between == pytest.approx(2 / 3)


def test_inputs_are_left_alone():
    known, unknown = normal_scores(np.float64, n=50)
    labels, features = np.arange(50) % 3, np.arange(200.0).reshape(50, 4) ** 2
    tensors = torch.tensor(known), torch.tensor(unknown)
    arrays = [known, unknown, labels, features]
    before = [a.copy() for a in arrays]
    for array in arrays:
        array.flags.writeable = False
    metrics.open_set_report(known, labels, labels[::-1], unknown)
    metrics.compactness(features, labels)
    metrics.macro_f1(labels, labels, 2)
    metrics.open_set_report(tensors[0], labels, labels, tensors[1])
    after = [*arrays, *(t.numpy() for t in tensors)]
    for array, copy in zip(after, [*before, *before[:2]], strict=True):
        np.testing.assert_array_equal(array, copy)


@by_name
@pytest.mark.parametrize(
    ("known", "unknown", "message"),
    [
        ([], [1.0], r"known_scores of shape \(n,\), n ≥ 1; got shape \(0,\)"),
        ([1.0], [], "unknown_scores of shape"),
        ([1.0], [math.nan, 2.0], "unknown_scores without NaN; got 1 NaN of 2"),
        (torch.tensor([math.nan]), [1.0], "known_scores without NaN"),
        ([[1.0, 2.0]], [1.0], r"got shape \(1, 2\)"),
        (3.0, [1.0], r"got shape \(\)"),
        (["high"], [1.0], "real numbers"),
        ([1.0 + 2.0j], [1.0], "real numbers"),
        ([[1.0], [1.0, 2.0]], [1.0], "as one array"),
    ],
)
def test_bad_scores_are_refused(metric, known, unknown, message):
    with pytest.raises(DeepSimplexError, match=message):
        metric(known, unknown)


@pytest.mark.parametrize("tpr", [0, 0.0, -0.1, 1.01, math.nan, math.inf, "most", None])
def test_bad_tpr_is_refused(tpr):
    with pytest.raises(DeepSimplexError, match=r"tpr in \(0, 1\]"):
        metrics.fpr_at([1.0], [0.0], tpr)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.accuracy([0, 1], [0]), "labels and predicted of one length; got 2 and 1"),
        (lambda: metrics.accuracy([], []), "n ≥ 1"),
        (lambda: metrics.accuracy([[0]], [[0]]), r"shape \(1, 1\)"),
        (lambda: metrics.accuracy([0, 1], ["0", "1"]), "of one kind"),
        (lambda: metrics.accuracy([0, "1"], ["0", "1"]), "all numbers or all names"),
        (lambda: metrics.accuracy([[0], [1, 2]], [0, 1]), "as one array"),
        (lambda: metrics.accuracy([0.0, math.nan], [0, 1]), "all numbers or all names"),
        (lambda: metrics.macro_f1([0, 1], [0], -1), "of one length"),
        (lambda: metrics.macro_f1(["a"], ["a"], -1), "got only 'a'"),
        (lambda: metrics.oscr([1.0, 2.0], [True], [0.0]), "known_correct of one length"),
        (lambda: metrics.oscr([1.0, 2.0], [3, 7], [0.0]), "True or False"),
        (lambda: metrics.oscr([1.0], [True], [math.nan]), "without NaN"),
        (lambda: metrics.open_set_report([1.0], [0, 1], [0, 1], [0.0]), "of one length"),
        (lambda: metrics.compactness([1.0, 2.0], [0, 1]), r"features of shape \(n, d\)"),
        (lambda: metrics.compactness(np.empty((0, 3)), []), r"features of shape \(n, d\)"),
        (lambda: metrics.compactness(np.eye(2), [0]), "features and labels of one length"),
        (lambda: metrics.compactness(np.eye(2), [0, 0]), "2 or more classes"),
        (lambda: metrics.compactness([[math.inf], [0.0]], [0, 1]), "finite features"),
    ],
)
def test_other_bad_input_is_refused(call, message):
    with pytest.raises(DeepSimplexError, match=message):
        call()
