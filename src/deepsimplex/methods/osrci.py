"""OSRCI and G-OpenMax: a class K+1 is learned from painted images that are none of the K.

Three stages. "gan": an image encoder E, a generator G and a critic D. "fit": the classifier C_K,
one against the rest. "open": C_{K+1}, which goes on from C_K with one more logit that is always
0, on real images and on painted ones.

Neal, Olson, Fern, Wong, Li (ECCV 2018). Their codes are 4×4 maps of unit vectors; ours is one
vector on the unit sphere. Their E and D have nine convolutions, ours three. Their critic also sees
the mean of the batch, ours one image at a time. They paint a set of images once; here each batch
has its own. The row `g-openmax` is their variant of G-OpenMax (Ge et al., BMVC 2017), the one that
the published tables measured: no conditional GAN and no Weibull tails, but images of codes between
two training images, kept where the largest softmax probability of C_K is below ½.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import (
    ABOVE_0,
    Batch,
    Encoder,
    Method,
    Optimiser,
    Passes,
    Stage,
    Update,
    check_choices,
    check_numbers,
    check_score,
    check_whole,
    part_of,
    through_head,
)
from deepsimplex.methods.networks import Critic, Generator, check_pictures, steady
from deepsimplex.simplex import wide


@dataclass(frozen=True)
class OSRCISettings:
    """Shares are of the recipe's epochs, or of a batch."""

    unknowns: Literal["counterfactual", "between"] = "counterfactual"
    latent: int = 64
    width: int | None = None  # of E, G and D; None: 64, on small images four a pixel of the side
    gan_epochs: float = 0.5  # theirs: 30, of half the batch, beside the common 100
    gan_rate: float = 2e-4  # of Adam, β₁ ½; theirs: 1e-4
    adversarial: float = 0.01  # weight of real images in D, and of D in G
    penalty: float = 10.0
    open_epochs: float = 0.1  # theirs: 3
    open_rate: float = 5e-5  # of Adam, β₁ 0.9; theirs: 1e-5
    share: float = 0.5  # of a batch, painted anew
    steps: int = 10  # in latent space; theirs: 100
    step_size: float = 0.01  # theirs: 0.1, of the mean over a batch
    distance: float = 1.0  # weight of ‖z − z₀‖²
    attempts: int = 8  # images between two codes, for each that may be kept
    ceiling: float = 0.5  # of the largest probability; an image is kept below it

    def __post_init__(self) -> None:
        check_choices(self)
        check_whole(self, latent=1, width=1, steps=1, attempts=1)
        check_numbers(self, gan_epochs=0, gan_rate=ABOVE_0, adversarial=0, penalty=0, open_epochs=0)
        check_numbers(self, open_rate=ABOVE_0, share=0, step_size=0, distance=0, ceiling=0)
        for name in ("share", "ceiling"):
            if getattr(self, name) > 1:
                raise DeepSimplexError(
                    f"{name} of 1 or less", repr(getattr(self, name)), "lower it"
                )

    def unread(self) -> tuple[str, ...]:
        """Fields that this way to the unknowns does not look at."""
        if self.unknowns == "between":
            return ("steps", "step_size", "distance")
        return ("attempts", "ceiling")


