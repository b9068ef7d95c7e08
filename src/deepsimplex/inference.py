"""Outputs and scores of many images, a batch at a time, on the method's own device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepsimplex.methods.base import Method


@torch.no_grad()
def outputs(
    method: nn.Module, images: Tensor, batch: int = 1024, *, mirror: bool = False
) -> Tensor:
    """The method's outputs for raw images, in eval mode, on the CPU: (n, …) → (n, d).

    With `mirror`, the mean of those of an image and its mirror image.
    """
    return torch.cat(list(_outputs(method, images, batch, mirror))).cpu()


@torch.no_grad()
def scores(
    method: Method,
    images: Tensor,
    score: str,
    also: tuple[str, ...] = (),
    *,
    mirror: bool = False,
    batch: int = 1024,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Class scores by `score`, (n, C), and knownness by it and others, (n,); float64, CPU.

    With `mirror`, of the mean output of an image and its mirror image.
    """
    by_class, known = [], {name: [] for name in (score, *also)}  # type: ignore[var-annotated]
    for rows in _outputs(method, images, batch, mirror):
        by_class.append(method.class_scores(rows, score))
        for name, pieces in known.items():
            pieces.append(method.knownness(rows, name))
    # Only here does the host wait for the device.
    found = {name: torch.cat(pieces).cpu().double() for name, pieces in known.items()}
    return torch.cat(by_class).cpu().double(), found


def _outputs(
    method: nn.Module, images: Tensor, batch: int, mirror: bool = False
) -> Iterator[Tensor]:
    method.eval()
    where = next(method.parameters()).device
    # TensorFloat-32 would make a GPU's scores differ from a CPU's in the fourth digit.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for rows in images.split(batch):
            view = rows.to(where)
            yield (method(view) + method(view.flip(-1))) / 2 if mirror else method(view)
