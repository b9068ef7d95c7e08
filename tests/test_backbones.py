"""Backbones: shapes, strides, parameter counts, names, initial weights, published weights."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from deepsimplex.backbones import (
    MLP,
    NAMES,
    LeNetPlusPlus,
    OSRCINet,
    SmallNet,
    TimmNet,
    build_backbone,
    resolve_backbone,
)
from deepsimplex.errors import DeepSimplexError
from deepsimplex.resnet import BasicBlock, Bottleneck, ResNet, load_torchvision_weights

CONCRETE = [name for name in NAMES if name not in ("auto", "timm:NAME")]
RGB = (3, 32, 32)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def shape_for(name: str) -> tuple[int, ...]:
    return (7,) if name == "mlp" else RGB


def map_sides(net: nn.Module, kind: type[nn.Module], x: torch.Tensor) -> list[int]:
    """The side of the map after each module of `kind`, in the order of the forward pass."""
    sides: list[int] = []

    def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        sides.append(output.shape[-1])

    for module in net.modules():
        if isinstance(module, kind):
            module.register_forward_hook(note)
    net.eval()(x)
    return sides


@pytest.mark.parametrize("name", CONCRETE)
def test_features_is_the_length_that_comes_out(name: str) -> None:
    shape = shape_for(name)
    with torch.device("meta"):
        net = build_backbone(name, shape)
        out = net(torch.empty(3, *shape))
    assert out.shape == (3, net.features)
    assert all(tensor.is_meta for tensor in net.state_dict().values())
    assert {n for n, _ in net.named_buffers()} <= net.state_dict().keys()


@pytest.mark.parametrize("name", ["osrci-flat", "resnet18-unpooled", "resnet18-cifar-unpooled"])
@pytest.mark.parametrize("side", [(33, 47), (64, 40)])
def test_flattened_length_for_odd_and_oblong_images(name: str, side: tuple[int, int]) -> None:
    with torch.device("meta"):
        net = build_backbone(name, (3, *side))
        assert net(torch.empty(2, 3, *side)).shape == (2, net.features)


@pytest.mark.parametrize(
    "name", ["mlp", "small", "osrci", "osrci-flat", "osrci-whole", "lenet++", "resnet18-cifar"]
)
def test_gradient_reaches_every_parameter_under_bf16_autocast(name: str) -> None:
    torch.manual_seed(0)
    shape = (7,) if name == "mlp" else (3, 8, 8)
    assert_gradient_reaches_all(build_backbone(name, shape), torch.randn(8, *shape))


@pytest.mark.parametrize("stride", [1, 2])
def test_gradient_reaches_every_parameter_of_a_bottleneck(stride: int) -> None:
    torch.manual_seed(0)
    assert_gradient_reaches_all(Bottleneck(8, 4, stride), torch.randn(4, 8, 6, 6))


def assert_gradient_reaches_all(net: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
    (out.float() * torch.randn(out.shape)).sum().backward()
    for path, parameter in net.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.abs().sum() > 0, path


def test_osrci_counts_and_strides() -> None:
    net = OSRCINet()
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert parameters(net) == 999_104
    assert sum(m.weight.numel() for m in convs) == 997_056
    assert all(m.bias is None for m in convs)
    assert map_sides(net, nn.Conv2d, torch.randn(1, *RGB)) == [32, 32, 16, 16, 16, 8, 8, 8, 4]
    assert net.features == 128
    assert OSRCINet(pooled=False, size=(32, 32)).features == 2048


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "drop"), [("osrci", 0.2), ("osrci-whole", 0.0)])
def test_osrci_is_dropout_convolution_norm_leaky_relu(
    name: str, drop: float, training: bool
) -> None:
    torch.manual_seed(1)
    net = build_backbone(name, RGB).train(training)
    assert isinstance(net, OSRCINet)
    layers: list[nn.Module] = []
    for number, pair in enumerate(net.layers):
        if number % 3 == 0 and drop:
            layers.append(nn.Dropout2d(drop))
        layers += pair, nn.LeakyReLU(0.2)
    plain = nn.Sequential(*layers).train(training)
    x = torch.randn(5, *RGB)
    torch.manual_seed(2)
    ours = net(x)
    torch.manual_seed(2)
    assert torch.equal(ours, plain(x).mean((2, 3)))


def test_osrci_initial_weights() -> None:
    torch.manual_seed(0)
    net = OSRCINet()
    convs = torch.cat(
        [m.weight.detach().flatten() for m in net.modules() if isinstance(m, nn.Conv2d)]
    )
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    scales = torch.cat([m.weight.detach() for m in norms])
    assert float(convs.mean()) == pytest.approx(0, abs=3e-4)
    assert float(convs.std()) == pytest.approx(0.05, rel=0.01)
    assert float(scales.mean()) == pytest.approx(1, abs=3e-3)
    assert float(scales.std()) == pytest.approx(0.02, rel=0.15)
    assert all((m.bias == 0).all() for m in norms)


def test_osrci_never_blanks_a_grey_image() -> None:
    x = torch.ones(256, 1, 8, 8)
    assert torch.equal(OSRCINet(channels=1).train().dropout(x), x)
    assert not torch.equal(OSRCINet(channels=3).train().layers[0](x.expand(-1, 3, -1, -1)), x)


def test_osrci_pooled_is_the_mean_of_the_flat_map() -> None:
    flat, pooled = OSRCINet(pooled=False, size=(16, 16)).eval(), OSRCINet().eval()
    pooled.load_state_dict(flat.state_dict())
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(flat(x).view(2, 128, 4).mean(2), pooled(x))


@pytest.mark.parametrize(
    ("depth", "count", "entries", "features"),
    [(18, 11_176_512, 120, 512), (50, 23_508_032, 318, 2048), (101, 42_500_160, 624, 2048)],
)
def test_resnet_counts(depth: int, count: int, entries: int, features: int) -> None:
    with torch.device("meta"):
        net, cifar = ResNet(depth), ResNet(depth, stem="cifar")
    assert parameters(net) == count
    assert parameters(cifar) == count - 64 * 3 * (49 - 9)
    assert len(net.state_dict()) == len(cifar.state_dict()) == entries
    assert net.features == features


def test_resnet_names_and_shapes_are_torchvisions() -> None:
    with torch.device("meta"):
        r18, r50 = ResNet(18).state_dict(), ResNet(50).state_dict()
    for state, name, shape in [
        (r18, "conv1.weight", (64, 3, 7, 7)),
        (r18, "bn1.running_mean", (64,)),
        (r18, "layer1.1.conv2.weight", (64, 64, 3, 3)),
        (r18, "layer2.0.downsample.0.weight", (128, 64, 1, 1)),
        (r18, "layer4.0.downsample.1.num_batches_tracked", ()),
        (r18, "layer4.1.bn2.bias", (512,)),
        (r50, "layer1.0.downsample.0.weight", (256, 64, 1, 1)),
        (r50, "layer3.5.conv3.weight", (1024, 256, 1, 1)),
        (r50, "layer4.0.conv1.weight", (512, 1024, 1, 1)),
        (r50, "layer4.2.bn3.running_var", (2048,)),
    ]:
        assert tuple(state[name].shape) == shape, name
    assert "layer1.0.downsample.0.weight" not in r18
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert list(r18)[:6] == ["conv1.weight", *(f"bn1.{entry}" for entry in norm)]


def test_resnet_strides() -> None:
    with torch.device("meta"):
        large, small = torch.empty(1, 3, 224, 224), torch.empty(1, 3, 32, 32)
        r18, cifar, r50 = ResNet(18), ResNet(18, stem="cifar"), ResNet(50)
        assert map_sides(r18, nn.Conv2d, large)[0] == 112
        assert map_sides(r18, nn.MaxPool2d, large) == [56]
        assert map_sides(r18, BasicBlock, large) == [56, 56, 28, 28, 14, 14, 7, 7]
        assert map_sides(cifar, nn.MaxPool2d, small) == []
        assert map_sides(cifar, BasicBlock, small) == [32, 32, 16, 16, 8, 8, 4, 4]
        assert ResNet(18, pooled=False, size=(224, 224)).features == 25_088
    for stage, stride in (("layer1", 1), ("layer2", 2), ("layer3", 2), ("layer4", 2)):
        block: Any = r50.get_submodule(stage)[0]  # type: ignore[index]
        assert [block.conv1.stride[0], block.conv2.stride[0], block.conv3.stride[0]] == [
            1,
            stride,
            1,
        ]
        assert block.downsample[0].stride[0] == stride


def test_resnet_initial_weights() -> None:
    torch.manual_seed(0)
    net = ResNet(18, stem="cifar")
    weight = net.get_parameter("layer4.1.conv2.weight").detach()
    assert float(weight.std()) == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert (net.bn1.weight == 1).all()
    assert (net.bn1.bias == 0).all()


def published(depth: int = 18) -> dict[str, torch.Tensor]:
    """A state dict like torchvision's file, with a value of its own in every entry."""
    state = {
        name: torch.rand(value.shape) if value.is_floating_point() else torch.tensor(5)
        for name, value in ResNet(depth).state_dict().items()
    }
    return state | {"fc.weight": torch.rand(1000, 512), "fc.bias": torch.rand(1000)}


