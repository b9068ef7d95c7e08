"""Each row descends the loss it names, with its own numbers: loops over vectors made by hand.

The functions under a row have tests of their own; here the row's `loss` is taken as training
takes it, from its stages.
"""

import math
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
import toys
from torch import nn

from deepsimplex.methods import METHODS, build_method
from deepsimplex.methods.base import Batch

CLASSES, WIDTH = 4, 5
VERTICES = oracles.simplex_vertices(CLASSES)


class Given(nn.Module):
    """An encoder that hands its input on."""

    features = WIDTH

    def forward(self, images):
        return images


def descended(method, stage="fit"):
    """The one loss of a stage."""
    (update,) = next(s for s in method.stages(1) if s.name == stage).updates
    return update.loss


def by_hand(name):
    """A row at its own settings; points and centres are drawn anew, so that none is near 0."""
    torch.manual_seed(0)
    method = METHODS[name].build(Given(), CLASSES, METHODS[name].settings).double()
    with torch.no_grad():
        for key, tensor in method.state_dict().items():
            if key == "points" or (key == "centres" and name != "cac"):
                tensor.normal_()
            elif key == "radius":
                tensor.fill_(0.3)
    return method


def hand_batch():
    """Features about class centres: some pairs break their margins, some do not."""
    random = np.random.default_rng(0)
    labels = np.arange(18) % CLASSES
    features = random.normal(size=(CLASSES, WIDTH))[labels] + 0.5 * random.normal(size=(18, WIDTH))
    return Batch(torch.from_numpy(features), torch.from_numpy(labels), None, torch.tensor(100))


def array(tensor):
    return tensor.detach().numpy().copy()


def logits(m, f):
    """What a linear head makes of features."""
    weight, bias = (array(tensor) for tensor in m.head.state_dict().values())
    return f @ weight.T + bias


def cross_entropy(m, f, y):
    return oracles.cross_entropy(logits(m, f), y)


def unit(m, f, columns=False):
    """Wx + b at unit length; with `columns`, of mean 0 and variance 1 by column before that."""
    rows = logits(m, f)
    if columns:
        rows = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    return np.array(oracles.unit_rows(rows))


def margin(m, f, y, target, scale=None):
    return oracles.margin_softmax(f, y, array(m.weight), target, scale)


def a_softmax(m, f, y):
    """At step 100."""
    return margin(m, f, y, lambda t: oracles.sphereface_target(t, 4, 1000 / 13))


def moved_apart(m, f, y):
    return oracles.uniformface_term(oracles.moved_centres(array(m.centres), f, y, 0.5))


# Of a method, features and labels. The numbers are written out: a row's may have been changed.
ROWS = {
    "dsc": lambda m, f, y: oracles.eq4(logits(m, f), y, VERTICES),
    "dsc-hinge": lambda m, f, y: oracles.eq6(logits(m, f), y, VERTICES, 0.01),
    "dsc-softmax": lambda m, f, y: oracles.eq7(logits(m, f), y, VERTICES),
    "dsc-blend": lambda m, f, y: (
        oracles.eq7(logits(m, f), y, VERTICES) + oracles.eq4(logits(m, f), y, VERTICES)
    ),
    "dsc-literal": lambda m, f, y: oracles.eq4(logits(m, f), y, 64 * VERTICES),
    "softmax": cross_entropy,
    "openmax": cross_entropy,
    "cac": lambda m, f, y: oracles.cac(logits(m, f), y, 10 * np.eye(CLASSES), 0.1),
    "gcpl": lambda m, f, y: oracles.gcpl(f, y, array(m.points), 1.0, 0.1),
    "rpl": lambda m, f, y: oracles.rpl(f, y, array(m.points), 0.3, 1.0, 0.1),
    "arpl": lambda m, f, y: oracles.arpl(f, y, array(m.points), 0.3, 1.0, 0.1),
    "contrastive": lambda m, f, y: oracles.contrastive(unit(m, f), y, 1.0),
    "triplet": lambda m, f, y: oracles.triplet_batch_hard(unit(m, f, columns=True), y, 0.5),
    "triplet-semihard": lambda m, f, y: oracles.triplet_semihard(unit(m, f), y, 0.2),
    "marginal": lambda m, f, y: cross_entropy(m, f, y) + oracles.marginal(f, y, 1.2, 0.3, 1.0),
    "range": lambda m, f, y: cross_entropy(m, f, y) + oracles.range_loss(f, y, 2, 1.0, 0.02, 2.0),
    "basis": lambda m, f, y: oracles.basis(unit(m, f), y, 1 / 3),
    "center": lambda m, f, y: (
        cross_entropy(m, f, y) + 0.1 * oracles.center_term(f, y, array(m.centres))
    ),
    "contrastive-center": lambda m, f, y: (
        cross_entropy(m, f, y) + oracles.contrastive_center_term(f, y, array(m.centres), 1.0)
    ),
    "cosface": lambda m, f, y: margin(m, f, y, lambda t: oracles.cosface_target(t, 0.35), 16.0),
    "arcface": lambda m, f, y: margin(m, f, y, lambda t: oracles.arcface_target(t, 0.5), 16.0),
    "sphereface": a_softmax,
    "uniformface": lambda m, f, y: a_softmax(m, f, y) + moved_apart(m, f, y),
    "regularface": lambda m, f, y: (
        cross_entropy(m, f, y) + oracles.regularface_term(array(m.head.weight))
    ),
    "mhe": lambda m, f, y: (  # the encoder has no layers: test_margins.py has those
        cross_entropy(m, f, y) + 10 * oracles.hyperspherical_energy(array(m.head.weight), 2)
    ),
}


