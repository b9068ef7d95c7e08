"""The loop: every promise of the contract, on a method made to use all of it."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from deepsimplex import engine
from deepsimplex.batches import TrainingSet, balanced_order, epoch_order
from deepsimplex.engine import Checkpoint, Place, train
from deepsimplex.errors import DeepSimplexError, NonFiniteLossError, Stopped
from deepsimplex.methods.base import Method, Optimiser, Stage, Update
from deepsimplex.recipes import Recipe, learning_rate


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
        critic = Optimiser("adam", 1e-2, momentum=0.5, constant=True)
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
        self.seen.append((batch.step, batch.labels.tolist(), batch.background is not None))
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
    for _, labels, _ in method.seen:  # P×K: four of each of the three classes
        assert np.bincount(labels).tolist() == [4, 4, 4]
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


def test_the_seed_decides(uninterrupted):
    method = fresh()
    train(method, data(), RECIPE, device="cpu")
    assert same(method, uninterrupted[0])
    other = fresh()
    train(other, data(), Recipe(**{**RECIPE.to_json(), "settings": None, "seed": 1}), device="cpu")
    assert not same(other, uninterrupted[0])


@pytest.mark.parametrize("poison", [0, 4, 11])
def test_a_nan_stops_the_training_and_names_the_step(poison):
    keeper = Memory()
    with pytest.raises(NonFiniteLossError, match=f"at step {poison};.*learning rate"):
        train(fresh(poison=poison), data(), RECIPE, device="cpu", keeper=keeper)
    assert keeper.checkpoint is None


def test_the_finite_check_reads_nothing_during_an_epoch(monkeypatch):
    """Tensor.item, float() and int() wait for a GPU: none may be called inside the step loop."""
    reads = []
    for name in ("item", "__float__", "__int__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def spy(self, original=original, name=name):
            reads.append(name)
            return original(self)

        monkeypatch.setattr(torch.Tensor, name, spy)
    meter = engine.Meter(fresh().stages(1)[0], torch.device("cpu"))
    for at in range(5):
        meter.observe("fit", torch.tensor(1.0 if at != 3 else math.inf), at)
        meter.observe("critic", torch.tensor(1.0), at)
    assert reads == []
    with pytest.raises(NonFiniteLossError, match="at step 3;"):
        meter.close(RECIPE)


def test_epoch_orders_differ_and_repeat():
    recipe, stage = Recipe(batch_size=16), Stage("s", (), 1)
    one = epoch_order(data(), recipe, stage, 0, 0, 3)
    again = epoch_order(data(), recipe, stage, 0, 0, 3)
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert one[0].unique().numel() == 48  # no image twice in an epoch
    for stage_number, epoch in ((0, 1), (1, 0)):
        other = epoch_order(data(), recipe, stage, stage_number, epoch, 3)
        assert not torch.equal(other[0], one[0])
    assert one[1].shape == (3, 128)
    assert one[1].max() < 7  # a small background comes round again
    assert np.ptp(np.bincount(one[1].flatten())) <= 1


def test_balanced_batches_repeat_small_classes():
    labels = torch.tensor([0] * 20 + [1] * 2 + [2] * 9)
    order = balanced_order(labels, 5, 12, 4, torch.Generator().manual_seed(0))
    assert order.shape == (5, 12)
    for row in order:
        assert np.bincount(labels[row]).tolist() == [4, 4, 4]
        assert row[labels[row] == 0].unique().numel() == 4


def test_warmup_then_cosine_to_zero():
    recipe = Recipe(warmup=0.1, learning_rate=1.0)
    rates = [learning_rate(recipe, 1.0, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == max(rates) == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(Recipe(warmup=0.0), 1.0, 0, 10) == 1.0


def test_small_sets_make_one_batch():
    recipe = Recipe(epochs=1, batch_size=64)
    few = TrainingSet(data().images[:5], data().labels[:5])
    order, background = epoch_order(few, recipe, Stage("s", (), 1), 0, 0, 1)
    assert order.shape == (1, 5)
    assert background is None


def test_bad_input():
    with pytest.raises(DeepSimplexError, match="two or more images"):
        train(fresh(), TrainingSet(torch.zeros(1, 4), torch.zeros(1).long()), RECIPE)
    with pytest.raises(DeepSimplexError, match="device 'auto'"):
        train(fresh(), data(), RECIPE, device="gpu-7")
    crop = Recipe(augment="crop")
    with pytest.raises(DeepSimplexError, match="images for augment"):
        train(fresh(), data(), crop)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_but_absent():
    with pytest.raises(DeepSimplexError, match="a usable CUDA device"):
        engine.pick_device("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_deterministic_resume_on_a_gpu():
    recipe = Recipe(**{**RECIPE.to_json(), "settings": None, "deterministic": True})
    whole = fresh()
    train(whole, data(), recipe, device="cuda")
    keeper = Memory(8)
    with pytest.raises(Stopped):
        train(fresh(), data(), recipe, device="cuda", keeper=keeper)
    keeper.stop_at = None
    again = fresh()
    train(again, data(), recipe, device="cuda", keeper=keeper)
    assert same(again, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_gpu(monkeypatch):
    """From drawing a batch to the end of its step, CUDA refuses every synchronising call."""
    original = engine.draw

    def strict(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        return original(*arguments)

    class Relaxing(Memory):
        steps = 0

        def stopping(self):
            torch.cuda.set_sync_debug_mode("default")
            self.steps += 1

    class Plain(Everything):
        def fit_loss(self, batch):  # as above, without the boolean masks, which do wait
            return nn.functional.cross_entropy(self.head(self(batch.images)), batch.labels)

    monkeypatch.setattr(engine, "draw", strict)
    keeper = Relaxing()
    torch.manual_seed(1)
    try:
        train(Plain(), data(), RECIPE, device="cuda", keeper=keeper)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert keeper.steps == 4 * 3 + 2 * 3
