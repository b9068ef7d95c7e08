"""Each loss against its equation as a slow loop, its gradient, and the identities it must obey."""

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepsimplex import losses
from deepsimplex.errors import DeepSimplexError
from deepsimplex.simplex import Simplex

CASES = [(2, 1, "regular"), (6, 8, "regular"), (4, 9, "truncated"), (7, 3, "doubled")]


def problem(classes, dim, kind, seed=0, n=9, k=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, dim, generator=generator, dtype=dtype)
    labels = torch.randint(0, classes, (n,), generator=generator)
    background = torch.randn(k, dim, generator=generator, dtype=dtype)
    return (
        Simplex(classes, dim, kind),
        oracles.simplex_centres(classes, dim, kind),
        features,
        labels,
        background,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_values_against_the_equations(case, seed):
    simplex, centres, f, y, b = problem(*case, seed)
    F, Y, B = f.numpy(), y.tolist(), b.numpy()
    half_mean = 1 / (2 * len(F) * len(B))

    def close(ours, oracle):
        assert ours.shape == ()
        assert float(ours) == pytest.approx(oracle, rel=1e-11)

    close(losses.simplex_loss(simplex, f, y), oracles.eq4(F, Y, centres))
    close(losses.hinge_loss(simplex, f, y, 0.8), oracles.eq6(F, Y, centres, 0.8))
    close(losses.softmax_loss(simplex, f, y, 0.3), oracles.eq7(F, Y, centres, scale=1 / 0.3))
    for reading, m, plain in (("A", 0.7, False), ("B", 0.7**2, False), ("C", 0.7, True)):
        close(
            losses.background_loss(simplex, f, y, b, 0.7, reading=reading),
            oracles.eq5(F, Y, B, centres, m, half_mean, plain),
        )
    largest = max(oracles.own_squared(F, Y, centres))
    for reading in "AB":
        close(
            losses.background_loss(simplex, f, y, b, "auto", reading=reading),
            oracles.eq5(F, Y, B, centres, largest, half_mean),
        )
    close(
        losses.background_loss(simplex, f, y, b, "auto", reading="C"),
        oracles.eq5(F, Y, B, centres, largest**0.5, half_mean, plain=True),
    )
    pull = np.mean([oracles.squared_distance(row, centres.mean(0)) for row in B])
    close(losses.centroid_pull(simplex, b), pull)
    for ramp in (None, 1.5):
        close(
            losses.authors_loss(simplex, f, y, b, 0.7, ramp=ramp),
            oracles.authors_three_terms(F, Y, B, centres, 0.7, ramp),
        )


@pytest.mark.parametrize("radius", [1.0, 5.0, 64.0, 200.0])
def test_literal_forms_against_the_equations_at_radius_u(radius):
    simplex, centres, f, y, b = problem(5, 6, "regular", seed=3)
    f, b, centres = f * radius, b * radius, centres * radius
    F, Y, B = f.numpy(), y.tolist(), b.numpy()
    half_mean = 1 / (2 * len(F) * len(B))
    bias = torch.linspace(-1, 1, 5, dtype=torch.float64)

    def close(ours, oracle):
        assert float(ours) == pytest.approx(oracle, rel=1e-10)

    close(losses.literal_simplex_loss(simplex, f, y, radius), oracles.eq4(F, Y, centres))
    close(losses.literal_hinge_loss(simplex, f, y, 3.0, radius), oracles.eq6(F, Y, centres, 3.0))
    close(losses.literal_softmax_loss(simplex, f, y, radius), oracles.eq7(F, Y, centres))
    close(
        losses.literal_softmax_loss(simplex, f, y, radius, bias), oracles.eq7(F, Y, centres, bias)
    )
    u = radius
    for reading, m, plain in (("A", u / 2, False), ("B", (u / 2) ** 2, False), ("C", u / 2, True)):
        close(
            losses.literal_background_loss(simplex, f, y, b, radius, reading=reading),
            oracles.eq5(F, Y, B, centres, m, half_mean, plain),
        )
    close(
        losses.literal_background_loss(simplex, f, y, b, radius, margin=2.0, weight=0.1),
        oracles.eq5(F, Y, B, centres, 2.0, 0.1),
    )
    for ramp in (None, 60.0):
        close(
            losses.literal_authors_loss(simplex, f, y, b, radius, 48.0, ramp),
            oracles.authors_three_terms(F, Y, B, centres, 48.0, ramp),
        )


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case):
    simplex, _, f, y, b = problem(*case, seed=1)
    f.requires_grad_()
    b.requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda f: losses.simplex_loss(simplex, f, y), f)
    assert check(lambda f: losses.hinge_loss(simplex, f, y, 0.8), f)
    assert check(lambda f: losses.softmax_loss(simplex, f, y, 0.5), f)
    for reading in "ABC":
        assert check(
            lambda f, b, r=reading: losses.background_loss(simplex, f, y, b, 0.7, reading=r), (f, b)
        )
    assert check(lambda b: losses.centroid_pull(simplex, b), b)
    assert check(lambda f, b: losses.authors_loss(simplex, f, y, b, 0.7), (f, b))