class OSRCI(Method):
    """Logits z (n, K) of C_{K+1}, whose last is 0: P_j = e^{z_j} / (1 + Σe^z), P_{K+1} the rest.

    Scores: `difference` max_j P_j − P_{K+1}, and `energy` logΣe^z, which orders as 1 − P_{K+1}.
    """

    def __init__(self, encoder: Encoder, classes: int, settings: OSRCISettings) -> None:
        super().__init__()
        check_pictures(encoder.shape)
        if settings.unknowns == "between" and 0 < settings.ceiling * classes <= 1:
            raise DeepSimplexError(
                f"more than {1 / settings.ceiling:g} classes: the largest of {classes} "
                f"probabilities is never below {settings.ceiling:g}",
                f"{classes}",
                "choose osrci, or a higher ceiling",
            )
        self.settings = settings
        self.scores = ("difference", "energy")
        self.encoder = encoder
        self.head = nn.Linear(encoder.features, classes)
        self.closed = constant_copy(nn.Sequential(encoder.backbone, self.head))
        width = settings.width or min(64, 4 * min(encoder.shape[1:]))
        self.inverse = Critic(encoder.shape, settings.latent, width)
        self.generator = Generator(settings.latent, encoder.shape, width)
        self.critic = Critic(encoder.shape, 1, width)

    def forward(self, images: Tensor) -> Tensor:
        return through_head(self.head, self.encoder(images))

    def stages(self, epochs: int) -> tuple[Stage, ...]:
        settings = self.settings
        classifier = (*self.encoder.parameters(), *self.head.parameters())
        painters = (*self.inverse.parameters(), *self.generator.parameters())
        adam = Optimiser("adam", settings.gan_rate, momentum=0.5, schedule=steady)
        gan = (
            Update("critic", self.critic_loss, tuple(self.critic.parameters()), adam),
            Update("paint", self.paint_loss, painters, adam),
        )
        fit = Update("fit", self.closed_loss, classifier)
        slow = Optimiser("adam", settings.open_rate)
        # The running statistics of C_K stay: painted images must not shift those of real ones.
        still = (self.closed, self.inverse, self.generator, self.encoder)
        return (
            Stage("gan", gan, part_of(epochs, settings.gan_epochs)),
            Stage("fit", (fit,), epochs, finish=self.keep_closed),
            Stage(
                "open",
                (Update("open", self.open_loss, classifier, slow),),
                part_of(epochs, settings.open_epochs),
                frozen=still,
            ),
        )

    def encode(self, images: Tensor) -> Tensor:
        """E: normalised images → codes on the unit sphere, (n, latent)."""
        return sphere(self.inverse(images))

    def closed_logits(self, images: Tensor) -> Tensor:
        """C_K: normalised images → (n, K), by weights that no optimiser moves."""
        return wide(through_head(self.closed[1], self.closed[0](images)))

    def keep_closed(self, passes: Passes) -> None:
        """The classifier as it now stands becomes C_K."""
        now = nn.Sequential(self.encoder.backbone, self.head)
        self.closed.load_state_dict(now.state_dict())

    def critic_loss(self, batch: Batch) -> Tensor:
        """softplus(D(G(E(x)))) + a·softplus(−D(x)) + penalty·(‖∇D‖ − 1)² between the two.

        The norm is of the whole image's gradient; their code takes it over channels alone. Their
        fakes are of random codes; ours are those that G is trained on, whose running statistics
        G's norms then keep.
        """
        real = self.encoder.normalise(batch.images)
        with torch.no_grad():
            fake = wide(self.generator(self.encode(real)))
        judged = wide(self.critic(torch.cat([fake, real])))[:, 0]
        as_fake, as_real = F.softplus(judged[: len(fake)]), F.softplus(-judged[len(fake) :])
        slope = slope_penalty(self.critic, real, fake)
        known = self.settings.adversarial * as_real.mean()
        return as_fake.mean() + known + self.settings.penalty * slope

    def paint_loss(self, batch: Batch) -> Tensor:
        """mean|x − G(E(x))| − a·mean D(G(E(x)))."""
        real = self.encoder.normalise(batch.images)
        painted = self.generator(self.encode(real))
        fooled = wide(self.critic(painted)).mean()
        return (real - wide(painted)).abs().mean() - self.settings.adversarial * fooled

    def closed_loss(self, batch: Batch) -> Tensor:
        """One against the rest, summed over j; theirs is the mean, the same to their Adam."""
        return one_vs_rest(wide(self(batch.images)), batch.labels)

    def open_loss(self, batch: Batch) -> Tensor:
        """−log P_y on real images, and −log P_{K+1} on the painted ones that are kept."""
        painted, kept = self.paint_unknowns(batch.images)
        real = self.encoder.normalise(batch.images)
        features = self.encoder.backbone(torch.cat([real, painted]))
        logits = wide(through_head(self.head, features))
        return open_cross_entropy(logits, batch.labels, kept)

    @torch.no_grad()
    def paint_unknowns(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images (m, c, h, w) that are to be unknown, and 1 or 0, (m,): keep it?

        Raw images (n, …) in, of which the first share is used: batches come shuffled.
        """
        settings = self.settings
        if settings.share == 0:
            nothing = self.encoder.normalise(images[:0])
            return nothing, nothing.new_zeros(0)
        few = images[: max(1, round(settings.share * len(images)))]
        codes = self.encode(self.encoder.normalise(few))
        if settings.unknowns == "counterfactual":
            numbers = settings.steps, settings.step_size, settings.distance
            codes = counterfactuals(codes, self._code_logits, *numbers)
            return wide(self.generator(codes)), torch.ones_like(codes[:, 0])
        share = codes.new_empty(settings.attempts, len(codes), 1).uniform_()
        painted = wide(self.generator(between(codes, share)))
        top = self.closed_logits(painted).softmax(1).amax(1)
        # Many attempts, few below the ceiling: as many as there are places, those first.
        kept, index = (top < settings.ceiling).float().topk(len(codes))
        return painted[index], kept

    def _code_logits(self, codes: Tensor) -> Tensor:
        return self.closed_logits(self.generator(codes))

    def class_scores(self, outputs: Tensor, score: str) -> Tensor:
        """log (1 + s_j) / (1 − s_j) of s_j = P_j − P_{K+1}, which does not saturate; or z."""
        check_score(self, score)
        return log_odds(outputs.double()) if score == "difference" else outputs

    def knownness(self, outputs: Tensor, score: str) -> Tensor:
        scores = self.class_scores(outputs, score)
        return outputs.double().logsumexp(1) if score == "energy" else scores.amax(1)


def constant_copy(module: nn.Sequential) -> nn.Sequential:
    """A copy whose weights are buffers: in every checkpoint, moved by no optimiser."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, weight.detach())
    return copied


def sphere(codes: Tensor) -> Tensor:
    """codes / ‖codes‖, (n, d), not in half precision."""
    return F.normalize(wide(codes), dim=1)


def slope_penalty(critic: Callable[[Tensor], Tensor], real: Tensor, fake: Tensor) -> Tensor:
    """mean (‖∇D(x)‖ − 1)² at x = u·real + (1 − u)·fake, u ~ U(0, 1) for each image."""
    share = torch.rand_like(real[:, :1, :1, :1])
    middle = (share * real + (1 - share) * fake).detach().requires_grad_()
    (slope,) = torch.autograd.grad(wide(critic(middle)).sum(), middle, create_graph=True)
    length = (wide(slope).flatten(1).square().sum(1) + 1e-12).sqrt()
    return (length - 1).square().mean()


def one_vs_rest(logits: Tensor, labels: Tensor) -> Tensor:
    """mean_i Σ_j softplus(−t_ij z_ij), t = 1 for the own class and −1 else; (n, K), (n,) → ()."""
    own = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)
    return F.softplus(torch.where(own, -logits, logits)).sum(1).mean()


