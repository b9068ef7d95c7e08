"""METHODS is the only table that knows every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepsimplex.methods.arpl_cs import ARPLCS, ARPLCSSettings
from deepsimplex.methods.background import (
    BackgroundClass,
    BackgroundClassSettings,
    EnergySettings,
    EnergyTuned,
    Entropic,
    EntropicSettings,
)
from deepsimplex.methods.base import Encoder, Method
from deepsimplex.methods.basis import Basis, BasisSettings
from deepsimplex.methods.c2ae import C2AE, C2AESettings
from deepsimplex.methods.centres import Centred, CentreSettings
from deepsimplex.methods.crosr import CROSR, CROSRSettings
from deepsimplex.methods.dsc import DSC, DSCSettings
from deepsimplex.methods.gdfr import GDFR, GDFRSettings
from deepsimplex.methods.margins import (
    Margin,
    MarginSettings,
    Sphere,
    SphereSettings,
    Spread,
    SpreadSettings,
)
from deepsimplex.methods.openmax import OpenMax, OpenMaxSettings
from deepsimplex.methods.osrci import OSRCI, OSRCISettings
from deepsimplex.methods.pairs import (
    MarginalSettings,
    Pairs,
    PairSettings,
    RangeSettings,
    WithPairs,
)
from deepsimplex.methods.prototypes import (
    CAC,
    GCPL,
    CACSettings,
    GCPLSettings,
    Reciprocal,
    ReciprocalSettings,
)
from deepsimplex.methods.softmax import Softmax, SoftmaxSettings
from deepsimplex.methods.turned import Turned


@dataclass(frozen=True)
class Row:
    """A method's constructor, the settings that make it this row, and what a reader asks of it."""

    build: Callable[[Encoder, int, Any], Method]
    settings: Any
    about: str
    uses_background: bool = False
    needs_background: bool = False
    family: str = "simplex"
    cite: str = "Cevikalp, Saribas 2022"
    defaults: str = "docs/decisions/0012"  # where the settings come from
    rate: float | None = None  # its learning rate, whatever the net; None is the recipe's
    channels: int = 1  # what its backbone sees, in channels of the image
    pictures: bool = False  # turns or paints images: no feature vectors, no frozen backbone
    flat: bool = False  # on the benchmarks it wants the last map, not its mean


_shown = partial(Row, uses_background=True, needs_background=True, family="background")

