"""ARPL with confusing samples: a GAN paints images that are like no class more than another.

Three updates a step. The critic tells real from painted; the generator deceives it and keeps the
classifier undecided; the classifier learns by ARPL on real images and to stay undecided on painted
ones. Painted images pass the backbone's BatchNorm layers with statistics, scale and shift of
their own, which scoring never uses. (The authors follow each such epoch by one of ARPL alone;
here every step is of the first kind.) With β = 0.1 the term on painted images is faint: on digits
its gradient at the encoder is under a thousandth of the loss's, and there the row ends where `arpl`
does (docs/decisions/0014).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from deepsimplex.methods.base import (
    ABOVE_0,
    Batch,
    Encoder,
    Method,
    Optimiser,
    Stage,
    Update,
    check_numbers,
    check_score,
    check_whole,
)
from deepsimplex.methods.networks import Critic, Generator, check_pictures, steady
from deepsimplex.methods.prototypes import (
    SPREAD,
    adversarial_logits,
    adversarial_loss,
    reciprocal_logits,
)
from deepsimplex.methods.softmax import logit_class_scores
from deepsimplex.simplex import wide

GAN = Optimiser("adam", 2e-4, momentum=0.5, schedule=steady)


@dataclass(frozen=True)
class ARPLCSSettings:
    temperature: float = 1.0
    weight: float = 0.1  # λ of the term that bounds the distances
    confusion: float = 0.1  # β of the confusing samples
    latent: int = 100
    width: int = 64  # of generator and critic

    def __post_init__(self) -> None:
        check_numbers(self, temperature=ABOVE_0, weight=0, confusion=0)
        check_whole(self, latent=1, width=1)


def sureness(distances: Tensor) -> Tensor:
    """S = exp(mean_i Σ_j p_ij log p_ij), p = softmax(D): 1/C undecided … 1 sure; (n, C) → ().

    As in the authors' code D has no dot products; divided by d it differs little from point to
    point, and S stays near 1/C for real images too: a gentle term.
    """
    log_p = distances.log_softmax(1)
    return (log_p.exp() * log_p).sum(1).mean().exp()


class SecondNorms(nn.Module):
    """A copy of every BatchNorm layer of a network, for images of another kind."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        found = {name: m for name, m in net.named_modules() if isinstance(m, _BatchNorm)}
        self.names = tuple(found)
        self.copies = nn.ModuleList(copy.deepcopy(m) for m in found.values())

    def forward(self, net: nn.Module, images: Tensor) -> Tensor:
        """net(images) with the copies' weights and running statistics, which it updates.

        functional_call changes only what it is given: bfloat16 shadows that the engine has put
        in place of convolution weights stay in use.
        """
        given = {
            f"{name}.{key}": tensor
            for name, norm in zip(self.names, self.copies, strict=True)
            for key, tensor in (*norm.named_parameters(), *norm.named_buffers())
        }
        out: Tensor = functional_call(net, given, (images,))
        return out


class ARPLCS(Method):
    """Scores as ARPL: max_j z_j, not normalised, and max_j softmax(z/T)_j."""

    def __init__(self, encoder: Encoder, classes: int, settings: ARPLCSSettings) -> None:
        super().__init__()
        check_pictures(encoder.shape)
        self.settings = settings
        self.scores = ("max_logit", "max_probability")
        self.encoder = encoder
        self.points = nn.Parameter(SPREAD * torch.randn(classes, encoder.features))
        self.radius = nn.Parameter(torch.zeros(()))
        self.second = SecondNorms(encoder.backbone)
        self.generator = Generator(settings.latent, encoder.shape, settings.width)
        self.critic = Critic(encoder.shape, 1, settings.width)

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images)

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        classifier = (
            *self.encoder.parameters(),
            *self.second.parameters(),
            self.points,
            self.radius,
        )
        updates = (
            Update("critic", self.critic_loss, tuple(self.critic.parameters()), GAN),
            Update("generator", self.generator_loss, tuple(self.generator.parameters()), GAN),
            Update("fit", self.loss, classifier),
        )
        return (Stage("fit", updates, epochs),)

    def paint(self, batch: Batch) -> Tensor:
        """As many images as the batch has, in normalised units."""
        code = self.points.new_empty(len(batch.images), self.settings.latent).normal_()
        painted: Tensor = self.generator(code)
        return painted

    def critic_loss(self, batch: Batch) -> Tensor:
        """−mean log σ(c(x)) − mean log(1 − σ(c(G(u))))."""
        with torch.no_grad():
            painted = self.paint(batch)
        real = wide(self.critic(self.encoder.normalise(batch.images)))
        return F.softplus(-real).mean() + F.softplus(wide(self.critic(painted))).mean()

    def generator_loss(self, batch: Batch) -> Tensor:
        """−mean log σ(c(G(u))) + β S(G(u))."""
        painted = self.paint(batch)
        deceived = F.softplus(-wide(self.critic(painted))).mean()
        return deceived + self.settings.confusion * self.painted_sureness(painted)

    def loss(self, batch: Batch) -> Tensor:
        """ARPL on real images + β S on painted ones."""
        features, s = wide(self(batch.images)), self.settings
        known = adversarial_loss(
            features, batch.labels, self.points, self.radius, s.temperature, s.weight
        )
        with torch.no_grad():
            painted = self.paint(batch)
        return known + s.confusion * self.painted_sureness(painted)

    def painted_sureness(self, painted: Tensor) -> Tensor:
        features = wide(self.second(self.encoder.backbone, painted))
        return sureness(reciprocal_logits(features, self.points))

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """z_j, or log-probabilities."""
        check_score(self, score)
        logits = adversarial_logits(outputs, self.points.to(outputs))
        return logit_class_scores(logits, score, self.settings.temperature)

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        return self.class_scores(outputs, score).amax(1)
