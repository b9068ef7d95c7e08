"""OSRCI and Neal's G-OpenMax: losses, painted images, scores."""

import dataclasses
import functools

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F
import toys
from torch import nn

from deepsimplex import engine
from deepsimplex.batches import TrainingSet
from deepsimplex.errors import DeepSimplexError
from deepsimplex.fitting import fit_model
from deepsimplex.methods import build_method, settings_for
from deepsimplex.methods.base import Batch
from deepsimplex.methods.osrci import (
    OSRCISettings,
    between,
    counterfactuals,
    log_odds,
    one_vs_rest,
    open_cross_entropy,
    slope_penalty,
    sphere,
    surprise,
)


def built(name="osrci", **changes):
    torch.manual_seed(0)
    return build_method(name, "small", (1, 8, 8), 3, settings_for(name, changes))


def batch(count=12):
    return Batch(*toys.tensors(*toys.pictures(count)), None, torch.tensor(0))


@functools.cache
def trained():
    images, labels = toys.tensors(*toys.pictures(90))
    method = built()
    method.encoder.normalise.fit(images)
    engine.train(method, TrainingSet(images, labels, None), toys.quick("osrci", 25), device="cpu")
    return method


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_losses_of_logits():
    logits, labels = 3 * random(9, 4), np.arange(9) % 4
    unknown, kept = 2 * random(5, 4, seed=1), np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    z, y = torch.from_numpy(logits), torch.from_numpy(labels)
    assert float(one_vs_rest(z, y)) == pytest.approx(oracles.one_vs_rest(logits, labels))
    every = torch.cat([z, torch.from_numpy(unknown)])
    for which in (kept, 0 * kept):
        value = float(open_cross_entropy(every, y, torch.from_numpy(which)))
        expected = oracles.open_cross_entropy(logits, labels, unknown, which)
        assert value == pytest.approx(expected)


def linear(weight, *after):
    """x → x·weight of flattened x."""
    layer = nn.Linear(*weight.shape, bias=False)
    layer.weight = nn.Parameter(torch.from_numpy(weight.T).float())
    return nn.Sequential(nn.Flatten(), layer, *after)


def test_losses_of_the_gan():
    method = built(latent=5, adversarial=0.3, penalty=2.0)
    inverse, paint, judge = random(64, 5), random(5, 64, seed=1), random(64, seed=2) / 5
    method.inverse, method.critic = linear(inverse), linear(judge[:, None])
    method.generator = linear(paint, nn.Unflatten(1, (1, 8, 8)))
    real = random(6, 64, seed=3)
    method.encoder.normalise.mean.fill_(0.5)
    method.encoder.normalise.std.fill_(2.0)
    raw = torch.from_numpy(2 * real + 0.5).float().view(6, 1, 8, 8)
    some = Batch(raw, torch.arange(6) % 3, None, 0)
    expected = oracles.critic_and_painter(real, inverse, paint, judge, 0.3, 2.0)
    got = [float(loss(some).detach()) for loss in (method.critic_loss, method.paint_loss)]
    assert got == pytest.approx(expected, rel=1e-4)


def test_the_critics_slope_is_taken_between_real_and_painted():
    generator = torch.Generator().manual_seed(3)
    real, fake = torch.randn(2, 5, 1, 2, 3, generator=generator, dtype=torch.float64)
    weight = torch.rand(1, 2, 3, generator=generator, dtype=torch.float64)
    torch.manual_seed(4)
    got = slope_penalty(lambda x: (weight * x.square()).flatten(1).sum(1) / 2, real, fake)
    torch.manual_seed(4)
    share = torch.rand_like(real[:, :1, :1, :1]).flatten().numpy()
    flat = [part.flatten(1).numpy() for part in (real, fake)]
    expected = oracles.penalty_of_quadratic(*flat, share, weight.flatten().numpy())
    assert got.item() == pytest.approx(expected, rel=1e-12)


def test_latent_steps():
    start = np.array([f / np.linalg.norm(f) for f in random(6, 5)])
    weight, bias = random(5, 3, seed=1), random(3, seed=2)

    def logits(codes):
        return codes @ torch.from_numpy(weight).float() + torch.from_numpy(bias).float()

    found = counterfactuals(torch.from_numpy(start).float(), logits, 7, 0.2, 0.4)
    for z, got in zip(start, found, strict=True):
        expected = oracles.counterfactual(z, weight, bias, 7, 0.2, 0.4)
        assert np.allclose(got, expected, atol=1e-5)
    assert not found.requires_grad


