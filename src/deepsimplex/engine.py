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
from deepsimplex.methods.base import Method, Optimiser, Stage, Update
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
            how = _check(data, recipe, stage)
            optimisers = _optimisers(recipe, stage)
            meter = Meter(stage, where)
            if saved and number == saved.place.stage:
                _restore_stage(saved, optimisers, meter)
            _set_mode(method, stage)
            while place.epoch < stage.epochs:
                began = time.perf_counter()
                known, background = epoch_order(data, recipe, stage, number, place.epoch)
                for step in range(place.step, len(known)):
                    at = place.epoch * len(known) + step
                    batch = draw(data, known[step], background, step, at, how)
                    for update in stage.updates:
                        optimiser = optimisers[update.shares or update.name]
                        _set_rate(optimiser, recipe, update, at, stage.epochs * len(known))
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
                        _check_weights(method, recipe)
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
            _check_weights(method, recipe)
            if keeper:
                keeper.save(_snapshot(place, method, {}, None, where))
        method.requires_grad_(True).eval()


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
        self.first_bad.masked_fill_(bad, at)
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


@torch.no_grad()
def outputs(method: Method, images: Tensor, batch: int = 1024) -> Tensor:
    """The method's outputs for raw images, in eval mode, on the CPU: (n, …) → (n, d)."""
    return torch.cat([rows.cpu() for rows in _outputs(method, images, batch)])


@torch.no_grad()
def scores(
    method: Method, images: Tensor, score: str, also: tuple[str, ...] = (), batch: int = 1024
) -> tuple[Tensor, dict[str, Tensor]]:
    """Class scores by `score`, (n, C), and knownness by it and others, (n,); float64, CPU."""
    by_class, known = [], {name: [] for name in (score, *also)}  # type: ignore[var-annotated]
    for rows in _outputs(method, images, batch):
        by_class.append(method.class_scores(rows, score).double().cpu())
        for name, pieces in known.items():
            pieces.append(method.knownness(rows, name).double().cpu())
    return torch.cat(by_class), {name: torch.cat(pieces) for name, pieces in known.items()}


def _outputs(method: Method, images: Tensor, batch: int) -> Iterator[Tensor]:
    method.eval()
    where = next(method.parameters()).device
    # TensorFloat-32 would make a GPU's scores differ from a CPU's in the fourth digit.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for rows in images.split(batch):
            yield method(rows.to(where))


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
    check_augment(how, tuple(data.images.shape[1:]))
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


def _optimisers(recipe: Recipe, stage: Stage) -> dict[str, torch.optim.Optimizer]:
    """One for each update, or for all updates that share a name."""
    made: dict[str, torch.optim.Optimizer] = {}
    for update in stage.updates:
        made.setdefault(update.shares or update.name, _optimiser(recipe, update))
    return made


def _optimiser(recipe: Recipe, update: Update) -> torch.optim.Optimizer:
    own = update.optimiser or Optimiser(
        recipe.optimiser,
        recipe.learning_rate,
        recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
    )
    if own.kind == "sgd":
        return torch.optim.SGD(
            update.parameters,
            own.learning_rate,
            own.momentum,
            weight_decay=own.weight_decay,
            nesterov=own.nesterov and own.momentum > 0,
        )
    family = torch.optim.AdamW if own.kind == "adamw" else torch.optim.Adam
    betas = own.momentum, own.beta2
    return family(update.parameters, own.learning_rate, betas, weight_decay=own.weight_decay)


def _set_rate(
    optimiser: torch.optim.Optimizer, recipe: Recipe, update: Update, at: int, total: int
) -> None:
    own = update.optimiser
    base = own.learning_rate if own else recipe.learning_rate
    if own and own.schedule:
        rate = base * own.schedule(at, total)
    else:
        rate = learning_rate(recipe, base, at, total)
    for group in optimiser.param_groups:
        group["lr"] = rate


def _precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    """bfloat16 where it pays: on a GPU, unless the recipe says otherwise."""
    wanted = recipe.precision == "bfloat16" or (
        recipe.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


@contextlib.contextmanager
def _reproducible(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Seed the generators, and put them and the determinism flags back afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    seed = mix(recipe.seed, -1, 0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        if recipe.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warn)


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
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
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


def _check_weights(method: Method, recipe: Recipe) -> None:
    """No checkpoint and no model holds a number that is not finite."""
    for name, tensor in method.state_dict().items():
        if tensor.numel() and not all(math.isfinite(v) for v in torch.aminmax(tensor)):
            raise NonFiniteLossError(
                "finite weights",
                f"NaN or infinity in {name}",
                f"lower the learning rate (now {recipe.learning_rate:g}) or look at the input",
            )
