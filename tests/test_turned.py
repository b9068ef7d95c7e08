"""Joint labels of class and turn."""

import numpy as np
import oracles
import pytest
import torch

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import build_method
from deepsimplex.methods.base import Batch
from deepsimplex.methods.turned import turned


def test_turned_images_are_quarter_turns():
    images = torch.arange(40 * 2 * 3 * 3).view(40, 2, 3, 3)
    torch.manual_seed(0)
    result, turn = turned(images)
    assert turn.unique().tolist() == [0, 1, 2, 3]
    for image, source, k in zip(result, images, turn.tolist(), strict=True):
        assert torch.equal(image, torch.rot90(source, k, (1, 2)))


def test_scores_are_the_mean_over_views_of_their_own_vertex():
    torch.manual_seed(0)
    method = build_method("dsc-turned", "small", (1, 8, 8), 3, None).eval()
    images = torch.randint(0, 255, (5, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        outputs = method(images)
        assert outputs.shape == (5, 4 * 11)
        dots, cosines = torch.zeros(5, 3), torch.zeros(5, 3)
        for turn in range(4):
            view = method.inner(torch.rot90(images, turn, (2, 3)))
            for c in range(3):
                vertex = method.inner.simplex.centres(torch.tensor([c + 3 * turn]))[0]
                dots[:, c] += view @ vertex / 4
                cosines[:, c] += view @ vertex / (4 * view.norm(dim=1))
        for score, expected in (("dot", dots), ("cosine", cosines)):
            scores = method.class_scores(outputs, score)
            assert torch.allclose(scores, expected, atol=1e-5)
            assert torch.equal(method.knownness(outputs, score), scores.amax(1))


def test_the_loss_is_the_inner_loss_of_turned_images():
    torch.manual_seed(0)
    method = build_method("dsc-turned", "small", (1, 8, 8), 3, None)
    images = torch.randint(0, 255, (6, 1, 8, 8), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    batch = Batch(images, labels, images[:2], torch.tensor(0))
    torch.manual_seed(1)
    got = method.loss(batch)
    torch.manual_seed(1)
    moved, turn = turned(images)
    others, _ = turned(images[:2])
    method.load_state_dict(method.state_dict())
    want = method.inner.loss(Batch(moved, labels + 3 * turn, others, torch.tensor(0)))
    assert torch.allclose(got, want, atol=1e-6)


def test_the_loss_is_eq7_on_four_vertices_a_class():
    torch.manual_seed(0)
    method = build_method("dsc-turned", "small", (1, 8, 8), 3, None).double().eval()
    images = torch.randint(0, 255, (30, 1, 8, 8), dtype=torch.uint8)
    known, others, labels = images[:18], images[18:], torch.arange(18) % 3
    torch.manual_seed(1)
    turns = [torch.randint(0, 4, (len(some),)).tolist() for some in (known, others)]
    assert all(len(set(turn)) == 4 for turn in turns)

    def features(some, turn):
        views = [np.rot90(x, k, (1, 2)) for x, k in zip(some.numpy(), turn, strict=True)]
        return method.inner(torch.from_numpy(np.stack(views))).detach().numpy()

    joint = [y + 3 * k for y, k in zip(labels.tolist(), turns[0], strict=True)]
    centres = oracles.simplex_centres(12, 11, "regular")
    expected = oracles.eq7(features(known, turns[0]), joint, centres)
    expected += np.mean([b @ b for b in features(others, turns[1])])
    torch.manual_seed(1)
    value = float(method.loss(Batch(known, labels, others, torch.tensor(0))).detach())
    assert value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("net", "shape"), [("mlp", (6,)), ("small", (1, 8, 10))])
def test_only_square_images_turn(net, shape):
    with pytest.raises(DeepSimplexError, match="square images"):
        build_method("dsc-turned", net, shape, 3, None)
