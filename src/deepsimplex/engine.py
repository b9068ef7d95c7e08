"""The one training loop.

Read `train` from top to bottom: draw a batch, descend each loss of the stage, keep count. Data is
resident (on the GPU if it fits), augmentation happens on the device, and no step waits for the
device: losses are summed and watched for NaN there, and looked at once an epoch.

Stopping anywhere and starting again gives the same weights bit for bit (on the CPU always; on a
GPU under `deterministic`): the order of an epoch depends on seed, stage and epoch alone, and a
checkpoint holds everything else: weights, buffers, optimiser state, generators, running sums.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepsimplex.batches import TrainingSet, draw, epoch_order, mix, passes, resident
from deepsimplex.data.augment import check_augment
from deepsimplex.errors import DeepSimplexError, NonFiniteLossError, Stopped
from deepsimplex.methods.base import Method, Stage, Update
from deepsimplex.recipes import Recipe, learning_rate


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
    _check(data, recipe)
    with _reproducible(recipe, where):
        method.to(where)
        data = resident(data, where)
        saved = keeper.load() if keeper else None
        place = saved.place if saved else Place()
        if saved:
            _restore_method(saved, method, where)
        for number, stage in enumerate(method.stages(recipe.epochs)):
            if number < place.stage:
                continue
            optimisers = {update.name: _optimiser(recipe, update) for update in stage.updates}
            meter = Meter(stage, where)
            if saved and number == saved.place.stage:
                _restore_stage(saved, optimisers, meter)
            steps = max(1, len(data.labels) // recipe.batch_size)
            total = stage.epochs * steps
            method.train()
            for module in stage.frozen:
                module.eval()
            while place.epoch < stage.epochs:
                began = time.perf_counter()
                known, background = epoch_order(data, recipe, stage, number, place.epoch, steps)
                for step in range(place.step, steps):
                    at = place.epoch * steps + step
                    batch = draw(data, known[step], background, step, at, recipe.augment)
                    for update in stage.updates:
                        optimiser = optimisers[update.name]
                        _set_rate(optimiser, recipe, update, at, total)
                        optimiser.zero_grad(set_to_none=True)
                        with _precision(recipe, where):
                            loss = update.loss(batch)
                        loss.backward()
                        if recipe.clip is not None:
                            nn.utils.clip_grad_norm_(update.parameters, recipe.clip)
                        optimiser.step()
                        meter.observe(update.name, loss.detach(), at)
                    if stage.after_step is not None:
                        with torch.no_grad():
                            stage.after_step(batch)
                    place = Place(number, place.epoch, step + 1)
                    asked = keeper.stopping() if keeper else None
                    if keeper and (asked or keeper.due()):
                        meter.check(recipe)
                        keeper.save(_snapshot(place, method, optimisers, meter, where))
                        if asked:
                            raise Stopped(asked)
                record = {"stage": stage.name, "epoch": place.epoch + 1, "epochs": stage.epochs}
                record |= {"loss": meter.close(recipe), "seconds": time.perf_counter() - began}
                place = Place(number, place.epoch + 1)
                if keeper:
                    keeper.log(record)
                if report:
                    report(record)
            if stage.finish is not None:
                method.eval()
                with torch.no_grad():
                    stage.finish(lambda: passes(data))
            place = Place(number + 1)
            if keeper:
                keeper.save(_snapshot(place, method, {}, None, where))
        method.eval()
        _check_weights(method)


class Meter:
    """Sums of the losses of an epoch and the first non-finite step, kept on the device."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.stage = stage
        self.totals = {u.name: torch.zeros((), device=device) for u in stage.updates}
        self.counts = torch.zeros((), dtype=torch.int64)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def observe(self, name: str, loss: Tensor, at: int) -> None:
        self.totals[name] += loss.float()
        bad = ~loss.isfinite() & (self.first_bad < 0)
        self.first_bad = torch.where(bad, at, self.first_bad)
        if name == self.stage.updates[-1].name:
            self.counts += 1

    def check(self, recipe: Recipe) -> None:
        """Stop if any step so far was not finite. The only place that waits for the device."""
        bad = int(self.first_bad)
        if bad >= 0:
            raise NonFiniteLossError(
                f"a finite loss in stage {self.stage.name!r}",
                f"NaN or infinity at step {bad}",
                f"lower the learning rate (now {recipe.learning_rate:g}) or look at the input; "
                "no checkpoint was written after that step",
            )

    def close(self, recipe: Recipe) -> dict[str, float]:
        """Mean losses of the epoch; the sums start again."""
        self.check(recipe)
        means = {name: float(total) / int(self.counts) for name, total in self.totals.items()}
        for total in self.totals.values():
            total.zero_()
        self.counts.zero_()
        return means

    def tensors(self) -> dict[str, Tensor]:
        totals = {f"total.{name}": total for name, total in self.totals.items()}
        return {**totals, "counts": self.counts, "first_bad": self.first_bad}


