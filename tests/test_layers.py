"""The plain way of each layer is what it says; the kernels are held to it in test_kernels."""

import copy

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepsimplex.backbones import build_backbone
from deepsimplex.layers import beside, convolve, norm_act, stem
from deepsimplex.methods import build_method, settings_for
from deepsimplex.methods.base import Batch
from deepsimplex.resnet import BasicBlock


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("with_residual", [True, False])
def test_norm_act_is_norm_residual_leaky_relu(training, slope, with_residual):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4).train(training)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    twin = copy.deepcopy(norm)
    x, residual = torch.randn(2, 5, 4, 3, 3)
    z = twin(x) + (residual if with_residual else 0)
    expected = torch.where(z > 0, z, slope * z)
    assert (z < 0).any()
    assert torch.allclose(norm_act(norm, x, slope, residual if with_residual else None), expected)
    assert torch.equal(norm.running_mean, twin.running_mean)


def test_norm_act_drops_whole_maps_in_training_only():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(50).train()
    x = torch.randn(40, 50, 4, 4)
    y, whole = norm_act(norm, x, 1.0, drop=0.25), norm_act(norm, x, 1.0)
    dropped = (y == 0).flatten(2).all(2)
    assert 0.2 < dropped.float().mean() < 0.3
    assert torch.allclose(y[~dropped], whole[~dropped] / 0.75)
    norm.eval()
    assert torch.equal(norm_act(norm, x, 1.0, drop=0.25), norm(x))


def test_convolutions_are_the_module_where_there_is_no_gpu():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    x = torch.randn(2, 3, 6, 6)
    with beside(None):
        assert torch.equal(convolve(conv, x), conv(x))
    assert torch.equal(stem(conv, x), conv(x))


@pytest.mark.parametrize(("channels", "stride"), [(8, 1), (4, 2)])
def test_a_residual_block_by_hand(channels, stride):
    torch.manual_seed(0)
    block = BasicBlock(channels, 8, stride).train()
    twin = copy.deepcopy(block)
    x = torch.randn(5, channels, 6, 6)
    y = twin.bn2(twin.conv2(F.relu(twin.bn1(twin.conv1(x)))))
    short = x if twin.downsample is None else twin.downsample(x)
    assert torch.allclose(block(x), F.relu(y + short), atol=1e-6)


@pytest.mark.parametrize("side", [8, 16])
def test_the_small_net_by_hand(side):
    torch.manual_seed(0)
    net = build_backbone("small", (1, side, side)).train()
    twin = copy.deepcopy(net)
    x = torch.randn(6, 1, side, side)
    y = F.relu(twin.layers[0](x))
    y = F.max_pool2d(y, 2) if side >= 16 else y
    y = F.max_pool2d(F.relu(twin.layers[1](y)), 2)
    assert torch.allclose(net(x), F.relu(twin.layers[2](y)).mean((2, 3)), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dsc-blend", {"blend": 0.3, "temperature": 0.5}),
        ("dsc-softmax", {"label_smoothing": 0.2}),
        ("dsc-literal", {"radius": 7.0}),
    ],
)
def test_losses_of_the_added_rows_by_their_equations(name, changes):
    torch.manual_seed(0)
    method = build_method(name, "small", (1, 8, 8), 4, settings_for(name, changes)).eval()
    images = torch.randint(0, 255, (6, 1, 8, 8), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    with torch.no_grad():
        loss = float(method.loss(Batch(images, labels, None, torch.tensor(0))))
        f = method(images).double().numpy()
    y, v = labels.numpy(), method.simplex.centres(torch.arange(4), torch.float64).numpy()
    if name == "dsc-literal":
        expected = oracles.eq4(7.0 * f, y, 7.0 * v)
    else:
        logits = f @ v.T / changes.get("temperature", 1.0)
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        q = np.eye(4)[y] * (1 - changes.get("label_smoothing", 0.0))
        q = q + changes.get("label_smoothing", 0.0) / 4
        expected = -(q * log_p).sum(1).mean() + changes.get("blend", 0.0) * oracles.eq4(f, y, v)
    assert loss == pytest.approx(float(expected), rel=1e-5)