def test_no_gradient_flows_through_the_automatic_margin():
    simplex, _, f, y, b = problem(4, 3, "regular", seed=5)
    f.requires_grad_()
    losses.pair_hinge(simplex, f, y, b, "auto").backward()
    with torch.no_grad():
        m = float(simplex.own_squared_distance(f, y).max())
    fixed = f.detach().clone().requires_grad_()
    losses.pair_hinge(simplex, fixed, y, b, m).backward()
    assert torch.equal(f.grad, fixed.grad)


def test_eq6_has_no_gradient_inside_its_ball():
    """Outside √m it is eq. 4's, 2(f − v)/n; inside it is exactly 0."""
    simplex, centres, f, y, _ = problem(5, 4, "regular", 0)
    own = torch.from_numpy(centres)[y]
    away = torch.linspace(0.95, 1.05, len(f), dtype=torch.float64)[:, None]
    away = away * torch.nn.functional.normalize(f.detach())  # in units of √m
    given = (own + 0.8**0.5 * away).requires_grad_()
    losses.hinge_loss(simplex, given, y, 0.8).backward()
    inside = away.norm(dim=1) < 1
    assert 0 < inside.sum() < len(f)
    assert not given.grad[inside].any()
    assert torch.allclose(given.grad[~inside], (2 * 0.8**0.5 * away / len(f))[~inside])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(0, 4),
    st.sampled_from(["regular", "truncated"]),
    st.integers(0, 10**6),
    st.floats(0.05, 2.0),
)
def test_identities(classes, spare, kind, seed, margin):
    simplex, centres, f, y, b = problem(classes, classes - 1 + spare, kind, seed)
    dim = simplex.dim
    eq4 = losses.simplex_loss(simplex, f, y)
    # Eq. 6 with m = 0 is eq. 4; with a huge m it asks for nothing.
    assert torch.equal(losses.hinge_loss(simplex, f, y, 0.0), eq4)
    assert losses.hinge_loss(simplex, f, y, 1e9) == 0
    # The authors' mean over batch and dimension is eq. 4 divided by d.
    mse = torch.nn.functional.mse_loss(f, torch.from_numpy(centres)[y])
    assert torch.allclose(mse * dim, eq4)
    # K = 0 gives eq. 4; permuting the background, or doubling both batches, changes nothing.
    for reading in "ABC":

        def loss(f, y, b, reading=reading):
            return losses.background_loss(simplex, f, y, b, margin, reading=reading)

        assert torch.equal(loss(f, y, b[:0]), eq4)
        assert torch.allclose(loss(f, y, b.flip(0)), loss(f, y, b))
        twice = loss(torch.cat([f, f]), torch.cat([y, y]), torch.cat([b, b]))
        assert torch.allclose(twice, loss(f, y, b))
    # Background exactly at its centre: the hinge is m + r_i for every i of that class.
    at_centre = simplex.centres(y[:1], torch.float64)
    own = simplex.own_squared_distance(f[:1], y[:1])
    hinge = losses.pair_hinge(simplex, f[:1], y[:1], at_centre, margin)
    assert float(hinge) == pytest.approx((margin + float(own)) / 2)
    # Background at the centroid is at its goal.
    assert losses.centroid_pull(simplex, simplex.centroid(torch.float64)[None]) < 1e-25
    # Eq. 7 does not see what is orthogonal to the span of the vertices.
    if kind == "regular" and spare:
        moved = f.clone()
        moved[:, classes - 1 :] += 3.0
        assert torch.allclose(
            losses.softmax_loss(simplex, moved, y, 0.5), losses.softmax_loss(simplex, f, y, 0.5)
        )
        logits = simplex.dot_products(f)
        assert logits.sum(1).abs().max() < 1e-10


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 2000.0), st.integers(0, 10**6))
def test_the_radius_is_a_unit_of_length(radius, seed):
    """f = u·g: the literal loss is u² times the unit loss, so u only rescales the step."""
    simplex, _, g, y, b = problem(5, 7, "regular", seed)
    unit, literal = g.clone().requires_grad_(), g.clone().requires_grad_()
    losses.simplex_loss(simplex, unit, y).backward()
    losses.literal_simplex_loss(simplex, literal * radius, y, radius).backward()
    assert torch.allclose(literal.grad, radius**2 * unit.grad, rtol=1e-9)
    a = losses.literal_background_loss(simplex, g * radius, y, b * radius, radius, reading="B")
    c = losses.background_loss(simplex, g, y, b, 0.5, reading="B")
    assert float(a) == pytest.approx(radius**2 * float(c), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_inside_any_autocast(dtype):
    simplex, _, f, y, b = problem(6, 8, "regular", dtype=torch.float32)
    f, b = f.to(dtype), b.to(dtype)
    calls = [
        lambda f, b: losses.simplex_loss(simplex, f, y),
        lambda f, b: losses.hinge_loss(simplex, f, y, 0.1),
        lambda f, b: losses.softmax_loss(simplex, f, y, 1.0),
        lambda f, b: losses.background_loss(simplex, f, y, b, 0.5, reading="C"),
        lambda f, b: losses.centroid_pull(simplex, b),
        lambda f, b: losses.authors_loss(simplex, f, y, b, 0.5),
        lambda f, b: losses.literal_simplex_loss(simplex, f, y, 64.0),
    ]
    for call in calls:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = call(f, b)
        outside = call(f.float(), b.float())
        assert inside.dtype == torch.float32
        assert torch.equal(inside, outside)


def test_no_tensor_of_batch_by_background_by_dim():
    """n = K = 256, d = 4096: a B×K×d tensor alone would be 1 GiB."""
    simplex = Simplex(10, 4096, "truncated")
    f = torch.randn(256, 4096)
    y = torch.arange(256) % 10
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Watch():
        losses.background_loss(simplex, f, y, f.flip(0), 0.5)
        losses.authors_loss(simplex, f, y, f.flip(0), 0.5)
    assert max(sizes) == f.numel()


def test_bad_input():
    simplex = Simplex(4, 3)
    f, y = torch.zeros(2, 3), torch.tensor([0, 1])
    for call, words in [
        (lambda: losses.simplex_loss(simplex, f[:0], y[:0]), "at least 1 sample"),
        (lambda: losses.simplex_loss(simplex, f, y + 3), "labels in 0"),
        (lambda: losses.simplex_loss(simplex, f * float("nan"), y), "finite features"),
        (lambda: losses.hinge_loss(simplex, f[:, :2], y, 0.1), "features of shape"),
        (lambda: losses.softmax_loss(simplex, f, y.float(), 1.0), "integer"),
        (lambda: losses.background_loss(simplex, f, y, f[:, :2], 0.1), "features of shape"),
        (lambda: losses.background_loss(simplex, f, y, f / 0, 0.1), "finite features"),
        (lambda: losses.pair_hinge(simplex, f, y, f, 0.1, reading="D"), "reading 'A'"),
        (lambda: losses.pair_hinge(simplex, f, y, f, "large"), "a number or 'auto'"),
        (lambda: losses.centroid_pull(simplex, f / 0), "finite features"),
    ]:
        with pytest.raises(DeepSimplexError, match=words):
            call()
