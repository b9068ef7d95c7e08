"""`deepsimplex paper …`: parse and call. torch is not imported to answer --help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deepsimplex.paper.requests import Request

paper_app = typer.Typer(
    help="The paper's tables and figures, ours beside published.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Quick = Annotated[bool, typer.Option("--quick", help="Minutes on a CPU, on scikit-learn's digits.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Root = Annotated[Path | None, typer.Option("--data-root", help="Where official sets lie.")]
Out = Annotated[Path, typer.Option(help="Folder for the runs; resumes there.")]
Results = Annotated[Path | None, typer.Option(help="Folder for the record; results/ if not quick.")]
Figures = Annotated[Path | None, typer.Option(help="Folder for SVG and PNG; docs/figures/.")]
Seeds = Annotated[int, typer.Option(min=1, help="Trainings of each kind.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of the command's own.")]
Splits = Annotated[str, typer.Option(help="arpl or neal.")]
Columns = Annotated[str | None, typer.Option(help="Benchmarks, comma-separated; all if not given.")]
Track = Annotated[
    str | None, typer.Option(help="none or cifar100 (quick: photographs); both if not given.")
]
Rows = Annotated[str | None, typer.Option(help="Rows, comma-separated; all if not given.")]
Trials = Annotated[int, typer.Option(min=1, max=5, help="How many splits.")]
Scored = Annotated[
    str | None, typer.Option("--score", help="A detector, e.g. joined, for all rows.")
]
Recipes = Annotated[
    str,
    typer.Option(
        "--recipe",
        help="common, long, strong, strong-whole, whole (these two without dropout), moved and "
        "whole-moved (the same by many views), once (moved in one cosine), "
        "faint (whole with RandAugment and a background of weight 0.1; docs/decisions/0012).",
    ),
]

RUNS = Path("runs/paper")


@paper_app.command()
def table1(
    quick: Quick = False, splits: Splits = "arpl", columns: Columns = None, track: Track = None,
    rows: Rows = None, trials: Trials = 5, recipe: Recipes = "common", score: Scored = None,
    device: Device = "auto", data_root: Root = None, out: Out = RUNS, results: Results = None,
    figures: Figures = None, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Open-set AUROC on six benchmarks (table 1)."""
    from deepsimplex.paper import table1 as study

    request = _request(quick, device, data_root, out, results, figures, 5, epochs)
    study.table1(request, _plan(quick, splits, columns, track, rows, trials, recipe, score))


