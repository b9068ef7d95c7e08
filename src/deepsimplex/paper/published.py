"""The numbers that the paper and its rivals print, in %; each with where it stands.

Rows of the open-set tables were copied by the paper from other papers, with other backbones,
splits and data: they are shown, not compared against. Its own row uses a background set and,
by its code, the epoch that is best on the test set.
"""

from __future__ import annotations

from collections.abc import Collection

COLUMNS = ("mnist", "cifar10", "svhn", "cifar+10", "cifar+50", "tinyimagenet")

# Table 1: mean and sd over five trials; None where not reported.
Cell = tuple[float, float | None] | None
AUROC: dict[str, tuple[Cell, ...]] = {
    "DSC": ((99.6, 0.1), (93.8, 0.3), (95.3, 0.8), (99.1, 0.2), (98.4, 0.3), (82.5, 1.8)),
    "Softmax": ((97.8, 0.2), (67.7, 3.2), (88.6, 0.6), (81.6, None), (80.5, None), (57.7, None)),
    "OpenMax": ((98.1, 0.2), (69.5, 3.2), (89.4, 0.8), (81.7, None), (79.6, None), (57.6, None)),
    "G-OpenMax": ((98.4, 0.1), (67.5, 3.5), (89.6, 0.6), (82.7, None), (81.9, None), (58.0, None)),
    "C2AE": ((98.9, 0.2), (89.5, 0.9), (92.2, 0.9), (95.5, 0.6), (93.7, 0.4), (74.8, 0.5)),
    "CAC": ((99.1, 0.5), (80.1, 3.0), (94.1, 0.7), (87.7, 1.2), (87.0, 0.0), (76.0, 1.5)),
    "CPN": ((99.0, 0.2), (82.8, 2.1), (92.6, 0.6), (88.1, None), (87.9, None), (63.9, None)),
    "OSRCI": ((98.8, 0.1), (69.9, 2.9), (91.0, 0.6), (83.8, None), (82.7, None), (58.6, None)),
    "CROSR": ((99.1, None), (88.3, None), (89.9, None), (91.2, None), (90.5, None), (58.9, None)),
    "RPL": ((98.9, 0.1), (82.7, 1.4), (93.4, 0.5), (84.2, 1.0), (83.2, 0.7), (68.8, 1.4)),
    "GDFR": (None, (83.1, 3.9), (95.5, 1.8), (92.8, 0.2), (92.6, 0.0), (64.7, 1.2)),
    "Objectosphere": (
        None, (94.2, None), (91.4, None), (94.5, None), (94.4, None), (75.5, None),
    ),
    "ARPL": ((99.6, 0.1), (90.1, 0.5), (96.3, 0.3), (96.5, 0.6), (94.3, 0.4), (76.2, 0.5)),
    "ARPL+CS": ((99.7, 0.1), (91.0, 0.7), (96.7, 0.2), (97.1, 0.3), (95.1, 0.2), (78.2, 1.3)),
    "Energy": (None, (93.3, None), (89.4, None), (93.6, None), (93.7, None), (72.7, None)),
}  # fmt: skip

WITH_BACKGROUND = ("DSC", "Objectosphere", "Energy")
UNPRINTED = {
    "ARPL": "its own paper's (Chen et al. 2021), from memory [K]; no row of the paper's table",
    "ARPL+CS": "its own paper's (Chen et al. 2021), from memory [K]; no row of the paper's table",
    "Energy": "commented out in the source of the paper's table, so never printed",
}

# Best published without background on ARPL's splits, with its source.
BEST_WITHOUT_BACKGROUND = {
    "mnist": (99.7, "ARPL+CS, 2021"),
    "cifar10": (94.5, "SpHOR, 2026"),
    "cifar+10": (98.2, "SpHOR, 2026"),
    "cifar+50": (97.3, "ConOSR, 2023"),
}

# Closed-set accuracies of the open-set methods (appendix).
ACCURACY: dict[str, tuple[Cell, ...]] = {
    "DSC": ((99.8, 0.1), (96.1, 1.4), (96.5, 0.3), (97.6, 0.5), (97.9, 0.5), (83.3, 2.2)),
    "Softmax": ((99.5, 0.2), (80.1, 3.2), (94.7, 0.6), None, None, None),
    "OpenMax": ((99.5, 0.2), (80.1, 3.2), (94.7, 0.6), None, None, None),
    "G-OpenMax": ((99.6, 0.1), (81.6, 3.5), (94.8, 0.8), None, None, None),
    "CPN": ((99.7, 0.1), (92.9, 1.2), (96.7, 0.4), None, None, None),
    "OSRCI": ((99.6, 0.1), (82.1, 2.9), (95.1, 0.6), None, None, None),
    "CROSR": ((99.2, 0.1), (93.0, 2.5), (94.5, 0.5), None, None, None),
}

# Table 2: closed set, ResNet-18.
CLOSED = {
    "DSC": {"mnist": 99.7, "cifar10": 95.9, "cifar100": 79.5},
    "Softmax": {"mnist": 99.4, "cifar10": 94.4, "cifar100": 75.3},
    "Center loss": {"mnist": 99.7, "cifar10": 94.2, "cifar100": 76.1},
    "ArcFace": {"mnist": 99.7, "cifar10": 94.8, "cifar100": 75.7},
    "CosFace": {"mnist": 99.7, "cifar10": 95.0, "cifar100": 75.8},
    "SphereFace": {"mnist": 99.7, "cifar10": 94.7, "cifar100": 75.1},
}


def answer(printed: dict[str, tuple[Cell, ...]], row: str | None, column: str, track: str) -> Cell:
    """The published cell of a row, in a column, if it stands in the same track."""
    same = (row in WITH_BACKGROUND) == (track != "none")
    if row is None or row not in printed or column not in COLUMNS or not same:
        return None
    return printed[row][COLUMNS.index(column)]


def unprinted(rows: Collection[str | None]) -> list[str]:
    """Where the numbers of those rows stand that the paper's table does not have."""
    return [f"{row}: {why}." for row, why in UNPRINTED.items() if row in rows]


def cell(value: Cell) -> str:
    if value is None:
        return "–"
    mean, sd = value
    return f"{mean:.1f}" if sd is None else f"{mean:.1f} ± {sd:.1f}"
