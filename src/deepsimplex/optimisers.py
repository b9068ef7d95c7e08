"""Optimisers of a stage: clip the gradient, take a step at a rate that lies on the device.

On a GPU the recipe's SGD is two kernels over all parameters (kernels/descent.py), and the
convolutions compute with bfloat16 shadows of their weights that those kernels keep up to date;
everything else is torch.optim. Both keep the same state under the same names, so a checkpoint
of one is a checkpoint of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from deepsimplex.layers import has_triton
from deepsimplex.methods.base import Optimiser, Stage, Update
from deepsimplex.recipes import Recipe, learning_rate


class Descender(Protocol):
    """One optimiser as the loop sees it."""

    def clear(self) -> None:
        """Forget the gradients."""

    def step(self, rate: float | Tensor) -> None:
        """Clip and descend."""

    def settle(self) -> None:
        """After a capture: what the captured kernels must be told."""

    def state(self) -> dict[str, Tensor]: ...
    def load(self, state: dict[str, Tensor]) -> None: ...


def build_optimisers(
    recipe: Recipe, stage: Stage, shadows: dict[nn.Parameter, Tensor], device: torch.device
) -> dict[str, Descender]:
    """One for each update, or for all updates that share a name."""
    made: dict[str, Descender] = {}
    for update in stage.updates:
        name = update.shares or update.name
        if name in made:
            continue
        if fusable(recipe, update, device):
            own = optimiser_of(recipe, update)
            made[name] = Fused(update.parameters, own, recipe.clip, shadows)
        else:
            made[name] = Plain(update.parameters, optimiser_of(recipe, update), recipe.clip)
    return made


def optimiser_of(recipe: Recipe, update: Update) -> Optimiser:
    """The update's own, or the recipe's."""
    return update.optimiser or Optimiser(
        recipe.optimiser,
        recipe.learning_rate,
        recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
    )


def fusable(recipe: Recipe, update: Update, device: torch.device) -> bool:
    """Two losses that share an optimiser have two sets of gradients; the kernels know one."""
    return (
        device.type == "cuda"
        and has_triton()
        and update.shares is None
        and optimiser_of(recipe, update).kind == "sgd"
        and all(p.dtype == torch.float32 and _dense(p) for p in update.parameters)
    )


def rates(recipe: Recipe, update: Update, first: int, steps: int, total: int) -> list[float]:
    """Learning rates of the stage's steps first … first + steps − 1, of `total`."""
    own = update.optimiser
    base = own.learning_rate if own else recipe.learning_rate
    if own and own.schedule:
        return [base * own.schedule(at, total) for at in range(first, first + steps)]
    return [learning_rate(recipe, base, at, total) for at in range(first, first + steps)]


class Plain:
    """torch.optim; on a GPU its fused kernels, whose rate is a tensor."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], own: Optimiser, clip: float | None
    ) -> None:
        self.parameters, self.clip = tuple(parameters), clip
        gpu = any(p.is_cuda for p in self.parameters)
        rate = torch.zeros((), device=self.parameters[0].device) if gpu else own.learning_rate
        self.rate = rate
        self.optimiser: torch.optim.Optimizer
        if own.kind == "sgd":
            self.optimiser = torch.optim.SGD(
                self.parameters,
                rate,
                own.momentum,
                weight_decay=own.weight_decay,
                nesterov=own.nesterov and own.momentum > 0,
                fused=gpu or None,
            )
        else:
            family = torch.optim.AdamW if own.kind == "adamw" else torch.optim.Adam
            self.optimiser = family(
                self.parameters,
                rate,
                (own.momentum, own.beta2),
                weight_decay=own.weight_decay,
                fused=gpu or None,
                capturable=gpu,
            )

    def clear(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)

    def step(self, rate: float | Tensor) -> None:
        if isinstance(self.rate, Tensor):
            _lay(self.parameters)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        if isinstance(self.rate, Tensor):
            self.rate.copy_(rate)  # type: ignore[arg-type]
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
        self.optimiser.step()

    def settle(self) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": value
            for index, state in self.optimiser.state_dict()["state"].items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def load(self, state: dict[str, Tensor]) -> None:
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            index, name = key.split(".", 1)
            leaf = self.parameters[int(index)]
            laid = torch.empty_like(leaf).copy_(value) if value.shape == leaf.shape else value
            states.setdefault(int(index), {})[name] = laid
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": states, "param_groups": groups})
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate  # load_state_dict made a copy


class Fused:
    """SGD with momentum in two kernels; gradients are the shadows' where there is one."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        own: Optimiser,
        clip: float | None,
        shadows: dict[nn.Parameter, Tensor],
    ) -> None:
        from deepsimplex.kernels.descent import Descent

        self.own, self.clip = own, clip
        self.leaves = [shadows.get(p, p) for p in parameters]
        given = [shadows.get(p) for p in parameters]
        self.descent = Descent([p.detach() for p in parameters], given)

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def step(self, rate: float | Tensor) -> None:
        _lay(self.leaves)
        self.descent.note([leaf.grad for leaf in self.leaves])
        if not torch.cuda.is_current_stream_capturing():
            self.settle()
        nesterov = self.own.nesterov and self.own.momentum > 0
        assert isinstance(rate, Tensor)
        self.descent.step(rate, self.own.momentum, nesterov, self.own.weight_decay, self.clip)

    def settle(self) -> None:
        self.descent.settle()

    def state(self) -> dict[str, Tensor]:
        return {f"{i}.momentum_buffer": b for i, b in enumerate(self.descent.buffers)}

    def load(self, state: dict[str, Tensor]) -> None:
        for index, buffer in enumerate(self.descent.buffers):
            saved = state.get(f"{index}.momentum_buffer")
            buffer.copy_(saved) if saved is not None else buffer.zero_()


def shadow_weights(
    method: nn.Module, recipe: Recipe, stage: Stage, device: torch.device
) -> dict[nn.Parameter, Tensor]:
    """bfloat16 leaves in place of the convolution weights that a fused optimiser moves.

    Autocast would make the same copies anew in every step, a kernel each way for every layer.
    """
    moved = {p for u in stage.updates if fusable(recipe, u, device) for p in u.parameters}
    convolutions = {m.weight for m in method.modules() if isinstance(m, nn.Conv2d)}
    return {
        weight: weight.detach().to(torch.bfloat16).requires_grad_()
        for weight in method.parameters()
        if weight in convolutions & moved
    }


def _lay(leaves: Sequence[Tensor]) -> None:
    """Gradients as their leaves lie in memory: fused kernels, torch's too, walk both so.

    So must what an optimiser remembers lie (`Plain.load`: a checkpoint's tensors are contiguous).
    """
    for leaf in leaves:
        if leaf.grad is not None and leaf.grad.stride() != leaf.stride():
            leaf.grad = torch.empty_like(leaf).copy_(leaf.grad)


def _dense(tensor: Tensor) -> bool:
    """Elements fill their memory without gaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
