"""The geometry against a dense float64 matrix of centres."""

import math
import subprocess
import sys
import textwrap

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepsimplex.errors import DeepSimplexError
from deepsimplex.simplex import Simplex, centroid_squared_distance, constants, nearest_index

CASES = [
    (2, 1, "regular"),
    (2, 5, "regular"),
    (6, 5, "regular"),
    (6, 9, "regular"),
    (40, 39, "regular"),
    (2, 1, "truncated"),
    (2, 7, "truncated"),
    (6, 128, "truncated"),
    (8, 7, "truncated"),
    (2, 3, "doubled"),
    (4, 3, "doubled"),
    (5, 3, "doubled"),
    (6, 3, "doubled"),
    (7, 3, "doubled"),
    (8, 3, "doubled"),
    (6, 2, "doubled"),
    (30, 20, "doubled"),
]


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(["regular", "truncated", "doubled"]))
    dim = draw(st.integers(2, 24))
    most = 2 * dim + 2 if kind == "doubled" else dim + 1
    return draw(st.integers(2, most)), dim, kind, draw(st.integers(0, 10**6))


def normal(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("classes", "dim", "kind"), CASES)
def test_every_quantity_equals_the_dense_oracle(classes, dim, kind):
    simplex = Simplex(classes, dim, kind)
    centres = oracles.simplex_centres(classes, dim, kind)
    features = normal(33, dim, seed=classes)
    labels = torch.arange(33) % classes
    distances = ((features.numpy()[:, None] - centres) ** 2).sum(-1)

    assert np.allclose(simplex.centres(torch.arange(classes), torch.float64), centres, atol=1e-14)
    assert np.allclose(simplex.dot_products(features), features.numpy() @ centres.T, atol=1e-12)
    assert np.allclose(simplex.squared_distances(features), distances, atol=1e-11)
    own = simplex.own_squared_distance(features, labels)
    assert np.allclose(own, distances[np.arange(33), labels], atol=1e-12)
    nearest = simplex.nearest(features)
    assert (nearest.label.numpy() == distances.argmin(1)).all()
    assert np.allclose(nearest.distance, np.sqrt(distances.min(1)), atol=1e-12)
    centroid = simplex.centroid(torch.float64)
    assert np.allclose(centroid, centres.mean(0), atol=1e-14)
    pull = centroid_squared_distance(simplex, features)
    assert np.allclose(pull, ((features.numpy() - centres.mean(0)) ** 2).sum(1), atol=1e-12)


@pytest.mark.parametrize(("classes", "dim", "kind"), CASES)
def test_margin_is_the_smallest_distance_between_used_centres(classes, dim, kind):
    centres = oracles.simplex_centres(classes, dim, kind)
    gram = centres @ centres.T
    largest = (gram - 3 * np.eye(classes)).max()
    simplex = Simplex(classes, dim, kind)
    assert simplex.largest_cosine == pytest.approx(largest, abs=1e-12)
    assert simplex.margin == pytest.approx(math.sqrt(2 - 2 * largest), abs=1e-12)
    assert simplex.free == (0 if kind == "regular" else simplex.capacity - classes)


@pytest.mark.parametrize("classes", [*range(2, 41), 64, 129, 257, 513, 1000, 1999, 2000])
def test_gram_matrix_of_the_regular_simplex(classes):
    simplex = Simplex(classes, classes - 1)
    gram = simplex.dot_products(simplex.centres(torch.arange(classes), torch.float64))
    expected = (classes * torch.eye(classes, dtype=torch.float64) - 1) / (classes - 1)
    assert (gram - expected).abs().max() < 1e-12


@pytest.mark.slow
def test_gram_matrix_for_every_class_count_to_2000():
    for classes in range(2, 2001):
        test_gram_matrix_of_the_regular_simplex(classes)


