"""Options that several commands share: type, limits, help; and what their words mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Data = Annotated[str, typer.Argument(help="'digits', a .npz file, or a folder of class folders.")]
ModelPath = Annotated[Path, typer.Argument(help="A model file, or the folder of a run.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Size = Annotated[
    int | None,
    typer.Option(
        min=8,
        max=1024,
        help="Side to scale images to; if not given their own, from 8 to 64 and of all, else 28.",
    ),
]
OnBad = Annotated[str, typer.Option(help="Unreadable images: fail or skip.")]
Method = Annotated[str, typer.Option(help="auto, or one of `deepsimplex methods`.")]
Net = Annotated[str, typer.Option(help="auto picks by image size.")]
Known = Annotated[str | None, typer.Option(help="Train these classes only, e.g. 'cat,dog'.")]
Keep = Annotated[float, typer.Option(help="Share of new knowns to keep.")]
Freeze = Annotated[
    bool, typer.Option("--freeze", help="Train the head only, on features computed once.")
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the method, e.g. loss=softmax; repeatable."),
]
BatchSize = Annotated[int | None, typer.Option(min=2)]
Rate = Annotated[float | None, typer.Option(min=0)]
Augment = Annotated[str | None, typer.Option(help="none, crop, flip, crop+flip, rand+…")]
Shift = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Score the mean output of an image and of it moved by so many pixels in 8 directions; "
        "0: of itself. If not given, 2 from 29 to 64 pixels, else 0.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1)]
Weights = Annotated[Path | None, typer.Option(help="Pretrained backbone weights, a local file.")]
Score = Annotated[
    str | None,
    typer.Option(
        help="Knownness score: the method's default, another of its own, or a detector fitted "
        "after training: nearest, joined, energy; with the extra 'ood' knn, vim, odin, react …"
    ),
]


def names(text: str | None) -> list[str] | None:
    """Names with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def changes(
    backbone: str,
    epochs: int | None,
    batch_size: int | None,
    learning_rate: float | None,
    augment: str | None,
    shift: int | None,
) -> dict[str, Any]:
    """What is asked otherwise than the recipe has it; None is as it has it."""
    asked = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    net = None if backbone == "auto" else backbone
    return {"backbone": net, **asked, "augment": augment, "shift": shift}


def settings(pairs: list[str] | None) -> dict[str, Any]:
    """name=value pairs; a value is a number, or true or false, where it reads as one."""
    words = {"true": True, "false": False}
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set takes name=value, not {pair!r}")
        try:
            found[name] = int(text) if text.lstrip("-").isdigit() else float(text)
        except ValueError:
            found[name] = words.get(text.lower(), text)
    return found
