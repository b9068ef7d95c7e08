"""The errors of the package, one base: what was expected, what came, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DeepSimplexError(ValueError):
    """One line a person can act on.

    >>> print(DeepSimplexError("2 or more classes", "1", "add a second class"))
    expected 2 or more classes; got 1; add a second class
    """

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        super().__init__(expected, got, remedy)
        self.expected = expected
        self.got = got
        self.remedy = remedy

    def __str__(self) -> str:
        return f"expected {self.expected}; got {self.got}; {self.remedy}"


class ModelFileError(DeepSimplexError):
    """A model file that is truncated, altered, of another version, or not ours."""


class MissingExtraError(DeepSimplexError):
    """What was asked for needs an optional library that does not import here."""


class RunError(DeepSimplexError):
    """A run folder that cannot be used: locked by another process, or of another recipe."""


class NonFiniteLossError(DeepSimplexError):
    """Training left the finite numbers; the message names the step."""


class Stopped(Exception):
    """Training was asked to stop by a signal; its checkpoint is written."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def meant(name: str, among: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """A remedy for a misspelt name: the one that was meant, or else what to do."""
    close = difflib.get_close_matches(name, [*among], n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else otherwise
