"""Pretrained weights from a file, features computed once, and a head trained on them alone."""

import dataclasses
import hashlib
import os
import pickle
import sys
import types

import numpy as np
import pytest
import torch
import toys
from safetensors.torch import save_file
from test_engine import Memory
from torch import nn

from deepsimplex import engine, frozen
from deepsimplex.backbones import build_backbone
from deepsimplex.batches import TrainingSet
from deepsimplex.errors import DeepSimplexError, Stopped
from deepsimplex.fitting import fit_model
from deepsimplex.frozen import compute_features, feature_set, load_weights, trained_on_features
from deepsimplex.methods import build_method
from deepsimplex.methods.base import Normalise
from deepsimplex.model import Model

RGB = (3, 16, 16)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
NAMES = list("abc")
RECIPE = dataclasses.replace(toys.quick(epochs=40), learning_rate=0.1)  # random features are short


def method_for(backbone="small", shape=RGB, seed=0, method="dsc"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_method(method, backbone, shape, 3)


def trained_looking(net, seed=7):
    """A state dict for `net` with a value of its own in every entry; variances positive."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in net.state_dict().items():
        if not value.is_floating_point():
            state[name] = torch.full_like(value, 3)
        elif name.endswith("running_var"):
            state[name] = torch.rand(value.shape, generator=generator) + 0.5
        else:
            state[name] = 0.05 * torch.randn(value.shape, generator=generator)
    return state


def store(state, path):
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    return path


def images_of(channels=3, count=60, seed=0):
    return toys.tensors(*toys.pictures(count, size=16, channels=channels, seed=seed))


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


# Weights


@pytest.mark.parametrize("ending", ["safetensors", "pth", "pt"])
@pytest.mark.parametrize("backbone", ["small", "resnet18-cifar"])
def test_weights_in_every_format(tmp_path, ending, backbone):
    method = method_for(backbone)
    head = copied(method.head)
    state = trained_looking(method.encoder.backbone)
    extra = {"fc.weight": torch.ones(9, 512)} if backbone != "small" else {}
    path = store(state | extra, tmp_path / f"weights.{ending}")
    assert load_weights(method, path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert equal(method.encoder.backbone.state_dict(), state)
    assert equal(method.head.state_dict(), head)
    normalise = method.encoder.normalise
    assert normalise.mean.flatten().tolist() == pytest.approx(MEAN, rel=1e-7)
    assert normalise.std.flatten().tolist() == pytest.approx(STD, rel=1e-7)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_training_scripts_checkpoint_is_unwrapped(tmp_path, key):
    method = method_for()
    state = trained_looking(method.encoder.backbone)
    load_weights(method, store({key: state, "epoch": 3}, tmp_path / "w.pth"))
    assert equal(method.encoder.backbone.state_dict(), state)


def test_half_precision_and_old_files_without_counters(tmp_path):
    method = method_for()
    state = trained_looking(method.encoder.backbone)
    old = {n: v.half() for n, v in state.items() if "num_batches" not in n}
    load_weights(method, store(old, tmp_path / "w.safetensors"))
    own = method.encoder.backbone.state_dict()
    assert all(own[n].dtype == torch.float32 and torch.equal(own[n], old[n].float()) for n in old)


def test_one_channel_keeps_the_fitted_normalisation(tmp_path):
    method = method_for(shape=(1, 16, 16))
    method.encoder.normalise.fit(images_of(1)[0])
    before = copied(method.encoder.normalise)
    load_weights(method, store(trained_looking(method.encoder.backbone), tmp_path / "w.pth"))
    assert equal(method.encoder.normalise.state_dict(), before)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", ["torch", "old torch", 2, 5])
@pytest.mark.parametrize("inside", [True, False])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, protocol, inside):
    path, mark = tmp_path / "w.pth", tmp_path / "it ran"
    method = method_for()
    before = copied(method)
    payload = Payload(mark)
    content = trained_looking(method.encoder.backbone) | {"x": payload} if inside else payload
    if isinstance(protocol, int):
        path.write_bytes(pickle.dumps(content, protocol))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=protocol == "torch")
    with pytest.raises(DeepSimplexError, match="a state dict of finite numbers") as caught:
        load_weights(method, path)
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    assert equal(method.state_dict(), before)
    pickle.loads(pickle.dumps(payload))
    assert mark.exists()  # the payload was a real one


def test_files_that_are_not_weights(tmp_path):
    method = method_for()
    good = trained_looking(method.encoder.backbone)
    name = "layers.0.0.weight"
    whole = {e: store(good, tmp_path / f"good.{e}").read_bytes() for e in ("safetensors", "pth")}
    before = copied(method)
    for number, (ending, content) in enumerate(
        [
            *((e, data[:size]) for e, data in whole.items() for size in (0, 7, 100, len(data) - 9)),
            *((e, bytes(reversed(data))) for e, data in whole.items()),
            ("pth", whole["safetensors"]),
            ("safetensors", whole["pth"]),
            ("pth", torch.zeros(3)),
            ("pth", [torch.zeros(3)]),
            ("pth", {"epoch": 3}),
            ("pth", {1: torch.zeros(3)}),
            ("pth", good | {name: good[name] * float("nan")}),
            ("safetensors", good | {name: good[name] / 0}),
            ("pth", good | {name: good[name].to(torch.complex64)}),
            ("pth", good | {name: good[name].to_sparse()}),
            ("pth", good | {name: good[name].to("meta")}),
            ("safetensors", good | {"two\nlines": torch.ones(1)}),
            ("safetensors", good | {name: good[name].to(torch.float8_e8m0fnu)}),
        ]
    ):
        path = tmp_path / f"{number}.{ending}"
        path.write_bytes(content) if isinstance(content, bytes) else store(content, path)
        with pytest.raises(DeepSimplexError, match="a state dict of finite numbers") as caught:
            load_weights(method, path)
        assert "\n" not in str(caught.value)
        assert equal(method.state_dict(), before), number
    with pytest.raises(DeepSimplexError, match="No such file"):
        load_weights(method, tmp_path / "absent.pth")
    with pytest.raises(DeepSimplexError, match=r"\.safetensors, \.pth or \.pt"):
        load_weights(method, store(good, tmp_path / "weights.bin"))
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(DeepSimplexError, match="directory"):
        load_weights(method, tmp_path / "folder.pt")


def test_wrong_architecture_names_what_does_not_fit(tmp_path):
    small = trained_looking(method_for().encoder.backbone)
    residual = trained_looking(build_backbone("resnet18-cifar", RGB))
    lacking = {n: v for n, v in small.items() if n != "layers.1.0.weight"}
    odd = small | {"layers.0.0.weight": torch.zeros(32, 1, 3, 3)}
    for backbone, state, words in (
        ("small", residual, r"15 missing \(layers\.0\.0\.weight.*unexpected \(bn1\.bias"),
        ("resnet18-cifar", small, r"torchvision resnet18; got .* missing \(bn1\.bias"),
        ("small", lacking, r"got 1 missing \(layers\.1\.0\.weight\);"),
        ("small", small | {"more": torch.ones(2)}, r"got 1 unexpected \(more\);"),
        ("small", odd, r"got 1 of another shape \(layers\.0\.0\.weight\);"),
    ):
        method = method_for(backbone)
        before = copied(method)
        with pytest.raises(DeepSimplexError, match=words):
            load_weights(method, store(state, tmp_path / "w.safetensors"))
        assert equal(method.state_dict(), before)


# timm


class StandIn(nn.Module):
    """Like a timm model built without its classifier: part of its head stays."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 5)
        self.head = nn.ModuleDict({"norm": nn.BatchNorm2d(6)})

    def forward(self, x):
        return self.head["norm"](self.conv(x)).mean((2, 3))


@pytest.fixture
def timm(monkeypatch):
    fake = types.ModuleType("timm")
    fake.config = None

    def create_model(name, pretrained, num_classes, in_chans):
        net = StandIn(in_chans)
        net.pretrained_cfg = fake.config
        return net

    fake.create_model, fake.is_model = create_model, lambda name: name == "stand_in"
    fake.list_models = lambda: ["stand_in"]
    monkeypatch.setitem(sys.modules, "timm", fake)
    return fake


@pytest.mark.parametrize("classifier", ["head.fc.weight", "fc.weight", "classifier.bias", "head.b"])
def test_timm_weights_without_their_classifier(tmp_path, timm, classifier):
    method = method_for("timm:stand_in")
    state = trained_looking(method.encoder.backbone.net)
    path = store(state | {classifier: torch.ones(10)}, tmp_path / "w.safetensors")
    load_weights(method, path)
    assert equal(method.encoder.backbone.net.state_dict(), state)
    assert method.encoder.normalise.mean.flatten().tolist() == pytest.approx(MEAN)
    with pytest.raises(DeepSimplexError, match=r"1 unexpected \(neck"):
        load_weights(method, store(state | {"neck": torch.ones(1)}, path))
    part = {n: v for n, v in state.items() if n != "head.norm.weight"}
    with pytest.raises(DeepSimplexError, match=r"1 missing \(head\.norm\.weight\)"):
        load_weights(method, store(part, path))


def test_a_timm_models_own_normalisation(tmp_path, timm):
    timm.config = {"mean": (0.5, 0.25, 0.5), "std": (0.5, 0.5, 0.1), "url": ""}
    method = method_for("timm:stand_in")
    path = store(trained_looking(method.encoder.backbone.net), tmp_path / "w.pt")
    load_weights(method, path)
    assert method.encoder.normalise.mean.flatten().tolist() == [127.5, 63.75, 127.5]
    assert method.encoder.normalise.std.flatten().tolist() == pytest.approx([127.5, 127.5, 25.5])


def test_timm_absent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    recipe = dataclasses.replace(RECIPE, backbone="timm:resnet18")
    with pytest.raises(DeepSimplexError, match=r'pip install "deepsimplex\[timm\]"'):
        fit_model(*images_of(), NAMES, recipe, weights=tmp_path / "no.pth", freeze=True)


# Features


def test_features_are_the_encoders_outputs():
    method = method_for().train()
    images = images_of(count=300)[0]
    before = copied(method)
    features = compute_features(method, images, None)
    assert (features.shape, features.dtype) == ((300, 128), torch.float32)
    assert not features.requires_grad
    with torch.no_grad():
        direct = method.encoder.eval()(images)
    torch.testing.assert_close(features, direct, rtol=1e-5, atol=1e-6)
    assert equal(method.state_dict(), before)  # BatchNorm saw them in eval mode


@pytest.fixture
def calls(monkeypatch):
    """How often an encoder has begun to compute."""
    seen = []
    original = Normalise.forward

    def spy(self, images):
        seen.append(len(images))
        return original(self, images)

    monkeypatch.setattr(Normalise, "forward", spy)
    return seen


def test_cached_features_are_not_computed_again(tmp_path, calls):
    images = images_of(count=20)[0]
    cache = tmp_path / "deep" / "cache"
    first = compute_features(method_for(), images, cache)
    assert calls == [20]
    again = compute_features(method_for(), images, cache)
    assert calls == [20]
    assert torch.equal(first, again)
    (file,) = cache.iterdir()  # and nothing half-written beside it
    assert np.array_equal(np.load(file), first.numpy())
    before = file.read_bytes()
    again.zero_()  # the map is copy-on-write
    assert file.read_bytes() == before
    compute_features(method_for(seed=1), images, cache)  # other weights
    compute_features(method_for(), images[:19], cache)  # other images
    moved = method_for()
    moved.encoder.normalise.std.fill_(2.0)
    compute_features(moved, images, cache)  # another normalisation
    assert calls == [20, 20, 19, 20]
    assert len(list(cache.iterdir())) == 4


def test_equal_weights_of_different_networks_are_kept_apart(tmp_path):
    one, two = (method_for(f"resnet18-cifar{end}") for end in ("", "-unpooled"))
    assert equal(one.encoder.state_dict(), two.encoder.state_dict())
    images = images_of(count=2)[0]
    assert compute_features(one, images, tmp_path).shape == (2, 512)
    assert compute_features(two, images, tmp_path).shape == (2, 2048)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_broken_cache_file_is_computed_again(tmp_path, calls):
    images = images_of(count=20)[0]
    first = compute_features(method_for(), images, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    wide = tmp_path / "other"
    np.save(wide.with_suffix(".npy"), first.double().numpy())
    double = wide.with_suffix(".npy").read_bytes()
    np.savez(wide.with_suffix(".npz"), first.numpy())
    archive = wide.with_suffix(".npz").read_bytes()
    broken = [b"", whole[:5], whole[:90], whole[:-1], b"\0" * len(whole), double, archive]
    broken += [whole.replace(b"(20, 128)", b"(10, 128)"), whole.replace(b"'<f4'", b"'|O' ")]
    for number, content in enumerate(broken):
        file.write_bytes(content)
        assert torch.equal(compute_features(method_for(), images, tmp_path), first)
        assert len(calls) == number + 2
        assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeepSimplexError, match="choose another folder"):
        compute_features(method_for(), images_of(count=4)[0], tmp_path / "file")


# The head alone


def test_the_real_encoder_comes_back(tmp_path):
    method = method_for()
    encoder, before = method.encoder, copied(method.encoder)
    features = compute_features(method, images_of()[0], None)
    with trained_on_features(method):
        assert torch.equal(method.encoder(features), features)
        assert len(list(method.parameters())) == len(list(method.head.parameters()))
    assert method.encoder is encoder
    with pytest.raises(KeyError), trained_on_features(method):
        raise KeyError
    assert method.encoder is encoder
    method.train()
    with trained_on_features(method):
        method.eval()
    assert not any(module.training for module in method.modules())
    assert equal(encoder.state_dict(), before)


def test_no_head_and_odd_backgrounds_are_refused():
    images, labels = images_of()
    bare = method_for(method="dsc-authors")
    with pytest.raises(DeepSimplexError, match="a head to train"):
        feature_set(bare, TrainingSet(images, labels))
    with pytest.raises(DeepSimplexError, match="a head to train"), trained_on_features(bare):
        pass
    with pytest.raises(DeepSimplexError, match=r"background of shape \(3, 16, 16\)"):
        feature_set(method_for(), TrainingSet(images, labels, images[:, :, :8]))


@pytest.mark.parametrize("name", ["dsc", "softmax"])
def test_a_frozen_random_net_and_a_trained_head(name, tmp_path):
    images, labels = images_of(1)
    recipe = dataclasses.replace(toys.quick(name, epochs=60), learning_rate=0.1)
    untrained = dataclasses.replace(recipe, epochs=0)
    start, model = (
        fit_model(images, labels, NAMES, r, keep=0.9, freeze=True, device="cpu")
        for r in (untrained, recipe)
    )
    assert equal(start.method.encoder.state_dict(), model.method.encoder.state_dict())
    assert not equal(start.method.head.state_dict(), model.method.head.state_dict())
    fresh, truth = images_of(1, count=90, seed=5)
    assert (model.judge(fresh).predicted == truth.numpy()).mean() >= 0.95
    assert not any(module.training for module in model.method.modules())
    model.save(tmp_path / "model.safetensors")
    loaded = Model.load(tmp_path / "model.safetensors", "cpu")
    assert equal(loaded.method.state_dict(), model.method.state_dict())
    for one, two in zip(model.scores(fresh), loaded.scores(fresh), strict=True):
        assert np.array_equal(one, two)
    assert loaded.threshold == model.threshold


@pytest.mark.parametrize("backbone", ["small", "resnet18-cifar"])
def test_frozen_weights_stay_bit_for_bit(tmp_path, backbone):
    recipe = dataclasses.replace(RECIPE, backbone=backbone, epochs=2)
    state = trained_looking(build_backbone(backbone, RGB))
    path = store(state, tmp_path / "w.pth")
    images, labels = images_of(count=30)
    frozen_, tuned = (
        fit_model(images, labels, NAMES, recipe, weights=path, freeze=freeze, device="cpu").method
        for freeze in (True, False)
    )
    assert equal(frozen_.encoder.backbone.state_dict(), state)
    moved = tuned.encoder.backbone.state_dict()
    assert not any(torch.equal(moved[n], state[n]) for n in state if n.endswith("conv1.weight"))
    assert not equal(moved, state)
    for method in (frozen_, tuned):
        assert method.encoder.normalise.mean.flatten().tolist() == pytest.approx(MEAN)


def test_vectors_and_background_can_be_frozen_too():
    rows, labels = (torch.from_numpy(a) for a in toys.vectors())
    recipe = dataclasses.replace(RECIPE, backbone="mlp")
    model = fit_model(
        rows, labels, NAMES, recipe, background=rows[:7] + 9.0, freeze=True, device="cpu"
    )
    assert (model.judge(rows).predicted == labels.numpy()).mean() >= 0.9


@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_a_stopped_frozen_training_goes_on_as_if_it_had_not(tmp_path, stop_at):
    images, labels = images_of()
    path = store(trained_looking(build_backbone("small", RGB)), tmp_path / "w.safetensors")
    ways = {"weights": path, "freeze": True, "background": images[:9] // 2, "device": "cpu"}
    recipe = dataclasses.replace(RECIPE, epochs=3, background_batch=4)
    whole = fit_model(images, labels, NAMES, recipe, **ways)
    keeper = Memory(stop_at)
    with pytest.raises(Stopped):
        fit_model(images, labels, NAMES, recipe, keeper=keeper, **ways)
    assert keeper.checkpoint is not None
    assert not any("backbone" in name for name in keeper.checkpoint.tensors)
    keeper.stop_at = None
    cache = tmp_path / "cache"
    again = fit_model(images, labels, NAMES, recipe, keeper=keeper, feature_cache=cache, **ways)
    assert equal(again.method.state_dict(), whole.method.state_dict())
    assert len(list(cache.iterdir())) == 2
    assert keeper.steps == 3 * 3  # none was done twice


def test_a_second_fit_computes_no_features(tmp_path, calls, monkeypatch):
    images, labels = images_of(count=30)
    ways = {"freeze": True, "feature_cache": tmp_path, "device": "cpu"}
    one = fit_model(images, labels, NAMES, RECIPE, **ways)
    monkeypatch.setattr(frozen, "write_atomically", None)
    calls.clear()
    two = fit_model(images, labels, NAMES, dataclasses.replace(RECIPE, epochs=1), **ways)
    assert calls == [20]  # one step, through the identity
    assert equal(one.method.encoder.state_dict(), two.method.encoder.state_dict())


def test_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "training", None)
    images, labels = images_of(count=12)
    crop = dataclasses.replace(RECIPE, augment="crop")
    path = tmp_path / "absent.pth"
    for recipe, ways, words in (
        (crop, {"freeze": True}, "augment 'none' with a frozen backbone"),
        (crop, {"freeze": True, "score": "beauty"}, "a score among"),  # check_request is first
        (RECIPE, {"feature_cache": tmp_path}, "no feature cache without freeze"),
        (RECIPE, {"weights": path}, "No such file"),
    ):
        with pytest.raises(DeepSimplexError, match=words) as caught:
            fit_model(images, labels, NAMES, recipe, **ways)
        assert "\n" not in str(caught.value)
    with pytest.raises(DeepSimplexError, match=r"uint8 pixels .*; got float32"):
        fit_model(images.float() / 255, labels, NAMES, RECIPE, weights=path)
