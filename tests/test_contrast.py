"""The contrast between two views."""

import numpy as np
import oracles
import pytest
import torch

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import build_method
from deepsimplex.methods.contrast import AREA, ContrastSettings, another_view, contrast


@pytest.mark.parametrize("alike", [[0, 1, 2, 0, 1, 2], [0, 0, 1, 0, 0, 1]])
def test_against_the_formula(alike):
    places = np.random.default_rng(0).normal(size=(6, 5))
    got = contrast(torch.from_numpy(places).float(), torch.tensor(alike), 0.3)
    assert float(got) == pytest.approx(oracles.contrast(places, alike, 0.3), rel=1e-5)


def test_equal_views_far_from_all_others_cost_nothing():
    places = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [-1, 0]])
    assert float(contrast(places, torch.tensor([0, 1, 0, 1]), 0.05)) == pytest.approx(0, abs=1e-6)


def test_views_keep_shape_and_kind_and_differ():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    view = another_view(images)
    assert (view.shape, view.dtype) == (images.shape, torch.uint8)
    assert not (view == images).flatten(1).all(1).any()
    grey = (view.float().amax(1) - view.float().amin(1)).flatten(1).amax(1) <= 1
    assert 2 <= int(grey.sum()) <= 26  # a fifth of 64
    single = another_view(images[:, :1].float() / 255)
    assert single.dtype == torch.float32
    assert float(single.min()) >= 0
    assert float(single.max()) <= 1


def test_a_view_is_a_window_of_the_image():
    """Of the plane x it shows a range of x as wide as its share of the side, mirrored or not."""
    torch.manual_seed(0)
    ramp = torch.arange(64.0).expand(50, 1, 64, 64)
    shown = another_view(ramp)
    wide = (shown[:, 0, 32, -1] - shown[:, 0, 32, 0]) / 63
    assert (wide.abs() <= 1 + 1e-5).all()
    assert (wide.abs() >= AREA[0] ** 0.5 * (3 / 4) ** 0.5 - 1e-3).all()
    assert (wide < 0).any()
    assert (wide > 0).any()


def test_bad_settings_and_vectors_are_refused():
    for bad in ({"alike": "all"}, {"weight": -1}, {"temperature": 0}):
        with pytest.raises(DeepSimplexError, match="expected"):
            ContrastSettings(**bad)
    with pytest.raises(DeepSimplexError, match="dsc-contrast"):
        build_method("dsc-contrast", "mlp", (5,), 3, None)
