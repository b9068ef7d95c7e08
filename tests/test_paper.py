"""The paper's tables as commands: they run, resume, and say what is missing."""

import json
from pathlib import Path

import pytest

from deepsimplex import engine
from deepsimplex.cli import run
from deepsimplex.errors import DeepSimplexError
from deepsimplex.paper import published
from deepsimplex.paper.readme import update


def paper(*words):
    return run(["paper", *words, "--device", "cpu"])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(folder, name):
    return json.loads((folder / f"runs/paper/paper-{name}-quick.json").read_text())


def test_table1_and_closed_share_their_runs(here, monkeypatch, capsys):
    words = ("--quick", "--trials", "1", "--epochs", "1", "--rows", "softmax,eq. 7")
    assert paper("table1", *words) == 0
    found = record(here, "table1")
    assert [(c["column"], c["background"], c["row"]) for c in found["cells"]] == [
        ("digits", "none", "softmax"),
        ("digits", "none", "eq. 7"),
    ]
    assert 0 < found["cells"][0]["auroc"]["mean"] < 1
    assert found["quick"]
    assert found["published"]["DSC"][1] == "93.8 ± 0.3"
    assert not (here / "results").exists()  # a quick look is not among the records
    monkeypatch.setattr(engine, "training", None)
    assert paper("closed", *words) == 0
    assert record(here, "closed")["measure"] == "accuracy"
    assert "softmax" in capsys.readouterr().out


def test_a_column_without_data_says_how_to_get_it(here, capsys):
    words = ("--columns", "svhn", "--track", "none", "--trials", "1")
    assert paper("table1", *words, "--data-root", str(here / "none")) == 0
    out = capsys.readouterr().out
    assert "svhn: expected" in out
    assert "data get svhn" in out
    found = json.loads((here / "results/paper-table1.json").read_text())
    assert found["cells"] == []
    assert "svhn" in found["missing"]


def test_bad_names_are_refused(here, capsys):
    assert paper("table1", "--columns", "cifar11") == 1
    assert "columns among mnist" in capsys.readouterr().err
    assert paper("table1", "--rows", "eq. 9") == 1
    assert "rows among softmax" in capsys.readouterr().err


def test_table2_chooses_each_rate_on_training_images(here, monkeypatch):
    seen = []
    from deepsimplex.paper import closedset, studies

    original = studies.conduct

    def spy(wanted, *rest):
        seen.extend(wanted)
        return original(wanted, *rest)

    monkeypatch.setattr(closedset, "conduct", spy)
    assert paper("table2", "--quick", "--seeds", "1", "--epochs", "1") == 0
    found = record(here, "table2")["cells"]["digits"]
    assert set(found["rates"]) == {"softmax", "dsc", "dsc-softmax"}
    for method, rate in found["rates"].items():
        tried = found["screened"][method]
        assert tried[f"{rate:g}"] == max(tried.values())
    screens = [study for study in seen if study.name.endswith("screen")]
    final = [study for study in seen if not study.name.endswith("screen")]
    assert len(screens) == 9
    assert all(set(study.look) == {"held"} for study in screens)
    assert all(len(study.images) > len(screens[0].images) for study in final)


def test_published_rows_fit_the_columns():
    for rows in (published.AUROC, published.ACCURACY):
        assert all(len(cells) == len(published.COLUMNS) for cells in rows.values())
    assert published.cell(None) == "–"
    assert published.cell((81.6, None)) == "81.6"


def test_readme_shows_what_the_records_say():
    root = Path(__file__).parents[1]
    assert update(root / "README.md", root / "results") == (root / "README.md").read_text()


def test_readme_without_its_markers_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("# nothing\n")
    with pytest.raises(DeepSimplexError, match="training speed"):
        update(tmp_path / "README.md", tmp_path)
