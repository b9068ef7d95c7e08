"""The one training loop.

Read `training` from top to bottom, then `descend`, its step: draw a batch, descend each loss of
the stage. Data is resident (on the GPU if it fits), augmentation happens on the device, and no
step waits for it: losses are kept there and looked at once an epoch. On a GPU a step is captured
once and replayed (lanes.py); it reads its place, its batch and its rate from tensors.

Stopping anywhere and starting again gives the same weights bit for bit (on the CPU always; on a
GPU under `deterministic`): the order of an epoch depends on seed, stage and epoch alone, the
random numbers of a step on seed, stage and step, and a checkpoint holds everything else:
weights, buffers, optimiser state, the losses of the epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deepsimplex.batches import Feed, TrainingSet, mix, passes, resident
from deepsimplex.data.augment import check_augment
from deepsimplex.errors import DeepSimplexError, NonFiniteLossError, Stopped
from deepsimplex.lanes import Repeated, drive, seed, side_stream
from deepsimplex.layers import beside
from deepsimplex.methods.base import Batch, Method, Stage, Update
from deepsimplex.optimisers import build_optimisers, rates, shadow_weights
from deepsimplex.recipes import Recipe


@dataclass(frozen=True)
class Place:
    """Where training stands: so many steps of this epoch of this stage are done."""

    stage: int = 0
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class Checkpoint:
    place: Place
    tensors: dict[str, Tensor]


class Keeper(Protocol):
    """What the loop asks of a run folder (runs.py)."""

    def load(self) -> Checkpoint | None: ...
    def save(self, checkpoint: Checkpoint) -> None: ...
    def log(self, record: dict[str, Any]) -> None: ...
    def due(self) -> bool: ...
    def stopping(self) -> int | None: ...


def train(
    method: Method,
    data: TrainingSet,
    recipe: Recipe,
    *,
    device: str = "auto",
    keeper: Keeper | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Train `method` in place by `recipe`; leave it on the device, in eval mode."""
    where = pick_device(device)
    job = training(method, data, recipe, where, keeper=keeper, report=report)
    drive([job], where, deterministic=recipe.deterministic)


