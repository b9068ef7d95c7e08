"""deepsimplex: an image classifier that knows when it does not know.

Class centres are fixed at the vertices of a regular simplex; a network sends each class to
its vertex; what lands far from every vertex is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepsimplex.errors import DeepSimplexError
    from deepsimplex.estimator import OpenSetClassifier
    from deepsimplex.simplex import Simplex

__version__ = "0.1.0"
__all__ = ["DeepSimplexError", "OpenSetClassifier", "Simplex", "__version__"]

# Resolved on first use, so that `deepsimplex --help` need not import torch.
_HOMES = {"DeepSimplexError": "errors", "OpenSetClassifier": "estimator", "Simplex": "simplex"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deepsimplex' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"deepsimplex.{_HOMES[name]}"), name)
