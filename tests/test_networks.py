"""Generators and critics for every size of picture; class means against loops."""

import numpy as np
import pytest
import torch

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import Batch
from deepsimplex.methods.means import class_means
from deepsimplex.methods.networks import RANGE, Critic, Generator, check_pictures

SHAPES = [(1, 8, 8), (3, 9, 13), (1, 13, 9), (1, 28, 28), (3, 32, 32), (3, 64, 64)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def reached(module):
    return all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@every_shape
def test_a_generator_paints_the_shape_it_was_asked_for(shape):
    torch.manual_seed(0)
    generator = Generator(10, shape, width=8)
    painted = generator(torch.randn(5, 10))
    assert painted.shape == (5, *shape)
    assert painted.abs().max() <= RANGE
    assert 3 <= min(generator.start) <= 8  # it begins with about 4×4
    painted.square().sum().backward()
    assert reached(generator)
    loud = generator.eval()(1e4 * torch.randn(5, 10))
    assert loud.isfinite().all()
    assert RANGE - 1e-3 < loud.abs().max() <= RANGE


@every_shape
def test_every_pixel_answers_to_the_code(shape):
    torch.manual_seed(0)
    painted = Generator(10, shape, width=8).eval()(torch.randn(20, 10))
    assert (painted.std(0) > 0).all()


@every_shape
@pytest.mark.parametrize("outputs", [1, 7])
def test_a_critic_takes_that_shape(shape, outputs):
    torch.manual_seed(0)
    critic = Critic(shape, outputs, width=8)
    images = torch.randn(5, *shape, requires_grad=True)
    judged = critic(images)
    assert judged.shape == (5, outputs)
    judged.square().sum().backward()
    assert reached(critic)
    assert (images.grad.abs().sum((1, 2, 3)) > 0).all()


def test_a_critic_judges_each_image_by_itself():
    torch.manual_seed(0)
    critic = Critic((1, 8, 8), width=8).train().double()
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    alone = torch.cat([critic(image[None]) for image in images])
    assert torch.allclose(critic(images), alone)


def test_the_gradient_passes_from_critic_to_generator():
    torch.manual_seed(0)
    generator, critic = Generator(4, (3, 16, 16), width=8), Critic((3, 16, 16), width=8)
    critic(generator(torch.randn(6, 4))).mean().backward()
    assert reached(generator)


@pytest.mark.parametrize("shape", [(64,), (1, 7, 8), (1, 32, 4), (8, 8)])
def test_what_is_no_picture_is_refused(shape):
    with pytest.raises(DeepSimplexError, match="images of 8×8 or more for a method that paints"):
        check_pictures(shape)


@every_shape
def test_pictures_are_not_refused(shape):
    check_pictures(shape)


@pytest.mark.parametrize("batch", [1, 7, 50])
def test_class_means_against_loops(batch):
    random = np.random.default_rng(0)
    images, labels = random.normal(5, 2, (50, 4)), random.integers(0, 3, 50)
    x, y = torch.from_numpy(images).float(), torch.from_numpy(labels)

    def passes():
        for i in range(0, 50, batch):
            yield Batch(x[i : i + batch], y[i : i + batch], None, torch.zeros(()))

    means = class_means(passes, lambda rows: 2 * rows[:, :3], 4)
    assert means.dtype == torch.float32
    assert means.shape == (4, 3)
    for c in range(3):
        own = [2 * row[:3] for row, label in zip(images, labels, strict=True) if label == c]
        assert np.allclose(means[c], sum(own) / len(own), rtol=1e-6)
    assert torch.equal(means[3], torch.zeros(3))  # no image: the origin


def test_class_means_are_summed_in_float64():
    """A million times 1 + 2⁻²⁰ in float32 would drift by more than its last digits."""
    value = torch.full((1000, 1), 1 + 2**-20)
    labels = torch.zeros(1000, dtype=torch.int64)
    batch = Batch(value, labels, None, torch.zeros(()))
    means = class_means(lambda: (batch for _ in range(1000)), lambda rows: rows, 1)
    assert float(means) == 1 + 2**-20
