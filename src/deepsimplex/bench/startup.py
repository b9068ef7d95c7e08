"""How long a person waits before anything happens: wall time over that of a bare interpreter.

Half a minute. `import torch` is there because every command that computes pays it; --help and
--version must not.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepsimplex.bench import records
from deepsimplex.bench.timing import check_repeats, interleaved
from deepsimplex.terminal import table

BARE = "python -c pass"
STARTS = {
    BARE: ("-c", "pass"),
    "import deepsimplex": ("-c", "import deepsimplex"),
    "deepsimplex --version": ("-m", "deepsimplex.cli", "--version"),
    "deepsimplex --help": ("-m", "deepsimplex.cli", "--help"),
    "import torch": ("-c", "import torch"),
    "import OpenSetClassifier": ("-c", "from deepsimplex import OpenSetClassifier"),
}
QUICK = tuple(STARTS)[:4]


def startup(repeats: int = 7, out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Print the table, write the record."""
    check_repeats(repeats)
    names = QUICK if quick else tuple(STARTS)
    calls = {name: functools.partial(start, STARTS[name]) for name in names}
    found = interleaved(dict(calls), repeats)
    rows = [records.row(found[name], found[BARE], variant=name) for name in names]
    table(
        f"Start-up: wall time, and time over `{BARE}`",
        ("", "time", "ratio"),
        [
            (row["variant"], records.seconds_cell(row), records.ratio_cell(row["ratio"]))
            for row in rows
        ],
    )
    return records.finish(
        "startup",
        f"wall time of a fresh process / that of {BARE}; files in the disk cache",
        rows,
        {"repeats": repeats, "quick": quick},
        out,
        seed=None,
        repeats=repeats,
    )


def start(words: tuple[str, ...]) -> None:
    """One fresh interpreter, to its end."""
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
