"""`deepsimplex methods`."""

import json
import statistics
from pathlib import Path

import pytest

from deepsimplex import catalogue
from deepsimplex.cli import run
from deepsimplex.methods import METHODS

RESULTS = Path(__file__).parents[1] / "results"


def test_every_row_is_listed_with_what_a_reader_asks(capsys):
    assert run(["methods", "--json"]) == 0
    records = {record["method"]: record for record in json.loads(capsys.readouterr().out)}
    assert set(records) == set(METHODS)
    for record in records.values():
        assert all(record[key] for key in ("family", "about", "cite", "defaults", "scores"))
        assert sum(record["stages"].values()) >= catalogue.EPOCHS
        assert record["cost"] > 0
    assert records["entropic"]["background"] == "needed"
    assert records["dsc"]["background"] == "used if given"
    assert records["softmax"]["background"] == "not used"
    assert records["softmax"]["cost"] == pytest.approx(1)
    assert list(records["c2ae"]["stages"]) == ["fit", "decode"]


def test_the_record_on_digits_has_every_row_above_chance():
    kept = json.loads((RESULTS / "compare-digits-arpl-all.json").read_text())["methods"]
    assert set(kept) == set(METHODS)
    for name, rows in kept.items():
        assert all(r["auroc"] > 0.6 and r["accuracy"] > 0.9 for r in rows), name


def test_costs_are_those_of_their_record():
    rows = json.loads((RESULTS / "costs-digits.json").read_text())["methods"]
    shown = {record["method"]: record["cost"] for record in catalogue.catalogue()}
    assert set(rows) == set(shown)
    for name in set(rows) - {"softmax"}:
        ratios = [mine / softmax for mine, softmax in rows[name]["seconds"]]
        assert shown[name] == pytest.approx(statistics.median(ratios), abs=0.006)


SCORED_BY = {
    "distance": "dsc dsc-eq5-a dsc-eq5-b dsc-eq5-c dsc-hinge dsc-literal dsc-authors basis "
    "contrastive triplet triplet-semihard",
    "dot": "dsc-softmax dsc-blend dsc-turned",
    "max_logit": "softmax arpl arpl-cs center contrastive-center regularface mhe marginal range",
    "max_probability": "entropic oe gcpl rpl gdfr",
    "cosine": "cosface arcface",
    "logit": "sphereface uniformface",
    "openmax": "openmax crosr",
    "difference": "osrci g-openmax",
    "probability_norm": "objectosphere",
    "energy": "energy",
    "over_background": "background-class",
    "rejection": "cac",
    "reconstruction": "c2ae",
}


def test_every_row_is_scored_as_its_paper_or_a_decision_says(capsys):
    assert run(["methods", "--json"]) == 0
    first = {r["method"]: r["scores"][0] for r in json.loads(capsys.readouterr().out)}
    assert first == {row: score for score, rows in SCORED_BY.items() for row in rows.split()}


def test_the_list_as_a_person_reads_it(capsys):
    assert run(["methods"]) == 0
    out = capsys.readouterr().out
    assert out.index("simplex") < out.index("softmax") < out.index("openmax")
    assert f"{len(METHODS)} rows" in out
    assert run(["methods", "cac"]) == 0
    one = capsys.readouterr().out
    assert "Miller" in one
    assert "openmax" not in one
    assert "rate" not in one
    assert run(["methods", "rpl"]) == 0
    assert "; rate 1, whatever" in capsys.readouterr().out
    assert run(["methods", "cacc"]) == 1
    assert "did you mean 'cac'" in capsys.readouterr().err
