"""Outputs and scores of many images, a batch at a time, on the method's own device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deepsimplex.data.augment import ONE, Views
from deepsimplex.methods.base import Method


@torch.no_grad()
def outputs(method: nn.Module, images: Tensor, batch: int = 1024, *, views: Views = ONE) -> Tensor:
    """The method's outputs for raw images, in eval mode, on the CPU: (n, …) → (n, d).

    Of several views of an image, their mean.
    """
    return torch.cat(list(_outputs(method, images, batch, views))).cpu()


@torch.no_grad()
def scores(
    method: Method,
    images: Tensor,
    score: str,
    also: tuple[str, ...] = (),
    *,
    views: Views = ONE,
    batch: int = 1024,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Class scores by `score`, (n, C), and knownness by it and others, (n,); float64, CPU.

    Of several views of an image, by their mean output.
    """
    by_class, known = [], {name: [] for name in (score, *also)}  # type: ignore[var-annotated]
    for rows in _outputs(method, images, batch, views):
        by_class.append(method.class_scores(rows, score))
        for name, pieces in known.items():
            pieces.append(method.knownness(rows, name))
    # Only here does the host wait for the device.
    found = {name: torch.cat(pieces).cpu().double() for name, pieces in known.items()}
    return torch.cat(by_class).cpu().double(), found


def _outputs(method: nn.Module, images: Tensor, batch: int, views: Views) -> Iterator[Tensor]:
    method.eval()
    where = next(method.parameters()).device
    # TensorFloat-32 would make a GPU's scores differ from a CPU's in the fourth digit.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for rows in images.split(batch):
            found = [method(view) for view in views.of(rows.to(where))]
            yield torch.stack(found).mean(0) if len(found) > 1 else found[0]