def surprise(logits: Tensor) -> Tensor:
    """−log P_{K+1} = log(1 + Σe^z), (n, K) → (n,)."""
    return F.softplus(logits.logsumexp(1))


def open_cross_entropy(logits: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
    """Cross-entropy over [z, 0]: mean over real images + mean over the unknowns that are kept.

    Logits (n + m, K), the real images first; labels (n,); kept (m,), 1 or 0. With nothing kept
    the second mean is 0.
    """
    known, unknown = logits[: len(labels)], logits[len(labels) :]
    rejected = (kept * surprise(unknown)).sum() / kept.sum().clamp_min(1)
    return F.cross_entropy(F.pad(known, (0, 1)), labels) + rejected


def counterfactuals(
    codes: Tensor,
    logits: Callable[[Tensor], Tensor],
    steps: int,
    size: float,
    distance: float,
) -> Tensor:
    """Codes near the given ones that the classifier holds for none of its classes, (n, d).

    z ← Π(z − size·∇(−log P_{K+1}(z) + distance·‖z − z₀‖²)) from z₀ = codes, Π the projection to
    the unit sphere; `logits` maps codes to (n, K).
    """
    z = codes.detach()
    for _ in range(steps):
        with torch.enable_grad():
            z.requires_grad_()
            away = (z - codes).square().sum(1)
            (slope,) = torch.autograd.grad((surprise(logits(z)) + distance * away).sum(), z)
        z = sphere((z - size * slope).detach())
    return z


def between(codes: Tensor, share: Tensor) -> Tensor:
    """θz₀ + (1 − θ)z₁, back on the sphere: codes (n, d), θ = share (t, n, 1) → (t·n, d).

    z₁ is the code one, two, … t places before.
    """
    others = torch.stack([codes.roll(by + 1, 0) for by in range(len(share))])
    return sphere((share * codes + (1 - share) * others).flatten(0, 1))


def log_odds(logits: Tensor) -> Tensor:
    """log (1 + s_j) / (1 − s_j), s_j = P_j − P_{K+1} over [z, 0]; (n, K) → (n, K).

    = log(Σe^z + e^{z_j}) − log(2 + Σ_{i≠j} e^{z_i}). Of the largest z the sum without it is taken
    anew; of the others e^{z_j} is at most half of Σe^z, and subtracting it loses nothing.
    """
    every = logits.logsumexp(1, keepdim=True)
    top = logits.argmax(1, keepdim=True)
    rest = every + torch.log1p(-torch.exp(logits - every).clamp_max(0.75))
    without = logits.scatter(1, top, -math.inf).logsumexp(1, keepdim=True)
    rest = rest.scatter(1, top, without)
    return torch.logaddexp(every, logits) - torch.logaddexp(rest, rest.new_tensor(math.log(2)))