def test_published_weights_load_and_the_classifier_is_dropped() -> None:
    net, state = ResNet(18), published()
    load_torchvision_weights(net, state)
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert "fc.weight" in state


def test_published_weights_without_batch_counters_load() -> None:
    state = {n: v for n, v in published().items() if not n.endswith("num_batches_tracked")}
    net = ResNet(18)
    load_torchvision_weights(net, state)
    assert torch.equal(net.bn1.running_var, state["bn1.running_var"])


def test_published_weights_that_do_not_fit() -> None:
    state = published()
    cifar = ResNet(18, stem="cifar")
    before = cifar.bn1.weight.clone()
    with pytest.raises(DeepSimplexError, match=r"got \(64, 3, 7, 7\).*stem='imagenet'"):
        load_torchvision_weights(cifar, state)
    assert torch.equal(cifar.bn1.weight, before)
    with pytest.raises(DeepSimplexError, match="channels=3"):
        load_torchvision_weights(ResNet(18, channels=1), state)
    with torch.device("meta"):
        deeper = ResNet(50)
    with pytest.raises(DeepSimplexError, match=r"165 missing \(layer1.0.bn3.bias, .*0 unexpected"):
        load_torchvision_weights(deeper, state)
    extra = {n: v for n, v in state.items() if n != "bn1.bias"} | {"avg": torch.zeros(1)}
    with pytest.raises(DeepSimplexError, match=r"1 missing \(bn1.bias\), 1 unexpected \(avg\)"):
        load_torchvision_weights(ResNet(18), extra)


