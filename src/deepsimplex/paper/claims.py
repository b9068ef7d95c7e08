"""`claims`: what the paper says of its method, and what our records say of that.

Each claim is judged from numbers in results/, by a rule that stands in its docstring; a claim
whose record is missing names the command that makes it. One of two rows is clearly ahead where 0
lies outside Student's 95 % interval of their paired differences.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepsimplex.paper import charts
from deepsimplex.paper.requests import Request, behind, conditions, counted
from deepsimplex.paper.studies import clear
from deepsimplex.simplex import Simplex, dot_products, squared_distances
from deepsimplex.terminal import table

Records = dict[str, Any]


@dataclass(frozen=True)
class Judgement:
    verdict: str  # holds, holds (only) with …, not clear, does not hold, not measured
    because: str


NOTHING = Judgement("not measured", "the record lacks the rows that the claim compares")


@dataclass(frozen=True)
class Claim:
    says: str
    needs: tuple[str, ...]  # records, which are also the commands that make them
    judge: Callable[[Records], Judgement]


def claims(request: Request) -> dict[str, Any]:
    """Print every claim with its verdict and the record behind it."""
    records = {name: request.recorded(name) for name in RECORDS}
    found: list[dict[str, Any]] = []
    for claim in CLAIMS:
        missing = [name for name in claim.needs if records[name] is None]
        if missing:
            quick = " --quick" if request.quick else ""
            command = ", ".join(f"deepsimplex paper {name}{quick}" for name in missing)
            judged = Judgement("not measured", f"run {command}")
        else:
            judged = claim.judge(records)
        found.append(
            {
                "claim": claim.says,
                "verdict": judged.verdict,
                "because": judged.because,
                "records": [f"paper-{name}.json" for name in claim.needs],
            }
        )
    rows = [[f["claim"], f["verdict"], f["because"], behind(f)] for f in found]
    table("The paper's claims", ("claim", "verdict", "because", "record"), rows, 4)
    content = {"claims": found}
    before = request.recorded("claims")
    if before is None or before["claims"] != found:
        request.record("claims", content)
    request.draw("claims", charts.claims(content))
    return content


def no_parameter(records: Records) -> Judgement:
    """Holds if eq. 4 as printed trains at every radius and its accuracies lie within a point.

    If not, holds only with the loss at unit radius, provided that one is no more than a point
    behind the best of those at the same rate; where it is, the rate is what u was.
    """
    record = records["radius"]
    cells, unit = record["cells"]["literal"], [*record["cells"]["unit"].values()]
    gone = [u for u, cell in cells.items() if cell["accuracy"] is None]
    means = [100 * cell["accuracy"]["mean"] for cell in cells.values() if cell["accuracy"]]
    how = conditions(record)
    if not gone and max(means) - min(means) <= 1:
        return Judgement("holds", f"{min(means):.1f} to {max(means):.1f} % at every u{how}")
    rate = record.get("recipe", {}).get("learning_rate")
    told = "as printed" + ("" if rate is None else f", rate {rate:g}")
    told += f": diverged at u = {', '.join(gone)}" if gone else ""
    if means:
        told += f"; {min(means):.1f} to {max(means):.1f} % where it stayed finite"
    if any(cell["accuracy"] is None for cell in unit):
        return Judgement("does not hold", f"{told}; at unit radius it diverged too{how}")
    reached = 100 * unit[0]["accuracy"]["mean"]
    told += f"; at unit radius, where u is a unit of length, {reached:.1f}"
    if means and reached < max(means) - 1:
        clipped = record["cells"]["literal-clipped"].get("1", {}).get("accuracy")
        told += f" %, clipped {100 * clipped['mean']:.1f}" if clipped else ""
        return Judgement("does not hold", f"{told} %, so that the rate has to be chosen{how}")
    # Where the unit column's gradients were clipped, they may be what it takes.
    clipped = " and clipped gradients" if record.get("recipe", {}).get("clip") else ""
    return Judgement(f"holds only with the loss at unit radius{clipped}", f"{told} %{how}")


def agreement(records: Records) -> Judgement:
    """An identity: all centres have one norm. Tried on random features all the same."""
    generator = torch.Generator().manual_seed(0)
    simplex = Simplex(10, 9)
    features = torch.randn(100_000, 9, generator=generator, dtype=torch.float64)
    nearest = squared_distances(simplex, features).argmin(1)
    highest = dot_products(simplex, features).argmax(1)
    differing = int((nearest != highest).sum())
    verdict = "holds" if differing == 0 else "does not hold"
    return Judgement(
        f"{verdict} for the decision",
        f"{differing} of 100 000 random features decided differently; the scores do differ",
    )


def compact(records: Records) -> Judgement:
    """Holds if eq. 4 has the smallest spread of the three losses, on training and test images.

    There is one seed: a lead or lag of less than a twentieth is not clear.
    """
    record = records["embeddings"]
    least: dict[str, bool | None] = {}
    told = []
    for part, where in (("train", "training"), ("test", "test")):
        spreads = {k: v[f"{part}_spread"] for k, v in record["losses"].items()}
        ours, best = spreads["eq. 4"], min(v for k, v in spreads.items() if k != "eq. 4")
        near = abs(ours - best) < 0.05 * max(ours, best)
        least[part] = None if near else ours < best
        listed = ", ".join(
            f"{k} {spreads[k]:.2f}" for k in sorted(spreads, key=lambda k: spreads[k])
        )
        told.append(f"spread on {where} images: {listed}")
    verdict = {
        (True, True): "holds",
        (True, False): "holds only with training images",
        (True, None): "holds with training images, not clear with test images",
        (None, True): "not clear",
        (None, None): "not clear",
    }.get((least["train"], least["test"]), "does not hold")
    return Judgement(verdict, "; ".join(told) + conditions(record))


def imbalance(records: Records) -> Judgement:
    """Holds if the cut class clearly loses less under eq. 4 than under softmax, not if more."""
    record = records["imbalance"]
    lost = record["lost"]
    less = np.array(lost["softmax"]) - np.array(lost["eq. 4"])
    words = {1: "holds", 0: "not clear", -1: "does not hold"}
    return Judgement(
        words[clear(less)],
        f"the cut class loses {100 * np.mean(lost['eq. 4']):.1f} points, under softmax "
        f"{100 * np.mean(lost['softmax']):.1f}{conditions(record, len(less))}",
    )


def semantic(records: Records) -> Judgement:
    """Holds if each of the four pairs is found in at least four of five seeds."""
    record = records["semantic"]
    wanted = record["published"]["nearest"]
    if not wanted:
        return Judgement("not measured", "of digits the paper claims nothing")
    good, told = {}, []
    for title, seeds in record["methods"].items():
        hits = [sum(s["nearest"][u] == near for s in seeds) for u, near in wanted.items()]
        good[title] = min(hits) >= 0.8 * len(seeds)
        told.append(f"{title} {sum(hits)} of {len(hits) * len(seeds)}")
    verdict = "holds for every loss" if all(good.values()) else "holds"
    how = conditions(record, len(record["methods"]["DSC"]))
    because = f"nearest class as claimed: {', '.join(told)}{how}"
    return Judgement(verdict if good["DSC"] else "does not hold", because)


Aurocs = dict[tuple[str, str], tuple[np.ndarray, int | None]]
"""In %, a value a trial, and the epochs, by column and recipe; each row by its own score."""


def _aurocs(records: Records, row: str, background: str) -> Aurocs:
    return {
        (cell["column"], cell["recipe"]): (
            100 * np.array(cell["auroc"]["values"]),
            cell.get("epochs"),
        )
        for cell in records["table1"]["cells"]
        if cell["row"] == row and cell["background"] == background and not cell["detector"]
    }


def _compared(
    ours: Aurocs, theirs: Aurocs, least: int = 1
) -> tuple[dict[tuple[str, str], int], str]:
    """Like with like: one column, one recipe, and the trials that both have, from the first on.

    What has fewer than `least` trials is left out.
    """
    signs, told = {}, []
    for column, recipe in (key for key in ours if key in theirs):
        (mine, length), (other, another) = ours[column, recipe], theirs[column, recipe]
        trials = min(len(mine), len(other))
        if trials < least:
            continue
        mine, other = mine[:trials], other[:trials]
        signs[column, recipe] = clear(mine - other)
        how = [recipe]
        if length and another:
            same = length == another
            how.append(f"{length} epochs" if same else f"{length} against {another} epochs")
        how.append("one trial" if trials == 1 else f"{trials} trials")
        told.append(f"{column} ({', '.join(how)}) {mine.mean():.1f} against {other.mean():.1f}")
    return signs, ", ".join(told)


PEERS = ("oe", "background-class", "entropic", "objectosphere")
"""Softmax with a background set, in four ways."""
READINGS = ("eq. 5 A", "eq. 5 B", "eq. 5 C", "authors' code")
"""What the paper does with a background set, as it can be read."""


def _background(records: Records) -> str:
    """The background set that eq. 4 was measured with."""
    found = [cell["background"] for cell in records["table1"]["cells"] if cell["row"] == "eq. 4"]
    return next((track for track in found if track != "none"), "none")


def better(records: Records) -> Judgement:
    """Eq. 4 without background clearly above softmax by its max logit, by each column and recipe.

    If not, eq. 4 with one against softmax without is looked at, and against softmax with the same
    one: only above all of its ways does it hold with a background, not if one is above; what has
    not been measured in the same trials, or not in every column, is not clear.
    """
    softmax, with_one = _aurocs(records, "softmax", "none"), _background(records)
    signs, told = _compared(_aurocs(records, "eq. 4", "none"), softmax)
    if not signs:
        return NOTHING
    if all(sign > 0 for sign in signs.values()):
        return Judgement("holds", told)
    ours = _aurocs(records, "eq. 4", with_one)
    helped, more = _compared(ours, softmax)
    if not helped or any(sign <= 0 for sign in helped.values()):
        return Judgement(_not(signs), told)
    told = f"without: {told}; with: {more}" + _first_split(records, ("eq. 4", *PEERS))
    if lacking := _lacking(signs, helped):
        verdict = f"{_not(signs)} without a background set, not clear with one"
        return Judgement(verdict + lacking, told)
    against = [_compared(ours, _aurocs(records, row, with_one))[0] for row in PEERS]
    verdict = "holds only with a background set"
    if any(sign < 0 for found in against for sign in found.values()):
        verdict += " that softmax is denied"
    elif not all(signs.keys() <= f.keys() and min(f.values()) > 0 for f in against):
        verdict += ", not clear where softmax has it too"
    return Judgement(verdict, told)


def background(records: Records) -> Judgement:
    """Eq. 4 with a background set clearly above eq. 4 without, by each column and recipe.

    In row eq. 4 the background goes to the centroid, which is ours. The paper's term is eq. 5, and
    its authors' code has another: if one of them is clearly above the same without, the claim
    holds; if none is, it holds only with the centroid; what was not measured in as many of these
    trials is not clear. Where eq. 4 has been measured without one alone is told.
    """
    with_one = _background(records)
    ours, alone = (_aurocs(records, "eq. 4", track) for track in (with_one, "none"))
    signs, told = _compared(ours, alone)
    if not signs:
        return NOTHING
    if not all(sign > 0 for sign in signs.values()):
        return Judgement(_not(signs), told)
    lacking, trials = _lacking(alone, signs), max(len(values) for values, _ in ours.values())
    theirs = [
        _compared(_aurocs(records, row, with_one), _aurocs(records, _without(row), "none"), trials)[
            0
        ]
        for row in READINGS
    ]
    if any(signs.keys() <= found.keys() and min(found.values()) > 0 for found in theirs):
        return Judgement("holds" + lacking, told)
    told += _first_split(records, READINGS)
    if not all(signs.keys() <= found.keys() for found in theirs):
        verdict = "holds with the background drawn to the centroid, not clear as the paper has it"
        return Judgement(verdict + lacking, told)
    return Judgement("holds only with the background drawn to the centroid" + lacking, told)


def _lacking(wanted: Iterable[tuple[str, str]], found: Container[tuple[str, str]]) -> str:
    """Columns, and recipes other than the common one, that are wanted and were not found."""
    names = [
        column if recipe == "common" else f"{column} by {recipe}"
        for column, recipe in wanted
        if (column, recipe) not in found
    ]
    return f" ({', '.join(names)} not measured)" if names else ""


def _without(row: str) -> str:
    """The row that a reading is without a background: eq. 5 is eq. 4 then."""
    return "eq. 4" if row.startswith("eq. 5") else row


def _not(signs: dict[tuple[str, str], int]) -> str:
    """The verdict where ours is not clearly ahead everywhere."""
    return "does not hold" if min(signs.values()) < 0 else "not clear"


def _first_split(records: Records, rows: tuple[str, ...]) -> str:
    """What the record of all methods has of rows with a background, and without, in words."""
    every = {(r["row"], r["background"] != "none"): r["auroc"] for r in records["rivals"]["rows"]}
    told = []
    for row in rows:
        if (row, True) in every:
            told.append(f"{row} {100 * every[row, True]:.1f}")
            plain = every.get((_without(row), False))
            if plain is not None:
                told[-1] += f" ({100 * plain:.1f} without)"
    return f"; the first split alone, with: {', '.join(told)}" if told else ""


def radius(records: Records) -> Judgement:
    """Holds if eq. 4 as printed, gradients clipped, stays within a point from u = 32 to 200."""
    cells = records["radius"]["cells"]["literal-clipped"]
    means = {u: cells[u]["accuracy"] for u in ("32", "64", "100", "150", "200")}
    if any(cell is None for cell in means.values()):
        return Judgement("does not hold", "diverged at some u even with clipped gradients")
    values = [100 * cell["mean"] for cell in means.values() if cell]
    told = f"{min(values):.1f} to {max(values):.1f} % from u = 32 to 200, clipped"
    told += conditions(records["radius"])
    return Judgement("holds" if max(values) - min(values) <= 1 else "does not hold", told)


def closed_set(records: Records) -> Judgement:
    """Eq. 4's accuracy clearly above softmax's on every set of table 2, each at its longest.

    Clearly below on one, it does not hold; else it is not clear.
    """
    values: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    for cell in records["table2"]["cells"]:
        found = values.setdefault(cell["column"], {}).setdefault(cell["row"], {})
        found[cell["epochs"]] = np.array(cell["accuracy"]["values"])
    signs, told = [], []
    for column, rows in values.items():
        both = rows.get("dsc", {}).keys() & rows.get("softmax", {}).keys()
        if both:
            pair = [rows[name][max(both)] for name in ("dsc", "softmax")]
            ours, theirs = (values[: min(map(len, pair))] for values in pair)
            signs.append(clear(ours - theirs))
            told.append(f"{column} {100 * ours.mean():.1f} against {100 * theirs.mean():.1f}")
            told[-1] += f", {max(both)} epochs{counted(len(ours))}"
    if not signs:
        return NOTHING
    if any(sign < 0 for sign in signs):
        return Judgement("does not hold", "; ".join(told))
    good = all(sign > 0 for sign in signs)
    return Judgement("holds" if good else "not clear", "; ".join(told))


CLAIMS = (
    Claim("no hyper-parameter", ("radius",), no_parameter),
    Claim("Euclid and cosine agree", (), agreement),
    Claim("compact classes", ("embeddings",), compact),
    Claim("robust to imbalance", ("imbalance",), imbalance),
    Claim("semantic embeddings of unseen classes", ("semantic",), semantic),
    Claim("better than softmax, open set", ("table1", "rivals"), better),
    Claim("better than softmax, closed set", ("table2",), closed_set),
    Claim("background helps", ("table1", "rivals"), background),
    Claim("the radius matters little", ("radius",), radius),
)
RECORDS = tuple(dict.fromkeys(name for claim in CLAIMS for name in claim.needs))
