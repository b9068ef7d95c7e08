"""Entropic open-set, objectosphere, outlier exposure, energy fine-tuning, the K+1 classifier."""

import math

import numpy as np
import oracles
import pytest
import torch
import toys
from torch import nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.methods import METHODS, build_method, settings_for
from deepsimplex.methods.background import (
    BackgroundClassSettings,
    EnergySettings,
    EntropicSettings,
    energy_hinges,
    length,
)
from deepsimplex.methods.base import Batch

CLASSES = 4


class Given(nn.Module):
    """An encoder that hands its input on."""

    features = 3

    def forward(self, images):
        return images


def by_hand(name, **changes):
    torch.manual_seed(0)
    return METHODS[name].build(Given(), CLASSES, settings_for(name, changes)).double()


def hand_batch(seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    known = scale * torch.randn(9, 3, generator=generator, dtype=torch.float64)
    background = scale * torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return Batch(known, torch.arange(9) % CLASSES, background, torch.zeros(()))


def logits_of(method, rows):
    """By plain loops of the head's weights."""
    weight = method.head.weight.detach().numpy()
    bias = np.zeros(len(weight)) if method.head.bias is None else method.head.bias.detach().numpy()
    return [[float(w @ f + b) for w, b in zip(weight, bias, strict=True)] for f in rows.numpy()]


@pytest.mark.parametrize(
    ("name", "changes", "weight", "ring", "radius"),
    [
        ("entropic", {}, 1 / CLASSES, 0.0, 0.0),
        ("entropic", {"background_weight": 2.0}, 2.0, 0.0, 0.0),
        ("objectosphere", {}, 1 / CLASSES, 1e-4, 50.0),
        ("objectosphere", {"ring": 0.1, "radius": 5.0}, 1 / CLASSES, 0.1, 5.0),
        ("oe", {}, 0.5, 0.0, 0.0),
    ],
)
def test_entropic_losses(name, changes, weight, ring, radius):
    method, batch = by_hand(name, **changes), hand_batch()
    rows = torch.cat([batch.images, batch.background])
    labels = [*batch.labels.tolist(), *[-1] * 6]
    norms = [math.sqrt(sum(x * x for x in row)) for row in rows.tolist()]
    fit, near, uniform, far = oracles.entropic_terms(logits_of(method, rows), norms, labels, radius)
    expected = (fit + ring * near) / 9 + weight * (uniform + ring * far) / 6
    assert method.loss(batch).item() == pytest.approx(expected, rel=1e-5)
    assert (method.head.bias is not None) == (name == "oe")


def test_energy_losses():
    method, batch = by_hand("energy", margin_in=-3.0, margin_out=-1.0, weight=0.2), hand_batch()
    known, background = logits_of(method, batch.images), logits_of(method, batch.background)
    fit = oracles.entropic_terms(known, np.ones(9), batch.labels.tolist(), 0.0)[0] / 9
    hinges = oracles.energy_terms(known, background, -3.0, -1.0)
    assert method.loss(batch).item() == pytest.approx(fit, rel=1e-5)
    assert method.tuning_loss(batch).item() == pytest.approx(fit + 0.2 * hinges, rel=1e-5)


def test_background_class_is_a_classifier_of_one_class_more():
    method, batch = by_hand("background-class"), hand_batch()
    known, background = logits_of(method, batch.images), logits_of(method, batch.background)
    fit = oracles.entropic_terms(known, np.ones(9), batch.labels.tolist(), 0.0)[0] / 9
    rest = oracles.entropic_terms(background, np.ones(6), [CLASSES] * 6, 0.0)[0] / 6
    assert method.loss(batch).item() == pytest.approx(fit + rest / CLASSES, rel=1e-5)


def test_scores():
    rows = hand_batch().images
    for name in ("entropic", "objectosphere", "oe", "energy", "background-class"):
        method = by_hand(name)
        outputs = method(rows).detach()
        z = np.array(logits_of(method, rows))
        log_p = z - np.array([[oracles.log_sum_exp(row)] for row in z.tolist()])
        norms = np.linalg.norm(rows.numpy(), axis=1)
        top, known = log_p.max(1), z[:, :CLASSES]
        expected = {
            "max_probability": top,
            "max_logit": known.max(1),
            "energy": (z - log_p)[:, 0],
            "norm": norms,
            "probability_norm": np.log(np.exp(top) * norms),
            "over_background": log_p[:, :CLASSES].max(1) - log_p[:, -1],
            "not_background": np.log(1 - np.exp(log_p[:, -1])) - log_p[:, -1],
        }
        for score in method.scores:
            assert np.allclose(method.knownness(outputs, score), expected[score]), (name, score)
            assert np.array_equal(method.class_scores(outputs, score).argmax(1), known.argmax(1))
    assert by_hand("objectosphere").scores[0] == "probability_norm"
    assert by_hand("entropic").scores[0] == by_hand("oe").scores[0] == "max_probability"


def test_a_zero_feature_is_uniform_and_pays_the_whole_ring_only_as_a_known():
    zeros = torch.zeros(5, 3, dtype=torch.float64)
    batch = Batch(zeros, torch.arange(5) % CLASSES, zeros.clone().requires_grad_(), zeros[0, 0])
    plain, ring = by_hand("entropic").loss(batch), by_hand("objectosphere").loss(batch)
    assert plain.item() == pytest.approx((1 + 1 / CLASSES) * math.log(CLASSES), rel=1e-6)
    assert (ring - plain).item() == pytest.approx(1e-4 * 50**2, rel=1e-5)
    ring.backward()
    assert batch.background.grad.isfinite().all()  # of ‖f‖ at 0
    assert torch.equal(length(zeros), zeros[:, :1])


def test_hinges_vanish_inside_their_margins_and_energy_shifts_with_the_logits():
    method = by_hand("energy")
    outputs = method(hand_batch().images).detach()
    shift = method.knownness(outputs + 2, "energy") - method.knownness(outputs, "energy")
    assert torch.allclose(shift, torch.full_like(shift, 2))
    logits = torch.linspace(-4, 8, 40, dtype=torch.float64)[:, None].expand(-1, 4)
    energies = -logits[:, 0] - math.log(4)
    inside, outside = energy_hinges(logits, logits, -6.0, -1.0)
    assert torch.equal(inside == 0, energies <= -6)
    assert torch.equal(outside == 0, energies >= -1)


def test_energy_trains_first_and_tunes_a_tenth_at_a_small_rate():
    fit, tune = build_method("energy", "small", (1, 8, 8), 3).stages(100)
    assert (fit.epochs, tune.epochs) == (90, 10)
    assert tune.background_batch == 256
    slow = tune.updates[0].optimiser
    assert (slow.kind, slow.learning_rate) == ("sgd", 1e-3)
    assert (slow.momentum, slow.nesterov, slow.weight_decay) == (0.9, True, 5e-4)
    assert slow.schedule(0, 50) == pytest.approx(1.0)
    assert slow.schedule(50, 50) == pytest.approx(1e-3)
    assert slow.schedule(12.5, 50) == pytest.approx(1e-3 + 0.4995 * (1 + math.sqrt(0.5)))
    assert fit.updates[0].optimiser is None
    assert [s.epochs for s in build_method("energy", "small", (1, 8, 8), 3).stages(1)] == [1, 1]


@pytest.mark.parametrize("name", ["entropic", "objectosphere", "oe", "energy", "background-class"])
def test_background_it_has_not_seen_scores_below_the_knowns(name):
    images, labels = toys.tensors(*toys.pictures(90))
    seen, unseen = (
        toys.tensors(toys.unknown_pictures(60, seed=seed), np.zeros(60))[0] for seed in (3, 4)
    )
    plan = toys.quick(name, 15, background_batch=20)
    model = fit_model(images, labels, list("abc"), plan, background=seen, device="cpu")
    assert np.median(model.scores(images)[1]) > model.scores(unseen)[1].max()


def test_bad_settings_and_a_batch_without_background():
    for settings, bad, words in (
        (EntropicSettings, {"ring": -1.0}, "ring of 0 or more"),
        (EntropicSettings, {"radius": math.nan}, "radius of 0 or more"),
        (EntropicSettings, {"background_weight": "large"}, "background_weight among auto"),
        (EntropicSettings, {"background_weight": True}, "background_weight of 0"),
        (EnergySettings, {"margin_in": math.inf}, "a finite margin_in"),
        (EnergySettings, {"margin_in": "auto"}, "a finite margin_in"),
        (EnergySettings, {"margin_in": -1.0, "margin_out": -9.0}, "the lower energy"),
        (EnergySettings, {"share": 1.0}, "share below 1"),
        (EnergySettings, {"tuning_rate": -1e-3}, "tuning_rate above 0"),
        (EnergySettings, {"background_batch": 0}, "background_batch as a whole number of 1"),
        (BackgroundClassSettings, {"background_weight": -1}, "background_weight of 0"),
    ):
        with pytest.raises(DeepSimplexError, match=words):
            settings(**bad)
    batch = hand_batch()
    with pytest.raises(DeepSimplexError, match="a batch with background"):
        by_hand("oe").loss(Batch(batch.images, batch.labels, None, batch.step))


def test_no_share_is_no_tuning():
    untuned = build_method("energy", "small", (1, 8, 8), 3, EnergySettings(share=0.0))
    assert [stage.epochs for stage in untuned.stages(100)] == [100, 0]


def test_no_epochs_are_no_epochs():
    stages = build_method("energy", "small", (1, 8, 8), 3).stages(0)
    assert [stage.epochs for stage in stages] == [0, 0]