def test_lenet_counts_strides_and_free_sign() -> None:
    torch.manual_seed(0)
    net = LeNetPlusPlus()
    widths = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    convs = sum(25 * a * b + 2 * b + 1 for a, b in widths)  # conv, BN, one PReLU slope
    assert parameters(net) == convs + 2048 * 2 + 2
    x = torch.randn(64, *RGB)
    assert map_sides(net, nn.MaxPool2d, x[:1]) == [16, 8, 4]
    out = net.train()(x)
    assert out.shape == (64, 2)
    assert ((out < 0).any(0) & (out > 0).any(0)).any()
    assert isinstance(net.fc, nn.Linear)


@pytest.mark.parametrize(("side", "sides"), [(8, [8, 8, 4]), (28, [28, 14, 7]), (15, [15, 15, 7])])
def test_small_net_keeps_detail_on_tiny_images(side: int, sides: list[int]) -> None:
    net = SmallNet(size=(side, side))
    assert map_sides(net, nn.Conv2d, torch.randn(1, 1, side, side)) == sides
    assert parameters(net) == 9 * (32 + 32 * 32 + 32 * 128) + 2 * (32 + 32 + 128)
    assert SmallNet(channels=3, features=16)(torch.randn(2, 3, 9, 9)).shape == (2, 16)


