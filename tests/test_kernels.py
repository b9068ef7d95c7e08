"""Each kernel against its plain twin, in float64. They need a GPU."""

import pytest
import torch
import torch.nn.functional as F
import toys
from torch import nn

from deepsimplex.data.augment import augment, mirrored, windows
from deepsimplex.layers import beside, convolve, norm_act, stem
from deepsimplex.methods.base import Optimiser
from deepsimplex.optimisers import Fused, Plain

pytestmark = toys.GPU


def channels_last(*shape, dtype=torch.float32):
    return (
        torch.randn(*shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)
    )


def error(a, b):
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize(
    "shape",
    [
        (5, 3, 7, 6),
        (64, 64, 32, 32),
        (3, 96, 5, 5),
        (128, 130, 4, 4),
        (300, 512, 4, 4),
        (512, 64, 32, 32),
    ],
)
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("extra", ["nothing", "residual", "drop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_act(shape, slope, extra, dtype):
    torch.manual_seed(0)
    bound = 2e-5 if dtype == torch.float32 else 6e-3
    norm = nn.BatchNorm2d(shape[1]).cuda()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = (channels_last(*shape) * 2 + 10).to(dtype).requires_grad_()
    residual = channels_last(*shape, dtype=dtype).requires_grad_() if extra == "residual" else None
    drop = 0.3 if extra == "drop" else 0.0
    torch.manual_seed(1)
    y = norm_act(norm, x, slope, residual, drop)
    kept = y.new_ones(shape[:2])
    if drop:
        torch.manual_seed(1)
        kept = torch.empty(shape[:2], device="cuda").bernoulli_(0.7) / 0.7
        assert 0.15 < float((kept == 0).float().mean()) < 0.45
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(
        y, [x, norm.weight, norm.bias, *([residual] if extra == "residual" else [])], dy
    )
    xs = x.detach().double().requires_grad_()
    w, b = (p.detach().double().requires_grad_() for p in (norm.weight, norm.bias))
    mean, var = torch.zeros(shape[1]).cuda().double(), torch.ones(shape[1]).cuda().double()
    z = F.batch_norm(xs, mean, var, w, b, True, 0.1, 1e-5)
    leaves = [xs, w, b]
    if residual is not None:
        leaves.append(residual.detach().double().requires_grad_())
        z = z + leaves[-1]
    z = F.leaky_relu(z, slope) * kept.double()[:, :, None, None]
    expected = torch.autograd.grad(z, leaves, dy.double())
    assert y.dtype == dtype
    assert error(y, z) < bound
    for got, want in zip(grads, expected, strict=True):
        assert error(got, want) < bound
    assert error(norm.running_mean, mean) < 2e-5
    assert error(norm.running_var, var) < 2e-5
    assert int(norm.num_batches_tracked) == 1
    again = norm_act(norm, x, slope, residual)
    assert torch.equal(again, norm_act(norm, x, slope, residual))
    with beside(torch.cuda.Stream()):  # another plan
        other = norm_act(norm, x, slope, residual)
    assert error(other, again) < 1e-6 if dtype == torch.float32 else error(other, again) < 1e-3


def test_norm_act_takes_the_plain_way_where_it_must():
    norm = nn.BatchNorm2d(4).cuda()
    x = torch.randn(3, 4, 5, 6, device="cuda")  # not channels-last
    assert torch.equal(norm_act(norm, x, 0.0), F.relu(nn.BatchNorm2d(4).cuda()(x)))
    norm.eval()
    x = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(norm_act(norm, x, 0.2, drop=0.5), F.leaky_relu(norm(x), 0.2))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("half", [False, True])
def test_stem(channels, half):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 64, 3, padding=1, bias=False).cuda()
    conv.to(memory_format=torch.channels_last)
    x = torch.randn(9, channels, 17, 12, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        y = stem(conv, x)
    want = F.conv2d(x.double(), conv.weight.double(), padding=1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert error(y, want) < (1e-2 if half else 1e-5)
    dy = torch.randn_like(want)
    (got,) = torch.autograd.grad(y, conv.weight, dy.to(y.dtype))
    weight = conv.weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.conv2d(x.double(), weight, padding=1), weight, dy)
    assert error(got, expected) < (1e-2 if half else 1e-5)


@pytest.mark.parametrize("how", ["crop", "flip", "crop+flip"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augment_cuts_what_the_plain_way_cuts(how, dtype):
    images = torch.randint(0, 256, (50, 3, 32, 24), device="cuda").to(dtype)
    rows = torch.randint(0, 50, (128,), device="cuda")
    torch.manual_seed(5)
    got = augment(images.contiguous(memory_format=torch.channels_last), rows, how)
    torch.manual_seed(5)
    top = left = torch.zeros(128, dtype=torch.int64, device="cuda")
    mirror = torch.zeros(128, dtype=torch.bool, device="cuda")
    pad = 3 if "crop" in how else 0
    if pad:
        top, left = torch.randint(0, 2 * pad + 1, (2, 128), device="cuda")
    if "flip" in how:
        mirror = torch.rand(128, device="cuda") < 0.5
    assert torch.equal(got, mirrored(windows(images[rows], top, left, pad), mirror))
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("clip", [None, 1.0, 1e3])
@pytest.mark.parametrize("nesterov", [True, False])
def test_fused_descent_is_clipped_sgd(clip, nesterov):
    torch.manual_seed(0)
    own = Optimiser("sgd", 0.1, 0.9, nesterov=nesterov, weight_decay=1e-2)
    shapes = [(5000,), (3, 4), (64, 16, 3, 3), (1,), (7,)]
    ours = [nn.Parameter(torch.randn(s, device="cuda")) for s in shapes]
    ours[2].data = ours[2].data.contiguous(memory_format=torch.channels_last)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    fused, plain = Fused(ours, own, clip, {}), Plain(theirs, own, clip)
    for turn in range(4):
        for p, q in zip(ours[:-1], theirs, strict=False):  # the last has no gradient
            p.grad = torch.randn_like(p) * 10**-turn
            if turn == 1:
                p.grad = p.grad.contiguous()  # laid otherwise than the third parameter
            q.grad = p.grad.clone()
        rate = torch.tensor(0.1 / (turn + 1), device="cuda")
        fused.step(rate)
        plain.step(rate)
        for p, q in zip(ours, theirs, strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
    state = plain.state()
    assert all(torch.allclose(fused.state()[name], v, atol=1e-5) for name, v in state.items())
    again = Fused(ours, own, clip, {})
    again.load(state)
    assert all(torch.equal(again.state()[name], v) for name, v in state.items())


def test_shadows_follow_their_weights():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 32, 3, 3, device="cuda"))
    shadow = weight.detach().to(torch.bfloat16).requires_grad_()
    fused = Fused([weight], Optimiser("sgd", 0.1, 0.9), 1.0, {weight: shadow})
    plain = nn.Parameter(weight.detach().clone())
    reference = Plain([plain], Optimiser("sgd", 0.1, 0.9), 1.0)
    for _ in range(3):
        shadow.grad = torch.randn_like(shadow)
        plain.grad = shadow.grad.float()
        rate = torch.tensor(0.1, device="cuda")
        fused.step(rate)
        reference.step(rate)
        assert torch.allclose(weight, plain, rtol=1e-5, atol=1e-6)
        assert torch.equal(shadow, weight.to(torch.bfloat16))


def test_a_nan_gradient_shows_in_the_weights():
    weight = nn.Parameter(torch.ones(10, device="cuda"))
    fused = Fused([weight], Optimiser("sgd", 0.1, 0.9), 1.0, {})
    weight.grad = torch.full_like(weight, float("nan"))
    fused.step(torch.tensor(0.1, device="cuda"))
    assert weight.isnan().all()


@pytest.mark.parametrize("times", [1, 2])
def test_weight_gradients_beside_the_chain(times):
    """The other stream computes the same bits; a weight used twice stays on this one."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(16, 16, 3, s, 1, bias=False).cuda().bfloat16() for s in (1, 2, 1)]
    x = channels_last(64, 16, 32, 32, dtype=torch.bfloat16)

    def run(stream):
        for conv in convs:
            conv.to(memory_format=torch.channels_last).weight.grad = None
        with beside(stream):
            loss = 0
            for turn in range(times):
                y = x + turn
                for conv in convs:
                    y = convolve(conv, y)
                loss = loss + y.float().square().mean()
            loss.backward()
        return [conv.weight.grad.clone() for conv in convs]

    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        here, beside_it = run(None), run(torch.cuda.Stream())
    assert all(torch.equal(a, b) for a, b in zip(here, beside_it, strict=True))
