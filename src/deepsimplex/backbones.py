"""Networks from images or plain vectors to a feature vector, and the names they go by.

Every backbone has `features`, the length of its output: (n, c, h, w) → (n, features), and for
the MLP (n, p) → (n, features). Constructors look at sizes only, never at values, so all of
them build on the meta device too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError, meant
from deepsimplex.layers import convolve, norm_act, stem
from deepsimplex.resnet import BLOCKS, ResNet

NAMES = (
    "auto",
    "mlp",
    "small",
    "osrci",
    "osrci-flat",
    "osrci-whole",
    "lenet++",
    *(
        f"resnet{d}{stem}{end}"
        for d in BLOCKS
        for stem in ("", "-cifar")
        for end in ("", "-unpooled")
    ),
    "timm:NAME",
)


DROP = 0.2
"""Share of maps that the OSRCI net drops before each block; "osrci-whole" drops none."""


class OSRCINet(nn.Module):
    """The nine 3×3 convolutions of OSRCI, in three blocks that each end with stride 2.

    Conv (no bias) → BN → LeakyReLU 0.2, widths 64-64-128 then 128; a Dropout2d of `drop` before
    each block. Pooled, f is the mean over the last map (128); else the flattened map, which needs
    the image `size` (h, w): 2048 at 32×32. One-channel images skip the first dropout, which
    would blank one image in five.
    """

    def __init__(
        self,
        channels: int = 3,
        pooled: bool = True,
        size: tuple[int, int] | None = None,
        drop: float = DROP,
    ) -> None:
        super().__init__()
        self.drop = drop
        if not pooled and size is None:
            raise DeepSimplexError(
                "an image size for flattened features", "none", "give size=(height, width)"
            )
        self.pooled = pooled
        self.features = 128
        if not pooled and size is not None:
            self.features *= -(-size[0] // 8) * -(-size[1] // 8)
        # A one-channel image dropped is a blank image.
        self.dropout = nn.Dropout2d(drop) if channels > 1 and drop else nn.Identity()
        layers = []
        width = channels
        for block in ((64, 64, 128), (128, 128, 128), (128, 128, 128)):
            for out, stride in zip(block, (1, 1, 2), strict=True):
                layers.append(_conv_bn(width, out, 3, stride))
                width = out
        self.layers = nn.Sequential(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.05)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        for number, layer in enumerate(self.layers):
            conv, norm = _pair(layer)
            x = convolve(conv, x) if number else stem(conv, x)
            x = norm_act(norm, x, 0.2, drop=self.drop if number in (2, 5) else 0.0)
        return x.mean((2, 3)) if self.pooled else x.flatten(1)


class LeNetPlusPlus(nn.Module):
    """LeNet++ of the 2-D pictures: pairs of 5×5 convolutions, 32-32 | 64-64 | 128-128.

    Each is conv (no bias) → BN → PReLU, each pair ends with a 2×2 max-pool, and one linear layer
    gives the feature. Nothing follows that layer: the PReLU the authors' code puts there makes
    negative coordinates hard to reach.
    """

    def __init__(
        self, features: int = 2, channels: int = 3, size: tuple[int, int] = (32, 32)
    ) -> None:
        super().__init__()
        self.features = features
        layers: list[nn.Module] = []
        for width in (32, 64, 128):
            layers += _conv_bn(channels, width, 5), nn.PReLU()
            layers += _conv_bn(width, width, 5), nn.PReLU(), nn.MaxPool2d(2)
            channels = width
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(128 * (size[0] // 8) * (size[1] // 8), features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.layers(x).flatten(1))
        return out


class SmallNet(nn.Module):
    """Three 3×3 convolutions, 32-32-features, each → BN → ReLU, then the mean over the map.

    One 2×2 max-pool before the last; from 16 pixels a side (`size` is (h, w)) another after the
    first. The mean also keeps f short: flattened, eq. 4 diverges at learning rates this takes.
    """

    def __init__(
        self, channels: int = 1, features: int = 128, size: tuple[int, int] = (8, 8)
    ) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(
            _conv_bn(channels, 32, 3), _conv_bn(32, 32, 3), _conv_bn(32, features, 3)
        )
        self.pools = (1 if min(size) >= 16 else None, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            conv, norm = _pair(layer)
            if number in self.pools:
                x = F.max_pool2d(x, 2)
            x = norm_act(norm, convolve(conv, x) if number else stem(conv, x), 0.0)
        return x.mean((2, 3))


class MLP(nn.Module):
    """Linear → ReLU for each width in `hidden`; (n, inputs) → (n, hidden[-1]).

    No normalisation: a batch of one trains like any other, and an input far from the data gives
    a feature far from the centres.
    """

    def __init__(self, inputs: int, hidden: Sequence[int] = (128, 128)) -> None:
        super().__init__()
        if inputs < 1 or not hidden or min(hidden) < 1:
            raise DeepSimplexError(
                "1 or more inputs and hidden widths",
                f"inputs={inputs}, hidden={tuple(hidden)}",
                "give positive numbers",
            )
        self.features = hidden[-1]
        layers: list[nn.Module] = []
        for width in hidden:
            layers += nn.Linear(inputs, width), nn.ReLU()
            inputs = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class TimmNet(nn.Module):
    """Any model of the timm library without its classifier; random weights."""

    def __init__(self, name: str, channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        try:
            import timm
        except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision of another torch
            raise DeepSimplexError(
                f"timm for the backbone 'timm:{name}'",
                f"an import that failed ({error})",
                'pip install "deepsimplex[timm]" where torchvision imports, '
                "or take a built-in backbone",
            ) from error
        if not timm.is_model(name):
            raise _unknown_name(f"timm:{name}", [f"timm:{known}" for known in timm.list_models()])
        self.net = timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels)
        self.net.eval()
        try:
            with torch.no_grad():
                probe = self.net(torch.zeros(1, channels, *size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise DeepSimplexError(
                f"a timm model that takes images of {size[0]}×{size[1]}",
                f"{name}, which says: {error}",
                "resize the images to what it needs, or take another model",
            ) from error
        self.net.train()
        # timm's own num_features is not always the length that comes out.
        self.features = int(probe.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


Backbone = OSRCINet | ResNet | LeNetPlusPlus | SmallNet | MLP | TimmNet


def resolve_backbone(name: str, shape: Sequence[int]) -> str:
    """A concrete name for `name`; "auto" goes by the sample's shape, (p,) or (c, h, w).

    Vectors → "mlp"; images up to 28 pixels → "small", up to 64 → "osrci-whole" (no dropout:
    docs/decisions/0012), larger → "resnet18", or the largest of these that a narrow image fits.
    """
    _check_shape(shape)
    if name.startswith("timm:") and name != "timm:":
        return name
    if name not in NAMES:
        raise _unknown_name(name, NAMES)
    if name != "auto":
        return name
    if len(shape) == 1:
        return "mlp"
    short, long = sorted(shape[1:])
    if long <= 28 or short < _least_side("osrci"):
        return "small"
    return "osrci-whole" if long <= 64 or short < _least_side("resnet18") else "resnet18"


def build_backbone(name: str, shape: Sequence[int]) -> Backbone:
    """The backbone called `name` for samples of shape (p,) or (c, h, w)."""
    name = resolve_backbone(name, shape)
    if name == "mlp":
        if len(shape) != 1:
            raise DeepSimplexError(
                "vectors of shape (p,) for the backbone 'mlp'",
                f"images of shape {tuple(shape)}",
                "flatten them to (n, p), or use backbone 'auto'",
            )
        return MLP(shape[0])
    if len(shape) != 3:
        raise DeepSimplexError(
            f"images of shape (c, h, w) for the backbone {name!r}",
            f"vectors of shape {tuple(shape)}",
            "give images, or use backbone 'mlp'",
        )
    channels, *sides = shape
    size = (sides[0], sides[1])
    if min(size) < _least_side(name):
        raise DeepSimplexError(
            f"images of at least {_least_side(name)} pixels a side for the backbone {name!r}",
            f"{size[0]}×{size[1]}",
            "give larger images (--size says how large a folder's are)"
            + ("" if name == "small" else ", use backbone 'auto',")
            + " or flatten them to vectors for 'mlp'",
        )
    if name == "small":
        return SmallNet(channels, size=size)
    if name.startswith("osrci"):
        drop = 0.0 if name == "osrci-whole" else DROP
        return OSRCINet(channels, pooled=name != "osrci-flat", size=size, drop=drop)
    if name == "lenet++":
        return LeNetPlusPlus(channels=channels, size=size)
    if name.startswith("timm:"):
        return TimmNet(name.removeprefix("timm:"), channels, size)
    depth, *ends = name.removeprefix("resnet").split("-")
    stem = "cifar" if "cifar" in ends else "imagenet"
    return ResNet(int(depth), stem, "unpooled" not in ends, channels, size)


def _least_side(name: str) -> int:
    """The side at which the last map still has a pixel that no padding alone has made."""
    if name.startswith("resnet"):
        return 8 if "cifar" in name else 32
    return {"small": 4, "osrci": 8, "osrci-flat": 8, "osrci-whole": 8, "lenet++": 8}.get(name, 1)


def _check_shape(shape: Sequence[int]) -> None:
    if len(shape) not in (1, 3) or min(shape) < 1:
        raise DeepSimplexError(
            "a sample shape (p,) or (c, h, w) of positive sizes",
            str(tuple(shape)),
            "pass vectors (n, p) or images (n, c, h, w)",
        )


def _unknown_name(name: str, known: Sequence[str]) -> DeepSimplexError:
    listed = f"one of {', '.join(known)}" if len(known) <= 30 else "one of timm.list_models()"
    return DeepSimplexError(
        f"a backbone: {listed}",
        repr(name),
        meant(name.lower(), known, "pick one of these", cutoff=0.5),
    )


def _pair(layer: nn.Module) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """The parts of a `_conv_bn`."""
    conv, norm = layer.children()
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    return conv, norm


def _conv_bn(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution without bias, then BN; 'same' padding, so that stride s gives ⌈side/s⌉."""
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width))
