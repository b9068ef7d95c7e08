"""GDFR: a classifier that sees image and reconstruction, and tells how an image was turned.

Perera et al., CVPR 2020; no public code was found, all of it is from memory [K]. An unknown image
and what an auto-encoder of the knowns makes of it differ, and the classifier sees that they do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import (
    NUMBERS,
    Batch,
    Encoder,
    Optimiser,
    Stage,
    Update,
    check_numbers,
    check_whole,
    through_head,
)
from deepsimplex.methods.networks import Critic, Generator, check_pictures
from deepsimplex.methods.softmax import LinearLogits
from deepsimplex.methods.turned import TURNS, turned
from deepsimplex.simplex import wide


@dataclass(frozen=True)
class GDFRSettings:
    turn: float = 1.0  # λ, weight of the turns' cross-entropy
    latent: int = 32  # bottleneck of the auto-encoder: too wide, and A(x) is x
    learning_rate: float = 1e-3  # Adam's, of the auto-encoder

    def __post_init__(self) -> None:
        check_numbers(self, turn=0)
        check_whole(self, latent=1)
        if not (isinstance(self.learning_rate, NUMBERS) and 0 < self.learning_rate < 1):
            raise DeepSimplexError(
                "learning_rate between 0 and 1", repr(self.learning_rate), "change it"
            )


class WithReconstruction(nn.Module):
    """x → net([x, A(x)]): normalised images (n, c, s, s) → (n, d), by a net for 2c channels."""

    def __init__(self, net: nn.Module, autoencoder: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.autoencoder = autoencoder

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([x, self.autoencoder(x).to(x.dtype)], 1))
        return out


class GDFR(LinearLogits):
    """Stage "autoencode": mean (x − A(x))². Stage "fit", A frozen, features of [x, A(x)]:

    L = −log p_y(x) − λ log q_t(x turned by t quarters). Only the turn's head is asked about
    turned images, since a 6 turned is a 9. Scores, not turned: max probability, which is the
    published one [K], and max logit.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: GDFRSettings) -> None:
        check_pictures(encoder.shape)
        if encoder.shape[1] != encoder.shape[2]:
            raise DeepSimplexError(
                "square images, which can be turned",
                f"samples of shape {encoder.shape}",
                "choose another method, or crop the images",
            )
        autoencoder = nn.Sequential(
            Critic(encoder.shape, settings.latent), Generator(settings.latent, encoder.shape)
        )
        both = WithReconstruction(encoder.backbone, autoencoder)
        encoder = Encoder(both, encoder.features, encoder.shape)
        super().__init__(encoder, classes, ("max_probability", "max_logit"))
        self.settings = settings
        self.turn_head = nn.Linear(encoder.features, TURNS)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        both = _with_reconstruction(self.encoder)
        adam = Optimiser("adam", self.settings.learning_rate)
        first = Update("autoencode", self.pixel_loss, tuple(both.autoencoder.parameters()), adam)
        rest = (*both.net.parameters(), *self.head.parameters(), *self.turn_head.parameters())
        return (
            Stage("autoencode", (first,), -(-epochs // 2)),
            Stage("fit", (Update("fit", self.loss, rest),), epochs, frozen=(both.autoencoder,)),
        )

    def pixel_loss(self, batch: Batch) -> Tensor:
        """mean (x − A(x))² in normalised units."""
        x = self.encoder.normalise(batch.images)
        again: Tensor = _with_reconstruction(self.encoder).autoencoder(x)
        return (x - wide(again)).square().mean()

    def loss(self, batch: Batch) -> Tensor:
        """One pass over the batch and its turned copy, which A sees turned too."""
        images, turn = turned(batch.images)
        plain, moved = self.encoder(torch.cat([batch.images, images])).chunk(2)
        logits = wide(through_head(self.head, plain))
        turns = wide(through_head(self.turn_head, moved))
        loss = F.cross_entropy(logits, batch.labels)
        return loss + self.settings.turn * F.cross_entropy(turns, turn)


def _with_reconstruction(encoder: Encoder) -> WithReconstruction:
    if not isinstance(encoder.backbone, WithReconstruction):
        raise DeepSimplexError(
            "images for gdfr, which reconstructs them",
            "features of a frozen backbone",
            "do not freeze, or choose another method",
        )
    return encoder.backbone