# Rows whose own loss meets its loop elsewhere, and where.
ELSEWHERE = {
    **{f"dsc-eq5-{r}": "test_methods.test_rows_of_eq5_are_the_paper_at_radius_64" for r in "abc"},
    "dsc-authors": "test_methods.test_the_row_of_the_authors_is_their_script",
    "dsc-turned": "test_turned.test_the_loss_is_eq7_on_four_vertices_a_class",
    **dict.fromkeys(
        ("entropic", "objectosphere", "oe"), "test_background_methods.test_entropic_losses"
    ),
    "energy": "test_background_methods.test_energy_losses",
    "background-class": (
        "test_background_methods.test_background_class_is_a_classifier_of_one_class_more"
    ),
    "arpl-cs": "test_arpl_cs.test_the_three_losses_from_their_parts",
    "c2ae": "test_reconstruction.test_c2ae_losses_and_errors",
    "crosr": "test_reconstruction.test_crosr_loss_and_score",
    "gdfr": "test_reconstruction.test_gdfr_losses",
    "osrci": "test_osrci.test_losses_of_the_gan",
    "g-openmax": "test_osrci.test_losses_of_the_gan",
}


def test_every_row_meets_a_loop():
    assert not {*ROWS} & {*ELSEWHERE}
    assert {*ROWS, *ELSEWHERE} == {*METHODS}
    for place in ELSEWHERE.values():
        file, test = place.split(".")
        assert f"def {test}(" in Path(__file__).with_name(f"{file}.py").read_text(), place


@pytest.mark.parametrize("name", ROWS)
def test_rows_descend_their_loss(name):
    method, batch = by_hand(name), hand_batch()
    expected = ROWS[name](method, batch.images.numpy(), batch.labels.tolist())
    value = float(descended(method)(batch).detach())
    assert value == pytest.approx(expected, rel=1e-5)  # some are taken in float32


@pytest.mark.parametrize("name", ROWS)
def test_rows_keep_single_precision_under_autocast(name):
    """Of features of single precision: only nets compute in half."""
    method, batch = by_hand(name).float(), hand_batch()
    single = Batch(batch.images.float(), batch.labels, None, batch.step)
    expected = ROWS[name](method, single.images.double().numpy(), batch.labels.tolist())
    with torch.autocast("cpu", torch.bfloat16):
        value = float(descended(method)(single).detach())
    assert value == pytest.approx(expected, rel=2e-5)


def test_no_two_rows_have_one_loss():
    """Where two agreed on these vectors, an exchange would not be seen."""
    batch = hand_batch()
    values = [
        ROWS[name](by_hand(name), batch.images.numpy(), batch.labels.tolist())
        for name in set(ROWS) - {"softmax"}  # openmax has its loss
    ]
    for i, a in enumerate(values):
        for b in values[:i]:
            assert not math.isclose(a, b, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("c2ae", oracles.cross_entropy),
        ("osrci", oracles.one_vs_rest),
        ("g-openmax", oracles.one_vs_rest),
    ],
)
def test_rows_that_paint_first_descend_a_classifiers_loss(name, oracle):
    torch.manual_seed(0)
    method = build_method(name, "small", (1, 8, 8), 3).double().eval()
    images, labels = toys.tensors(*toys.pictures(12))
    method.encoder.normalise.fit(images)
    rows = logits(method, array(method.encoder(images)))
    value = float(descended(method)(Batch(images, labels, None, torch.tensor(0))).detach())
    assert value == pytest.approx(oracle(rows, labels.tolist()), rel=1e-5)
