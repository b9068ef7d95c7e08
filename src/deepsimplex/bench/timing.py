"""The clock: variants in turns, quartiles, ratios by rounds."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deepsimplex.bench.memory import OUT_OF_MEMORY, is_out_of_memory, peak_of
from deepsimplex.errors import DeepSimplexError

CPU = torch.device("cpu")
LEAST_REPEATS = 5
LEAST_SECONDS = 5e-3
MOST_LOOPS = 10_000


class Unavailable(Exception):
    """A variant that cannot run on this machine; the text says why, in a table's cell."""


@dataclass
class Measured:
    """A variant's times; `failed` says why there are none."""

    seconds: list[float] = field(default_factory=list)
    """Of one call, a value a round."""
    first: float | None = None
    """Seconds of the very first call, which builds, compiles and loads; in no round."""
    peak: int | None = None
    """Bytes beyond what was there before the call; None on the CPU."""
    failed: str | None = None


class Prepared:
    """A call that is built when first called: what cannot be built fails in its own turn.

    It is kept only once it has run, so that a variant without room leaves nothing behind.
    `fails_as` turns any error of the first call but a lack of memory into that reason.
    """

    def __init__(
        self, build: Callable[[], Callable[[], object]], fails_as: str | None = None
    ) -> None:
        self.build = build
        self.fails_as = fails_as
        self.call: Callable[[], object] | None = None

    def __call__(self) -> object:
        if self.call is not None:
            return self.call()
        try:
            call = self.build()
            value = call()
        except Exception as error:
            if self.fails_as is None or isinstance(error, Unavailable) or is_out_of_memory(error):
                raise
            raise Unavailable(f"{self.fails_as}: {type(error).__name__}") from error
        self.call = call
        return value


def interleaved(
    calls: dict[str, Callable[[], object]],
    repeats: int,
    device: torch.device = CPU,
    least: float = LEAST_SECONDS,
) -> dict[str, Measured]:
    """Every variant once a round, `repeats` rounds, after a round of warm-up.

    A turn calls its variant until about `least` seconds are filled, so that a short call is not
    measured by the noise of starting it; its time is the turn's divided by the calls. A variant
    that runs out of memory, or raises Unavailable, is out of the later rounds.
    """
    check_repeats(repeats)
    found = {name: Measured() for name in calls}
    loops = {}
    for name, call in calls.items():
        found[name].failed = _failure(
            functools.partial(_warm_up, found[name], call, device), device
        )
        if found[name].failed is None:
            loops[name] = min(MOST_LOOPS, max(1, math.ceil(least / found[name].seconds.pop())))
    for _ in range(repeats):
        for name, call in calls.items():
            if found[name].failed is None:
                turn = functools.partial(_turn, found[name], call, loops[name], device)
                found[name].failed = _failure(turn, device)
    return found


def check_repeats(repeats: int) -> None:
    if repeats < LEAST_REPEATS:
        raise DeepSimplexError(
            f"{LEAST_REPEATS} or more repeats",
            str(repeats),
            "quartiles of fewer say nothing; raise --repeats",
        )


def ratios(numerator: Measured, denominator: Measured) -> list[float]:
    """Time of one over time of the other, round by round; empty where either has failed."""
    if numerator.failed or denominator.failed:
        return []
    pairs = zip(numerator.seconds, denominator.seconds, strict=True)
    return [upper / lower for upper, lower in pairs]


def quartiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and quartiles; None of nothing."""
    if not values:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def _warm_up(measured: Measured, call: Callable[[], object], device: torch.device) -> None:
    """First call, peak memory of a second, length of a third; the length is left in `seconds`."""
    measured.first = _elapsed(call, 1, device)
    if device.type == "cuda":
        measured.peak = peak_of(call, device)
    _turn(measured, call, 1, device)


def _turn(measured: Measured, call: Callable[[], object], loops: int, device: torch.device) -> None:
    measured.seconds.append(_elapsed(call, loops, device) / loops)


def _elapsed(call: Callable[[], object], loops: int, device: torch.device) -> float:
    """Seconds that `loops` calls take; at least a nanosecond, so that ratios exist."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(loops):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return max(1e-9, start.elapsed_time(end) / 1e3)
    began = time.perf_counter()
    for _ in range(loops):
        call()
    return max(1e-9, time.perf_counter() - began)


def _failure(call: Callable[[], object], device: torch.device) -> str | None:
    """Why a call cannot be measured, or None; what it had allocated is free again."""
    try:
        call()
    except Unavailable as reason:
        return str(reason)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return None
    gc.collect()  # only here, where the error and the tensors in its frames are gone
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return OUT_OF_MEMORY