@torch.inference_mode()
def outputs(method: Method, images: Tensor, batch: int = 1024) -> Tensor:
    """The method's outputs for raw images, in eval mode, on the CPU: (n, …) → (n, d)."""
    method.eval()
    where = next(method.parameters()).device
    pieces = [method(rows.to(where)).cpu() for rows in images.split(batch)]
    return torch.cat(pieces)


def pick_device(name: str) -> torch.device:
    """ "auto" is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeepSimplexError("device 'auto', 'cpu' or 'cuda'", repr(name), "choose one") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeepSimplexError(
            "a usable CUDA device", "none found by this torch", "use device='cpu' or 'auto'"
        )
    return device


def _check(data: TrainingSet, recipe: Recipe) -> None:
    check_augment(recipe.augment, tuple(data.images.shape[1:]))
    if len(data.images) != len(data.labels) or len(data.labels) < 2:
        raise DeepSimplexError(
            "two or more images with a label each",
            f"{len(data.images)} images and {len(data.labels)} labels",
            "check the training set",
        )


def _optimiser(recipe: Recipe, update: Update) -> torch.optim.Optimizer:
    own = update.optimiser
    kind = own.kind if own else recipe.optimiser
    rate = own.learning_rate if own else recipe.learning_rate
    momentum = own.momentum if own else recipe.momentum
    decay = own.weight_decay if own else recipe.weight_decay
    if kind == "sgd":
        nesterov = recipe.nesterov and momentum > 0
        return torch.optim.SGD(
            update.parameters, rate, momentum, weight_decay=decay, nesterov=nesterov
        )
    family = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return family(update.parameters, rate, (momentum, 0.999), weight_decay=decay)


def _set_rate(
    optimiser: torch.optim.Optimizer, recipe: Recipe, update: Update, at: int, total: int
) -> None:
    base = update.optimiser.learning_rate if update.optimiser else recipe.learning_rate
    constant = update.optimiser is not None and update.optimiser.constant
    for group in optimiser.param_groups:
        group["lr"] = base if constant else learning_rate(recipe, base, at, total)


def _precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    """bfloat16 where it pays: on a GPU, unless the recipe says otherwise."""
    wanted = recipe.precision == "bfloat16" or (
        recipe.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


@contextlib.contextmanager
def _reproducible(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Seed the generators, and put them and the determinism flags back afterwards."""
    devices = [device] if device.type == "cuda" else []
    before = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(mix(recipe.seed, -1, 0))
        if recipe.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def _snapshot(
    place: Place,
    method: Method,
    optimisers: dict[str, torch.optim.Optimizer],
    meter: Meter | None,
    device: torch.device,
) -> Checkpoint:
    tensors = {f"method.{name}": tensor for name, tensor in method.state_dict().items()}
    for update, optimiser in optimisers.items():
        for index, state in optimiser.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{update}.{index}.{name}"] = value
    if meter is not None:
        tensors |= {f"meter.{name}": tensor for name, tensor in meter.tensors().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return Checkpoint(place, copies)


def _restore_method(saved: Checkpoint, method: Method, device: torch.device) -> None:
    prefix = "method."
    weights = {k[len(prefix) :]: v for k, v in saved.tensors.items() if k.startswith(prefix)}
    method.load_state_dict(weights)
    torch.set_rng_state(saved.tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in saved.tensors:
        torch.cuda.set_rng_state(saved.tensors["rng.cuda"], device)


def _restore_stage(
    saved: Checkpoint, optimisers: dict[str, torch.optim.Optimizer], meter: Meter
) -> None:
    states: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in optimisers}
    for key, tensor in saved.tensors.items():
        if key.startswith("optimiser."):
            update, index, name = key[len("optimiser.") :].rsplit(".", 2)
            states[update].setdefault(int(index), {})[name] = tensor
    for name, optimiser in optimisers.items():
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": states[name], "param_groups": groups})
    for name, tensor in meter.tensors().items():
        if f"meter.{name}" in saved.tensors:  # absent when the stage has not begun
            tensor.copy_(saved.tensors[f"meter.{name}"])


def _check_weights(method: Method) -> None:
    for name, tensor in method.named_parameters():
        if tensor.numel() and not all(math.isfinite(v) for v in torch.aminmax(tensor.detach())):
            raise NonFiniteLossError(
                "finite weights after training", f"NaN or infinity in {name}", "lower the rate"
            )
