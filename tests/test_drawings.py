"""Photographs beside drawings: what is drawn, and how."""

import numpy as np
import pytest
import torch
import toys
from sklearn.datasets import load_digits

from deepsimplex.cli import run
from deepsimplex.data.background import patches
from deepsimplex.data.drawings import apart, drawings, drawn, suited
from deepsimplex.data.sources import to_tensor
from deepsimplex.fitting import fit_model


@pytest.fixture
def digits():
    return torch.from_numpy(load_digits().images.astype(np.uint8))[:, None]


def photographs(size, channels):
    return to_tensor(patches(size, channels, count=50))


def strokes(count=20, size=28, channels=3):
    images = torch.zeros(count, 1, size, size, dtype=torch.uint8)
    for number, image in enumerate(images):
        image[0, 2 + number % 5, 3:-3] = 200 + number
        image[0, 4:20, 3 + number % 5] = 255
    return images.expand(-1, channels, -1, -1).contiguous()


def test_drawings_are_grey_and_mostly_of_one_level(digits):
    assert drawings(digits)
    assert drawings(strokes())
    assert not drawings(photographs(28, 3))
    assert not drawings(photographs(28, 1))
    coloured = strokes()
    coloured[3, 0, 2, 2] += 1
    assert not drawings(coloured)
    assert not drawings(strokes().float())
    assert not drawings(torch.zeros(9, 5, dtype=torch.uint8))
    assert not drawings(strokes()[:0])
    third = torch.arange(60, dtype=torch.uint8).view(1, 1, 6, 10).clone()
    third[0, 0, :2] = 0  # 20 of 60 pixels: no more than a third
    assert not drawings(third)
    third[0, 0, 2, 0] = 0
    assert drawings(third)


def test_every_drawn_image_has_the_levels_of_a_known_one_in_the_order_of_its_blurred_self():
    knowns, images = strokes(), photographs(28, 3)
    found = drawn(images, knowns)
    assert found.shape == images.shape
    assert found.dtype == torch.uint8
    assert torch.equal(found, found[:, :1].expand_as(found))
    levels = {tuple(sorted(image[0].flatten().tolist())) for image in knowns}
    used = [tuple(sorted(image[0].flatten().tolist())) for image in found]
    assert set(used) <= levels
    assert len(set(used)) > 5  # not one image's alone
    for image, result in zip(images.double().numpy(), found[:, 0].numpy(), strict=True):
        field = image.mean(0)
        for _ in range(2):
            padded = np.pad(field, 1, mode="edge")
            around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
            field = (around + field) / 5
        order = np.argsort(field.ravel())
        steps = np.diff(field.ravel()[order]) > 0.01  # where neither ties nor rounding decide
        assert (np.diff(result.ravel()[order].astype(int))[steps] >= 0).all()
    assert torch.equal(drawn(images, knowns), found)


def test_small_images_are_not_blurred(digits):
    images = photographs(8, 1)
    found = drawn(images, digits)
    for image, result in zip(images, found, strict=True):
        for level in image.unique():
            above, below = result[image > level], result[image < level]
            assert not len(above) or not len(below) or above.min() >= below.max()


def test_a_background_like_the_knowns_stays_as_it_is(digits):
    photos = photographs(28, 3)
    assert suited(photos, photographs(28, 3)) is photos
    assert suited(strokes(), strokes()) is not None
    other = strokes(9)
    assert suited(other, strokes()) is other
    assert apart(photos, strokes())
    assert drawings(suited(photos, strokes()))
    assert not apart(strokes(), photos)


def test_training_sees_the_drawn_background(digits):
    labels = torch.from_numpy(load_digits().target)
    images, labels = digits[labels < 3][:150], labels[labels < 3][:150]
    photos = photographs(8, 1)

    def weights(background):
        plan = toys.quick("dsc-blend", 2)
        model = fit_model(images, labels, list("abc"), plan, background=background, device="cpu")
        return torch.cat([p.detach().flatten() for p in model.method.parameters()])

    by_photos = weights(photos)
    assert torch.equal(by_photos, weights(drawn(photos, images)))
    assert not torch.equal(by_photos, weights(strokes(50, 8, 1)))


def test_train_says_that_it_draws(tmp_path, capsys):
    words = ["train", "digits", "--known", "0,1", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert run([*words, "--background", "photographs"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2000 background (photographs, to be drawn in the grey levels of the images)" in text