@paper_app.command()
def closed(
    quick: Quick = False, splits: Splits = "arpl", columns: Columns = None, track: Track = None,
    rows: Rows = None, trials: Trials = 5, recipe: Recipes = "common", score: Scored = None,
    device: Device = "auto", data_root: Root = None, out: Out = RUNS, results: Results = None,
    figures: Figures = None, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Closed-set accuracies of the same runs (appendix)."""
    from deepsimplex.paper import table1 as study

    request = _request(quick, device, data_root, out, results, figures, 5, epochs)
    study.closed(request, _plan(quick, splits, columns, track, rows, trials, recipe, score))


@paper_app.command()
def table2(
    quick: Quick = False, columns: Columns = None, rows: Rows = None, device: Device = "auto",
    data_root: Root = None, out: Out = RUNS, results: Results = None, figures: Figures = None,
    seeds: Seeds = 3, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Closed-set accuracies with ResNet-18 (table 2)."""
    from deepsimplex.paper import closedset

    _one_set(quick, columns)
    closedset.table2(
        _request(quick, device, data_root, out, results, figures, seeds, epochs),
        _chosen(rows, tuple(closedset.EVERY), "rows", tuple(closedset.ROWS)),
        _chosen(columns, tuple(closedset.COLUMNS), "columns"),
    )


@paper_app.command()
def radius(
    quick: Quick = False, device: Device = "auto", data_root: Root = None, out: Out = RUNS,
    results: Results = None, figures: Figures = None, seeds: Seeds = 1, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Accuracy against the radius u (appendix)."""
    from deepsimplex.paper import radius as study

    study.radius(_request(quick, device, data_root, out, results, figures, seeds, epochs))


@paper_app.command()
def simplex(
    quick: Quick = False, device: Device = "auto", data_root: Root = None, out: Out = RUNS,
    results: Results = None, figures: Figures = None, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Features at 2, 3 and 4 vertices (figure 1)."""
    from deepsimplex.paper import drawings

    drawings.simplex(_request(quick, device, data_root, out, results, figures, 1, epochs))


@paper_app.command()
def embeddings(
    quick: Quick = False, device: Device = "auto", data_root: Root = None, out: Out = RUNS,
    results: Results = None, figures: Figures = None, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Planar features under three losses (figure 3)."""
    from deepsimplex.paper import drawings

    drawings.embeddings(_request(quick, device, data_root, out, results, figures, 1, epochs))


@paper_app.command()
def imbalance(
    quick: Quick = False, device: Device = "auto", data_root: Root = None, out: Out = RUNS,
    results: Results = None, figures: Figures = None, seeds: Seeds = 5, epochs: Epochs = None,
) -> None:  # fmt: skip
    """The same with one class cut to a tenth (appendix)."""
    from deepsimplex.paper import drawings

    drawings.imbalance(_request(quick, device, data_root, out, results, figures, seeds, epochs))


@paper_app.command()
def semantic(
    quick: Quick = False, device: Device = "auto", data_root: Root = None, out: Out = RUNS,
    results: Results = None, figures: Figures = None, seeds: Seeds = 5, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Distances between classes, four unseen (figure 4)."""
    from deepsimplex.paper import semantic as study

    study.semantic(_request(quick, device, data_root, out, results, figures, seeds, epochs))


@paper_app.command()
def dam(
    quick: Quick = False, device: Device = "auto", data_root: Root = None, out: Out = RUNS,
    results: Results = None, figures: Figures = None, seeds: Seeds = 5, epochs: Epochs = None,
) -> None:  # fmt: skip
    """Ways past d < C−1, DAM among them (figure 2)."""
    from deepsimplex.paper import dam as study

    few = min(seeds, 2) if quick else seeds
    study.dam(_request(quick, device, data_root, out, results, figures, few, epochs))


@paper_app.command()
def rivals(
    quick: Quick = False, rows: Rows = None, device: Device = "auto", data_root: Root = None,
    out: Out = RUNS, results: Results = None, figures: Figures = None, epochs: Epochs = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Trainings side by side; 1 times each alone.")
    ] = None,
) -> None:  # fmt: skip
    """Every method once, CIFAR-10's first split."""
    from deepsimplex.paper import rivals as study
    from deepsimplex.paper.opensets import EVERY

    request = _request(quick, device, data_root, out, results, figures, 1, epochs)
    study.rivals(request, _chosen(rows, tuple(EVERY), "rows"), at_once)


@paper_app.command()
def claims(
    quick: Quick = False, device: Device = "auto", out: Out = RUNS, results: Results = None,
    figures: Figures = None,
) -> None:  # fmt: skip
    """Every claim, judged from the records."""
    from deepsimplex.paper import claims as study

    study.claims(_request(quick, device, None, out, results, figures, 1, None))


@paper_app.command()
def readme(
    check: Annotated[bool, typer.Option("--check", help="Only say whether it is so.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("results"),
    file: Annotated[Path, typer.Option(help="What to rewrite.")] = Path("README.md"),
) -> None:
    """README's tables from the records in results/."""
    from deepsimplex.paper.readme import update
    from deepsimplex.runs import write_atomically

    made = update(file, results)
    same = made == file.read_text()
    if not same and not check:
        write_atomically(file, made.encode())
    typer.echo(f"{file}: " + ("as the records say" if same else "changed"))
    if check and not same:
        raise typer.Exit(1)


def _request(
    quick: bool, device: str, root: Path | None, out: Path, results: Path | None,
    figures: Path | None, seeds: int, epochs: int | None,
) -> Request:  # fmt: skip
    from deepsimplex.data.archives import data_root
    from deepsimplex.paper.requests import Request

    # A quick look never lands among the records that README quotes.
    beside = out if quick else Path("results")
    drawn = out if quick else Path("docs/figures")
    return Request(
        quick, device, data_root(root), out, results or beside, figures or drawn, seeds, epochs
    )


def _plan(
    quick: bool,
    family: str,
    columns: str | None,
    track: str | None,
    rows: str | None,
    trials: int,
    recipe: str,
    score: str | None,
) -> Any:
    from deepsimplex.data.background import PHOTOGRAPHS
    from deepsimplex.data.protocols import FAMILIES
    from deepsimplex.paper.opensets import EVERY, ROWS, TRACKS, Plan
    from deepsimplex.paper.published import COLUMNS
    from deepsimplex.recipes import BENCHMARK_RECIPES

    _one_set(quick, columns)
    return Plan(
        _one(family, FAMILIES, "splits"),
        _chosen(columns, COLUMNS, "columns"),
        _chosen(track, (*TRACKS, PHOTOGRAPHS) if quick else TRACKS, "a track"),
        _chosen(rows, tuple(EVERY), "rows", tuple(ROWS)),
        trials,
        _one(recipe, tuple(BENCHMARK_RECIPES), "a recipe"),
        score,
    )


def _one_set(quick: bool, columns: str | None) -> None:
    from deepsimplex.errors import DeepSimplexError

    if quick and columns is not None:
        raise DeepSimplexError(
            "--quick or --columns", f"both, {columns!r}", "the quick version is on digits"
        )


def _chosen(
    given: str | None, among: tuple[str, ...], what: str, default: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """The names that are given, by comma; if none, the default ones, or all."""
    if given is None:
        return default or among
    wanted = tuple(part.strip() for part in given.split(","))
    return tuple(dict.fromkeys(_one(name, among, what) for name in wanted))


def _one(given: str, among: tuple[str, ...], what: str) -> str:
    from deepsimplex.errors import DeepSimplexError, meant

    if given not in among:
        remedy = meant(given, among, "choose")
        raise DeepSimplexError(f"{what} among {', '.join(among)}", repr(given), remedy)
    return given
