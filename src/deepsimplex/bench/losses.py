"""The simplex loss against cross-entropy and ArcFace: forward + backward, time and peak memory.

A batch of 128 backbone features of width 128 goes through a head to C−1 features (simplex) or
C logits (the rivals), and the gradient comes back to the features and the head. The head is what
costs at many classes, so it is counted; the loss on given features stands beside it. On a GPU
everything is measured in float32 and again under bfloat16 autocast. A ratio is a variant's time
over the simplex loss's of the same group: above 1, the simplex loss is faster.

    group       variant
    with head   simplex, compiled, kernel; cross-entropy, compiled; ArcFace; basis
    loss alone  simplex, compiled, kernel; cross-entropy; basis

"simplex" is the formula as written, "compiled" torch.compile of the whole of it, "kernel"
kernels/loss.py, GPU only, which losses.simplex_loss takes from MANY classes on; "basis" is
Do et al.'s loss, which looks at all C centres where eq. 4 looks at one (methods/basis.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.bench import records
from deepsimplex.bench.memory import claim
from deepsimplex.bench.timing import (
    Measured,
    Prepared,
    Unavailable,
    check_repeats,
    interleaved,
    quartiles,
    ratios,
)
from deepsimplex.engine import pick_device
from deepsimplex.losses import MANY
from deepsimplex.methods.basis import basis_loss
from deepsimplex.simplex import Simplex, constants, own_squared_distance, split_constant, wide
from deepsimplex.terminal import console, table

SEED, BATCH, WIDTH = 0, 128, 128
CLASSES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
QUICK = (10, 1_000)
LARGEST_ON_CPU = 10_000

# The kernel has earned its place if it beats the compiled formula by GAIN from MANY classes on.
GAIN = 1.3

Criterion = Callable[[Tensor], Tensor]
HEAD, ALONE = "with head", "loss alone"
SIMPLEX, COMPILED, KERNEL = "simplex", "simplex, compiled", "simplex, kernel"


@dataclass(frozen=True)
class Setting:
    """One block of the table."""

    classes: int
    device: torch.device
    half: bool = False
    compiled: bool = True
    """Whether the compiled variants are measured: compiling takes most of a short run."""
    batch: int = BATCH
    width: int = WIDTH

    @property
    def precision(self) -> str:
        return "bfloat16 autocast" if self.half else "float32"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)


def loss(
    device: str = "auto",
    repeats: int = 7,
    out: Path | None = None,
    quick: bool = False,
    largest: int | None = None,
) -> dict[str, Any]:
    """Print the table, write the record."""
    check_repeats(repeats)
    where = pick_device(device)
    most = largest or (CLASSES[-1] if where.type == "cuda" else LARGEST_ON_CPU)
    halves = (False,) if quick or where.type == "cpu" else (False, True)
    rows: list[dict[str, Any]] = []
    gains: list[dict[str, Any]] = []
    for half in halves:
        for classes in QUICK if quick else CLASSES:
            if classes <= most:
                setting = Setting(classes, where, half, compiled=not quick)
                found = measure(setting, repeats)
                rows += block(setting, found)
                gains += gain(setting, found)
                console.print(f"  {classes:,} classes done, {setting.precision}", style="dim")
    for half in halves:
        _print(rows, Setting(0, where, half))
    note = verdict(gains)
    console.print(note)
    return records.finish(
        "loss",
        "time of each variant, forward + backward / that of the simplex loss of its group",
        rows,
        {"device": where, "repeats": repeats, "quick": quick, "largest": largest},
        out,
        where,
        seed=SEED,
        repeats=repeats,
        batch=BATCH,
        width=WIDTH,
        memory="peak beyond inputs and weights; gradients are in it",
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        kernel_gains=gains,
        kernel_note=note,
    )


def measure(setting: Setting, repeats: int) -> dict[tuple[str, str], Measured]:
    """All variants of both groups in turns: {(group, variant): …}."""
    torch.compiler.reset()  # a function is recompiled for a few sizes only, then left plain
    calls = variants(setting)
    found = interleaved(
        {" ".join(key): call for key, call in calls.items()}, repeats, setting.device
    )
    return {key: found[" ".join(key)] for key in calls}


class Problem:
    """Features, labels and heads of a setting, made when first asked for."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        generator = torch.Generator().manual_seed(SEED)
        size, device = (setting.batch, setting.width), setting.device
        self.labels = torch.randint(setting.classes, size[:1], generator=generator).to(device)
        self.x = torch.randn(size, generator=generator).to(device).requires_grad_()
        self.head = functools.cache(lambda outputs: nn.Linear(size[1], outputs, device=device))
        self.given = functools.cache(self._given)

    def _given(self, outputs: int) -> Tensor:
        f = torch.randn(self.setting.batch, outputs, device=self.setting.device) / outputs**0.5
        return (f.bfloat16() if self.setting.half else f).requires_grad_()

    def room(self, copies: int, heads: int) -> None:
        """Claim memory for so many (n, C) arrays and (d, C) heads before taking it."""
        each = copies * self.setting.batch + heads * self.setting.width
        claim(4 * self.setting.classes * each, self.setting.device)

    def step(self, forward: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
        def once() -> object:
            with self.setting.autocast():
                value = forward()
            return torch.autograd.grad(value, inputs)

        return once

    def call(self, outputs: int, criterion: Criterion, compiled: bool, head: bool) -> Prepared:
        """criterion(head(x)), or criterion(given features); forward + backward."""

        def with_head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return criterion(F.linear(x, weight, bias))

        def build() -> Callable[[], object]:
            if compiled and not self.setting.compiled:
                raise Unavailable("left out by --quick")
            self.room(copies=4 if head else 5, heads=3 if head else 0)
            layer = self.head(outputs) if head else None
            inputs = [self.given(outputs)] if layer is None else [self.x, layer.weight, layer.bias]
            forward: Callable[..., Tensor] = with_head if head else criterion
            run = compile_(forward) if compiled else forward
            return self.step(lambda: run(*inputs), inputs)

        return Prepared(build, "does not compile here" if compiled else None)

    def arcface(self) -> Callable[[], object]:
        criterion_class = arcface_class()
        self.room(copies=10, heads=3)
        made = criterion_class(num_classes=self.setting.classes, embedding_size=self.setting.width)
        criterion = made.to(self.setting.device)
        return self.step(lambda: criterion(self.x, self.labels), [self.x, *criterion.parameters()])


def variants(setting: Setting) -> dict[tuple[str, str], Callable[[], object]]:
    """{(group, variant): forward + backward}; nothing is allocated before the first call."""
    C = setting.classes
    simplex, problem = Simplex(C, C - 1), Problem(setting)
    y = problem.labels
    criteria: dict[str, tuple[int, Criterion, bool]] = {
        SIMPLEX: (C - 1, lambda f: own_squared_distance(simplex, f, y).mean(), False),
        COMPILED: (C - 1, lambda f: fusible_simplex_loss(simplex, f, y), True),
        KERNEL: (C - 1, lambda f: kernel_loss(simplex, f, y), False),
        "cross-entropy": (C, lambda z: F.cross_entropy(z, y), False),
        "cross-entropy, compiled": (C, lambda z: F.cross_entropy(z, y), True),
        "basis": (C, lambda z: basis_loss(F.normalize(wide(z), dim=1), y), False),
    }
    found: dict[tuple[str, str], Callable[[], object]] = {}
    for name, way in criteria.items():
        found[HEAD, name] = problem.call(*way, head=True)
    found[HEAD, "ArcFace"] = Prepared(problem.arcface, "fails")
    for name in (SIMPLEX, COMPILED, KERNEL, "cross-entropy", "basis"):
        found[ALONE, name] = problem.call(*criteria[name], head=False)
    return found


def fusible_simplex_loss(simplex: Simplex, features: Tensor, labels: Tensor) -> Tensor:
    """Eq. 4 in the form a compiler fuses best: no scatter, no chunks; d = C−1 and kind regular.

    The same numbers as simplex.own_squared_distance, whose chunks spare memory that a fused form
    never takes: the strongest rival of a kernel. features (n, C−1), labels (n,) → ().
    """
    first, kappa, eta = constants(simplex.vertices)
    f, y = wide(features), labels[:, None]
    is_first = y == 0
    is_own = torch.arange(simplex.span, device=f.device)[None, :] == y - 1
    high, low = (
        torch.where(is_first, at_first, torch.where(is_own, own, rest))
        for at_first, own, rest in zip(
            split_constant(first), split_constant(kappa + eta), split_constant(kappa), strict=True
        )
    )
    return ((f - high) - low).square().sum(1).mean()


def kernel_loss(simplex: Simplex, features: Tensor, labels: Tensor) -> Tensor:
    """kernels/loss.py, where there is a GPU and Triton."""
    if features.device.type != "cuda":
        raise Unavailable("needs a GPU")
    try:
        from deepsimplex.kernels import loss as fused
    except ImportError:
        raise Unavailable("needs Triton") from None
    return fused.fused_simplex_loss(simplex, features, labels)


def arcface_class() -> Any:
    """ArcFaceLoss of pytorch-metric-learning."""
    try:
        from pytorch_metric_learning.losses import ArcFaceLoss
    except ImportError:
        raise Unavailable("not installed") from None
    return ArcFaceLoss


def compile_(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile for these very shapes, or an error: never silently plain."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def block(setting: Setting, found: dict[tuple[str, str], Measured]) -> list[dict[str, Any]]:
    """A row a variant; the ratio is to the plain simplex loss of its group."""
    keys = {"classes": setting.classes, "precision": setting.precision}
    return [
        records.row(measured, found[group, SIMPLEX], **keys, group=group, variant=variant)
        for (group, variant), measured in found.items()
    ]


def gain(setting: Setting, found: dict[tuple[str, str], Measured]) -> list[dict[str, Any]]:
    """Compiled formula's time over the kernel's, both alone; nothing where either is missing."""
    spread = quartiles(ratios(found[ALONE, COMPILED], found[ALONE, KERNEL]))
    if spread is None:
        return []
    return [{"classes": setting.classes, "precision": setting.precision, "ratio": spread}]


def verdict(gains: list[dict[str, Any]]) -> str:
    """Whether the kernel earns its place, in a sentence."""
    counted = [row for row in gains if row["classes"] >= MANY]
    if not counted:
        return f"Fused kernel: not measured against the compiled formula at C ≥ {MANY:,}."
    least = min(row["ratio"]["median"] for row in counted)
    cells = ", ".join(
        f"{records.ratio_cell(row['ratio'])} at {row['classes']:,} in {row['precision']}"
        for row in counted
    )
    word = "beats" if least >= GAIN else "does not beat"
    return f"Fused kernel: {word} the compiled formula by {GAIN}× at C ≥ {MANY:,}: {cells}."


def _print(rows: list[dict[str, Any]], setting: Setting) -> None:
    table(
        f"Loss, forward + backward, batch {BATCH}, {setting.precision} on {setting.device}: "
        "time over the simplex loss's",
        ("C", "group", "variant", "time", "ratio", "memory", "first call"),
        [
            (
                f"{row['classes']:,}",
                row["group"],
                row["variant"],
                records.seconds_cell(row),
                records.ratio_cell(row["ratio"]),
                records.bytes_cell(row["peak_bytes"]),
                records.first_cell(row["first_call_s"]),
            )
            for row in rows
            if row["precision"] == setting.precision
        ],
    )
