"""The order of the house: a module imports only from modules above it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "deepsimplex"

# From the top down. A line may import only from lines above it.
HOUSE = [
    "errors",
    "simplex",
    "metrics",
    "calibration",
    "heads",
    "kernels.norm",
    "kernels.images",
    "kernels.descent",
    "kernels.loss",
    "kernels",
    "layers",
    "losses",
    "resnet",
    "backbones",
    "data.pictures",
    "data.folders",
    "data.cache",
    "data.sources",
    "data.check",
    "data.packed",
    "data.archives",
    "data.download",
    "data.resize",
    "data.background",
    "data.protocols",
    "data.randaugment",
    "data.augment",
    "data.drawings",
    "methods.base",
    "methods.means",
    "methods.networks",
    "methods.dsc",
    "methods.turned",
    "methods.softmax",
    "methods.osrci",
    "methods.centres",
    "methods.margins",
    "methods.pairs",
    "methods.basis",
    "methods.prototypes",
    "methods.arpl_cs",
    "methods.background",
    "methods.weibull",
    "methods.openmax",
    "methods.c2ae",
    "methods.crosr",
    "methods.gdfr",
    "methods.rows",
    "methods",
    "inference",
    "recipes",
    "asked",
    "batches",
    "lanes",
    "optimisers",
    "engine",
    "runs",
    "frozen",
    "detector_table",
    "detectors",
    "model",
    "fitting",
    "estimator",
    "tables",
    "compare",
    "terminal",
    "own",
    "answers",
    "commands",
    "demo",
    "catalogue",
    "research",
    "estimate",
    "paper",
    "paper.studies",
    "paper.requests",
    "paper.published",
    "paper.opensets",
    "paper.charts",
    "paper.table1",
    "paper.rivals",
    "paper.closedset",
    "paper.equidistant",
    "paper.radius",
    "paper.dam",
    "paper.panels",
    "paper.drawings",
    "paper.semantic",
    "paper.claims",
    "paper.readme",
    "paper.commands",
    "bench",
    "bench.memory",
    "bench.timing",
    "bench.records",
    "bench.losses",
    "bench.scores",
    "bench.aurocs",
    "bench.startup",
    "bench.training",
    "bench.commands",
    "options",
    "cli",
]


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def home(name):
    """The house line that an imported dotted name belongs to, or None if it is not ours."""
    parts = name.split(".")
    if parts[0] != "deepsimplex":
        return None
    for length in (3, 2):
        line = ".".join(parts[1:length])
        if line in HOUSE:
            return line
    return None


def test_every_module_has_its_place():
    names = {name for name, _ in modules()} - {"__init__", "data"}
    assert names == set(HOUSE)


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_come_from_above(name, path):
    if name in ("__init__", "data"):
        return
    place = HOUSE.index(name)
    for target in imported(path):
        line = home(target)
        if line is not None and line != name:
            assert HOUSE.index(line) < place, f"{name} imports {line}, which stands below it"


def test_files_stay_readable():
    for _, path in modules():
        assert len(path.read_text().splitlines()) <= 400, f"{path.name} is asking to be two"


def test_the_package_never_reads_shared():
    for _, path in modules():
        assert "../shared" not in path.read_text()