def training(
    method: Method,
    data: TrainingSet,
    recipe: Recipe,
    where: torch.device,
    *,
    keeper: Keeper | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> Generator[None, None, None]:
    """`train`, yielding after every step; for `drive`."""
    method.to(where)
    if where.type == "cuda":
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data = resident(data, where)
    saved = keeper.load() if keeper else None
    place = saved.place if saved else Place()
    if saved:
        _restore_method(saved, method)
    for number, stage in enumerate(method.stages(recipe.epochs)):
        if number < place.stage:
            continue
        _set_mode(method, stage)
        now = Now(method, data, recipe, stage, number, where)
        if saved and number == saved.place.stage:
            now.restore(saved)
        step = Repeated(lambda now=now: descend(now), now.settle, capture=now.capture)  # type: ignore[misc]
        while place.epoch < stage.epochs:
            began = time.perf_counter()
            now.begin(place)
            for turn in range(place.step, now.feed.steps):
                now.feed.fetch(turn)
                seed(where, mix(recipe.seed, number, place.epoch, turn))
                step()
                place = Place(number, place.epoch, turn + 1)
                asked = keeper.stopping() if keeper else None
                if keeper and (asked or keeper.due()):
                    now.check(turn + 1)
                    _check_weights(method, recipe)
                    keeper.save(_snapshot(place, method, now))
                    if asked:
                        raise Stopped(asked)
                yield
            record = {"stage": stage.name, "epoch": place.epoch + 1, "epochs": stage.epochs}
            record |= {"loss": now.means(), "seconds": time.perf_counter() - began}
            place = Place(number, place.epoch + 1)
            if keeper:
                keeper.log(record)
            if report:
                report(record)
        del step
        now.keep_average()
        now.clear()
        if stage.finish is not None:
            method.eval()
            seed(where, mix(recipe.seed, number, stage.epochs, 0))
            # What is fitted here is scored without TensorFloat-32 (inference).
            with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                stage.finish(lambda: passes(data))
        place = Place(number + 1)
        _check_weights(method, recipe)
        if keeper:
            keeper.save(_snapshot(place, method, None))
    method.requires_grad_(True).eval()


def descend(now: Now) -> None:
    """One step: a batch, and for each loss of the stage its gradient and a step against it."""
    batch = now.feed.draw(now.turn, now.at)
    for update in now.stage.updates:
        optimiser = now.optimisers[update.shares or update.name]
        optimiser.clear()
        with beside(now.side):
            with _precision(now.recipe, now.device):
                loss = now.loss(update, batch)
            loss.backward()
        optimiser.step(now.rate(update))
        now.losses[update.name].index_copy_(0, now.turn, loss.detach().float().view(1))
    if now.stage.after_step is not None:
        with torch.no_grad():
            now.stage.after_step(batch)
            for weight, shadow in now.shadow_of.items():
                shadow.copy_(weight)
    if now.averages:
        with torch.no_grad():
            torch._foreach_lerp_(now.averages, now.averaged, 1 - now.recipe.average)
    now.clear()
    now.count += 1


class Now:
    """A stage at work: all that its step reads and writes, in tensors that stay in place."""

    def __init__(
        self,
        method: Method,
        data: TrainingSet,
        recipe: Recipe,
        stage: Stage,
        number: int,
        device: torch.device,
    ) -> None:
        how = _check(data, recipe, stage)
        self.method, self.recipe, self.stage, self.device = method, recipe, stage, device
        self.capture = device.type == "cuda" and stage.capture
        self.feed = Feed(data, recipe, stage, number, how)
        self.count = torch.zeros(2, dtype=torch.int64, device=device)
        self.turn, self.at = self.count[:1], self.count[1]  # of the epoch, of the stage
        self.shadow_of: dict[nn.Parameter, Tensor] = {}
        if _half(recipe, device):
            self.shadow_of = shadow_weights(method, recipe, stage, device)
        names = {parameter: name for name, parameter in method.named_parameters()}
        self.shadows = {f"method.{names[p]}": shadow for p, shadow in self.shadow_of.items()}
        self.side = side_stream(device) if self.shadow_of else None
        self.optimisers = build_optimisers(recipe, stage, self.shadow_of, device)
        self.calls = {u.name: _Call(method, u) for u in stage.updates}
        self.averaged = [t for t in method.state_dict().values() if t.is_floating_point()]
        self.averages = [t.clone() for t in self.averaged] if recipe.average else []
        empty = torch.zeros(self.feed.steps, device=device)
        self.losses = {u.name: empty.clone() for u in stage.updates}
        exact = torch.float32 if device.type == "cuda" else torch.float64
        self.rates = {u.name: empty.to(exact, copy=True) for u in stage.updates}

    def begin(self, place: Place) -> None:
        """Lay out an epoch: order, rates, counters."""
        steps = self.feed.steps
        self.feed.begin(place.epoch)
        first, total = place.epoch * steps, self.stage.epochs * steps
        for update in self.stage.updates:
            table = rates(self.recipe, update, first, steps, total)
            self.rates[update.name].copy_(torch.tensor(table, dtype=torch.float64))
        self.count.copy_(torch.tensor([place.step, first + place.step]))

    def rate(self, update: Update) -> float | Tensor:
        rate = self.rates[update.name].index_select(0, self.turn)[0]
        return rate if self.device.type == "cuda" else rate.item()

    def loss(self, update: Update, batch: Batch) -> Tensor:
        if not self.shadows:
            return update.loss(batch)
        return functional_call(self.calls[update.name], self.shadows, (batch,))

    def keep_average(self) -> None:
        """The running average takes the place of weights and statistics."""
        for tensor, average in zip(self.averaged, self.averages, strict=False):
            tensor.copy_(average)

    def clear(self) -> None:
        """No gradient outlives its step: a captured one would write where it lay."""
        for optimiser in self.optimisers.values():
            optimiser.clear()

    def settle(self) -> None:
        for optimiser in self.optimisers.values():
            optimiser.settle()

    def check(self, steps: int) -> None:
        """Stop if a step of this epoch was not finite. Waits for the device."""
        first = int(self.at) - steps
        for losses in self.losses.values():
            bad = (~losses[:steps].isfinite()).nonzero()
            if len(bad):
                raise NonFiniteLossError(
                    f"a finite loss in stage {self.stage.name!r}",
                    f"NaN or infinity at step {first + int(bad[0])}",
                    f"lower the learning rate (now {self.recipe.learning_rate:g}) or look at the "
                    "input; no checkpoint was written after that step",
                )

    def means(self) -> dict[str, float]:
        """Mean losses of a whole epoch."""
        self.check(self.feed.steps)
        return {name: float(losses.double().mean()) for name, losses in self.losses.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the method."""
        found = {f"losses.{name}": losses for name, losses in self.losses.items()}
        for name, optimiser in self.optimisers.items():
            found |= {f"optimiser.{name}.{key}": v for key, v in optimiser.state().items()}
        return found | {f"average.{i}": average for i, average in enumerate(self.averages)}

    def restore(self, saved: Checkpoint) -> None:
        for name, losses in self.losses.items():
            if f"losses.{name}" in saved.tensors:  # absent when the stage has not begun
                losses.copy_(saved.tensors[f"losses.{name}"])
        for name, optimiser in self.optimisers.items():
            optimiser.load(_under(f"optimiser.{name}.", saved.tensors))
        for index, average in enumerate(self.averages):
            if f"average.{index}" in saved.tensors:
                average.copy_(saved.tensors[f"average.{index}"])


class _Call(nn.Module):
    """An update's loss as a module, so that functional_call can put shadows in the method."""

    def __init__(self, method: Method, update: Update) -> None:
        super().__init__()
        self.method = method
        self.update = update

    def forward(self, batch: Batch) -> Tensor:
        return self.update.loss(batch)


def pick_device(name: str) -> torch.device:
    """ "auto" is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeepSimplexError("device 'auto', 'cpu' or 'cuda'", repr(name), "choose one") from None
    if device.type not in ("cpu", "cuda"):
        raise DeepSimplexError("device 'auto', 'cpu' or 'cuda'", repr(name), "choose one")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeepSimplexError(
            "a usable CUDA device",
            f"{torch.cuda.device_count()} found by this torch",
            "use device='cpu' or 'auto'",
        )
    return device


def _check(data: TrainingSet, recipe: Recipe, stage: Stage) -> str:
    """See that the stage can run on this data; the name of its augmentation."""
    how = stage.augment or recipe.augment
    check_augment(how, tuple(data.images.shape[1:]), data.images.dtype == torch.uint8)
    if len(data.images) != len(data.labels) or len(data.labels) < 2:
        raise DeepSimplexError(
            "two or more images with a label each",
            f"{len(data.images)} images and {len(data.labels)} labels",
            "check the training set",
        )
    if data.background is not None and data.background.shape[1:] != data.images.shape[1:]:
        raise DeepSimplexError(
            f"background of shape {tuple(data.images.shape[1:])}",
            f"{tuple(data.background.shape[1:])}",
            "resize it",
        )
    names = [update.name for update in stage.updates]
    assert len(names) == len(set(names)), f"updates of one name in stage {stage.name!r}"
    return how


def _set_mode(method: Method, stage: Stage) -> None:
    """Train mode but for what is frozen; gradients for what the stage moves and nothing else."""
    method.train()
    for module in stage.frozen:
        module.eval()
    method.requires_grad_(False)
    for update in stage.updates:
        for parameter in update.parameters:
            parameter.requires_grad_(True)


def _precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=_half(recipe, device))


def _half(recipe: Recipe, device: torch.device) -> bool:
    """bfloat16 where it pays: on a GPU, unless the recipe says otherwise."""
    return recipe.precision == "bfloat16" or (
        recipe.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )


def finite(tensor: Tensor) -> bool:
    """No NaN and no infinity. aminmax, unlike isfinite().all(), makes no copy."""
    return tensor.numel() == 0 or all(math.isfinite(v) for v in torch.aminmax(tensor))


def _snapshot(place: Place, method: Method, now: Now | None) -> Checkpoint:
    tensors = {f"method.{name}": tensor for name, tensor in method.state_dict().items()}
    if now is not None:
        tensors |= now.tensors()
    copies = {n: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for n, t in tensors.items()}
    return Checkpoint(place, copies)


def _restore_method(saved: Checkpoint, method: Method) -> None:
    method.load_state_dict(_under("method.", saved.tensors))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}


def _check_weights(method: Method, recipe: Recipe) -> None:
    """No checkpoint and no model holds a number that is not finite."""
    for name, tensor in method.state_dict().items():
        if not finite(tensor):
            raise NonFiniteLossError(
                "finite weights",
                f"NaN or infinity in {name}",
                f"lower the learning rate (now {recipe.learning_rate:g}) or look at the input",
            )
