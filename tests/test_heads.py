"""Heads: values against NumPy, the rank that a DAM adds, and the choice between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.heads import DAM, DAM_WEIGHTS, LinearHead, NoHead, build_head, choose_head
from deepsimplex.methods.base import through_head


def centred_rank(outputs: torch.Tensor) -> int:
    return int(np.linalg.matrix_rank((outputs - outputs.mean(0)).double().numpy(), tol=1e-4))


def test_linear_is_an_affine_map_with_nothing_after_it() -> None:
    head = LinearHead(4, 3)
    x = torch.randn(50, 4)
    weight, bias = (p.detach().numpy() for p in (head.fc.weight, head.fc.bias))
    np.testing.assert_allclose(head(x).detach(), x.numpy() @ weight.T + bias, atol=1e-6)


@pytest.mark.parametrize("hidden", [None, 5])
def test_dam_is_fc_relu_fc(hidden: int | None) -> None:
    head = DAM(4, 9, hidden)
    width = 9 if hidden is None else hidden
    assert [tuple(p.shape) for p in head.parameters()] == [(width, 4), (width,), (9, width), (9,)]
    x = torch.randn(50, 4)
    w1, b1, w2, b2 = (p.detach().numpy() for p in head.parameters())
    expected = np.maximum(x.numpy() @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(head(x).detach(), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "dam"])
def test_negative_coordinates_are_reached(kind: str) -> None:
    torch.manual_seed(0)
    out = build_head(kind, 8, 6)(torch.rand(200, 8))
    assert (out < 0).any()
    assert (out > 0).any()


def test_dam_lifts_the_rank_that_a_linear_map_cannot() -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 2)
    with torch.no_grad():
        assert centred_rank(LinearHead(2, 19)(x)) <= 2
        assert centred_rank(DAM(2, 19)(x)) > 2


def test_dam_fits_twenty_centres_from_the_plane_and_linear_does_not() -> None:
    """20 points of a circle to 20 orthogonal targets: rank 2 leaves at least 17/20 of eq. 4."""
    torch.manual_seed(0)
    angle = torch.arange(20) * (2 * torch.pi / 20)
    x, target = torch.stack([angle.cos(), angle.sin()], 1), torch.eye(20)
    final = {}
    for kind in ("linear", "dam"):
        head = build_head(kind, 2, 20)
        optimiser = torch.optim.Adam(head.parameters(), lr=0.02)
        for _ in range(600):
            loss = (head(x) - target).square().sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        final[kind] = float(loss.detach())
    assert final["linear"] >= 17 / 20 - 1e-3
    assert final["dam"] < 0.5 * final["linear"]


@pytest.mark.parametrize("kind", ["linear", "dam", "none"])
def test_every_head_states_its_widths(kind: str) -> None:
    head = build_head(kind, 7, 7)
    assert (head.in_features, head.out_features) == (7, 7)
    assert head(torch.randn(3, 7)).shape == (3, 7)


def test_none_passes_the_vector_through_without_parameters() -> None:
    head = build_head("none", 5, 5)
    x = torch.randn(2, 5)
    assert isinstance(head, NoHead)
    assert torch.equal(head(x), x)
    assert not list(head.parameters())


@pytest.mark.parametrize("kind", ["linear", "dam"])
def test_gradient_reaches_every_parameter_also_under_autocast(kind: str) -> None:
    head = build_head(kind, 6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = head(torch.randn(32, 6))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_builds_on_the_meta_device() -> None:
    with torch.device("meta"):
        head = build_head("dam", 512, 18_599)
    assert sum(p.numel() for p in head.parameters()) == 18_599 * (512 + 18_599 + 2)


@pytest.mark.parametrize(
    ("features", "classes", "kind"),
    [(128, 2, "linear"), (5, 6, "linear"), (5, 7, "dam"), (1, 3, "dam"), (512, 20_001, "dam")],
)
def test_choice(features: int, classes: int, kind: str) -> None:
    assert choose_head(features, classes) == kind


def test_choice_beyond_the_limit_gives_remedies_that_work() -> None:
    with pytest.raises(DeepSimplexError, match="20001 features") as caught:
        choose_head(512, 20_002)
    assert "doubled" not in caught.value.remedy
    hidden = int(caught.value.remedy.split("hidden=")[1].split(")")[0])
    assert hidden * (512 + 20_001) <= DAM_WEIGHTS
    with pytest.raises(DeepSimplexError, match="doubled"):
        choose_head(10_000, 20_002)
    with pytest.raises(DeepSimplexError) as over:
        choose_head(10_000, 20_003)
    assert "doubled" not in over.value.remedy


@pytest.mark.parametrize("kind", ["linear", "dam", "none"])
@pytest.mark.parametrize("widths", [(0, 3), (3, 0), (-1, 3)])
def test_widths_below_one_are_refused(kind: str, widths: tuple[int, int]) -> None:
    with pytest.raises(DeepSimplexError, match="at least 1"):
        build_head(kind, *widths)


def test_other_errors() -> None:
    with pytest.raises(DeepSimplexError, match="linear, dam, none"):
        build_head("arcface", 3, 3)
    with pytest.raises(DeepSimplexError, match="3 features and 4 outputs"):
        build_head("none", 3, 4)
    with pytest.raises(DeepSimplexError, match="hidden"):
        DAM(3, 4, hidden=0)
    with pytest.raises(DeepSimplexError, match="2 or more classes"):
        choose_head(3, 1)


def test_a_head_is_not_rounded_under_autocast():
    """Of features in half precision and in single; a head of millions of weights may be."""
    head = nn.Linear(6, 3)
    features = torch.randn(5, 6)
    plain = head(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(through_head(head, features), plain)
        half = features.bfloat16()
        rounded = through_head(head, half)
        large = nn.Linear(4096, 4096, bias=False)
        assert through_head(large, torch.randn(2, 4096)).dtype == torch.bfloat16
    assert torch.equal(rounded, head(half.float()))
    assert through_head(nn.Linear(6, 3).double(), features.double()).dtype == torch.float64
