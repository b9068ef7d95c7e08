"""METHODS is the only table that knows every method."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from deepsimplex.backbones import build_backbone
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods.base import Encoder, Method
from deepsimplex.methods.dsc import DSC, DSCSettings
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
    defaults: str = "docs/decisions"  # where the settings come from
    rate: float = 1.0  # its learning rate, in those of softmax


METHODS: dict[str, Row] = {
    "dsc": Row(DSC, DSCSettings(), "squared distance to the class's vertex (eq. 4)", True),
    **{
        f"dsc-eq5-{reading.lower()}": Row(
            DSC,
            DSCSettings(background=f"hinge-{reading}", margin=margin),  # type: ignore[arg-type]
            f"eq. 5, its hinge in reading {reading} (docs/decisions/0006)",
            uses_background=True,
            needs_background=True,
        )
        for reading, margin in (("A", 0.5), ("B", 0.5), ("C", 0.5))
    },
    "dsc-hinge": Row(
        DSC, DSCSettings(loss="hinge", margin=0.01), "eq. 4 outside a ball (eq. 6)", True
    ),
    "dsc-softmax": Row(
        DSC, DSCSettings(loss="softmax"), "softmax with the vertices as fixed weights (eq. 7)", True
    ),
    "dsc-blend": Row(DSC, DSCSettings(loss="blend"), "eq. 7 with a share of eq. 4", True),
    "dsc-turned": Row(
        Turned, DSCSettings(loss="softmax"), "eq. 7 over classes × four turns of the image", True
    ),
    "dsc-literal": Row(
        DSC, DSCSettings(loss="literal"), "eq. 4 as printed, at radius u; may diverge"
    ),
    "dsc-authors": Row(
        DSC,
        DSCSettings(loss="authors", margin=48 / 200**2, head="none", simplex="truncated"),
        "the authors' code: three terms on pooled features, first C of d+1 vertices",
        True,
        defaults="their script; terms divided by 2d, so a larger rate",
        rate=30.0,
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
    # Open set, prototypes
    # Open set, generated and reconstructed images
    # Closed set: centres and margins
    # Closed set: pairs and triplets
}


def method_row(name: str) -> Row:
    if name in METHODS:
        return METHODS[name]
    close = difflib.get_close_matches(name, METHODS, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else "choose one of them"
    raise DeepSimplexError(f"a method among {', '.join(METHODS)}", repr(name), remedy)


def settings_for(name: str, changes: dict[str, Any] | None = None) -> Any:
    """The row's settings with some fields changed; unknown fields are refused."""
    settings = method_row(name).settings
    known = [field.name for field in fields(settings)]
    for key in changes or {}:
        if key not in known:
            raise DeepSimplexError(
                f"settings of {name!r} among {', '.join(known)}", repr(key), "remove it"
            )
    return replace(settings, **(changes or {}))


def build_method(
    name: str, backbone: str, shape: tuple[int, ...], classes: int, settings: Any = None
) -> Method:
    """A fresh method; shape is (c, h, w) of an image or (p,) of a feature vector."""
    row = method_row(name)
    if classes < 2:
        raise DeepSimplexError("at least 2 classes", f"{classes}", "add a second class")
    net = build_backbone(backbone, shape)
    encoder = Encoder(net, net.features, shape)
    return row.build(encoder, classes, row.settings if settings is None else settings)
