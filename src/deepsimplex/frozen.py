"""Frozen backbones: pretrained weights from a file, features computed once, the head alone trained.

Weights are data: safetensors, or torch's weights-only reader for .pth and .pt; neither runs
anything. Features are a pure function of encoder and images, so they are cached under a hash of
both and never invalidated.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as from_safetensors
from torch import Tensor, nn

import deepsimplex
from deepsimplex.backbones import TimmNet
from deepsimplex.batches import TrainingSet
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import Encoder, Method
from deepsimplex.resnet import ResNet, load_torchvision_weights
from deepsimplex.runs import fingerprint, write_atomically

# Mean and std of ImageNet's RGB as 0…1, which published weights expect.
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_CLASSIFIERS = ("head", "fc", "classifier")  # how timm's names of classifiers begin
_WRAPPERS = ("state_dict", "model")  # where training scripts put the state dict
_CHUNK = 128  # images at a time


@dataclass(frozen=True)
class Pretrained:
    """What a training starts from: weights in a file or chance, frozen or not."""

    weights: Path | None = None
    freeze: bool = False
    cache: Path | None = None  # folder for a frozen backbone's features

    def ways(self) -> dict[str, Any]:
        """For fit_model."""
        return {"weights": self.weights, "freeze": self.freeze, "feature_cache": self.cache}

    def asked(self) -> dict[str, Any]:
        """For the record of a run; of the file its content counts, not its name."""
        if self.weights is None:
            return {}
        return {"weights": _read(self.weights)[1]}


FROM_CHANCE = Pretrained()


def load_weights(method: Method, path: Path) -> str:
    """Fill the backbone with the pretrained weights in `path`; the SHA-256 of the file.

    Torchvision's and timm's classifiers are dropped; all the rest must fit, or nothing is loaded.
    For RGB images the normalisation becomes what published weights expect, ImageNet's mean and
    std on 0…255 pixels (a timm model's own if it states one); other images keep what was fitted.
    """
    given, digest = _read(Path(path))
    net, stated = method.encoder.backbone, IMAGENET
    if isinstance(net, ResNet):
        load_torchvision_weights(net, given)
    elif isinstance(net, TimmNet):
        own = net.net.state_dict()
        kept = {n: v for n, v in given.items() if n in own or not n.startswith(_CLASSIFIERS)}
        _load_exactly(net.net, kept, path)
        config = getattr(net.net, "pretrained_cfg", None) or {}
        stated = {name: config.get(name) or value for name, value in IMAGENET.items()}
    else:
        _load_exactly(net, given, path)
    if method.encoder.shape[0] == 3 and len(method.encoder.shape) == 3:
        for name, buffer in method.encoder.normalise.named_buffers():
            buffer.copy_(255 * torch.tensor(stated[name], dtype=torch.float64).view(3, 1, 1))
    return digest


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    """The state dict in the file and the SHA-256 of its bytes; nothing in the file is run."""
    if path.suffix.lower() not in (".safetensors", ".pth", ".pt"):
        raise DeepSimplexError("weights as .safetensors, .pth or .pt", str(path), "convert them")
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".safetensors":
            found: Any = from_safetensors(content)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        for name in _WRAPPERS:
            if isinstance(found.get(name), dict):
                found = found[name]
        for name, value in found.items():  # names are shown to people
            plain = name.isprintable() and value.layout == torch.strided and not value.is_complex()
            if not plain or not value.isfinite().all():
                raise ValueError(name)
    except OSError as error:
        got = error.strerror or str(error)
        raise DeepSimplexError(f"weights in {path}", got, "check the path") from None
    except Exception as error:  # whatever a broken or hostile file makes of its readers
        raise DeepSimplexError(
            f"a state dict of finite numbers in {path}",
            f"something else, refused ({type(error).__name__})",
            "save net.state_dict() anew where the weights come from, best as .safetensors",
        ) from None
    return dict(found), hashlib.sha256(content).hexdigest()


def _load_exactly(net: nn.Module, given: dict[str, Tensor], path: Path) -> None:
    """All names and shapes, or none; only BN's batch counters, which nothing reads, may lack."""
    own = net.state_dict()
    given = {n: v for n, v in own.items() if n.endswith("num_batches_tracked")} | given
    faults = {"missing": own.keys() - given.keys(), "unexpected": given.keys() - own.keys()}
    both = own.keys() & given.keys()
    faults["of another shape"] = {n for n in both if own[n].shape != given[n].shape}
    if any(faults.values()):
        some = [f"{len(n)} {kind} ({', '.join(sorted(n)[:3])})" for kind, n in faults.items() if n]
        raise DeepSimplexError(
            f"the {len(own)} weights of this backbone in {path}",
            ", ".join(some),
            "load the weights that belong to it, or choose the backbone they belong to",
        )
    net.load_state_dict(given)


@torch.no_grad()
def compute_features(method: Method, images: Tensor, cache: Path | None = None) -> Tensor:
    """The encoder's outputs in eval mode: raw images (n, …) → (n, features), float32 on the CPU.

    In the folder `cache` they are kept as .npy and memory-mapped when asked for again; a file
    that is not whole is computed anew.
    """
    encoder = method.encoder.eval()
    shape = (len(images), encoder.features)
    path = cache / f"{_key(encoder, images)}.npy" if cache is not None and len(images) else None
    stored = None if path is None else _stored(path, shape)
    if stored is not None:
        return stored
    features = torch.empty(shape)
    where = next(encoder.parameters()).device
    # TensorFloat-32 would make a GPU's features differ from a CPU's in the fourth digit.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for start in range(0, len(images), _CHUNK):
            rows = slice(start, start + _CHUNK)
            features[rows] = encoder(images[rows].to(where)).cpu()
    if path is not None:
        content = io.BytesIO()
        np.save(content, features.numpy())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content.getvalue())
        except OSError as error:
            raise DeepSimplexError(
                f"to keep features in {path.parent}",
                error.strerror or str(error),
                "choose another folder for the cache, or none",
            ) from None
    return features


