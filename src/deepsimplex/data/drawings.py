"""Photographs beside drawings: a background that colour and grey level alone do not give away.

Digits are strokes on an even ground. A net that is shown photographs beside them learns to tell
photographs, which no unknown digit is, and rejects worse than without any (docs/decisions/0012).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EVEN = 1 / 3
"""Grey images are drawings if one level has more than this share of their pixels."""
_LOOK, _CHUNK = 1000, 4096
_CROSS = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3) / 5


def suited(background: Tensor, knowns: Tensor) -> Tensor:
    """The background as it is, or `drawn` where the knowns are drawings and it is not."""
    return drawn(background, knowns) if apart(background, knowns) else background


def apart(background: Tensor, knowns: Tensor) -> bool:
    """Whether the knowns are drawings and the background is not."""
    return drawings(knowns) and not drawings(background)


def drawings(images: Tensor) -> bool:
    """Bytes (n, c, h, w), grey, and mostly of one level; looks at a thousand at most."""
    if images.dtype != torch.uint8 or images.ndim != 4 or not len(images):
        return False
    some = images[:: -(-len(images) // _LOOK)]
    if not (some == some[:, :1]).all():
        return False
    counts = torch.bincount(some[:, 0].flatten().int(), minlength=256)
    return bool(counts.max() > EVEN * counts.sum())


def drawn(images: Tensor, knowns: Tensor) -> Tensor:
    """Grey, blurred, and each in the levels of some known image, by rank: (n, c, h, w) bytes.

    The brightest pixel takes the brightest level of that image, and so on, which turns blurred
    photographs into strokes and spots. Ties fall by chance; the same every time.
    """
    random = torch.Generator().manual_seed(0)
    return torch.cat([_drawn(part, knowns, random) for part in images.split(_CHUNK)])


def _drawn(images: Tensor, knowns: Tensor, random: torch.Generator) -> Tensor:
    n, c, h, w = images.shape
    field = images.float().mean(1, keepdim=True)
    for _ in range(min(h, w) // 14):  # 28 pixels: twice; digits of 8 pixels: not at all
        field = F.conv2d(F.pad(field, (1, 1, 1, 1), mode="replicate"), _CROSS)
    flat = field.flatten(1) + 1e-3 * torch.rand(n, h * w, generator=random)
    rank = flat.argsort(1).argsort(1)
    models = knowns[torch.randint(0, len(knowns), (n,), generator=random)]
    levels = models[:, 0].flatten(1).sort(1).values
    return levels.gather(1, rank).view(n, 1, h, w).expand(n, c, h, w).contiguous()