@pytest.mark.parametrize("classes", [2, 3, 10, 100, 2000, 100_000])
@pytest.mark.parametrize("distance", [1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("kind", ["regular", "truncated", "doubled"])
def test_float32_own_distance_close_to_a_vertex(classes, distance, kind):
    dim = max(2, classes if kind == "truncated" else classes - 1)
    if kind == "doubled":
        dim = max(2, classes // 2 - 1)
    simplex = Simplex(classes, dim, kind)
    labels = torch.tensor([0, 1, classes // 2, classes - 1])
    vertices = simplex.centres(labels, torch.float64)
    step = normal(4, dim, seed=classes)
    features = (vertices + distance * step / step.norm(dim=1, keepdim=True)).float()
    true = (features.double() - vertices).norm(dim=1)
    for ours in (simplex.own_distance(features, labels), simplex.nearest(features).distance):
        assert ((ours.double() - true).abs() / true).max() < 1e-5
    if classes <= 2000:
        all_distances = simplex.squared_distances(features).double().sqrt()
        assert ((all_distances.gather(1, labels[:, None])[:, 0] - true).abs() / true).max() < 1e-5


@settings(max_examples=60, deadline=None)
@given(cases())
def test_identities(case):
    classes, dim, kind, seed = case
    simplex = Simplex(classes, dim, kind)
    features = normal(7, dim, seed)
    vertices = simplex.centres(torch.arange(classes), torch.float64)
    assert torch.allclose(vertices.norm(dim=1), torch.ones(classes, dtype=torch.float64))
    # The decision is one and the same by distance, cosine or dot product.
    by_dot = simplex.dot_products(features).argmax(1)
    assert torch.equal(simplex.squared_distances(features).argmin(1), by_dot)
    assert torch.equal(nearest_index(simplex, features), by_dot)
    if kind == "regular":
        assert vertices.sum(0).abs().max() < 1e-12
        # Σ_j‖f − v_j‖² = C(‖f‖² + 1)
        total = simplex.squared_distances(features).sum(1)
        assert torch.allclose(total, classes * (features.square().sum(1) + 1))
    # A rotation acting on centres and features together changes no distance.
    rotation = torch.linalg.qr(normal(dim, dim, seed + 1))[0]
    labels = torch.arange(7) % classes
    rotated = ((features @ rotation) - (vertices @ rotation)[labels]).square().sum(1)
    assert torch.allclose(rotated, simplex.own_squared_distance(features, labels))


@pytest.mark.parametrize(
    ("classes", "dim", "kind"), [(5, 6, "regular"), (4, 6, "truncated"), (7, 3, "doubled")]
)
def test_gradients(classes, dim, kind):
    simplex = Simplex(classes, dim, kind)
    features = normal(6, dim).requires_grad_()
    labels = torch.arange(6) % classes
    check = torch.autograd.gradcheck
    assert check(simplex.dot_products, features)
    assert check(simplex.squared_distances, features)
    assert check(lambda f: simplex.own_squared_distance(f, labels), features)
    assert check(lambda f: simplex.own_distance(f, labels), features)
    assert check(lambda f: simplex.nearest(f).distance, features)


def test_the_distance_has_a_gradient_at_its_own_centre():
    simplex = Simplex(3, 2)
    features = simplex.centres(torch.tensor([1]), torch.float64).requires_grad_()
    simplex.own_distance(features, torch.tensor([1])).sum().backward()
    assert torch.equal(features.grad, torch.zeros(1, 2, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["regular", "truncated", "doubled"])
def test_huge_batches_are_taken_a_few_rows_at_a_time(kind, monkeypatch):
    simplex = Simplex(8, 9, kind)
    features, labels = normal(25, 9), torch.arange(25) % 8
    whole = simplex.own_squared_distance(features, labels), *simplex.nearest(features)
    monkeypatch.setattr("deepsimplex.simplex._CHUNK", 20)
    parts = simplex.own_squared_distance(features, labels), *simplex.nearest(features)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_half_features_are_widened():
    simplex = Simplex(4, 3)
    features = normal(5, 3, dtype=torch.float32).bfloat16()
    assert simplex.squared_distances(features).dtype == torch.float32
    assert torch.equal(simplex.dot_products(features), simplex.dot_products(features.float()))
    assert torch.equal(simplex.nearest(features).distance, simplex.nearest(features.float())[1])


def test_an_empty_batch_gives_empty_answers():
    simplex = Simplex(4, 3)
    empty = torch.empty(0, 3)
    assert simplex.nearest(empty).label.shape == (0,)
    assert simplex.squared_distances(empty).shape == (0, 4)


MILLION = textwrap.dedent("""
    import resource, torch
    from deepsimplex.simplex import Simplex
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    simplex = Simplex(1_000_000, 999_999)
    small = Simplex(1000, 999)
    small.nearest(torch.randn(256, 999))  # warm the thread pools and the kernels
    torch.manual_seed(0)
    features = torch.empty(256, 999_999).normal_()
    features[:, :] += 0.0
    before = peak()
    nearest = simplex.nearest(features)
    extra = peak() - before
    assert nearest.label.shape == (256,)
    print(extra / features.nbytes)
""")


def test_a_million_classes_need_no_table():
    run = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, check=True, timeout=300
    )
    assert float(run.stdout) <= 0.10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 3), "at least 2 classes"),
        ((0, 3), "at least 2 classes"),
        ((3, 0), "dim of 1 or more"),
        ((3, 1, "doubled"), "dim of 2 or more"),
        ((3, 2, "cubic"), "kind to be one of"),
        ((3.0, 2), "classes to be an int"),
        (("3", 2), "classes to be an int"),
        ((3, True), "dim to be an int"),
        ((30, 10), "width 29 or more"),
        ((12, 10, "truncated"), "at most 11 classes"),
        ((23, 10, "doubled"), "at most 22 classes"),
    ],
)
def test_bad_simplices(arguments, words):
    with pytest.raises(DeepSimplexError, match=words):
        Simplex(*arguments)


def test_the_remedy_for_too_many_classes_fits_the_case():
    def remedy(classes, dim, kind="regular"):
        with pytest.raises(DeepSimplexError) as caught:
            Simplex(classes, dim, kind)
        return caught.value.remedy

    assert "doubled" in remedy(20, 10)
    assert "doubled" not in remedy(30, 10)
    assert "doubled" not in remedy(4, 1)
    assert "doubled" not in remedy(30, 10, "doubled")
    assert "DAM before the loss (29²" in remedy(30, 10)
    assert "narrow hidden layer" in remedy(30_000, 10)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (torch.zeros(3, 4), r"features of shape \(n, 3\)"),
        (torch.zeros(3), r"got \(3,\)"),
        (torch.zeros(2, 3, 3), r"got \(2, 3, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int64), "floating-point features"),
        (torch.tensor([[0.0, float("nan"), 0.0]]), "finite features"),
        (torch.tensor([[0.0, float("inf"), 0.0]]), "finite features"),
        (torch.tensor([[0.0, float("-inf"), 0.0]]), "finite features"),
        (np.zeros((2, 3)), "torch.Tensor"),
    ],
)
def test_bad_features(features, words):
    simplex = Simplex(4, 3)
    for method in (simplex.dot_products, simplex.squared_distances, simplex.nearest):
        with pytest.raises(DeepSimplexError, match=words):
            method(features)
    with pytest.raises(DeepSimplexError, match=words):
        simplex.own_distance(features, torch.zeros(len(features), dtype=torch.int64))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.tensor([0, 4]), r"labels in 0 … 3; got 4"),
        (torch.tensor([-1, 0]), r"labels in 0 … 3; got -1"),
        (torch.tensor([0.0, 1.0]), "integer"),
        (torch.tensor([0]), r"labels of shape \(2,\)"),
        ([0, 1], "integer torch.Tensor; got list"),
    ],
)
def test_bad_labels(labels, words):
    with pytest.raises(DeepSimplexError, match=words):
        Simplex(4, 3).own_distance(torch.zeros(2, 3), labels)


def test_constants_of_equation_two():
    first, kappa, eta = constants(6)
    assert first == pytest.approx(0.4472135955)
    assert kappa == pytest.approx(-(1 + math.sqrt(6)) / 5**1.5)
    assert eta == pytest.approx(math.sqrt(6 / 5))