def _key(encoder: Encoder, images: Tensor) -> str:
    """SHA-256 of architecture, weights and images, and of the device, whose rounding is its own."""
    state = encoder.state_dict()
    device = next(encoder.parameters()).device.type
    # Equal weights may belong to different networks: the padding of timm's tf_ models, pooling.
    text = f"{deepsimplex.__version__} {device} {encoder} {encoder.features} {list(state)}"
    return hashlib.sha256(f"{text} {fingerprint(*state.values(), images)}".encode()).hexdigest()


def _stored(path: Path, shape: tuple[int, int]) -> Tensor | None:
    """The features in the file, or None unless it is there, whole, and of this shape."""
    try:
        # Copy-on-write: torch asks for memory it could write to, and the file stays as it is.
        found = np.load(path, mmap_mode="c", allow_pickle=False)
        return torch.from_numpy(found) if (found.shape, found.dtype) == (shape, "f4") else None
    except Exception:  # absent, or whatever a broken file makes of the reader
        return None


def feature_set(method: Method, data: TrainingSet, cache: Path | None = None) -> TrainingSet:
    """The training set seen through the encoder: what `trained_on_features` trains on."""
    _check_head(method)
    background = data.background
    if background is not None:
        shape, got = tuple(data.images.shape[1:]), tuple(background.shape[1:])
        if got != shape:  # a pooled backbone would take it
            raise DeepSimplexError(f"background of shape {shape}", str(got), "resize it")
        background = compute_features(method, background, cache)
    return TrainingSet(compute_features(method, data.images, cache), data.labels, background)


@contextlib.contextmanager
def trained_on_features(method: Method) -> Iterator[None]:
    """Within, `method` takes feature vectors and has no encoder: training moves the head alone.

    Its checkpoints hold the head. The real encoder comes back unchanged, on the head's device.
    """
    _check_head(method)
    encoder = method.encoder
    # Statistics 0 and 1 over no backbone: the identity, bit for bit.
    method.encoder = Encoder(nn.Identity(), encoder.features, (encoder.features,))
    try:
        yield
    finally:
        where = next(method.parameters()).device
        method.encoder = encoder.to(where).train(method.training)


def _check_head(method: Method) -> None:
    if all(name.startswith("encoder.") for name, _ in method.named_parameters()):
        raise DeepSimplexError(
            "a method with a head to train on frozen features",
            "one whose only weights are the backbone's",
            "do not freeze, or give it a head",
        )