def test_painted_counterfactuals_against_loops():
    """E, G and C_K linear: the codes of the first share of a batch take the settings' steps."""
    method = built(latent=5, share=0.5, steps=7, step_size=0.2, distance=0.6)
    inverse, paint, told = random(64, 5), random(5, 64, seed=1), random(64, 3, seed=2) / 9
    method.inverse = linear(inverse)
    method.generator = linear(paint, nn.Unflatten(1, (1, 8, 8)))
    method.closed = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    method.closed[1].weight = nn.Parameter(torch.from_numpy(told.T).float())
    bias = method.closed[1].bias.detach().numpy()
    real = random(6, 64, seed=3)
    painted, kept = method.paint_unknowns(torch.from_numpy(real).float().view(6, 1, 8, 8))
    assert kept.tolist() == [1, 1, 1]
    for x, got in zip(real, painted.flatten(1), strict=False):
        code = x @ inverse
        start = code / np.linalg.norm(code)
        code = oracles.counterfactual(start, paint @ told, bias, 7, 0.2, 0.6)
        assert np.linalg.norm(code - start) > 0.1
        assert np.allclose(got, code @ paint, atol=1e-4)


def test_codes_between():
    codes, share = sphere(torch.randn(4, 3)), torch.rand(2, 4, 1)
    found = between(codes, share)
    for by in range(2):
        for i in range(4):
            part = float(share[by, i, 0])
            mixed = part * codes[i] + (1 - part) * codes[(i - by - 1) % 4]
            assert torch.allclose(found[4 * by + i], mixed / mixed.norm(), atol=1e-6)


def test_the_unknown_class_becomes_likelier_along_the_latent_steps():
    method, images = trained(), batch(30).images
    codes = method.encode(method.encoder.normalise(images)).detach()

    def reached(steps):
        z = counterfactuals(codes, method._code_logits, steps, 0.01, 1.0)
        assert torch.allclose(z.norm(dim=1), torch.ones(30), atol=1e-5)
        return float((-surprise(method._code_logits(z))).exp().mean().detach())

    values = [reached(steps) for steps in range(11)]
    assert values == sorted(values)
    assert values[-1] > values[0] + 0.1


@pytest.mark.parametrize("name", ["osrci", "g-openmax"])
def test_codes_lie_on_the_sphere(name):
    method, seen = built(name).eval(), []
    method.generator.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    method.paint_unknowns(batch().images)
    for codes in seen:
        assert torch.allclose(codes.norm(dim=1), torch.ones(len(codes)), atol=1e-5)


def test_images_between_two_codes_are_at_shares_of_chance():
    """One attempt an image, so that all are kept, in order of their probability."""
    method, seen = built("g-openmax", attempts=8, ceiling=1.0).eval(), []
    method.generator.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    some = batch(12).images
    torch.manual_seed(5)
    method.paint_unknowns(some)
    torch.manual_seed(5)
    codes = method.encode(method.encoder.normalise(some[:6]))
    expected = between(codes, torch.rand(8, 6, 1))
    assert torch.allclose(seen[0], expected, atol=1e-6)


def with_settings(method, **changes):
    other = build_method("g-openmax", "small", (1, 8, 8), 3, settings_for("g-openmax", changes))
    other.load_state_dict(method.state_dict())
    return other.eval()


@pytest.mark.parametrize("ceiling", [0.0, 0.5, 0.9, 1.0])
def test_kept_images_are_those_the_classifier_doubts(ceiling):
    method = with_settings(trained(), ceiling=ceiling, attempts=10)
    painted, kept = method.paint_unknowns(batch(60).images)
    assert painted.shape == (30, 1, 8, 8)
    top = method.closed_logits(painted).softmax(1).amax(1)
    assert torch.equal(kept, (top < ceiling).float())
    assert (kept.diff() <= 0).all()
    if ceiling in (0.0, 1.0):
        assert (kept == ceiling).all()
    if ceiling == 0.9:
        assert kept.sum() > 0


@pytest.mark.parametrize("nothing", [{"ceiling": 0.0}, {"share": 0.0}])
def test_with_nothing_painted_it_is_plain_training_on_one_more_logit(nothing):
    method, some = with_settings(trained(), **nothing), batch()
    parameters = method.stages(3)[2].updates[0].parameters
    logits = method(some.images)
    plain = F.cross_entropy(F.pad(logits, (0, 1)), some.labels)
    expected = torch.autograd.grad(plain, parameters)
    loss = method.open_loss(some)
    # log(1 + ε) in float32 knows ε to 6e-8.
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5, abs=1e-7)
    for a, b in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["osrci", "g-openmax"])
