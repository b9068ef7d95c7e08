"""Memory: how much is free, what an error says about it, what a call needs at its peak."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

OUT_OF_MEMORY = "out of memory"
_SIGNS = (OUT_OF_MEMORY, "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a device's, the CPU allocator's or Python's word for too little."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def claim(size: int, device: torch.device) -> None:
    """Raise torch.OutOfMemoryError if `size` bytes are not free in main memory.

    Linux grants more main memory than it has and kills the process that uses it; a GPU refuses
    by itself, so nothing is asked of it here.
    """
    free = free_memory()
    if device.type == "cpu" and free is not None and size > free:
        raise torch.OutOfMemoryError(f"{OUT_OF_MEMORY}: {size:,} bytes wanted, {free:,} free")


def free_memory() -> int | None:
    """Bytes of main memory that can be had without swapping; None where nothing tells."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024 * int(line.split()[1]))
        group = Path("/sys/fs/cgroup")  # a container's own limit
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    if not found:
        try:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (ValueError, OSError, AttributeError):
            return None
    return max(0, min(found))


def peak_of(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes a call takes at its peak beyond what was allocated before; None on the CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
