"""The loop: every promise of the contract, on a method made to use all of it."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from deepsimplex import engine, inference
from deepsimplex.batches import Feed, TrainingSet, balanced_order, epoch_order, passes
from deepsimplex.data.augment import ONE, Views
from deepsimplex.engine import Checkpoint, Place, train
from deepsimplex.errors import DeepSimplexError, NonFiniteLossError, Stopped
from deepsimplex.methods import build_method
from deepsimplex.methods.base import Method, Optimiser, Stage, Update
from deepsimplex.optimisers import Plain, build_optimisers, rates
from deepsimplex.recipes import (
    BENCHMARK_RECIPES,
    Recipe,
    changed,
    default_recipe,
    digits_recipe,
    learning_rate,
)


class Everything(Method):
    """Two stages and optimisers, running centres, a counter, P×K batches, dropout, a last pass."""

    def __init__(self, poison: int | None = None) -> None:
        super().__init__()
        self.poison, self.scores = poison, ("dot",)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)
        self.critic = nn.Linear(8, 1)
        self.register_buffer("centres", torch.zeros(3, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("means", torch.zeros(3, 8))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.seen: list[tuple] = []

    def forward(self, images):
        return self.body(images.float())

    def stages(self, epochs):
        body = (*self.body.parameters(), *self.head.parameters())
        critic = Optimiser("adam", 1e-2, momentum=0.5, schedule=lambda step, steps: 1.0)
        return (
            Stage(
                "first",
                (
                    Update("fit", self.fit_loss, body),
                    Update("critic", self.critic_loss, tuple(self.critic.parameters()), critic),
                ),
                epochs,
                per_class=4,
                after_step=self.tick,
            ),
            Stage(
                "second",
                (Update("tune", self.tune_loss, tuple(self.head.parameters())),),
                max(1, epochs // 2),
                frozen=(self.body,),
                finish=self.average,
            ),
        )

    def fit_loss(self, batch):
        features = self(batch.images)
        with torch.no_grad():  # a running centre, moved without a gradient
            for c in range(3):
                own = features[batch.labels == c]
                if len(own):
                    self.centres[c].lerp_(own.float().mean(0), 0.5)
        self.seen.append((int(batch.step), batch.labels.tolist(), batch.background is not None))
        loss = nn.functional.cross_entropy(self.head(features), batch.labels)
        if batch.background is not None:
            loss = loss + 0.1 * self(batch.background).square().mean()
        if self.poison is not None and batch.step == self.poison:
            loss = loss * float("nan")
        return loss

    def critic_loss(self, batch):
        return self.critic(self(batch.images).detach()).square().mean()

    def tune_loss(self, batch):
        assert not self.body.training
        assert self.head.training
        return nn.functional.cross_entropy(self.head(self(batch.images)), batch.labels)

    def tick(self, batch):
        assert not torch.is_grad_enabled()
        self.count += 1

    def average(self, passes):
        for _ in range(2):
            self.passes += 1
            total, number = torch.zeros_like(self.means), self.means.new_zeros(3, 1)
            for batch in passes():
                features = self(batch.images)
                total.index_add_(0, batch.labels, features.float())
                number.index_add_(0, batch.labels, features.new_ones(len(features), 1))
            self.means.copy_(total / number)

    def class_scores(self, outputs, score):
        return self.head(outputs)

    def knownness(self, outputs, score):
        return self.class_scores(outputs, score).amax(1)


class Static(Everything):
    """The same without boolean masks, whose shapes depend on values: a step can be captured."""

    def fit_loss(self, batch):
        features = self(batch.images)
        loss = nn.functional.cross_entropy(self.head(features), batch.labels)
        with torch.no_grad():
            mine = nn.functional.one_hot(batch.labels, 3).float()
            self.centres.lerp_(mine.T @ features.float() / mine.sum(0)[:, None], 0.5)
        if batch.background is not None:
            loss = loss + 0.1 * self(batch.background).square().mean()
        if self.poison is not None:
            loss = loss + torch.where(batch.step == self.poison, float("nan"), 0.0)
        return loss


class Memory:
    """A keeper in memory that can stop the loop after any number of steps."""

    def __init__(self, stop_at=None):
        self.stop_at, self.steps = stop_at, 0
        self.checkpoint: Checkpoint | None = None
        self.records: list[dict] = []

    def load(self):
        return self.checkpoint

    def save(self, checkpoint):
        self.checkpoint = checkpoint

    def log(self, record):
        self.records.append(record)

    def due(self):
        return False

    def stopping(self):
        self.steps += 1
        return 15 if self.stop_at is not None and self.steps == self.stop_at else None


def data(background=True):
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(50) % 3
    images = torch.randn(50, 4, generator=generator) + 2 * nn.functional.one_hot(labels, 4)
    others = torch.randn(7, 4, generator=generator) if background else None
    return TrainingSet(images, labels, others)


RECIPE = Recipe(epochs=4, batch_size=16, background_batch=8, learning_rate=0.05)


def fresh(**arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Everything(**arguments)


def same(a, b):
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


@pytest.fixture(scope="module")
def uninterrupted():
    method, keeper = fresh(), Memory()
    train(method, data(), RECIPE, device="cpu", keeper=keeper)
    return method, keeper


def test_the_contract_is_used_in_full(uninterrupted):
    method, keeper = uninterrupted
    steps = 50 // 16
    assert int(method.count) == 4 * steps
    assert int(method.passes) == 2
    assert [step for step, _, _ in method.seen] == list(range(4 * steps))
    assert all(with_background for _, _, with_background in method.seen)
    for _, labels, _ in method.seen:  # P×K: all three classes, K grown to fill the batch
        assert np.bincount(labels).tolist() == [5, 5, 5]
    assert [(r["stage"], r["epoch"]) for r in keeper.records] == [
        *(("first", e) for e in (1, 2, 3, 4)),
        *(("second", e) for e in (1, 2)),
    ]
    assert set(keeper.records[0]["loss"]) == {"fit", "critic"}
    assert keeper.records[3]["loss"]["fit"] < keeper.records[0]["loss"]["fit"]
    assert keeper.checkpoint.place == Place(2, 0, 0)
    expected = [method(data().images[data().labels == c]).mean(0) for c in range(3)]
    assert torch.allclose(method.means, torch.stack(expected), atol=1e-6)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 7, 12, 13, 14, 15, 17])
def test_stopping_after_any_step_and_going_on_changes_no_bit(uninterrupted, stop_at):
    keeper = Memory(stop_at)
    with pytest.raises(Stopped) as stopped:
        train(fresh(), data(), RECIPE, device="cpu", keeper=keeper)
    assert stopped.value.signal == 15
    again = fresh()
    for parameter in again.parameters():  # the checkpoint, not the start, must supply the weights
        nn.init.zeros_(parameter)
    keeper.stop_at = None
    train(again, data(), RECIPE, device="cpu", keeper=keeper)
    assert same(again, uninterrupted[0])
    names = [(r["stage"], r["epoch"]) for r in keeper.records]
    assert len(names) == len(set(names)) == 6
    assert [r["loss"] for r in keeper.records] == [r["loss"] for r in uninterrupted[1].records]


def test_a_finished_training_is_only_restored(uninterrupted):
    method, keeper = fresh(), Memory()
    keeper.checkpoint = uninterrupted[1].checkpoint
    train(method, data(), RECIPE, device="cpu", keeper=keeper)
    assert same(method, uninterrupted[0])
    assert keeper.records == []


def test_the_callers_generator_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(fresh(), data(), RECIPE, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_every_step_and_epoch_has_a_seed_of_its_own(monkeypatch):
    seeds, orders = [], []
    monkeypatch.setattr(engine, "seed", lambda device, value: seeds.append(value))
    monkeypatch.setattr(
        "deepsimplex.batches.mix", lambda *parts: orders.append(engine.mix(*parts)) or orders[-1]
    )
    train(fresh(), data(), RECIPE, device="cpu")
    assert len(seeds) == len(set(seeds)) == 4 * 3 + 2 * 3 + 1  # steps, and the last pass
    assert len(set(orders)) == 4 + 2
    assert not set(seeds) & set(orders)


def test_the_seed_decides(uninterrupted):
    method = fresh()
    train(method, data(), RECIPE, device="cpu")
    assert same(method, uninterrupted[0])
    other = fresh()
    train(other, data(), dataclasses.replace(RECIPE, seed=1), device="cpu")
    assert not same(other, uninterrupted[0])


@pytest.mark.parametrize("poison", [0, 4, 11])
def test_a_nan_stops_the_training_and_names_the_step(poison):
    keeper = Memory()
    with pytest.raises(NonFiniteLossError, match=f"at step {poison};.*learning rate"):
        train(fresh(poison=poison), data(), RECIPE, device="cpu", keeper=keeper)
    assert keeper.checkpoint is None


def test_a_step_looks_at_no_value(monkeypatch):
    """Tensor.item, float(), int() and bool() wait for a GPU, and a captured step has none."""
    method, reads = fresh(), []
    method.fit_loss = lambda batch: method.head(method(batch.images)).square().mean()
    now = engine.Now(method, data(), RECIPE, method.stages(1)[0], 0, torch.device("cpu"))
    monkeypatch.setattr(now, "rate", lambda update: 0.1)  # on the CPU a Python number
    now.begin(Place())
    for name in ("item", "__float__", "__int__", "__bool__", "tolist"):
        original = getattr(torch.Tensor, name)

        def spy(self, original=original, name=name):
            reads.append(name)
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, spy)
    before = method.head.weight.detach().clone()
    # torch.optim's Adam on the CPU keeps its step count in a tensor and reads it.
    now.optimisers["critic"] = now.optimisers["fit"]
    engine.descend(now)
    assert reads == []
    assert not torch.equal(method.head.weight, before)


def test_epoch_orders_differ_and_repeat():
    recipe, stage = Recipe(batch_size=16), Stage("s", (), 1)
    one = epoch_order(data(), recipe, stage, 0, 0)
    again = epoch_order(data(), recipe, stage, 0, 0)
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert one[0].shape == (3, 16)
    assert one[0].unique().numel() == 48  # no image twice in an epoch
    for seed, number, epoch in ((0, 0, 1), (0, 1, 0), (1, 0, 0)):
        other = epoch_order(data(), dataclasses.replace(recipe, seed=seed), stage, number, epoch)
        assert not torch.equal(other[0], one[0])
    assert one[1].shape == (3, 128)
    assert one[1].max() < 7  # a small background comes round again
    assert np.ptp(np.bincount(one[1].flatten())) <= 1
    own = Stage("s", (), 1, batch_size=10, background_batch=4)
    known, background = epoch_order(data(), recipe, own, 0, 0)
    assert known.shape == (5, 10)
    assert background.shape == (5, 4)


def test_balanced_batches_see_every_class_and_image_in_turn():
    labels = torch.arange(60) % 6
    generator = torch.Generator().manual_seed(0)
    order = balanced_order(labels, 12, 4, generator)  # three of six classes a batch
    assert order.shape == (5, 12)
    for row in order:
        assert sorted(np.bincount(labels[row], minlength=6).tolist()) == [0, 0, 0, 4, 4, 4]
        assert row.unique().numel() == 12
    for first, second in ((0, 1), (2, 3)):  # two batches make one round of the classes
        assert labels[order[first : second + 1].flatten()].unique().numel() == 6
    assert order.unique().numel() >= 48  # two of a class's three turns are new images
    whole = balanced_order(labels, 32, 4, generator)  # six classes of four would not fill 32
    assert whole.shape == (2, 30)
    assert np.bincount(labels[whole[0]]).tolist() == [5] * 6


def test_balanced_batches_repeat_small_classes():
    labels = torch.tensor([0] * 20 + [1] * 2 + [2] * 9)
    order = balanced_order(labels, 12, 4, torch.Generator().manual_seed(0))
    assert order.shape == (2, 12)
    for row in order:
        assert np.bincount(labels[row]).tolist() == [4, 4, 4]
        assert row[labels[row] == 0].unique().numel() == 4
    orders = [balanced_order(labels, 8, 4, torch.Generator().manual_seed(i)) for i in range(20)]
    assert len({tuple(labels[o[0]].unique().tolist()) for o in orders}) == 3


def test_warmup_then_cosine_to_zero():
    recipe = Recipe(warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(recipe, 1.0, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == max(rates) == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(Recipe(warmup=0.0), 1.0, 0, 10) == 1.0


def test_cosines_begin_again():
    recipe = Recipe(warmup=0.0, restarts=2, learning_rate=1.0)
    rates = [learning_rate(recipe, 1.0, step, 90) for step in range(91)]
    assert rates[0] == rates[30] == rates[60] == 1.0
    assert rates[15] == pytest.approx(0.5)
    assert rates[29] < 0.01
    assert rates[90] == pytest.approx(0.0, abs=1e-12)


def test_the_average_of_the_weights_is_kept():
    recipe = dataclasses.replace(RECIPE, average=0.75)
    weights = []

    class Watching(Everything):
        def tick(self, batch):
            super().tick(batch)
            weights.append(self.critic.weight.detach().clone())

        def stages(self, epochs):
            return super().stages(epochs)[:1]

    method = fresh()
    start = method.critic.weight.detach().clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        method = Watching()
    train(method, data(), recipe, device="cpu")
    expected = start
    for weight in weights:
        expected = expected + 0.25 * (weight - expected)
    assert torch.allclose(method.critic.weight, expected, atol=1e-6)
    assert not torch.allclose(method.critic.weight, weights[-1], atol=1e-6)
    keeper = Memory(7)
    whole = fresh()
    train(whole, data(), recipe, device="cpu")
    with pytest.raises(Stopped):
        train(fresh(), data(), recipe, device="cpu", keeper=keeper)
    keeper.stop_at = None
    again = fresh()
    train(again, data(), recipe, device="cpu", keeper=keeper)
    assert same(again, whole)


def test_small_sets_make_one_batch():
    recipe = Recipe(epochs=1, batch_size=64)
    few = TrainingSet(data().images[:5], data().labels[:5])
    order, background = epoch_order(few, recipe, Stage("s", (), 1), 0, 0)
    assert order.shape == (1, 5)
    assert background is None


def plain_optimiser(recipe, update):
    stage = Stage("s", (update,), 1)
    (made,) = build_optimisers(recipe, stage, {}, torch.device("cpu")).values()
    assert isinstance(made, Plain)
    return made.optimiser


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_what_is_remembered_lies_as_the_weights_do(kind):
    """torch's fused kernels refuse anything else; a checkpoint's tensors are contiguous."""

    def begun():
        weight = nn.Parameter(torch.arange(24.0).view(2, 3, 2, 2))
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        bias = nn.Parameter(torch.ones(()))
        return Plain([weight, bias], Optimiser(kind, 0.1, 0.9), None)

    def descend(made):
        for leaf in made.parameters:
            leaf.grad = torch.full_like(leaf, 0.5)
        made.step(0.1)

    first, again = begun(), begun()
    descend(first)
    again.load(
        {
            key: value.clone(memory_format=torch.contiguous_format)
            for key, value in first.state().items()
        }
    )
    weight = again.parameters[0]
    kept = [v for v in again.state().values() if v.shape == weight.shape]
    assert kept
    assert all(value.stride() == weight.stride() for value in kept)
    weight.data.copy_(first.parameters[0].data)
    again.parameters[1].data.copy_(first.parameters[1].data)
    for made in (first, again):
        descend(made)
    for mine, other in zip(first.parameters, again.parameters, strict=True):
        assert torch.equal(mine, other)


def test_optimisers_are_what_the_recipe_says():
    weight = nn.Parameter(torch.ones(3))
    update = Update("u", lambda batch: weight.sum(), (weight,))
    recipe = Recipe(learning_rate=0.2, momentum=0.8, weight_decay=0.01)
    made = plain_optimiser(recipe, update)
    assert isinstance(made, torch.optim.SGD)
    group = made.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.2, 0.8, 0.01)
    assert group["nesterov"]
    made = plain_optimiser(dataclasses.replace(recipe, optimiser="adamw"), update)
    assert type(made) is torch.optim.AdamW
    assert made.param_groups[0]["betas"] == (0.8, 0.999)
    assert made.param_groups[0]["weight_decay"] == 0.01
    own = Optimiser(
        "adam", 0.3, momentum=0.5, beta2=0.9, weight_decay=0.1, schedule=lambda s, n: s / n
    )
    update = dataclasses.replace(update, optimiser=own)
    made = plain_optimiser(recipe, update)
    assert type(made) is torch.optim.Adam
    assert made.param_groups[0]["betas"] == (0.5, 0.9)
    assert made.param_groups[0]["weight_decay"] == 0.1
    assert rates(recipe, update, 3, 2, 10) == pytest.approx([0.09, 0.12])
    plain = dataclasses.replace(update, optimiser=None)
    assert rates(recipe, plain, 3, 1, 10) == [learning_rate(recipe, 0.2, 3, 10)]


def test_updates_can_share_an_optimiser():
    weight = nn.Parameter(torch.ones(3))
    updates = tuple(
        Update(name, lambda batch: weight.sum(), (weight,), shares="both") for name in "ab"
    )
    cpu = torch.device("cpu")
    assert list(build_optimisers(RECIPE, Stage("s", updates, 1), {}, cpu)) == ["both"]
    apart = tuple(dataclasses.replace(update, shares=None) for update in updates)
    assert list(build_optimisers(RECIPE, Stage("s", apart, 1), {}, cpu)) == ["a", "b"]


def test_what_a_stage_does_not_move_gets_no_gradient(uninterrupted):
    method, _ = uninterrupted
    body, head, critic = (
        [p.grad is not None for p in module.parameters()]
        for module in (method.body, method.head, method.critic)
    )
    assert all(p.requires_grad for p in method.parameters())
    method.zero_grad()
    engine._set_mode(method, method.stages(2)[1])
    assert [p.requires_grad for p in method.body.parameters()] == [False] * len(body)
    assert [p.requires_grad for p in method.head.parameters()] == [True] * len(head)
    assert [p.requires_grad for p in method.critic.parameters()] == [False] * len(critic)
    method.requires_grad_(True).eval()


def test_clipping_bounds_the_step():
    class Steep(Everything):
        def stages(self, epochs):
            plain = Optimiser("sgd", 1.0, momentum=0.0, schedule=lambda step, steps: 1.0)
            loss = lambda batch: 1e4 * self.head.weight.sum()  # noqa: E731
            return (Stage("s", (Update("u", loss, (self.head.weight,), plain),), 1, batch_size=50),)

    for clip, length in ((1.0, 1.0), (0.5, 0.5), (None, 1e4 * math.sqrt(24))):
        method = Steep()
        before = method.head.weight.detach().clone()
        train(method, data(False), dataclasses.replace(RECIPE, clip=clip), device="cpu")
        moved = (method.head.weight.detach() - before).norm()
        assert float(moved) == pytest.approx(length, rel=1e-3)


def test_precision_follows_the_recipe():
    seen = []

    class Watching(Everything):
        def fit_loss(self, batch):
            seen.append(self.head(self(batch.images)).dtype)
            return super().fit_loss(batch)

    for precision, dtype in (("bfloat16", torch.bfloat16), ("auto", torch.float32)):
        seen.clear()
        recipe = dataclasses.replace(RECIPE, epochs=1, precision=precision)
        if precision == "bfloat16":
            recipe = dataclasses.replace(recipe, background_batch=4)
        train(Watching(), data(False), recipe, device="cpu")
        assert set(seen) == {dtype}


def test_determinism_is_switched_on_and_back(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen = []

    class Watching(Everything):
        def tick(self, batch):
            seen.append(torch.are_deterministic_algorithms_enabled())

    for wanted in (True, False):
        seen.clear()
        train(Watching(), data(), dataclasses.replace(RECIPE, deterministic=wanted), device="cpu")
        assert set(seen) == {wanted}
        assert not torch.are_deterministic_algorithms_enabled()


def test_knowns_and_background_are_augmented():
    images = torch.arange(16 * 8 * 8, dtype=torch.float32).view(16, 1, 8, 8)
    pictures = TrainingSet(images, torch.arange(16) % 2, images.clone())
    recipe = Recipe(batch_size=8, background_batch=4)
    turn, at = torch.tensor([1]), torch.tensor(7)
    plain = Feed(pictures, recipe, Stage("s", (), 1), 0, "none")
    plain.begin(0)
    batch = plain.draw(turn, at)
    known, background = epoch_order(pictures, recipe, Stage("s", (), 1), 0, 0)
    assert torch.equal(batch.images, images[known[1]])
    assert torch.equal(batch.labels, pictures.labels[known[1]])
    assert torch.equal(batch.background, images[background[1]])
    assert batch.step is at
    moving = Feed(pictures, recipe, Stage("s", (), 1), 0, "crop")
    moving.begin(0)
    torch.manual_seed(0)
    moved = moving.draw(turn, at)
    assert not torch.equal(moved.images, batch.images)
    assert not torch.equal(moved.background, batch.background)
    again = Feed(pictures, recipe, Stage("s", (), 1), 0, "none")
    where = again.known.data_ptr()
    again.begin(3)
    assert again.known.data_ptr() == where  # a captured step reads it there
    assert not torch.equal(again.known, known)


def test_passes_see_every_image_once():
    count = 2500
    big = TrainingSet(torch.arange(count).float()[:, None], torch.arange(count) % 3)
    seen = torch.cat([batch.images[:, 0] for batch in passes(big)])
    assert torch.equal(seen, torch.arange(count).float())


def test_outputs_and_scores_see_every_image():
    method = fresh().eval()
    images = torch.randn(2500, 4)
    assert inference.outputs(method, images).shape == (2500, 8)
    by_class, known = inference.scores(method, images, "dot")
    assert by_class.shape == (2500, 3)
    assert by_class.dtype == torch.float64
    assert torch.allclose(known["dot"], by_class.amax(1))
    assert not by_class.requires_grad  # though the head is a Parameter


class NaNGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


@pytest.mark.parametrize("at", [0, 5, 11])
def test_no_checkpoint_holds_a_nan_that_the_loss_did_not_show(at):
    class Sneaky(Everything):
        def fit_loss(self, batch):
            loss = super().fit_loss(batch)
            return NaNGradient.apply(loss) if batch.step == at else loss

    class Saving(Memory):
        def due(self):
            return True

    keeper = Saving()
    with pytest.raises(NonFiniteLossError, match=r"NaN or infinity"):
        train(Sneaky(), data(), RECIPE, device="cpu", keeper=keeper)
    if keeper.checkpoint is not None:
        assert all(
            t.isfinite().all() for n, t in keeper.checkpoint.tensors.items() if "rng" not in n
        )
        assert keeper.checkpoint.place.step + 3 * keeper.checkpoint.place.epoch <= at + 1


def test_bad_input():
    with pytest.raises(DeepSimplexError, match="two or more images"):
        train(fresh(), TrainingSet(torch.zeros(1, 4), torch.zeros(1).long()), RECIPE)
    for name in ("gpu-7", "meta", "mps"):
        with pytest.raises(DeepSimplexError, match="device 'auto'"):
            train(fresh(), data(), RECIPE, device=name)
    with pytest.raises(DeepSimplexError, match="images for augment"):
        train(fresh(), data(), Recipe(augment="crop"))
    narrow = TrainingSet(data().images, data().labels, torch.zeros(3, 2))
    with pytest.raises(DeepSimplexError, match="background of shape"):
        train(fresh(), narrow, RECIPE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": -1}, "epochs as a whole number"),
        ({"epochs": 2.5}, "epochs as a whole number"),
        ({"batch_size": 1}, "batch_size as a whole number from 2"),
        ({"seed": 10**20}, "seed as a whole number"),
        ({"learning_rate": math.nan}, "learning_rate from 0"),
        ({"learning_rate": 0}, "a learning_rate above 0"),
        ({"momentum": 1.0}, "momentum from 0 to below 1"),
        ({"clip": 0.0}, "clip above 0"),
        ({"optimiser": "lion"}, "optimiser among sgd, adamw"),
        ({"precision": "half"}, "precision among"),
        ({"settings": object()}, "DSCSettings for method 'dsc'"),
    ],
)
def test_bad_recipes(changes, words):
    with pytest.raises(DeepSimplexError, match=words):
        Recipe(**changes)


def test_recipes_take_numpy_numbers_and_survive_json():
    recipe = Recipe(epochs=np.int64(3), learning_rate=np.float32(0.5), seed=np.uint8(4))
    assert recipe == Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    with pytest.raises(DeepSimplexError, match="unknown fields"):
        Recipe.from_json({**recipe.to_json(), "lr": 1})
    older = recipe.to_json()
    older["settings"] = {**older["settings"], "length": 0.1}
    with pytest.raises(
        DeepSimplexError, match=r"\['settings.length'\]; use the version that wrote it"
    ):
        Recipe.from_json(older)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_but_absent():
    with pytest.raises(DeepSimplexError, match="a usable CUDA device"):
        engine.pick_device("cuda")


def test_few_small_images_get_more_epochs():
    assert default_recipe("dsc", (1, 8, 8), images=120).epochs == 400
    assert default_recipe("dsc", (1, 8, 8), images=640).epochs == 40
    assert default_recipe("dsc", (1, 8, 8), images=6400).epochs == 30
    assert default_recipe("dsc", (1, 8, 8)).epochs == 30


def test_larger_images_are_trained_at_length_where_that_was_measured():
    recipe = default_recipe("auto", (3, 32, 32))
    assert recipe == dataclasses.replace(
        BENCHMARK_RECIPES["once"]("dsc-softmax", "crop"), backbone="auto"
    )
    assert (recipe.epochs, recipe.augment, recipe.clip) == (600, "strong+crop", None)
    beside = default_recipe("auto", (3, 32, 32), background=True)
    assert beside == dataclasses.replace(
        BENCHMARK_RECIPES["whole-moved"]("dsc-blend", "crop"), backbone="auto"
    )
    assert (beside.epochs, beside.augment, beside.clip) == (160, "crop", 1.0)
    plain = default_recipe("auto", (3, 32, 32), pixels=False)
    assert (plain.epochs, plain.augment, plain.clip) == (100, "crop", 1.0)


def test_many_views_from_29_to_64_pixels():
    views = {name: default_recipe("auto", shape).views for name, shape in SIZES.items()}
    assert {name for name, seen in views.items() if seen == Views(False, 2)} == {"29", "64"}
    assert all(seen in (ONE, Views(False, 2)) for seen in views.values())
    for background in (True, False):
        assert default_recipe("auto", SIZES["64"], background=background).shift == 2
        assert default_recipe("auto", SIZES["64"], background=background, pixels=False).shift == 0
    for name in ("moved", "whole-moved"):
        make = BENCHMARK_RECIPES[name]
        assert make("softmax", "crop+flip").views == Views(True, 2)
        assert make("softmax", "crop").views == Views(False, 2)
        assert make("softmax", "none").views == ONE  # MNIST: what was not trained on moved images


SIZES = {"vector": (5,), "28": (1, 28, 28), "29": (3, 29, 29), "64": (3, 64, 64)}
SIZES |= {"65": (3, 65, 65), "narrow": (3, 28, 40)}


def test_what_training_does_not_move_is_scored_as_it_is():
    recipe = default_recipe("auto", (3, 32, 32))
    for augment, shift in (("none", 0), ("flip", 0), ("crop", 2), ("rand+crop+flip", 2)):
        assert changed(recipe, {"augment": augment}).shift == shift
        assert changed(recipe, {"augment": augment, "shift": 3}).shift == 3
    assert changed(recipe, {"epochs": 5}) == dataclasses.replace(recipe, epochs=5)


def test_c2ae_decodes_the_last_map_of_the_benchmarks_net():
    recipe = BENCHMARK_RECIPES["common"]("c2ae", "none")
    method = build_method("c2ae", recipe.backbone, (3, 32, 32), 6, recipe.settings)
    assert method.encoder.features == 128 * 4 * 4
    assert BENCHMARK_RECIPES["common"]("softmax", "none").backbone == "osrci"


@pytest.mark.parametrize("name", ["rpl", "gcpl"])
def test_losses_divided_by_the_dimension_have_a_rate_of_their_own(name):
    makers = [BENCHMARK_RECIPES["common"](name, "none"), default_recipe(name, (5,))]
    makers += [digits_recipe(name), default_recipe(name, (3, 64, 64))]
    assert {recipe.learning_rate for recipe in makers} == {1.0}


@pytest.mark.parametrize(
    ("shape", "background", "method"),
    [
        ((5,), False, "dsc"),
        ((3, 28, 28), False, "dsc"),
        ((3, 29, 29), False, "dsc-softmax"),
        ((1, 8, 8), True, "dsc-blend"),
        ((3, 64, 64), True, "dsc-blend"),
    ],
)
def test_auto_takes_the_default_of_the_family(shape, background, method):
    assert default_recipe("auto", shape, background=background).method == method
    assert default_recipe("softmax", shape, background=background).method == "softmax"