def test_small_net_learns_digits() -> None:
    """Ten epochs at the lr that eq. 4 takes; softmax with a linear head, 600 images to train."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    data = load_digits()
    x = torch.tensor(data.images / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(data.target)
    net = nn.Sequential(SmallNet(), nn.Linear(128, 10))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    for _ in range(10):
        for batch in torch.randperm(600).split(60):
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert (net.eval()(x[600:]).argmax(1) == y[600:]).float().mean() > 0.9


@pytest.mark.parametrize("inputs", [1, 2, 300])
def test_mlp_trains_on_a_batch_of_one(inputs: int) -> None:
    net = MLP(inputs, hidden=(16, 8))
    assert net.features == 8
    assert parameters(net) == inputs * 16 + 16 + 16 * 8 + 8
    out = net.train()(torch.randn(1, inputs))
    assert out.shape == (1, 8)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1,), "mlp"),
        ((300,), "mlp"),
        ((1, 8, 8), "small"),
        ((3, 28, 28), "small"),
        ((3, 29, 28), "osrci-whole"),
        ((3, 64, 64), "osrci-whole"),
        ((3, 65, 64), "resnet18"),
        ((3, 224, 224), "resnet18"),
        ((3, 224, 20), "osrci-whole"),
        ((3, 224, 6), "small"),
    ],
)
def test_auto(shape: tuple[int, ...], name: str) -> None:
    assert resolve_backbone("auto", shape) == name
    with torch.device("meta"):
        net = build_backbone("auto", shape)
        assert net(torch.empty(2, *shape)).shape == (2, net.features)


def test_a_concrete_name_resolves_to_itself() -> None:
    for name in [*CONCRETE, "timm:vit_tiny"]:
        assert resolve_backbone(name, RGB) == name


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet8", RGB, "did you mean 'resnet18'"),
        ("OSRCI", RGB, "did you mean 'osrci'"),
        ("qqq", RGB, r"one of auto, mlp, small.*timm:NAME.*got 'qqq'; pick one"),
        ("timm:", RGB, "a backbone"),
        ("osrci", (64,), "use backbone 'mlp'"),
        ("mlp", RGB, "flatten"),
        ("resnet18", (3, 31, 64), "at least 32 pixels.*got 31×64"),
        ("resnet18-cifar", (3, 7, 7), "at least 8 pixels"),
        ("osrci-flat", (3, 7, 32), "at least 8 pixels.*, use backbone .auto., or flatten"),
        ("small", (1, 3, 3), r"at least 4 pixels.*folder.s are\) or flatten"),
        ("lenet++", (3, 7, 32), "at least 8 pixels"),
        ("auto", (1, 3, 3), "vectors for 'mlp'"),
        ("auto", (8, 8), r"\(p,\) or \(c, h, w\)"),
        ("auto", (), "positive sizes"),
        ("auto", (0,), "positive sizes"),
        ("auto", (1, 0, 8), "positive sizes"),
    ],
)
def test_names_and_shapes_that_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(DeepSimplexError, match=message):
        build_backbone(name, shape)


def test_constructors_that_are_refused() -> None:
    for build in (
        lambda: OSRCINet(pooled=False),
        lambda: ResNet(18, pooled=False),
        lambda: ResNet(34),
        lambda: ResNet(18, stem="mnist"),
        lambda: MLP(0),
        lambda: MLP(3, hidden=()),
    ):
        with pytest.raises(DeepSimplexError):
            build()


def test_timm_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(DeepSimplexError, match=r'pip install "deepsimplex\[timm\]"'):
        build_backbone("timm:resnet18", RGB)


class StandIn(nn.Module):
    """Answers like a timm model without classifier whose num_features is not its output."""

    num_features = 99

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 12, 16)
        self.norm = nn.BatchNorm2d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).mean((2, 3))  # type: ignore[no-any-return]


def test_timm_present(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def create_model(name: str, in_chans: int, **rest: Any) -> nn.Module:
        asked.append(rest)
        return StandIn(in_chans)

    fake: Any = types.ModuleType("timm")
    fake.create_model = create_model
    fake.is_model = lambda name: name == "stand_in"
    fake.list_models = lambda: ["stand_in"]
    monkeypatch.setitem(sys.modules, "timm", fake)
    net = build_backbone("timm:stand_in", (1, 20, 20))
    assert isinstance(net, TimmNet)
    assert (net.features, net.training) == (12, True)
    assert all(module.training for module in net.modules())
    assert int(net.get_buffer("net.norm.num_batches_tracked")) == 0
    assert asked == [{"pretrained": False, "num_classes": 0}]
    assert net(torch.randn(2, 1, 20, 20)).shape == (2, 12)
    with torch.device("meta"):
        assert build_backbone("timm:stand_in", (1, 20, 20)).features == 12
    with pytest.raises(DeepSimplexError, match="did you mean 'timm:stand_in'"):
        build_backbone("timm:standin", (1, 20, 20))
    with pytest.raises(DeepSimplexError, match="images of 9×9"):
        build_backbone("timm:stand_in", (1, 9, 9))


@pytest.mark.parametrize("depth", [18, 50, 101])
def test_torchvisions_own_weights_give_torchvisions_own_features(depth):
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    theirs = getattr(models, f"resnet{depth}")(weights=None).eval()
    ours = ResNet(depth, stem="imagenet").eval()
    load_torchvision_weights(ours, theirs.state_dict())
    theirs.fc = torch.nn.Identity()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_100"])
def test_real_timm_models(name):
    pytest.importorskip("timm", reason="timm is not installed")
    shape = (3, 224, 224) if "224" in name else (3, 64, 64)
    net = build_backbone(f"timm:{name}", shape)
    assert net(torch.randn(2, *shape)).shape == (2, net.features)
    with torch.device("meta"):
        assert build_backbone(f"timm:{name}", shape).features == net.features
