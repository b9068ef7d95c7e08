"""Trainings side by side on one device, and steps that are captured once and replayed.

A training is a generator that yields after every step (engine.training); `drive` takes its
steps, or those of several in turn. On a GPU each has a lane of its own: a stream, and a random
state that the default generator stands for while the lane is taken. What a training computes
does not depend on the others beside it.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

import torch

from deepsimplex.errors import DeepSimplexError, Stopped

T = TypeVar("T")

_alone = False  # whether the one training that runs has the device to itself

WARM_UP = 3
"""Steps taken before one is captured: libraries choose their kernels, optimisers their state."""


def side_by_side(device: torch.device, asked: int | None = None, jobs: int | None = None) -> int:
    """How many trainings to run at once, of so many jobs: one small net does not fill a GPU."""
    most = asked or (5 if device.type == "cuda" else 1)
    return most if jobs is None else max(1, min(most, jobs))


def drive(
    jobs: Iterable[Generator[None, None, T]],
    device: torch.device,
    *,
    deterministic: bool = False,
    at_once: int = 1,
) -> list[T]:
    """Take the steps of all jobs, `at_once` of them in turn; what they return, in order.

    A job that is stopped lets the others reach their own stop; any other error ends them all.
    """
    waiting: Iterator[tuple[int, Generator[None, None, T]]] = enumerate(jobs)
    running: list[tuple[int, Generator[None, None, T], Lane]] = []
    found: dict[int, T] = {}
    stopped: Stopped | None = None
    with surroundings(device, deterministic, alone=at_once == 1):
        try:
            while True:
                while len(running) < at_once and (job := next(waiting, None)) is not None:
                    running.append((*job, Lane(device)))
                if not running:
                    break
                for entry in tuple(running):
                    number, job_, lane = entry
                    try:
                        with lane.taken():
                            next(job_)
                    except StopIteration as end:
                        found[number] = end.value
                        running.remove(entry)
                        lane.wait()
                    except Stopped as signal:
                        stopped = stopped or signal
                        running.remove(entry)
                        waiting = iter(())
        finally:
            for _, job_, _ in running:
                job_.close()
    if stopped is not None:
        raise stopped
    return [found[number] for number in sorted(found)]


class Lane:
    """A stream and a random state of one's own; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self.state = torch.Generator(device).graphsafe_get_state()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        generator = torch.cuda.default_generators[_index(self.device)]
        before = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self.state)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            generator.graphsafe_set_state(before)

    def wait(self) -> None:
        if self.device.type == "cuda":
            self.stream.synchronize()


class Repeated:
    """Calls `body`; on a GPU, after a few calls, replays the kernels of one captured call.

    The body reads and writes tensors that stay where they are, and never looks at their values.
    `settle` runs after the capture, before the first replay.
    """

    def __init__(
        self, body: Callable[[], None], settle: Callable[[], None], *, capture: bool
    ) -> None:
        self.body, self.settle, self.capture = body, settle, capture
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self.capture and self.calls >= WARM_UP:
            self.graph = self._captured()
            self.graph.replay()
        else:
            self.calls += 1
            self.body()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        collecting = gc.isenabled()
        gc.disable()  # memory of some earlier graph, freed now, would break the capture
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.body()
        except RuntimeError as error:
            raise DeepSimplexError(
                "a step whose kernels do not depend on values, for a CUDA graph",
                str(error).partition("\n")[0],
                "mend the method's loss, or say capture=False in its Stage",
            ) from error
        finally:
            if collecting:
                gc.enable()
        self.settle()
        return graph


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A second stream for a training that has the GPU to itself; more would get in the way.

    Layers choose other kernels with it, and so other roundings: none under `deterministic`.
    """
    wanted = _alone and not torch.are_deterministic_algorithms_enabled()
    return torch.cuda.Stream(device) if device.type == "cuda" and wanted else None


def seed(device: torch.device, value: int) -> None:
    """Seed the default generators of the CPU and of the device."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(value)


@contextlib.contextmanager
def surroundings(device: torch.device, deterministic: bool, alone: bool) -> Iterator[None]:
    """Random states and flags for training; all put back afterwards.

    cuDNN times its algorithms before it chooses: worth it for a training alone on the GPU, not
    for several at once, which share it. Timing would also make runs differ.
    """
    global _alone
    before = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    timed, company = cudnn.benchmark, _alone
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        cudnn.benchmark = alone and not deterministic
        _alone = alone
        try:
            yield
        finally:
            cudnn.benchmark, _alone = timed, company
            torch.use_deterministic_algorithms(before, warn_only=only_warn)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
