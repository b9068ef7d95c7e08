"""Each operation against Pillow, which torchvision's RandAugment is built on."""

import numpy as np
import pytest
import torch
import toys
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from deepsimplex.data.augment import AUGMENTS, augment, check_augment
from deepsimplex.data.randaugment import BINS, GREY, OPERATIONS, apply, mild, randaugment, strong
from deepsimplex.errors import DeepSimplexError

SIDE = 32
AMOUNT = 9 / BINS
PLACE = 0.3


def batch(count=6):
    random = np.random.default_rng(0)
    smooth = random.normal(size=(count, 3, SIDE, SIDE)).cumsum(2).cumsum(3)
    low, high = smooth.min((2, 3), keepdims=True), smooth.max((2, 3), keepdims=True)
    return torch.from_numpy((20 + 190 * (smooth - low) / (high - low)).astype(np.uint8))


def pillow(images, operation):
    rows = []
    for image in images:
        picture = Image.fromarray(image.numpy().transpose(1, 2, 0))
        rows.append(np.asarray(operation(picture)).transpose(2, 0, 1))
    return np.stack(rows).astype(int)


def ours(name, sign, policy=None):
    images = batch()
    n = len(images)
    which = torch.full((n,), OPERATIONS.index(name))
    signs, place = torch.full((n,), float(sign)), torch.full((n, 2), PLACE)
    return apply(images, which, signs, policy or mild(9), place).numpy().astype(int)


FACTOR = {1: 1 + 0.9 * AMOUNT, -1: 1 - 0.9 * AMOUNT}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("colour", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
def test_blends(name, enhance, sign):
    want = pillow(batch(), lambda picture: enhance(picture).enhance(FACTOR[sign]))
    assert np.abs(ours(name, sign) - want).max() <= 2  # rounding of grey and product


def test_posterise_solarise_autocontrast_equalise():
    bits = 8 - round(AMOUNT * 4)
    assert (ours("posterise", 1) == pillow(batch(), lambda p: ImageOps.posterize(p, bits))).all()
    limit = 255 * (1 - AMOUNT)
    want = pillow(batch(), lambda p: ImageOps.solarize(p, int(np.ceil(limit))))
    assert (ours("solarise", 1) == want).all()
    want = pillow(batch(), ImageOps.autocontrast)
    assert np.abs(ours("autocontrast", 1) - want).max() <= 1
    assert (ours("equalise", 1) == pillow(batch(), ImageOps.equalize)).all()


def test_flat_channels_stay():
    images = torch.full((4, 3, 8, 8), 77, dtype=torch.uint8)
    for name in ("autocontrast", "equalise"):
        which = torch.full((4,), OPERATIONS.index(name))
        assert torch.equal(apply(images, which, torch.ones(4), mild(9)), images)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["shear x", "shear y", "translate x", "translate y", "rotate"])
def test_warps(name, sign):
    """Pillow's affine map sends a target pixel to its source; ours turns about the same centre."""
    a, half = sign * AMOUNT, SIDE / 2
    turn = a * np.pi / 6
    matrix = {
        "shear x": [[1, 0.3 * a], [0, 1]],
        "shear y": [[1, 0], [0.3 * a, 1]],
        "rotate": [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]],
    }.get(name, [[1, 0], [0, 1]])
    shift = 150 / 331 * SIDE * a
    offset = {"translate x": (shift, 0), "translate y": (0, shift)}.get(name, (0, 0))
    (p, q), (r, s) = matrix
    data = (
        p, q, half - p * half - q * half + offset[0], r, s, half - r * half - s * half + offset[1],
    )  # fmt: skip
    want = pillow(batch(), lambda picture: picture.transform(picture.size, Image.AFFINE, data))
    differing = (ours(name, sign) != want).any(1).mean()
    assert differing < 0.02  # nearest pixels at a tie


def test_every_operation_is_drawn_and_identity_is_one():
    torch.manual_seed(0)
    images = batch(1).expand(700, 3, SIDE, SIDE).contiguous()
    result = randaugment(images, mild(9))
    assert result.dtype == torch.uint8
    kinds = {row.numpy().tobytes() for row in result}
    assert len(kinds) == 1 + 2 * 9 + 4 - 0  # identity, nine with a sign, four without
    same = (result == images).flatten(1).all(1).float().mean()
    assert float(same) == pytest.approx(1 / 14, abs=0.04)


def pasted(picture, square):
    left = int(max(0, PLACE * SIDE - square / 2))
    picture = picture.copy()
    colour = tuple(int(value) for value in GREY)
    ImageDraw.Draw(picture).rectangle((left, left, left + square, left + square), colour)
    return picture


def brighter(picture, by):
    return Image.fromarray(np.clip(np.asarray(picture).astype(int) + by, 0, 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("name", "operation", "off"),
    [
        ("invert", ImageOps.invert, 0),
        ("posterise", lambda p: ImageOps.posterize(p, 1), 0),
        ("solarise", lambda p: ImageOps.solarize(p, 52), 0),  # the limit is 51.2
        ("solarise add", lambda p: ImageOps.solarize(brighter(p, 22), 128), 0),
        ("cutout", lambda p: pasted(p, 8), 0),
        ("brightness", lambda p: ImageEnhance.Brightness(p).enhance(0.46), 2),
        ("translate x", lambda p: p.transform(p.size, Image.AFFINE, (1, 0, 20, 0, 1, 0)), 0),
        ("translate y", lambda p: p.transform(p.size, Image.AFFINE, (1, 0, 0, 0, 1, 20)), 0),
    ],
)
def test_the_strong_ones_at_magnitude_6(name, operation, off):
    assert np.abs(ours(name, 1, strong(6)) - pillow(batch(), operation)).max() <= off


def test_strong_draws_all_but_identity():
    torch.manual_seed(0)
    images = batch(1).expand(900, 3, SIDE, SIDE).contiguous()
    result = randaugment(images, strong(6))
    assert not (result == images).flatten(1).all(1).any()
    drawn = {row.numpy().tobytes() for row in result}
    assert len(drawn) > 2 * 5 + 10  # five with a sign, ten without, squares anywhere


def test_by_name():
    torch.manual_seed(0)
    images = batch()
    rows = torch.tensor([1, 4, 4])
    assert augment(images, rows, "rand+crop+flip").shape == (3, 3, SIDE, SIDE)
    assert augment(images[:, :1], rows, "rand+crop").shape == (3, 1, SIDE, SIDE)
    with pytest.raises(DeepSimplexError, match="uint8 pixels"):
        check_augment("rand+crop", (3, 32, 32), pixels=False)


@toys.on_gpu
@pytest.mark.parametrize("name", AUGMENTS)
def test_a_cuda_graph_can_hold_it(name):
    images, rows = batch(64).cuda(), torch.arange(32, device="cuda")
    torch.cuda.manual_seed(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        augment(images, rows, name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = augment(images, rows, name)
    graph.replay()
    torch.cuda.synchronize()
    assert (result.shape, result.dtype) == ((32, 3, SIDE, SIDE), torch.uint8)
    assert name == "none" or not torch.equal(result, images[:32])
