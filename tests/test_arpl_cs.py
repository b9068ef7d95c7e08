"""ARPL with confusing samples: its three losses, its second norms, and what the GAN is for."""

import numpy as np
import oracles
import pytest
import torch
import toys
from torch.func import functional_call

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import build_method
from deepsimplex.methods.arpl_cs import ARPLCSSettings, SecondNorms, sureness
from deepsimplex.methods.base import Batch
from deepsimplex.methods.prototypes import adversarial_loss


def fresh(**settings):
    torch.manual_seed(0)
    return build_method("arpl-cs", "small", (1, 8, 8), 3, ARPLCSSettings(**settings))


def batch():
    images, labels = toys.tensors(*toys.pictures(12))
    return Batch(images, labels, None, 0)


def number(loss):
    return float(loss.detach())


def statistics(net):
    return {name: b.clone() for name, b in net.named_buffers()}


def test_sureness_against_a_loop_and_at_its_ends():
    distances = 3 * torch.randn(7, 4, dtype=torch.float64)
    expected = oracles.sureness(distances.numpy())
    assert float(sureness(distances)) == pytest.approx(expected, rel=1e-12)
    assert 1 / 4 <= float(sureness(distances)) <= 1
    assert float(sureness(torch.zeros(5, 4))) == pytest.approx(1 / 4)
    assert float(sureness(1e4 * torch.eye(4))) == pytest.approx(1)


def test_the_three_losses_from_their_parts(monkeypatch):
    method, known = fresh(confusion=0.3, temperature=0.7, weight=0.2), batch()
    painted = 2 * torch.randn(12, 1, 8, 8)
    monkeypatch.setattr(method, "paint", lambda b: painted)
    method.train()
    method.encoder.normalise.mean.fill_(90.0)
    method.encoder.normalise.std.fill_(40.0)
    real = method.critic((known.images.float() - 90) / 40).detach().double().numpy()
    fake = method.critic(painted).detach().double().numpy()
    sigmoid = lambda t: 1 / (1 + np.exp(-t))  # noqa: E731
    expected = -np.log(sigmoid(real)).mean() - np.log(1 - sigmoid(fake)).mean()
    assert number(method.critic_loss(known)) == pytest.approx(expected, rel=1e-5)
    # The copies are fresh: they give what the layers they were copied from would.
    features = method.encoder.backbone(painted).detach().numpy()
    points = method.points.detach().numpy()
    sure = oracles.sureness(oracles.mean_squares(features, points))
    value = number(method.generator_loss(known))
    assert value == pytest.approx(-np.log(sigmoid(fake)).mean() + 0.3 * sure, rel=1e-5)
    own = oracles.arpl(
        method(known.images).detach().numpy(), known.labels.tolist(), points, 0.0, 0.7, 0.2
    )
    assert number(method.loss(known)) == pytest.approx(own + 0.3 * sure, rel=1e-5)


def test_images_are_painted_from_normal_codes():
    method, seen = fresh().eval(), []
    method.generator.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    torch.manual_seed(2)
    method.paint(batch())
    torch.manual_seed(2)
    assert torch.equal(seen[0], torch.randn(12, 100))


def test_painted_images_pass_norms_of_their_own():
    method = fresh().train()
    backbone = method.encoder.backbone
    first, second = statistics(backbone), statistics(method.second)
    painted = method.paint(batch())
    method.second(backbone, painted)
    assert all(torch.equal(first[n], b) for n, b in backbone.named_buffers())
    assert all(not torch.equal(second[n], b) for n, b in method.second.named_buffers())
    second = statistics(method.second)
    method(batch().images)
    assert all(torch.equal(second[n], b) for n, b in method.second.named_buffers())
    assert all(not torch.equal(first[n], b) for n, b in backbone.named_buffers())
    # Their scale and shift too: painted images do not see those of the real.
    before = method.second(backbone, painted)
    with torch.no_grad():
        for norm in backbone.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                norm.weight.mul_(3)
    assert torch.equal(method.second(backbone, painted), before)
    assert not torch.equal(backbone(painted), before)


def test_second_norms_leave_weights_alone_that_another_call_has_put_there():
    """The engine trains with bfloat16 shadows of convolution weights, by functional_call."""
    method = fresh().train()
    name, weight = next(
        (n, p) for n, p in method.named_parameters() if n.startswith("encoder") and p.ndim == 4
    )
    shadow = (0.5 * weight.detach().flip(0)).requires_grad_()

    class Call(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.method = method

        def forward(self, b):
            return method.loss(b)

    torch.manual_seed(1)
    inside = functional_call(Call(), {f"method.{name}": shadow}, (batch(),))
    inside.backward()
    assert shadow.grad is not None
    assert shadow.grad.abs().sum() > 0
    assert weight.grad is None
    kept = weight.detach().clone()
    method = fresh().train()
    with torch.no_grad():
        dict(method.named_parameters())[name].copy_(shadow)
    torch.manual_seed(1)
    assert torch.equal(inside, method.loss(batch()))
    assert torch.equal(weight, kept)


def test_a_net_without_batch_norm_has_no_second_norms():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
    norms, images = SecondNorms(net), torch.randn(3, 1, 8, 8)
    assert norms.names == ()
    assert torch.equal(norms(net, images), net(images))


def test_undecided_images_cost_less_and_the_critic_learns():
    method = fresh().train()
    with torch.no_grad():
        method.points.mul_(30)  # far apart: sure of something
    painted = method.paint(batch()).detach()
    start = number(method.painted_sureness(painted))
    optimiser = torch.optim.SGD(method.encoder.parameters(), 1.0)
    for _ in range(10):
        optimiser.zero_grad()
        method.painted_sureness(painted).backward()
        optimiser.step()
    assert 1 / 3 <= number(method.painted_sureness(painted)) < 0.9 * start
    optimiser = torch.optim.Adam(method.critic.parameters(), 2e-3, (0.5, 0.999))
    first = number(method.critic_loss(batch()))
    for _ in range(20):
        optimiser.zero_grad()
        method.critic_loss(batch()).backward()
        optimiser.step()
    assert number(method.critic_loss(batch())) < 0.7 * first


def test_without_confusion_the_classifier_descends_arpl():
    method, known = fresh(confusion=0.0).train(), batch()
    features = method(known.images)
    expected = adversarial_loss(features, known.labels, method.points, method.radius, 1.0, 0.1)
    assert number(method.loss(known)) == pytest.approx(number(expected), rel=1e-6)


def test_vectors_and_bad_settings():
    with pytest.raises(DeepSimplexError, match="images of 8×8 or more for a method that paints"):
        build_method("arpl-cs", "mlp", (6,), 3)
    for bad, words in (
        ({"confusion": -0.1}, "confusion of 0 or more"),
        ({"temperature": 0}, "temperature above 0"),
        ({"latent": 0}, "latent as a whole number"),
        ({"width": 2.5}, "width as a whole number"),
    ):
        with pytest.raises(DeepSimplexError, match=words):
            ARPLCSSettings(**bad)
