"""ResNet-18/50/101 without the classifier, under torchvision's parameter names.

Stages of 64-128-256-512 channels (times 4 for bottlenecks) that halve the map from the second
on; f is a mean of ReLU outputs, so f ≥ 0. The stride of a bottleneck sits in its 3×3
convolution, as in the weights that torchvision publishes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.layers import convolve, norm_act, stem

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
STRIDES = {"cifar": 8, "imagenet": 32}
"""Image side over side of the last map; every halving rounds up."""


class BasicBlock(nn.Module):
    """relu(bn(3×3) ∘ relu ∘ bn(3×3, stride) + shortcut); (n, c, h, w) → (n, width, h/s, w/s)."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = norm_act(self.bn1, convolve(self.conv1, x), 0.0)
        return norm_act(
            self.bn2, convolve(self.conv2, y), 0.0, residual=_shortcut(self.downsample, x)
        )


class Bottleneck(nn.Module):
    """1×1 down, 3×3 with the stride, 1×1 up, plus shortcut; → (n, 4·width, h/s, w/s)."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1 = _conv(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, wide, 1)
        self.bn3 = nn.BatchNorm2d(wide)
        self.downsample = _downsample(channels, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = norm_act(self.bn1, convolve(self.conv1, x), 0.0)
        y = norm_act(self.bn2, convolve(self.conv2, y), 0.0)
        return norm_act(
            self.bn3, convolve(self.conv3, y), 0.0, residual=_shortcut(self.downsample, x)
        )


class ResNet(nn.Module):
    """(n, channels, h, w) → (n, features).

    stem "imagenet": 7×7 stride 2 and a max-pool (last map h/32); "cifar": 3×3 stride 1 and no
    pool (h/8). Pooled features are 512 or 2048 long; unpooled they are the whole last map, which
    needs the image `size` (h, w): 25 088 = 512·7·7 for ResNet-18 at 224×224.
    """

    def __init__(
        self,
        depth: int,
        stem: str = "imagenet",
        pooled: bool = True,
        channels: int = 3,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if depth not in BLOCKS:
            raise DeepSimplexError("a ResNet of depth 18, 50 or 101", str(depth), "pick one")
        if stem not in STRIDES:
            raise DeepSimplexError("stem 'cifar' or 'imagenet'", repr(stem), "pick one")
        if not pooled and size is None:
            raise DeepSimplexError(
                "an image size for unpooled features", "none", "give size=(height, width)"
            )
        self.depth = depth
        self.stem = stem
        self.pooled = pooled
        if stem == "cifar":
            self.conv1 = _conv(channels, 64, 3)
        else:
            self.conv1 = _conv(channels, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, 2, padding=1)
        block = BasicBlock if depth == 18 else Bottleneck
        self.layer1 = _stage(block, 64, 64, BLOCKS[depth][0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, BLOCKS[depth][1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, BLOCKS[depth][2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, BLOCKS[depth][3], stride=2)
        self.features: int = 512 * block.expansion
        if not pooled and size is not None:
            self.features *= -(-size[0] // STRIDES[stem]) * -(-size[1] // STRIDES[stem])
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(norm_act(self.bn1, stem(self.conv1, x), 0.0))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3)) if self.pooled else x.flatten(1)


def load_torchvision_weights(net: ResNet, state_dict: Mapping[str, Tensor]) -> None:
    """Fill `net` with published ResNet weights; the classifier `fc.*` among them is dropped.

    Nothing is loaded unless every name and shape fits. Older files lack BN's batch counters,
    which nothing here reads; those keep their own values.
    """
    own = net.state_dict()
    given = {name: value for name, value in own.items() if name.endswith("num_batches_tracked")}
    given |= {name: value for name, value in state_dict.items() if not name.startswith("fc.")}
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unexpected:
        raise DeepSimplexError(
            f"the {len(own)} entries of a torchvision resnet{net.depth}",
            f"{len(missing)} missing{_some(missing)}, {len(unexpected)} unexpected"
            f"{_some(unexpected)}",
            f"load the weights of resnet{net.depth}, or build the ResNet they belong to",
        )
    for name, value in own.items():
        if given[name].shape != value.shape:
            raise DeepSimplexError(
                f"{name} of shape {tuple(value.shape)} ({net.stem} stem)",
                str(tuple(given[name].shape)),
                _shape_remedy(net, name, value, given[name]),
            )
    net.load_state_dict(given)


def _shape_remedy(net: ResNet, name: str, own: Tensor, given: Tensor) -> str:
    if name == "conv1.weight" and own.shape[2:] != given.shape[2:]:
        other = "imagenet" if net.stem == "cifar" else "cifar"
        return f"build ResNet({net.depth}, stem={other!r}), or train this stem from scratch"
    if name == "conv1.weight":
        return f"build ResNet({net.depth}, channels={given.shape[1]}) and convert the images"
    return f"load the weights of resnet{net.depth}, or build the ResNet they belong to"


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" if names else ""


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(downsample: nn.Sequential | None, x: Tensor) -> Tensor:
    if downsample is None:
        return x
    conv, norm = downsample
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    return norm_act(norm, convolve(conv, x), 1.0)


def _downsample(channels: int, width: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels == width:
        return None
    return nn.Sequential(_conv(channels, width, 1, stride), nn.BatchNorm2d(width))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], channels: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    first = block(channels, width, stride)
    rest = [block(width * block.expansion, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)
