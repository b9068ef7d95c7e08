"""Trainings side by side, and captured steps: the same weights as one at a time."""

import dataclasses

import pytest
import torch
import toys
from test_engine import RECIPE, Everything, Memory, Static, data, same
from toys import DEVICES, on_gpu

from deepsimplex import engine, lanes, layers
from deepsimplex.batches import Feed, TrainingSet
from deepsimplex.errors import DeepSimplexError, NonFiniteLossError, Stopped
from deepsimplex.lanes import Repeated, drive
from deepsimplex.methods import build_method
from deepsimplex.recipes import Recipe

CPU = torch.device("cpu")


def fresh(kind=Static, **arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return kind(**arguments)


def job(method, recipe, where, **options):
    return engine.training(method, data(), recipe, where, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_company_changes_no_bit(device):
    where = torch.device(device)
    recipes = [
        dataclasses.replace(RECIPE, seed=s, epochs=4 + s, deterministic=True) for s in (0, 1, 2)
    ]
    alone = []
    for recipe in recipes:
        alone.append(fresh())
        drive([job(alone[-1], recipe, where)], where, deterministic=True)
    for at_once in (2, 3):
        beside = [fresh() for _ in recipes]
        jobs = (job(m, r, where) for m, r in zip(beside, recipes, strict=True))
        drive(jobs, where, deterministic=True, at_once=at_once)
        assert all(same(a, b) for a, b in zip(alone, beside, strict=True))
    assert not same(alone[0], alone[1])


def test_results_come_in_the_order_of_the_jobs():
    def counting(number, steps):
        for _ in range(steps):
            yield
        return number

    jobs = (counting(number, steps) for number, steps in enumerate([5, 0, 3, 9, 1]))
    assert drive(jobs, CPU, at_once=3) == [0, 1, 2, 3, 4]


def test_a_stop_reaches_every_training():
    keepers = [Memory(4), Memory(6)]
    jobs = [job(fresh(), RECIPE, CPU, keeper=keeper) for keeper in keepers]
    with pytest.raises(Stopped):
        drive(jobs, CPU, at_once=2)
    assert [keeper.checkpoint.place.step for keeper in keepers] == [1, 3]


def test_an_error_closes_the_others():
    closed = []

    def patient():
        try:
            while True:
                yield
        finally:
            closed.append(True)

    with pytest.raises(NonFiniteLossError):
        drive([patient(), job(fresh(poison=1), RECIPE, CPU)], CPU, at_once=2)
    assert closed == [True]


def test_flags_and_generators_are_put_back():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    benchmark = torch.backends.cudnn.benchmark
    seen = []

    def looking():
        seen.append((torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()))
        torch.rand(3)
        yield

    drive([looking()], CPU)
    drive([looking()], CPU, deterministic=True)
    drive([looking(), looking()], CPU, at_once=2)
    assert seen == [(True, False), (False, True), (False, False), (False, False)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.backends.cudnn.benchmark == benchmark
    assert not torch.are_deterministic_algorithms_enabled()


def test_repeated_calls_its_body_where_nothing_is_captured():
    calls = []
    step = Repeated(lambda: calls.append(1), lambda: None, capture=False)
    for _ in range(7):
        step()
    assert len(calls) == 7


# What follows needs a GPU.


def pictures(count=200, size=16, channels=3):
    images, labels = toys.pictures(count, size=size, channels=channels)
    return TrainingSet(*toys.tensors(images, labels))


def net(backbone, seed=0, shape=(3, 16, 16), name="dsc"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_method(name, backbone, shape, 3, None)


PLAN = Recipe(backbone="osrci", epochs=3, batch_size=32, augment="crop+flip", learning_rate=0.02)


@on_gpu
@pytest.mark.parametrize("backbone", ["osrci", "resnet18-cifar"])
@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_a_captured_step_equals_one_as_written(backbone, precision, monkeypatch):
    recipe = dataclasses.replace(PLAN, deterministic=True, precision=precision)
    captured, written = net(backbone), net(backbone)
    engine.train(captured, pictures(), recipe, device="cuda")
    monkeypatch.setattr(lanes, "WARM_UP", 10**9)
    engine.train(written, pictures(), recipe, device="cuda")
    assert same(captured, written)


@on_gpu
@pytest.mark.parametrize("stop_at", [1, 3, 4, 5, 8, 12])
def test_resume_on_a_gpu_changes_no_bit(stop_at):
    recipe = dataclasses.replace(PLAN, deterministic=True)
    whole, again, keeper = net("osrci"), net("osrci"), Memory(stop_at)
    engine.train(whole, pictures(), recipe, device="cuda")
    with pytest.raises(Stopped):
        engine.train(net("osrci"), pictures(), recipe, device="cuda", keeper=keeper)
    keeper.stop_at = None
    engine.train(again, pictures(), recipe, device="cuda", keeper=keeper)
    assert same(again, whole)


@on_gpu
@pytest.mark.parametrize("stop_at", [2, 8, 13])
def test_resume_of_two_stages_and_optimisers_on_a_gpu(stop_at):
    recipe = dataclasses.replace(RECIPE, deterministic=True)
    whole, again, keeper = fresh(), fresh(), Memory(stop_at)
    engine.train(whole, data(), recipe, device="cuda")
    with pytest.raises(Stopped):
        engine.train(fresh(), data(), recipe, device="cuda", keeper=keeper)
    keeper.stop_at = None
    engine.train(again, data(), recipe, device="cuda", keeper=keeper)
    assert same(again, whole)


@on_gpu
def test_two_streams_train_as_one_does(monkeypatch):
    """Alone on the GPU the gradients of weights have a stream of their own."""
    recipe = dataclasses.replace(PLAN, epochs=10)
    keepers, seen = (Memory(), Memory()), []
    original = lanes.side_stream
    monkeypatch.setattr(engine, "side_stream", lambda d: seen.append(original(d)) or seen[-1])
    engine.train(net("osrci"), pictures(), recipe, device="cuda", keeper=keepers[0])
    monkeypatch.setattr(engine, "side_stream", lambda device: None)
    engine.train(net("osrci"), pictures(), recipe, device="cuda", keeper=keepers[1])
    assert seen[0] is not None
    two, one = (keeper.records[-1]["loss"]["fit"] for keeper in keepers)
    assert two == pytest.approx(one, rel=0.2)


@on_gpu
def test_nets_side_by_side_on_a_gpu_equal_nets_alone():
    recipes = [dataclasses.replace(PLAN, deterministic=True, seed=s) for s in range(3)]
    where = torch.device("cuda")
    alone, beside = [net("osrci", s) for s in range(3)], [net("osrci", s) for s in range(3)]
    for method, recipe in zip(alone, recipes, strict=True):
        engine.train(method, pictures(), recipe, device="cuda")
    jobs = [engine.training(m, pictures(), r, where) for m, r in zip(beside, recipes, strict=True)]
    drive(jobs, where, deterministic=True, at_once=3)
    assert all(same(a, b) for a, b in zip(alone, beside, strict=True))


@on_gpu
@pytest.mark.parametrize("poison", [0, 4, 11])
def test_a_nan_in_a_captured_step_is_named(poison):
    keeper = Memory()
    with pytest.raises(NonFiniteLossError, match=f"at step {poison};"):
        engine.train(fresh(poison=poison), data(), RECIPE, device="cuda", keeper=keeper)
    assert keeper.checkpoint is None


@on_gpu
def test_random_numbers_differ_from_step_to_step():
    seen = []

    class Watching(Static):
        def fit_loss(self, batch):
            self.means.copy_(torch.rand(3, 8, device=batch.images.device))
            return super().fit_loss(batch)

        def average(self, passes):
            pass

    class Looking(Memory):
        def stopping(self):
            seen.append(method.means.cpu().clone())

    for _ in range(2):
        method = fresh(Watching)
        engine.train(method, data(), RECIPE, device="cuda", keeper=Looking())
    first, second = seen[:12], seen[18:30]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({float(m.sum()) for m in first}) == 12


@on_gpu
def test_data_in_the_hosts_memory_train_alike(monkeypatch):
    recipe = dataclasses.replace(PLAN, deterministic=True)
    here, there = net("osrci"), net("osrci")
    engine.train(here, pictures(), recipe, device="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    engine.train(there, pictures(), recipe, device="cuda")
    assert same(here, there)


@on_gpu
def test_a_loss_that_cannot_be_captured_says_so():
    with pytest.raises(DeepSimplexError, match="capture=False"):
        engine.train(fresh(Everything), data(), RECIPE, device="cuda")

    class AsWritten(Everything):
        def stages(self, epochs):
            first, second = super().stages(epochs)
            return dataclasses.replace(first, capture=False), second

    method = fresh(AsWritten)
    engine.train(method, data(), RECIPE, device="cuda")
    assert int(method.count) == 12


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_gpu(monkeypatch):
    """From drawing a batch to the end of its step, CUDA refuses every synchronising call."""
    original, count = Feed.draw, []

    def strict(self, turn, at):
        torch.cuda.set_sync_debug_mode("error")
        return original(self, turn, at)

    class Relaxing(Memory):
        def stopping(self):
            torch.cuda.set_sync_debug_mode("default")
            count.append(1)

    monkeypatch.setattr(Feed, "draw", strict)
    monkeypatch.setattr(lanes, "WARM_UP", 10**9)
    try:
        with layers.plain():  # the fused optimiser looks up addresses until it is captured
            engine.train(fresh(), data(), RECIPE, device="cuda", keeper=Relaxing())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(count) == 4 * 3 + 2 * 3


@on_gpu
def test_without_triton_a_gpu_trains_as_well():
    recipe = dataclasses.replace(PLAN, epochs=10)
    keepers = Memory(), Memory()
    with layers.plain():
        engine.train(net("osrci"), pictures(), recipe, device="cuda", keeper=keepers[0])
    engine.train(net("osrci"), pictures(), recipe, device="cuda", keeper=keepers[1])
    plain, fused = (keeper.records[-1]["loss"]["fit"] for keeper in keepers)
    assert plain == pytest.approx(fused, rel=0.2)
    assert plain < 0.7 * keepers[0].records[0]["loss"]["fit"]


@on_gpu
def test_frozen_parts_and_later_stages_are_captured_too():
    class TwoStages(Static):
        def average(self, passes):
            self.passes += 1

    method = fresh(TwoStages)
    before = method.body[0].weight.detach().clone()
    engine.train(method, data(), dataclasses.replace(RECIPE, epochs=8), device="cuda")
    assert not torch.equal(method.body[0].weight.cpu(), before)
    assert int(method.count) == 8 * 3
    assert all(p.grad is None for p in method.parameters())


@pytest.mark.parametrize(
    ("device", "asked", "jobs", "count"),
    [
        ("cpu", None, None, 1), ("cuda", None, None, 5), ("cuda", None, 2, 2), ("cuda", None, 0, 1),
        ("cpu", 3, None, 3), ("cpu", 3, 9, 3), ("cuda", 7, 6, 6),
    ],
)  # fmt: skip
def test_no_more_side_by_side_than_there_are(device, asked, jobs, count):
    assert lanes.side_by_side(torch.device(device), asked, jobs) == count