def test_no_share_of_the_images_paints_none(name):
    painted, kept = built(name, share=0.0).paint_unknowns(batch().images)
    assert painted.shape == (0, 1, 8, 8)
    assert kept.shape == (0,)


def test_no_share_of_the_epochs_is_none():
    stages = built(gan_epochs=0.0, open_epochs=0.0).stages(10)
    assert sorted(stage.epochs for stage in stages) == [0, 0, 10]


def test_the_closed_classifier_is_kept_while_the_open_one_goes_on():
    method = trained()
    assert not list(method.closed.parameters())
    closed = method.closed.state_dict()
    now = nn.Sequential(method.encoder.backbone, method.head).state_dict()
    assert closed.keys() == now.keys()
    for key, tensor in closed.items():
        moved = not torch.equal(tensor, now[key])
        assert moved != ("running" in key or "tracked" in key), key


def test_training_lowers_the_loss_on_new_counterfactuals():
    method, others = trained(), toys.pictures(60, seed=9)
    painted, _ = method.paint_unknowns(toys.tensors(*others)[0])
    after = surprise(method.head(method.encoder.backbone(painted))).mean()
    assert float(after.detach()) < float(surprise(method.closed_logits(painted)).mean())


def test_scores():
    method, logits = built(), 4 * random(20, 3)
    z = torch.from_numpy(logits)
    by_class, known = method.class_scores(z, "difference"), method.knownness(z, "difference")
    for i, row in enumerate(logits):
        p = oracles.open_probabilities(row)
        odds = [np.log((1 + q - p[-1]) / (1 - q + p[-1])) for q in p[:-1]]
        assert np.allclose(by_class[i], odds)
        assert float(known[i]) == pytest.approx(max(odds))
    assert np.allclose(method.knownness(z, "energy"), np.log(np.exp(logits).sum(1)))
    # P itself is 1 in float64 from 37 on; its odds still tell the images apart.
    far = torch.tensor([[60.0, 0.0, 0.0], [80.0, 0.0, 0.0], [80.0, 79.0, 0.0], [-900.0] * 3])
    sure = method.knownness(far, "difference")
    assert sure[1] > sure[0] > sure[2] > sure[3]
    assert torch.equal(log_odds(far.double()).argmax(1)[:3], torch.zeros(3, dtype=torch.int64))


def test_scores_rise_with_the_energy():
    """Of logits alike but for a constant, all that is left to tell them apart is logΣe^z."""
    method, logits = built(), 3 * random(200, 3)
    known = method.knownness(torch.from_numpy(logits), "energy")
    rest = [-oracles.open_probabilities(row)[-1] for row in logits]
    assert np.array_equal(known.argsort(), np.argsort(rest))
    for row in logits[:20]:
        lifted = torch.from_numpy(row + np.linspace(-30, 15, 50)[:, None])
        for score in method.scores:
            assert (method.knownness(lifted, score).diff() > 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unknowns": "noise"}, "unknowns among counterfactual, between"),
        ({"latent": 0}, "latent as a whole number of 1"),
        ({"width": 0}, "width as a whole number of 1"),
        ({"steps": 2.5}, "steps as a whole number of 1"),
        ({"attempts": True}, "attempts as a whole number of 1"),
        ({"gan_rate": -1.0}, "gan_rate above 0"),
        ({"open_rate": float("inf")}, "open_rate above 0"),
        ({"share": 1.5}, "share of 1 or less"),
        ({"ceiling": "half"}, "ceiling of 0 or more"),
    ],
)
def test_bad_settings(changes, words):
    with pytest.raises(DeepSimplexError, match=words):
        dataclasses.replace(OSRCISettings(), **changes)


def test_only_pictures():
    with pytest.raises(DeepSimplexError, match="images of 8×8 or more for a method that paints"):
        build_method("osrci", "mlp", (6,), 3)
    images, labels = toys.tensors(*toys.pictures(30))
    with pytest.raises(DeepSimplexError, match="no frozen backbone for method 'osrci'"):
        fit_model(images, labels, list("abc"), toys.quick("osrci", 3), device="cpu", freeze=True)


def test_between_two_classes_nothing_is_below_a_half():
    with pytest.raises(DeepSimplexError, match="more than 2 classes"):
        build_method("g-openmax", "small", (1, 8, 8), 2)
