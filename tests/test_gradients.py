"""Gradients of every rival's loss against differences; the plans and numbers of their rows."""

import dataclasses

import numpy as np
import pytest
import torch
import toys
from torch import nn
from torch.autograd import gradcheck

from deepsimplex.methods import (
    METHODS,
    build_method,
    centres,
    margins,
    osrci,
    pairs,
    settings_for,
)
from deepsimplex.methods import background as bg
from deepsimplex.methods import prototypes as points
from deepsimplex.methods.arpl_cs import sureness
from deepsimplex.methods.base import Batch
from deepsimplex.methods.basis import basis_loss
from deepsimplex.methods.networks import steady

N, WIDTH, CLASSES = 7, 5, 4
LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3])


def random(*size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


F, P, Z = random(N, WIDTH), random(CLASSES, WIDTH, seed=1), random(N, CLASSES, seed=2)
R = torch.tensor(0.3, dtype=torch.float64)


def unit(x):
    return nn.functional.normalize(x, dim=1)


class Given(nn.Module):
    features = WIDTH

    def forward(self, images):
        return images


def of_method(kind, settings):
    """The loss as a function of features; what it keeps between steps is put back each time."""
    torch.manual_seed(0)
    net = kind(Given(), CLASSES, settings).double()
    kept = {name: buffer.clone() for name, buffer in net.named_buffers()}

    def loss(features):
        for name, buffer in net.named_buffers():
            buffer.copy_(kept[name])
        return net.loss(Batch(features, LABELS, None, torch.tensor(10**5)))

    return loss


LOSSES = {
    **{
        f"{name} {margin}": (lambda f, loss=loss, m=margin: loss(unit(f), LABELS, m), (F,))
        for name, loss in pairs.LOSSES.items()
        for margin in (0.2, 1.0)
    },
    "marginal": (lambda f: pairs.marginal_term(f, LABELS, pairs.MarginalSettings()), (F,)),
    "range": (
        lambda f: pairs.range_term(f, LABELS, pairs.RangeSettings(margin=4.0)),
        (F,),
    ),
    "basis": (lambda z: basis_loss(unit(z), LABELS), (Z,)),
    "cac": (
        lambda z: points.anchor_loss(z, LABELS, 10 * torch.eye(CLASSES).double(), 0.1),
        (Z,),
    ),
    "gcpl": (lambda f, p: points.prototype_loss(f, LABELS, p, 0.7, 0.1), (F, P)),
    "rpl": (lambda f, p, r: points.reciprocal_loss(f, LABELS, p, r, 0.7, 0.1), (F, P, R)),
    "arpl": (lambda f, p, r: points.adversarial_loss(f, LABELS, p, r, 0.7, 0.1), (F, P, R)),
    "sureness": (lambda f, p: sureness(points.reciprocal_logits(f, p)), (F, P)),
    "center": (of_method(centres.Centred, centres.CentreSettings()), (F,)),
    "contrastive-center": (
        of_method(centres.Centred, centres.CentreSettings(term="contrastive")),
        (F,),
    ),
    "cosface": (of_method(margins.Margin, margins.MarginSettings()), (F,)),
    "sphereface": (of_method(margins.Sphere, margins.SphereSettings()), (F,)),
    "uniformface": (of_method(margins.Sphere, margins.SphereSettings(uniform=1.0)), (F,)),
    "regularface": (margins.regularity, (P,)),
    **{
        f"energy of weights {power} {half}": (
            lambda w, power=power, half=half: margins.energy(w, power, half),
            (P,),
        )
        for power in (0, 1, 2)
        for half in (False, True)
    },
    "to uniform": (lambda z: bg.to_uniform(z).sum(), (Z,)),
    "ring": (lambda f: sum(t.sum() for t in bg.ring_terms(bg.length(f), bg.length(f), 3.0)), (F,)),
    "energy": (lambda z: sum(t.sum() for t in bg.energy_hinges(z, z, -3.0, -1.0)), (Z,)),
    "one against the rest": (lambda z: osrci.one_vs_rest(z, LABELS), (Z,)),
    "open": (
        lambda z: osrci.open_cross_entropy(z, LABELS[:4], torch.tensor([1.0, 0.0, 1.0]).double()),
        (Z,),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_values(name):
    loss, inputs = LOSSES[name]
    given = tuple(x.clone().requires_grad_() for x in inputs)
    assert gradcheck(loss, given, eps=1e-6, atol=1e-6)


OTHERWISE = {"arcface": "the gradient of its authors' code, which test_margins.py checks"}
"""Rows whose gradient is not the loss's own, and why."""
AT_WORK = {"energy": {"margin_out": -0.5}, "arpl-cs": {"confusion": 1e4}}
"""Settings under which no term of a fresh net's gradient is 0, or lost beside the others."""


def loss_at(method, begin, update, batch, directions, size):
    """The update's loss from the state `begin`, its parameters moved by `size` along directions."""
    method.load_state_dict(begin)
    with torch.no_grad():
        for parameter, direction in zip(update.parameters, directions, strict=True):
            parameter.add_(size * direction)
    torch.manual_seed(1)  # some draw
    return update.loss(batch)


@pytest.mark.parametrize(
    ("name", "background"),
    [
        (name, background)
        for name, row in METHODS.items()
        for background in sorted({row.needs_background, row.uses_background})
        if name not in OTHERWISE
    ],
)
def test_every_update_descends_its_own_loss(name, background):
    """Nothing that training moves is left out of a gradient: slopes against differences."""
    torch.manual_seed(0)
    settings = settings_for(name, AT_WORK.get(name, {}))
    method = build_method(name, "small", (1, 8, 8), 3, settings).double().train()
    images, labels = toys.tensors(*toys.pictures(12))
    others = toys.tensors(toys.unknown_pictures(5), np.zeros(5))[0] if background else None
    method.encoder.normalise.fit(images)
    batch = Batch(images, labels, others, torch.tensor(10**5))
    begin = {key: value.clone() for key, value in method.state_dict().items()}
    for update in (update for stage in method.stages(3) for update in stage.updates):
        directions = [(p.abs().mean() + 0.01) * torch.randn_like(p) for p in update.parameters]
        at = method, begin, update, batch, directions
        method.zero_grad()
        loss_at(*at, 0.0).backward()
        slope = sum((p.grad * d).sum() for p, d in zip(update.parameters, directions, strict=True))
        step = 1e-6
        rise = (loss_at(*at, step) - loss_at(*at, -step)).item() / (2 * step)
        assert slope.item() == pytest.approx(rise, rel=1e-5, abs=1e-8), update.name


def stages(name):
    method = build_method(name, "small", (1, 8, 8), 3)
    return method, {stage.name: stage for stage in method.stages(10)}


def test_what_a_second_stage_leaves_alone():
    energy, plan = stages("energy")
    assert plan["tune"].frozen == (energy.encoder,)
    gdfr, plan = stages("gdfr")
    assert plan["fit"].frozen == (gdfr.encoder.backbone.autoencoder,)
    for name in ("osrci", "g-openmax"):  # painted images move no running statistics
        gan, plan = stages(name)
        assert set(plan["open"].frozen) == {gan.closed, gan.inverse, gan.generator, gan.encoder}
    c2ae, plan = stages("c2ae")
    assert plan["decode"].frozen == (c2ae.encoder, c2ae.head)


GAN = (("critic", "adam", 2e-4, 0.5, True), ("paint", "adam", 2e-4, 0.5, True))
# Stages of 100 epochs: their length, and of each update that has an optimiser of its own its name,
# kind, rate, momentum, and whether that rate stays as it is.
OWN = {
    "arpl-cs": {
        "fit": (
            100,
            ("critic", "adam", 2e-4, 0.5, True),
            ("generator", "adam", 2e-4, 0.5, True),
        )
    },
    "c2ae": {"fit": (100,), "decode": (100, ("decode", "adam", 1e-3, 0.9, False))},
    "energy": {"fit": (90,), "tune": (10, ("tune", "sgd", 1e-3, 0.9, False))},
    "gdfr": {"autoencode": (50, ("autoencode", "adam", 1e-3, 0.9, False)), "fit": (100,)},
    "osrci": {"gan": (50, *GAN), "fit": (100,), "open": (10, ("open", "adam", 5e-5, 0.9, False))},
    "g-openmax": {
        "gan": (50, *GAN),
        "fit": (100,),
        "open": (10, ("open", "adam", 5e-5, 0.9, False)),
    },
}


@pytest.mark.parametrize("name", METHODS)
def test_stages_have_their_lengths_and_optimisers(name):
    method = build_method(name, "small", (1, 8, 8), 3)
    found = {}
    for stage in method.stages(100):
        own = [(u.name, u.optimiser) for u in stage.updates if u.optimiser is not None]
        told = [(n, o.kind, o.learning_rate, o.momentum, o.schedule is steady) for n, o in own]
        found[stage.name] = (stage.epochs, *told)
    assert found == OWN.get(name, {"fit": (100,)})


@pytest.mark.parametrize("name", METHODS)
def test_losses_of_pairs_have_four_images_of_each_class(name):
    pairs = ("contrastive", "triplet", "triplet-semihard", "marginal", "range")
    for stage in build_method(name, "small", (1, 8, 8), 3).stages(10):
        assert stage.per_class == (4 if name in pairs else None)


# The numbers of the papers or of their authors' code, at unit radius or unit length where ours is.
PUBLISHED = {
    "dsc-eq5-a": {"loss": "squared", "background": "hinge-A", "margin": 32 / 64**2},
    "dsc-eq5-b": {"loss": "squared", "background": "hinge-B", "margin": 32 / 64},
    "dsc-eq5-c": {"loss": "squared", "background": "hinge-C", "margin": 32 / 64},
    "dsc-hinge": {"loss": "hinge"},
    "dsc-literal": {"loss": "literal", "radius": 64.0},
    "dsc-authors": {
        "loss": "authors",
        "radius": 200.0,
        "margin": 48 / 200**2,
        "head": "none",
        "simplex": "truncated",
    },
    "cac": {"anchor": 10.0, "weight": 0.1},
    "gcpl": {"temperature": 1.0, "weight": 0.1},
    "rpl": {"loss": "rpl", "temperature": 1.0, "weight": 0.1},
    "arpl": {"loss": "arpl", "temperature": 1.0, "weight": 0.1},
    "arpl-cs": {"confusion": 0.1, "weight": 0.1, "latent": 100, "width": 64},
    "openmax": {"tail": 20, "alpha": 10},
    "crosr": {"latent": 32, "reconstruction": 1.0, "tail": 20, "alpha": 10},
    "c2ae": {"match": 0.9},
    "gdfr": {"turn": 1.0},
    "osrci": {
        "unknowns": "counterfactual",
        "latent": 64,
        "adversarial": 0.01,
        "penalty": 10.0,
        "distance": 1.0,
        # Ours, as its settings tell:
        "gan_epochs": 0.5,
        "gan_rate": 2e-4,
        "open_epochs": 0.1,
        "open_rate": 5e-5,
        "share": 0.5,
        "steps": 10,
        "step_size": 0.01,
    },
    "g-openmax": {"unknowns": "between", "ceiling": 0.5},
    "energy": {"weight": 0.1, "margin_in": -25.0, "margin_out": -7.0},
    "entropic": {"background_weight": "auto", "ring": 0.0, "bias": False},
    "objectosphere": {"background_weight": "auto", "ring": 1e-4, "radius": 50.0, "bias": False},
    "oe": {"background_weight": 0.5, "ring": 0.0, "bias": True},
    "center": {"term": "center", "rate": 0.5, "weight": 0.1},  # of 0.01 … 1
    "contrastive-center": {"term": "contrastive", "weight": 1.0, "delta": 1.0},  # of 0.1 … 1
    "cosface": {"kind": "cosine", "margin": 0.35},
    "arcface": {"kind": "angle", "margin": 0.5},
    "sphereface": {"m": 4, "start": 1000.0, "decay": 0.12, "floor": 5.0, "uniform": 0.0},
    "uniformface": {"m": 4, "uniform": 1.0, "rate": 0.5},
    "regularface": {"output": 0.0, "hidden": 0.0},
    "mhe": {"output": 10.0, "hidden": 1.0, "power": 2, "half_space": True, "regular": 0.0},
    "marginal": {"threshold": 1.2, "margin": 0.3, "weight": 1.0},
    "range": {"count": 2, "margin": 1.0, "inter": 2.0},  # M = 2e4 is 1, β = 1e-4 is 2
    "contrastive": {"loss": "contrastive", "margin": 1.0},
    "triplet": {"loss": "hard"},
    "triplet-semihard": {"loss": "semihard", "margin": 0.2},
    "basis": {"away": 1 / 3},
}

# Rows whose numbers no paper has; those of our choice among the others are in test_rows.py.
NO_NUMBERS = ("dsc", "dsc-softmax", "dsc-blend", "dsc-turned", "softmax", "background-class")


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_have_the_published_numbers(name):
    settings = dataclasses.asdict(METHODS[name].settings)
    assert {key: settings[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def test_every_row_has_its_numbers_here():
    assert not {*PUBLISHED} & {*NO_NUMBERS}
    assert {*PUBLISHED, *NO_NUMBERS} == set(METHODS)
    assert points.SPREAD == 0.1
    assert pairs.PER_CLASS == 4
