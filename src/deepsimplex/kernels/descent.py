"""SGD with a clipped gradient over all parameters at once: two kernels, whatever their number.

The plain twin is torch.nn.utils.clip_grad_norm_ and torch.optim.SGD. Parameters are float32;
one may have a bfloat16 shadow that the network computes with: its gradient is then the
shadow's, and the shadow follows the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
GROUP = 4  # blocks whose squares one program sums
WARPS = 8


@triton.jit
def _gradient(table, which, at, inside):
    address = tl.load(table + which * 4 + 1)
    if tl.load(table + which * 4 + 3) != 0:
        half = address.to(tl.pointer_type(tl.bfloat16))
        g = tl.load(half + at, inside, other=0.0).to(tl.float32)
    else:
        full = address.to(tl.pointer_type(tl.float32))
        g = tl.load(full + at, inside, other=0.0)
    return g


@triton.jit
def _squares(
    table, tensor_of, start_of, sizes, partial, blocks, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Each program's Σg² over its blocks."""
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(GROUP):
        block = tl.program_id(0) * GROUP + k
        there = block < blocks
        which = tl.load(tensor_of + block, there, other=0)
        at = tl.load(start_of + block, there, other=0) + tl.arange(0, BLOCK)
        g = _gradient(table, which, at, there & (at < tl.load(sizes + which)))
        total += g * g
    tl.store(partial + tl.program_id(0), tl.sum(total))


@triton.jit
def _descend(
    table, tensor_of, start_of, sizes, partial, rate, programs, momentum, decay, clip,
    NESTEROV: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """g ← min(1, clip/‖g‖)·g + decay·p;  b ← momentum·b + g;  p ← p − rate·b.

    With NESTEROV the step is rate·(g + momentum·b).
    """
    program = tl.program_id(0)
    which = tl.load(tensor_of + program)
    at = tl.load(start_of + program) + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + which)
    g = _gradient(table, which, at, inside)
    if CLIP:
        every = tl.arange(0, BLOCK_P)
        norm = tl.sqrt(tl.sum(tl.load(partial + every, every < programs, other=0.0)))
        scale = clip / (norm + 1e-6)
        g *= tl.where(scale > 1.0, 1.0, scale)
    parameter = tl.load(table + which * 4).to(tl.pointer_type(tl.float32))
    buffer = tl.load(table + which * 4 + 2).to(tl.pointer_type(tl.float32))
    p = tl.load(parameter + at, inside, other=0.0)
    g += decay * p
    b = momentum * tl.load(buffer + at, inside, other=0.0) + g
    tl.store(buffer + at, b, inside)
    if NESTEROV:
        b = g + momentum * b
    p -= tl.load(rate) * b
    tl.store(parameter + at, p, inside)
    shadow = tl.load(table + which * 4 + 3)
    if shadow != 0:
        tl.store(shadow.to(tl.pointer_type(tl.bfloat16)) + at, p.to(tl.bfloat16), inside)


class Descent:
    """The addresses that the kernels read, and the momentum `buffers`."""

    def __init__(self, parameters: list[Tensor], shadows: list[Tensor | None]) -> None:
        device = parameters[0].device
        self.parameters, self.shadows = parameters, shadows  # their memory must stay
        self.buffers = [torch.zeros_like(p) for p in parameters]
        rows = zip(parameters, self.buffers, shadows, strict=True)
        table = [
            [p.data_ptr(), 0, b.data_ptr(), 0 if s is None else s.data_ptr()] for p, b, s in rows
        ]
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        self.sizes = torch.zeros(len(parameters), dtype=torch.int64, device=device)
        blocks = [(i, at) for i, p in enumerate(parameters) for at in range(0, p.numel(), BLOCK)]
        self.tensor_of = torch.tensor([i for i, _ in blocks], dtype=torch.int32, device=device)
        self.start_of = torch.tensor([at for _, at in blocks], dtype=torch.int64, device=device)
        self.blocks = len(blocks)
        self.partial = torch.empty(triton.cdiv(self.blocks, GROUP), device=device)
        self.noted: list[tuple[int, int]] = []

    def note(self, gradients: list[Tensor | None]) -> None:
        """Where the gradients lie; a parameter without one is left alone, as in torch.optim."""
        for p, g in zip(self.leaves, gradients, strict=True):
            assert g is None or (g.stride() == p.stride() and g.dtype == p.dtype)
        self.noted = [(0, 0) if g is None else (g.data_ptr(), g.numel()) for g in gradients]

    @property
    def leaves(self) -> list[Tensor]:
        return [p if s is None else s for p, s in zip(self.parameters, self.shadows, strict=True)]

    def settle(self) -> None:
        """Tell the kernels. A captured step's gradients stay where they were noted."""
        noted = torch.tensor(self.noted, dtype=torch.int64).to(self.table.device)
        self.table[:, 1] = noted[:, 0]
        self.sizes.copy_(noted[:, 1])

    def step(
        self, rate: Tensor, momentum: float, nesterov: bool, decay: float, clip: float | None
    ) -> None:
        shared = self.table, self.tensor_of, self.start_of, self.sizes, self.partial
        programs = len(self.partial)
        if clip is not None:
            _squares[(programs,)](*shared, self.blocks, BLOCK=BLOCK, GROUP=GROUP, num_warps=WARPS)
        _descend[(self.blocks,)](
            *shared, rate, programs, momentum, decay, clip or 0.0,
            NESTEROV=nesterov, CLIP=clip is not None,
            BLOCK=BLOCK, BLOCK_P=triton.next_power_of_2(programs), num_warps=WARPS,
        )  # fmt: skip
