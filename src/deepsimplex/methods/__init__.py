"""Methods by name: their rows, their settings, and fresh ones."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from deepsimplex.backbones import build_backbone
from deepsimplex.errors import DeepSimplexError, meant
from deepsimplex.methods.base import Choosy, Encoder, Method
from deepsimplex.methods.rows import METHODS, Row

__all__ = ["METHODS", "Row", "build_method", "method_row", "settings_for", "settings_kept"]


def method_row(name: str) -> Row:
    if name in METHODS:
        return METHODS[name]
    remedy = meant(name, METHODS, f"choose one of {', '.join(METHODS)}")
    raise DeepSimplexError("a method that `deepsimplex methods` lists", repr(name), remedy)


def settings_for(name: str, changes: dict[str, Any] | None = None) -> Any:
    """The row's settings with some fields changed; unknown and unread ones are refused."""
    given, row = changes or {}, method_row(name)
    settings = settings_kept(name, given)
    idle = set(settings.unread()) if isinstance(settings, Choosy) else set()
    if not row.uses_background:
        idle |= {key for key in given if key.startswith("background")}
    for key in given:
        if key in idle and given[key] != getattr(row.settings, key):
            raise DeepSimplexError(
                f"settings that {name!r}, as it is set, reads",
                f"{key} = {given[key]!r}, which it does not",
                "leave it out, or change those that it depends on",
            )
    return settings


def settings_kept(name: str, record: dict[str, Any]) -> Any:
    """The same from a file, which also has what its loss does not read."""
    settings = method_row(name).settings
    known = [field.name for field in fields(settings)]
    for key in record:
        if key not in known:
            raise DeepSimplexError(
                f"settings of {name!r} among {', '.join(known)}", repr(key), "remove it"
            )
    return replace(settings, **record)


def build_method(
    name: str, backbone: str, shape: tuple[int, ...], classes: int, settings: Any = None
) -> Method:
    """A fresh method; shape is (c, h, w) of an image or (p,) of a feature vector."""
    row = method_row(name)
    if classes < 2:
        raise DeepSimplexError("at least 2 classes", f"{classes}", "add a second class")
    seen = shape if row.channels == 1 else (row.channels * shape[0], *shape[1:])
    net = build_backbone(backbone, seen)
    encoder = Encoder(net, net.features, shape)
    return row.build(encoder, classes, row.settings if settings is None else settings)
