"""What a run was asked for, and whether another asks for the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from deepsimplex.data.augment import Views
from deepsimplex.recipes import Recipe

AFTER_TRAINING = ("trial", "source", "test", "score", "guarantee", "by", "radius")
"""What a run was asked for that its weights do not depend on."""
VIEWS = tuple(field.name for field in dataclasses.fields(Views))
"""The same of its recipe."""


def completed(record: Any) -> Any:
    """What a run was asked for, with the recipe's fields that came after it at their defaults."""
    try:
        recipe = Recipe.from_json(record["recipe"]).to_json()
    except (ValueError, LookupError, TypeError):  # no recipe of this version: told as it is
        return record
    return record | {"recipe": json.loads(json.dumps(recipe))}


def unlike(folder: Path, asked: dict[str, Any]) -> str | None:
    """Why the run in `folder` has not trained what another is `asked` for; None if it has."""
    try:
        here = completed(json.loads((folder / "recipe.json").read_text()))
        told, wanted = (_trained(record) for record in (here, asked))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "no run"
    different = differences(told, wanted)
    if different:
        return f"one with a different {', '.join(different)}"
    return None if (folder / "results.json").exists() else "one that is not finished"


def _trained(record: dict[str, Any]) -> dict[str, Any]:
    data = {key: value for key, value in record["data"].items() if key not in AFTER_TRAINING}
    # Whether images are held out counts, not what is promised of them.
    held = data.get("keep") is not None
    recipe = {key: value for key, value in record["recipe"].items() if key not in VIEWS}
    return {"recipe": recipe, "data": data | {"keep": held}}


def differences(here: Any, asked: Any, name: str = "") -> list[str]:
    """Dotted names of the fields in which two JSON records differ, with both values."""
    if isinstance(here, dict) and isinstance(asked, dict):
        found = []
        for key in sorted({*here, *asked}):
            inner = f"{name}.{key}" if name else key
            found += differences(here.get(key), asked.get(key), inner)
        return found
    if here == asked:
        return []
    return [SPOKEN.get(name) or f"{name} ({_value(here)} there, {_value(asked)} asked)"]


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}…"


SPOKEN = {
    "data.fingerprint": "set of images or labels",
    "data.training": "set of training images",
    "data.test": "set of test images",
    "data.weights": "file of weights",
}
"""What fields that hold a hash stand for."""