METHODS: dict[str, Row] = {
    "dsc": Row(DSC, DSCSettings(), "squared distance to the class's vertex (eq. 4)", True),
    **{
        f"dsc-eq5-{reading.lower()}": Row(
            DSC,
            DSCSettings(background=f"hinge-{reading}", margin=margin),  # type: ignore[arg-type]
            f"eq. 5, its hinge in reading {reading} (docs/decisions/0006)",
            uses_background=True,
            needs_background=True,
            defaults="the paper's m = u/2 and u = 64, at unit radius"
            + ("; its pairs weigh what they would at u = 1" if reading == "C" else ""),
        )
        for reading, margin in (("A", 1 / 128), ("B", 0.5), ("C", 0.5))  # m/u² or m/u
    },
    "dsc-hinge": Row(
        DSC,
        DSCSettings(loss="hinge", margin=0.01),
        "eq. 4 outside a ball (eq. 6)",
        True,
        defaults="the margin is ours: a ball of a tenth of the radius, squared",
    ),
    "dsc-softmax": Row(
        DSC, DSCSettings(loss="softmax"), "softmax with the vertices as fixed weights (eq. 7)", True
    ),
    "dsc-blend": Row(
        DSC,
        DSCSettings(loss="blend"),
        "eq. 7 + eq. 4",
        True,
        cite="of Cevikalp, Saribas 2022; the sum is ours",
    ),
    "dsc-turned": Row(
        Turned,
        DSCSettings(loss="softmax"),
        "eq. 7 over classes × four turns of the image",
        True,
        cite="after Lee, Hwang, Shin 2020",
        pictures=True,
    ),
    "dsc-literal": Row(
        DSC,
        DSCSettings(loss="literal"),
        "eq. 4 as printed, at radius u; may diverge",
        defaults="the paper's u = 64",
    ),
    "dsc-authors": Row(
        DSC,
        DSCSettings(
            loss="authors", margin=48 / 200**2, radius=200.0, head="none", simplex="truncated"
        ),
        "the authors' code: three terms on pooled features, first C of d+1 vertices",
        True,
        defaults="their script with background, u = 200; without, less its third term",
    ),
    # Open set, softmax and background
    "softmax": Row(
        Softmax,
        SoftmaxSettings(),
        "cross-entropy with a learned linear head",
        family="softmax",
        cite="Hendrycks, Gimpel 2017; Vaze et al. 2022",
        defaults="nothing to choose",
    ),
    "entropic": _shown(
        Entropic,
        EntropicSettings(),
        "softmax; background to the uniform distribution",
        cite="Dhamija, Günther, Boult 2018",
        defaults="the authors' code, but SGD",
    ),
    "objectosphere": _shown(
        Entropic,
        EntropicSettings(ring=1e-4),
        "entropic; known features long, background's short",
        cite="Dhamija, Günther, Boult 2018",
        defaults="the authors' code for 2-D features, not validated for longer ones; SGD",
    ),
    "oe": _shown(
        Entropic,
        EntropicSettings(background_weight=0.5, bias=True),
        "outlier exposure: entropic with bias and weight 0.5, from scratch",
        cite="Hendrycks, Mazeika, Dietterich 2019",
        defaults="the authors' weight",
    ),
    "energy": _shown(
        EnergyTuned,
        EnergySettings(),
        "softmax, then fine-tuned by hinges on the energy of known and background",
        cite="Liu, Wang, Owens, Li 2020",
        defaults="the authors' code for CIFAR-10",
    ),
    "background-class": _shown(
        BackgroundClass,
        BackgroundClassSettings(),
        "cross-entropy with the background as one class more",
        cite="the control",
        defaults="the background weighs as much as a class",
    ),
    "openmax": Row(
        OpenMax,
        OpenMaxSettings(),
        "softmax whose logits yield to an unknown class in a Weibull tail around class means",
        family="softmax",
        cite="Bendale, Boult 2016",
        defaults="OSDN; the distance from Neal et al. 2018",
    ),
    # Open set, prototypes
    "cac": Row(
        CAC,
        CACSettings(),
        "logits drawn to fixed anchors α·e_j",
        family="prototypes",
        cite="Miller et al. 2021",
        defaults="the authors' code",
    ),
    "gcpl": Row(
        GCPL,
        GCPLSettings(),
        "learned prototypes; distances divided by d (CPN)",
        family="prototypes",
        cite="Yang et al. 2018, 2022",
        defaults="ARPL's re-run; distances divided by d, so a larger rate",
        rate=1.0,
    ),
    "rpl": Row(
        Reciprocal,
        ReciprocalSettings(loss="rpl"),
        "learned points of what a class is not",
        family="prototypes",
        cite="Chen et al. 2020",
        defaults="the authors' code, in ARPL; distances divided by d, so a larger rate",
        rate=1.0,
    ),
    "arpl": Row(
        Reciprocal,
        ReciprocalSettings(loss="arpl"),
        "adversarial reciprocal points, without confusing samples",
        family="prototypes",
        cite="Chen et al. 2021",
        defaults="the authors' code",
    ),
    "arpl-cs": Row(
        ARPLCS,
        ARPLCSSettings(),
        "arpl with confusing samples painted by a GAN",
        family="prototypes",
        cite="Chen et al. 2021",
        defaults="the authors' code; GAN of methods/networks.py",
        pictures=True,
    ),
    # Open set, generated and reconstructed images
    "c2ae": Row(
        C2AE,
        C2AESettings(),
        "error of a decoder that is told the class",
        family="reconstruction",
        cite="Oza, Patel 2019",
        defaults="from memory; rate 1e-3 for 3e-4, ours",
        pictures=True,
        flat=True,
    ),
    "crosr": Row(
        CROSR,
        CROSRSettings(),
        "OpenMax on logits and the bottleneck of a reconstruction; one level",
        family="reconstruction",
        cite="Yoshihashi et al. 2019",
        defaults="the paper; tail and α of saketd403/CROSR",
        pictures=True,
    ),
    "gdfr": Row(
        GDFR,
        GDFRSettings(),
        "softmax on image and reconstruction, beside a head that tells turns",
        family="reconstruction",
        cite="Perera et al. 2020",
        defaults="the paper, from memory; the auto-encoder is ours",
        channels=2,
        pictures=True,
    ),
    "osrci": Row(
        OSRCI,
        OSRCISettings(),
        "one more class, learned from counterfactual images a GAN paints",
        family="generated",
        cite="Neal et al. 2018",
        defaults="the authors' code; latent steps, epochs, rates and GAN ours",
        pictures=True,
    ),
    "g-openmax": Row(
        OSRCI,
        OSRCISettings(unknowns="between"),
        "Neal's variant: images between two codes, kept where max softmax < 0.5, as one more class",
        family="generated",
        cite="Ge et al. 2017, as measured by Neal et al. 2018",
        defaults="Neal's code; as osrci",
        pictures=True,
    ),
    # Closed set: centres and margins
    "center": Row(
        Centred,
        CentreSettings(),
        "cross-entropy, and features drawn to running class centres",
        family="centres",
        cite="Wen et al. 2016",
        defaults="the paper: α = 0.5, λ = 0.1 from the middle of its MNIST figure",
    ),
    "contrastive-center": Row(
        Centred,
        CentreSettings(term="contrastive", weight=1.0),
        "cross-entropy, and distance to the own centre over that to the others",
        family="centres",
        cite="Qi, Su 2017",
        defaults="the paper, from memory, but a mean over the batch; centres by Wen et al.'s rule",
    ),
    "sphereface": Row(
        Sphere,
        SphereSettings(),
        "A-softmax: the angle to the class's weight, times four",
        family="margins",
        cite="Liu et al. 2017",
        defaults="the authors' training script",
    ),
    "cosface": Row(
        Margin,
        MarginSettings(),
        "softmax of cosines, less a margin for the own class",
        family="margins",
        cite="Wang et al. 2018",
        defaults="the paper's margin; scale 16, by its bound enough for 300 classes",
    ),
    "arcface": Row(
        Margin,
        MarginSettings(kind="angle", margin=0.5),
        "softmax of cosines, the angle to the own class widened by a margin",
        family="margins",
        cite="Deng et al. 2019",
        defaults="the paper's margin; scale 16, by CosFace's bound enough for 300 classes",
    ),
    "regularface": Row(
        Spread,
        SpreadSettings(regular=1.0),
        "cross-entropy, and class weights pushed from their nearest neighbour",
        family="margins",
        cite="Zhao, Xu, Cheng 2019",
        defaults="λ near 10, from memory; 1 already reaches the least cosine on digits",
    ),
    "mhe": Row(
        Spread,
        SpreadSettings(output=10.0, hidden=1.0),
        "cross-entropy, and the energy of all layers' weights as charges on a sphere",
        family="margins",
        cite="Liu et al. 2018",
        defaults="the authors' code: weights 1 and 10, 1/r², half-space below the head",
    ),
    "uniformface": Row(
        Sphere,
        SphereSettings(uniform=1.0),
        "A-softmax, and running class centres pushed apart",
        family="margins",
        cite="Duan, Lu, Zhou 2019",
        defaults="the paper, from memory; A-softmax as in sphereface",
    ),
    # Closed set: pairs and triplets
    "contrastive": Row(
        Pairs,
        PairSettings("contrastive", margin=1.0),
        "pairs of a class pulled together, others pushed past a margin; nearest class mean",
        family="pairs",
        cite="Hadsell, Chopra, LeCun 2006",
        defaults="margin 1 at unit length",
    ),
    "triplet": Row(
        Pairs,
        PairSettings("hard", margin=0.5),
        "farthest of the class against nearest of another; nearest class mean",
        family="pairs",
        cite="Hermans, Beyer, Leibe 2017",
        defaults="margin 0.5: a fresh net meets 0.2 on easy images",
    ),
    "triplet-semihard": Row(
        Pairs,
        PairSettings("semihard", margin=0.2),
        "triplets whose negative is a little farther than the positive; nearest class mean",
        family="pairs",
        cite="Schroff, Kalenichenko, Philbin 2015",
        defaults="its paper's margin",
    ),
    "marginal": Row(
        WithPairs,
        MarginalSettings(),
        "cross-entropy and a hinge on squared distances of unit features",
        family="pairs",
        cite="Deng, Zhou, Zafeiriou 2017",
        defaults="its paper's, from memory",
    ),
    "range": Row(
        WithPairs,
        RangeSettings(),
        "cross-entropy, widest ranges in a class and nearest class means",
        family="pairs",
        cite="Zhang et al. 2017",
        defaults="its paper's, from memory, in units of its margin; α ours",
    ),
    "basis": Row(
        Basis,
        BasisSettings(),
        "distances of unit features to the basis vectors of R^C",
        family="pairs",
        cite="Do et al. 2019",
        defaults="its paper's, from memory",
    ),
}
