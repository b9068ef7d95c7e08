"""The paper's tables as commands: they run, resume, and say what is missing."""

import dataclasses
import io
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import toys

from deepsimplex import engine, metrics, terminal
from deepsimplex.cli import run
from deepsimplex.data.sources import LabelledSet
from deepsimplex.errors import DeepSimplexError
from deepsimplex.methods import METHODS, build_method
from deepsimplex.paper import commands, opensets, published, rivals, table1
from deepsimplex.paper.readme import closed_set, open_set, update
from deepsimplex.paper.requests import Request
from deepsimplex.paper.studies import Study, conduct
from deepsimplex.recipes import BENCHMARK_RECIPES, default_recipe
from deepsimplex.runs import environment

RESULTS = Path(__file__).parents[1] / "results"


def paper(*words):
    return run(["paper", *words, "--device", "cpu"])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Request, "draw", lambda *arguments: None)  # test_paper_charts.py draws
    return tmp_path


def record(folder, name):
    return json.loads((folder / f"runs/paper/paper-{name}-quick.json").read_text())


def test_table1_and_closed_share_their_runs(here, monkeypatch, capsys):
    words = ("--quick", "--trials", "1", "--epochs", "1", "--rows", "softmax,eq. 7,oe,softmax")
    assert paper("table1", *words) == 0
    found = record(here, "table1")
    assert [(c["column"], c["background"], c["row"]) for c in found["cells"]] == [
        ("digits", "none", "softmax"),
        ("digits", "none", "eq. 7"),
        ("digits", "photographs", "eq. 7"),
        ("digits", "photographs", "oe"),
    ]
    assert all(len(c["auroc"]["values"]) == 1 for c in found["cells"])
    assert {c["recipe"] for c in found["cells"]} == {"digits"}
    out = capsys.readouterr().out
    assert "without background, 1 arpl trials, digits recipe" in out
    assert "background photographs, 1 arpl trials, digits recipe" in out
    assert 0 < found["cells"][0]["auroc"]["mean"] < 1
    assert found["quick"]
    assert found["published"]["DSC"][1] == "93.8 ± 0.3"
    assert not (here / "results").exists()  # a quick look is not among the records
    monkeypatch.setattr(engine, "training", None)
    assert paper("closed", *words) == 0
    assert record(here, "closed")["measure"] == "accuracy"
    assert "softmax" in capsys.readouterr().out


def test_quick_keeps_to_the_track(here, capsys):
    words = ("--quick", "--trials", "1", "--epochs", "1", "--rows", "eq. 7,oe")
    assert paper("table1", *words, "--track", "none") == 0
    assert [(c["background"], c["row"]) for c in record(here, "table1")["cells"]] == [
        ("none", "eq. 7")
    ]
    assert "Not in track none: oe, which need a background." in capsys.readouterr().out
    for track in ("cifar100", "photographs"):
        out = ("--out", str(here / track), "--track", track)
        assert paper("closed", *words, *out) == 0
        found = json.loads((here / track / "paper-closed-quick.json").read_text())
        assert {c["background"] for c in found["cells"]} == {"photographs"}
    assert paper("table1", "--track", "photographs") == 1
    assert "a track among none, cifar100;" in capsys.readouterr().err


def test_a_run_without_cells_says_why(here, capsys):
    assert paper("table1", "--quick", "--rows", "oe,energy", "--track", "none") == 1
    error = capsys.readouterr().err
    assert error.startswith("deepsimplex: expected rows with a place in track none; got oe, energy")
    assert error.count("\n") == 1
    for table in ("table1", "closed", "table2"):
        assert paper(table, "--quick", "--columns", "mnist") == 1
        assert "expected --quick or --columns; got both, 'mnist'" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_a_command_for_some_cells_leaves_the_others_be(here):
    words = ("--quick", "--trials", "1", "--epochs", "1")
    assert paper("table1", *words, "--rows", "softmax,eq. 7") == 0
    before = {c["row"]: c for c in record(here, "table1")["cells"]}
    assert paper("table1", *words, "--rows", "eq. 4,softmax") == 0
    cells = {c["row"]: c for c in record(here, "table1")["cells"]}
    assert list(cells) == ["softmax", "eq. 7", "eq. 4"]
    assert cells["eq. 7"] == before["eq. 7"]
    assert cells["eq. 4"]["epochs"] == 1


def test_a_command_that_finds_nothing_new_leaves_the_record_be(here, capsys, monkeypatch):
    words = ("table1", "--quick", "--rows", "softmax", "--track", "none", "--trials", "2")
    assert paper(*words, "--epochs", "2") == 0
    path = here / "runs/paper/paper-table1-quick.json"
    before = path.read_bytes()
    (cell,) = json.loads(before)["cells"]
    assert cell["hardware"] == [environment()["cpu"]]
    monkeypatch.setattr("deepsimplex.paper.requests.environment", lambda device: {"cpu": "other"})
    capsys.readouterr()
    assert paper(*words[:-1], "1", "--epochs", "1") == 0
    out = capsys.readouterr().out
    assert "the record's cell of 2 epochs, 2 trials stays" in out
    assert f"Nothing new for the record: {path.relative_to(here)}" in out
    assert path.read_bytes() == before
    # Scores and figure are made all the same: they may not have been.
    scores = path.with_suffix(".npz")
    kept, drawn = scores.read_bytes(), list[str]()
    scores.unlink()
    monkeypatch.setattr(Request, "draw", lambda request, name, figure: drawn.append(name))
    assert paper(*words, "--epochs", "2") == 0
    assert (path.read_bytes(), drawn) == (before, ["table1"])
    with np.load(io.BytesIO(kept)) as old, np.load(scores) as new:
        assert {name: new[name].tobytes() for name in new} == {n: old[n].tobytes() for n in old}
    assert paper(*words, "--epochs", "3") == 0
    (longer,) = record(here, "table1")["cells"]
    assert longer["epochs"] == 3
    assert paper("table1", "--quick", "--rows", "cac", "--trials", "1", "--epochs", "1") == 0
    after = record(here, "table1")
    assert (after["trials"], after["environment"]) == (2, {"cpu": "other"})


def test_equal_splits_and_cells_of_another_record_are_nothing_new(here):
    for name in ("table1", "closed"):
        (here / f"paper-{name}.json").write_bytes((RESULTS / f"paper-{name}.json").read_bytes())
    words = ("closed", "--track", "none", "--columns", "cifar10,cifar+10", "--rows", "softmax")
    seen = []
    for _ in range(2):
        assert paper(*words, "--results", str(here)) == 0
        seen.append((here / "paper-closed.json").read_bytes())
    assert seen[0] == seen[1]
    cells = {(c["column"], c["row"], c["recipe"]): c for c in json.loads(seen[0])["cells"]}
    assert "accuracy of different splits" in cells["cifar10", "softmax", "common"]


@pytest.mark.parametrize("option", ["--results", "--figures"])
def test_where_nothing_can_be_written_is_told_before_training(option, here, capsys, monkeypatch):
    taken = here / "taken"
    taken.write_text("")
    for place in (taken, taken / "below"):
        assert paper("semantic", "--quick", option, str(place)) == 1
        error = capsys.readouterr().err
        assert f"expected to write records and figures to {place}; got {taken}" in error
        assert error.count("\n") == 1
    monkeypatch.setattr("os.access", lambda path, mode: not path.is_absolute())
    assert paper("semantic", "--quick", option, str(here / "new")) == 1
    assert f"got {here}, which is no folder to write to" in capsys.readouterr().err
    assert sorted(here.iterdir()) == [taken]


def test_unasked_the_rows_are_the_papers():
    plan = commands._plan(False, "arpl", None, None, None, 5, "common", None)
    assert plan.rows == tuple(opensets.ROWS)


def test_trainings_are_counted_that_are_to_be_done(here, monkeypatch):
    said = []

    def training(title, trainings):
        said.append(trainings)
        return terminal.training(title, trainings)

    monkeypatch.setattr(opensets, "training", training)
    words = ("table1", "--quick", "--track", "none", "--epochs", "1", "--trials")
    assert paper(*words, "1", "--rows", "softmax") == 0
    assert paper(*words, "2", "--rows", "softmax,cac") == 0
    assert paper(*words, "2", "--rows", "softmax", "--score", "energy") == 0
    assert said == [1, 3, 0]
    request = Request(False, "cpu", here, here, here, here)
    pair = opensets.Plan(columns=("cifar+10", "cifar+50"), tracks=("none",), rows=("softmax",))
    keys = [(column, "none", "softmax") for column in pair.columns]
    assert opensets._left(request, pair, keys) == 5  # of the same known classes
    assert opensets._left(request, pair, keys[1:]) == 5
    apart = dataclasses.replace(pair, columns=("cifar10", "cifar+50"))
    assert opensets._left(request, apart, [("cifar10", *keys[0][1:]), keys[1]]) == 10


def test_rows_that_the_papers_table_has_not_are_taken_by_name(here):
    words = ("--quick", "--trials", "1", "--epochs", "1", "--track", "none")
    assert paper("table1", *words, "--rows", "center,dsc-literal") == 0
    assert [cell["row"] for cell in record(here, "table1")["cells"]] == ["center", "dsc-literal"]
    assert paper("closed", *words, "--rows", "center") == 0
    found = record(here, "closed")
    assert [cell["method"] for cell in found["cells"]] == ["center", "dsc-literal"]


def test_scores_of_every_image_stand_beside_the_record(here):
    words = ("--quick", "--trials", "2", "--epochs", "1", "--track", "none")
    assert paper("table1", *words, "--rows", "softmax") == 0
    assert paper("table1", *words, "--rows", "eq. 4") == 0
    assert paper("table1", *words, "--rows", "softmax", "--trials", "1") == 0  # the two stay
    assert paper("table1", *words, "--rows", "softmax", "--score", "energy", "--trials", "1") == 0
    found = record(here, "table1")
    assert len(found["seconds of commands"]) == 1  # here all have the words of pytest
    with np.load(here / "runs/paper/paper-table1-quick.npz") as file:
        arrays = dict(file)
    places = {"digits/none/softmax", "digits/none/eq. 4", "digits/none/softmax, by energy"}
    assert {name.rpartition("/")[0] for name in arrays} == places
    for cell in found["cells"]:
        for trial, value in enumerate(cell["auroc"]["values"]):
            name = f"digits/none/{opensets.label(cell)}/{trial}"
            label, predicted, score = (
                arrays[f"{name}.{part}"] for part in ("label", "predicted", cell["score"])
            )
            assert metrics.auroc(score[label >= 0], score[label < 0]) == value
            known = label >= 0
            right = metrics.accuracy(label[known], predicted[known])
            assert right == cell["accuracy"]["values"][trial]


def test_scores_of_a_replaced_cell_go_with_it(here):
    words = ("--quick", "--track", "none", "--rows", "softmax")
    assert paper("table1", *words, "--trials", "2", "--epochs", "1") == 0
    assert paper("closed", *words, "--trials", "2", "--epochs", "1") == 0
    assert not (here / "runs/paper/paper-closed-quick.npz").exists()  # nothing was trained for it
    more = ("--trials", "1", "--epochs", "2", "--out", str(here / "new"))
    assert paper("table1", *words, *more, "--results", str(here / "runs/paper")) == 0
    with np.load(here / "runs/paper/paper-table1-quick.npz") as file:
        assert {name.rpartition(".")[0] for name in file.files} == {"digits/none/softmax/0"}


def test_a_row_timed_alone_is_trained_for_it(here):
    words = ("--quick", "--epochs", "1", "--rows")
    for rows, counts, most in (
        ("cac,gcpl", [2, 2], "2"),
        ("cac", [1], "1"),
        ("gcpl", [1], "5"),
        ("cac,center", [2, 1], "2"),  # there was one to train
    ):
        assert paper("rivals", *words, rows, "--at-once", most) == 0
        lines = {line["row"]: line["trainings at once"] for line in record(here, "rivals")["rows"]}
        assert [lines[row] for row in rows.split(",")] == counts


def test_table1_by_another_score_stands_beside_the_own(here, capsys):
    words = ("--quick", "--trials", "1", "--epochs", "1", "--rows", "softmax")
    assert paper("table1", *words) == 0
    assert paper("table1", *words, "--score", "joined") == 0
    own, other = record(here, "table1")["cells"]
    assert (own["detector"], other["detector"], other["score"]) == (None, "joined", "joined")
    assert other["auroc"]["mean"] == other["auroc by score"]["joined"]
    # The same training by its own score, too.
    assert other["auroc by score"]["max_logit"] == own["auroc"]["mean"]
    assert paper("table1", *words, "--score", "joint") == 1
    assert "did you mean 'joined'?" in capsys.readouterr().err
    words = ("--quick", "--trials", "1", "--out", str(here / "new"))
    assert paper("table1", *words, "--rows", "eq. 7,softmax", "--score", "dot") == 1
    assert not (here / "new").exists()  # softmax has no such score: told before eq. 7 is trained
    assert paper("table1", *words, "--recipe", "long") == 1
    assert "expected --quick or a --recipe" in capsys.readouterr().err
    assert paper("table1", "--recipe", "short") == 1
    assert "a recipe among common, whole, long, strong" in capsys.readouterr().err


def test_openmax_is_scored_as_its_published_row(here):
    words = ("--quick", "--epochs", "1", "--rows", "openmax")
    assert paper("table1", *words, "--trials", "1") == 0
    (neal,) = record(here, "table1")["cells"]
    assert (neal["detector"], neal["score"]) == (None, "neal")
    assert neal["auroc"]["mean"] == neal["auroc by score"]["neal"]
    assert neal["auroc by score"]["neal"] != neal["auroc by score"]["openmax"]
    assert paper("rivals", *words) == 0
    assert record(here, "rivals")["rows"][0]["score"] == "neal"
    assert paper("closed", *words, "--trials", "1") == 0
    assert record(here, "closed")["cells"][0]["score"] == "neal"
    assert paper("table1", *words, "--trials", "1", "--score", "openmax") == 0
    before, asked = record(here, "table1")["cells"]
    assert before == neal
    (told,) = here.glob("runs/paper/opensets-quick/*/openmax-0-1-epochs-openmax/results.json")
    assert json.loads(told.read_text())["trained by"].endswith("/openmax-0-1-epochs-neal")
    assert (asked["detector"], asked["score"]) == ("openmax", "openmax")
    assert asked["auroc by score"] == neal["auroc by score"]


def test_other_splits_have_a_record_of_their_own(here, capsys):
    words = ("--quick", "--trials", "1", "--epochs", "1", "--rows", "softmax")
    assert paper("table1", *words) == 0
    before = record(here, "table1")
    assert paper("table1", *words, "--splits", "neal") == 0
    assert record(here, "table1") == before
    found = record(here, "table1-neal")
    assert (before["family"], found["family"]) == ("arpl", "neal")
    assert len(found["cells"]) == 1
    for wrong, remedy in (("foo", "choose"), ("nael", "did you mean 'neal'?"), ("", "choose")):
        for table in ("table1", "closed"):
            elsewhere = ("--out", str(here / "new"), "--splits", wrong)
            assert paper(table, *words, *elsewhere) == 1
            said = f"expected splits among arpl, neal; got {wrong!r}; {remedy}"
            assert capsys.readouterr().err == f"deepsimplex: {said}\n"
    assert not (here / "new").exists()


def test_fewer_epochs_are_not_recorded_over_more(here, capsys):
    words = ("--quick", "--trials", "1", "--rows", "softmax")
    assert paper("table1", *words, "--epochs", "2") == 0
    before = record(here, "table1")["cells"]
    assert paper("table1", *words, "--epochs", "1") == 0  # a run folder of its own
    assert "of 2 epochs, 1 trials stays" in capsys.readouterr().out
    assert record(here, "table1")["cells"] == before


def test_fewer_trials_are_not_recorded_over_more(here, capsys):
    words = ("--quick", "--epochs", "1", "--rows", "softmax")
    assert paper("table1", *words, "--trials", "2") == 0
    before = record(here, "table1")["cells"]
    assert paper("table1", *words, "--trials", "1") == 0
    said = "of 1 epochs, 2 trials stays; 1 epochs, 1 trials are not recorded over it."
    assert f"digits, softmax: the record's cell {said}" in capsys.readouterr().out
    assert record(here, "table1")["cells"] == before


def test_a_split_that_comes_twice_is_told(here, capsys):
    """ARPL's second split of CIFAR-10 is its first again."""
    few_digits(here / "data")
    words = ("--track", "none", "--epochs", "1", "--rows", "softmax")
    data = ("--data-root", str(here / "data"))
    assert paper("table1", "--columns", "mnist", *words, "--trials", "1", *data) == 0
    made = json.loads((here / "results/paper-table1.json").read_text())
    values = {"mean": 0.5, "sd": 0.2, "values": [0.3, 0.9, 0.4, 0.5, 0.4]}
    made["cells"].append(
        made["cells"][0] | {"column": "cifar10", "accuracy": values, "auroc": values}
    )
    (here / "results/paper-table1.json").write_text(json.dumps(made))
    capsys.readouterr()
    assert paper("closed", "--columns", "cifar10", *words, *data) == 0
    said = (
        "cifar10: some of the splits are equal; over the different ones alone: softmax 40.0 ± 8.2."
    )
    assert said in " ".join(capsys.readouterr().out.split())
    digits, photographs = json.loads((here / "results/paper-closed.json").read_text())["cells"]
    assert "accuracy of different splits" not in digits
    found = photographs["accuracy of different splits"]
    assert found["values"] == [0.3, 0.4, 0.5, 0.4]
    assert found["mean"] == pytest.approx(0.4)


def test_closed_takes_what_table1_has_recorded(here, capsys):
    few_digits(here / "data")
    words = ("--columns", "mnist", "--track", "none", "--epochs", "1", "--rows", "softmax,eq. 7")
    words = (*words, "--data-root", str(here / "data"))
    assert paper("table1", *words, "--trials", "1") == 0
    from_table1 = json.loads((here / "results/paper-table1.json").read_text())
    longer = {**from_table1["cells"][1], "recipe": "long"}
    from_table1["cells"].append(longer)
    (here / "results/paper-table1.json").write_text(json.dumps(from_table1))
    away = ("--out", str(here / "away"))
    assert paper("closed", *words[:-1], str(here / "none"), "--trials", "1", *away) == 0
    found = json.loads((here / "results/paper-closed.json").read_text())
    assert found["cells"] == from_table1["cells"]
    assert (found["measure"], found["missing"]) == ("accuracy", {})
    assert found["published"]["DSC"][0] == "99.8 ± 0.1"
    assert "best published without background" not in found
    assert found["taken from"]["record"] == "paper-table1.json"
    assert found["taken from"]["environment"] == from_table1["environment"]
    assert not (here / "away").exists()
    assert "softmax" in capsys.readouterr().out
    # More than table1 has is trained, and then there is no way around the data.
    assert paper("closed", *words[:-1], str(here / "none"), "--trials", "2", *away) == 1
    assert "none of mnist" in capsys.readouterr().err


def test_help_names_every_recipe(capsys):
    assert paper("table1", "--help") == 0
    told = capsys.readouterr().out
    told = " ".join(told[told.index("--recipe") : told.index("--score")].split())
    for name in BENCHMARK_RECIPES:
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", told), name


def test_the_recipes_by_name():
    common = opensets.recipe_for("eq. 7", "cifar10", 2, None)
    assert (common.backbone, common.clip, common.epochs) == ("osrci", 1.0, 100)
    whole = opensets.recipe_for("eq. 7", "cifar10", 2, None, "whole")
    assert whole == dataclasses.replace(common, backbone="osrci-whole")
    theirs = opensets.recipe_for("softmax", "cifar10", 0, None, "strong")
    both = opensets.recipe_for("softmax", "cifar10", 0, None, "strong-whole")
    assert both == dataclasses.replace(theirs, backbone="osrci-whole")
    assert (theirs.epochs, theirs.augment, theirs.restarts) == (600, "strong+crop+flip", 2)
    assert (theirs.weight_decay, theirs.clip, theirs.nesterov) == (1e-4, None, False)
    moved, once = (opensets.recipe_for("eq. 7", "cifar10", 0, None, n) for n in ("moved", "once"))
    assert moved == dataclasses.replace(once, restarts=2)
    assert default_recipe("auto", (3, 32, 32)).restarts == 0
    plan = opensets.recipe_for("eq. 7", "cifar10", 2, None, "long")
    assert (plan.epochs, plan.augment, plan.mirror, plan.seed) == (500, "rand+crop+flip", True, 2)
    digits = opensets.recipe_for("eq. 7", "mnist", 0, 7, "long")
    assert (digits.epochs, digits.mirror) == (7, False)
    faint = opensets.recipe_for("eq. 7", "mnist", 2, None, "faint")
    kept = (faint.backbone, faint.augment, faint.epochs, faint.seed)
    assert kept == ("osrci-whole", "rand", 100, 2)
    assert (faint.settings.background_weight, faint.settings.loss) == (0.1, "softmax")
    with pytest.raises(DeepSimplexError, match="background_weight for the recipe 'faint'"):
        opensets.recipe_for("softmax", "mnist", 0, None, "faint")


def test_a_column_without_data_says_how_to_get_it(here, capsys):
    few_digits(here / "data")
    words = ("--track", "none", "--trials", "1", "--epochs", "1", "--rows", "softmax")
    words = (*words, "--data-root", str(here / "data"))
    assert paper("table1", "--columns", "svhn,tinyimagenet", *words) == 1
    said = capsys.readouterr()
    assert "svhn: expected" in said.out
    assert "data get svhn" in said.out
    assert said.err.startswith("deepsimplex: expected data of one column or more; got none of svhn")
    assert paper("table2", "--columns", "cifar10", "--data-root", str(here / "data")) == 1
    assert "got none of cifar10; get them" in capsys.readouterr().err
    assert not (here / "results").exists()
    assert paper("table1", "--columns", "svhn,mnist", *words) == 0
    found = json.loads((here / "results/paper-table1.json").read_text())
    assert [cell["column"] for cell in found["cells"]] == ["mnist"]
    assert list(found["missing"]) == ["svhn"]


def few_digits(root):
    """A few images of each digit where MNIST's official files lie."""
    folder = root / "MNIST/raw"
    folder.mkdir(parents=True)
    for stem, count in (("train", 200), ("t10k", 100)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{stem}-{kind}-ubyte").write_bytes(head + array.tobytes())


def test_a_missing_background_leaves_the_other_track(here, capsys):
    few_digits(here / "data")
    words = ("--columns", "mnist", "--trials", "1", "--epochs", "1", "--rows", "eq. 7,softmax")
    assert paper("table1", *words, "--data-root", str(here / "data")) == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines() if line.startswith("best")] == [
        ["best", "published", "99.7", "(ARPL+CS,", "2021)"]
    ]
    found = json.loads((here / "results/paper-table1.json").read_text())
    assert [(c["background"], c["row"]) for c in found["cells"]] == [
        ("none", "eq. 7"),
        ("none", "softmax"),
    ]
    assert list(found["missing"]) == ["mnist, background cifar100"]
    assert "data get cifar100" in found["missing"]["mnist, background cifar100"]
    assert "mnist, background cifar100: expected" in out
    # A row that has no use for a background misses none.
    assert paper("table1", *words[:-1], "softmax", "--data-root", str(here / "data")) == 0
    assert "background cifar100: expected" not in capsys.readouterr().out


def test_bad_names_are_refused(here, capsys):
    assert paper("table1", "--columns", "cifar11") == 1
    assert "columns among mnist" in capsys.readouterr().err
    assert paper("table1", "--rows", "eq. 9") == 1
    assert "rows among eq. 4" in capsys.readouterr().err


def test_table2_tells_what_diverged_and_keeps_more_seeds(here, monkeypatch, capsys):
    from deepsimplex.paper import closedset, studies

    original, lost = studies.conduct, set()

    def failing(wanted, *rest):
        return [
            dataclasses.replace(outcome, failed="gone at step 3") if study.name in lost else outcome
            for study, outcome in zip(wanted, original(wanted, *rest), strict=True)
        ]

    monkeypatch.setattr(closedset, "conduct", failing)
    words = ("--quick", "--epochs", "1", "--rows", "softmax")
    assert paper("table2", *words, "--seeds", "3") == 0
    (whole,) = record(here, "table2")["cells"]
    assert whole["diverged"] == []
    assert paper("table2", *words, "--seeds", "2") == 0
    assert (
        "digits, softmax: the record's cell of 3 seeds stays; 2 are not recorded over it."
        in capsys.readouterr().out
    )
    assert record(here, "table2")["cells"] == [whole]
    (here / "runs/paper/paper-table2-quick.json").unlink()
    lost.add(f"digits-softmax-{whole['rate']:g}-1")
    assert paper("table2", *words, "--seeds", "3") == 0
    assert ", 1 diverged" in capsys.readouterr().out
    (cell,) = record(here, "table2")["cells"]
    values = whole["accuracy"]["values"]
    assert cell["accuracy"]["values"] == [values[0], values[2]]
    assert cell["diverged"] == ["gone at step 3"]
    lost |= {f"digits-softmax-{whole['rate']:g}-{seed}" for seed in range(3)}
    assert paper("table2", *words, "--seeds", "3") == 1
    out = capsys.readouterr()
    assert "digits, softmax: diverged, gone at step 3" in out.out
    assert "expected a training that stays finite" in out.err


def test_table2_chooses_each_rate_on_training_images(here, monkeypatch):
    seen = []
    from deepsimplex.paper import closedset, studies

    original = studies.conduct

    def spy(wanted, *rest):
        seen.extend(wanted)
        return original(wanted, *rest)

    monkeypatch.setattr(closedset, "conduct", spy)
    words = ("--quick", "--seeds", "1", "--epochs", "1", "--rows", "softmax,dsc,dsc-softmax")
    assert paper("table2", *words) == 0
    found = {cell["row"]: cell for cell in record(here, "table2")["cells"]}
    assert list(found) == ["softmax", "dsc", "dsc-softmax"]
    for cell in found.values():
        assert cell["screened"][f"{cell['rate']:g}"] == max(cell["screened"].values())
        assert list(cell["screened"]) == ["0.09", "0.3", "0.9"]
    screens = [study for study in seen if study.name.endswith("screen")]
    final = [study for study in seen if not study.name.endswith("screen")]
    assert len(screens) == 9
    assert all(set(study.look) == {"held"} for study in screens)
    assert all(len(study.images) > len(screens[0].images) for study in final)


def test_every_row_of_table2_fits_the_net_it_gets():
    from deepsimplex.paper import closedset

    needy = {name for name, row in METHODS.items() if row.needs_background}
    assert set(closedset.EVERY) == set(METHODS) - needy
    assert len(needy) >= 4
    plan = closedset._recipe(Request(False, "cpu", *[Path()] * 4, 1, None), "cifar10")
    for name in closedset.EVERY:
        recipe = closedset._of(plan, name, 0.1, 0, 2)
        method = build_method(name, recipe.backbone, (3, 32, 32), 10, recipe.settings).eval()
        with torch.inference_mode():
            assert len(method(torch.zeros(2, 3, 32, 32))) == 2
        assert recipe.backbone.endswith("unpooled") == METHODS[name].flat


@pytest.mark.parametrize(("epochs", "screened"), [(200, 20), (40, 10), (20, 10), (6, 6)])
def test_a_screening_is_long_enough_to_tell(epochs, screened, monkeypatch):
    """Margins that are eased in too fast leave every rate at chance."""
    from deepsimplex.paper import closedset

    class Seen(Exception):
        pass

    def seen(studies, *rest):
        raise Seen(*{study.recipe.epochs for study in studies})

    monkeypatch.setattr(closedset, "conduct", seen)
    images, labels = toys.pictures(60)
    data = LabelledSet("toys", images, labels, ("a", "b", "c"))
    request = Request(True, "cpu", Path(), Path(), Path(), Path(), 1, epochs)
    with pytest.raises(Seen, match=f"^{screened}$"):
        closedset._choose(request, ("dsc",), "digits", data, closedset._recipe(request, "digits"))


def test_table2_marks_a_rate_at_the_edge(here, monkeypatch, capsys):
    """A better one may lie beyond."""
    from deepsimplex.paper import closedset

    def chosen(request, rows, *rest):
        best = dict(zip(rows, closedset.RATES, strict=True))
        return {row: {r: float(r == best[row]) for r in closedset.RATES} for row in rows}

    monkeypatch.setattr(closedset, "_choose", chosen)
    words = ("--quick", "--seeds", "1", "--epochs", "1", "--rows", "softmax,dsc,dsc-softmax")
    assert paper("table2", *words) == 0
    cells = record(here, "table2")["cells"]
    assert [(c["rate"], c["edge"]) for c in cells] == [(0.09, True), (0.3, False), (0.9, True)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith(("softmax ", "dsc"))] == [
        ["0.09,", "edge"],
        ["0.3", f"{100 * cells[1]['accuracy']['mean']:.1f}"],
        ["0.9,", "edge"],
    ]


def test_table2_for_some_cells_leaves_the_others_be(here):
    words = ("--quick", "--seeds", "1", "--epochs", "1")
    assert paper("table2", *words, "--rows", "softmax,dsc") == 0
    before = {c["row"]: c for c in record(here, "table2")["cells"]}
    assert paper("table2", *words, "--rows", "dsc-softmax,softmax") == 0
    cells = {c["row"]: c for c in record(here, "table2")["cells"]}
    assert list(cells) == ["softmax", "dsc", "dsc-softmax"]
    assert cells["dsc"] == before["dsc"]
    # Another number of epochs is another cell, trained in a folder of its own.
    assert paper("table2", *words[:-1], "2", "--rows", "dsc") == 0
    after = record(here, "table2")["cells"]
    assert [(c["row"], c["epochs"]) for c in after if c["row"] == "dsc"] == [("dsc", 1), ("dsc", 2)]


def test_table2_takes_other_rows_by_name_alone(here, monkeypatch):
    """Their cells stay and are drawn; who has a rate of its own keeps near it."""
    from deepsimplex.paper import closedset

    drawn = []
    monkeypatch.setattr(Request, "draw", lambda self, name, figure: drawn.append(figure))
    words = ("--quick", "--seeds", "1", "--epochs", "1")
    assert paper("table2", *words, "--rows", "c2ae,gcpl") == 0
    assert paper("table2", *words, "--rows", "softmax") == 0
    cells = {c["row"]: c for c in record(here, "table2")["cells"]}
    assert list(cells) == ["c2ae", "gcpl", "softmax"]
    assert [float(r) for r in cells["gcpl"]["screened"]] == pytest.approx([1 / 3, 1, 3], rel=1e-5)
    assert list(cells["c2ae"]["screened"]) == ["0.09", "0.3", "0.9"]
    (axes,) = drawn[-1].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [*cells][::-1]
    asked = []
    monkeypatch.setattr(closedset, "table2", lambda request, rows, columns: asked.append(rows))
    assert paper("table2", "--quick") == 0
    assert asked == [tuple(closedset.ROWS)]


def test_rivals_stand_beside_what_was_published(here, capsys):
    words = ("--quick", "--epochs", "1", "--rows", "softmax,cac,center,oe")
    assert paper("rivals", *words) == 0
    found = record(here, "rivals")
    assert [(line["background"], line["row"]) for line in found["rows"]] == [
        ("none", "softmax"),
        ("none", "cac"),
        ("none", "center"),
        ("photographs", "oe"),
    ]
    assert all(line["published"] is None for line in found["rows"])  # of digits nothing was
    assert "background photographs, digits recipe, in %\n" in capsys.readouterr().out
    words = ("--rows", "eq. 4,cac", "--at-once", "2")
    assert paper("rivals", "--quick", "--epochs", "1", *words) == 0
    again = record(here, "rivals")["rows"]
    assert [line["row"] for line in again] == ["eq. 4", "softmax", "cac", "center", "eq. 4", "oe"]
    assert [again[i] for i in (1, 3, 5)] == [found["rows"][i] for i in (0, 2, 3)]
    written = (here / "runs/paper/paper-rivals-quick.md").read_text()
    assert written.count("\n| ") == 2 + 6  # two headings, six rows


def test_rivals_tell_of_unprinted_numbers_beside_the_rows_they_print(here, monkeypatch, capsys):
    beside = {"published": (90.0, None), "why": None}
    monkeypatch.setattr(rivals, "_beside", lambda line, column: line | beside)
    for rows, told in (("softmax,arpl", 1), ("softmax,cac", 0), ("arpl,cac", 1)):
        assert paper("rivals", "--quick", "--epochs", "1", "--rows", rows) == 0
        lines = capsys.readouterr().out.replace("\n", " ")
        assert lines.count("ARPL: ") == told
        assert (here / "runs/paper/paper-rivals-quick.md").read_text().count("\nARPL: ") == 1


def test_a_number_far_from_the_published_one_has_its_reason():
    def beside(track, row, auroc):
        return rivals._beside({"background": track, "row": row, "auroc": auroc}, "cifar10")

    near, far = beside("none", "softmax", 0.70), beside("none", "softmax", 0.90)
    assert (near["published"], near["why"]) == ((67.7, 3.2), None)
    assert "Neal" in far["why"]
    assert beside("none", "softmax", 0.677 + 0.049)["why"] is None
    assert beside("none", "softmax", 0.677 + 0.051)["why"] == far["why"]
    assert beside("none", "eq. 4", 0.5)["published"] is None
    assert beside("cifar100", "eq. 4", 0.5)["published"] == (93.8, 0.3)
    assert "half the weight" in beside("cifar100", "eq. 5 A", 0.5)["why"]
    assert "never printed" in beside("cifar100", "energy", 0.5)["why"]
    assert beside("none", "center", 0.5)["why"] is None


def test_every_published_row_has_its_reason():
    assert set(rivals.REASONS) == set(published.AUROC)
    assert set(rivals.OF_ROWS) < set(opensets.ROWS)
    assert {e.answers for e in opensets.ROWS.values()} - {None} == set(published.AUROC)
    assert {e.method for e in opensets.EVERY.values()} == set(METHODS)


def test_the_published_column_of_cifar10():
    """In the order of the paper's table; ARPL's two from their own paper."""
    column = {row: cells[1] for row, cells in published.AUROC.items() if cells[1] is not None}
    assert {row: cell[0] for row, cell in column.items()} == {
        "DSC": 93.8, "Softmax": 67.7, "OpenMax": 69.5, "G-OpenMax": 67.5, "C2AE": 89.5,
        "CAC": 80.1, "CPN": 82.8, "OSRCI": 69.9, "CROSR": 88.3, "RPL": 82.7, "GDFR": 83.1,
        "Objectosphere": 94.2, "ARPL": 90.1, "ARPL+CS": 91.0, "Energy": 93.3,
    }  # fmt: skip


def test_the_record_of_all_methods_says_what_its_code_says():
    found = json.loads((RESULTS / "paper-rivals.json").read_text())
    for line in found["rows"]:
        made = rivals._beside(line, found["column"])
        assert json.loads(json.dumps(made)) == line
    assert {line["method"] for line in found["rows"]} == set(METHODS)
    written = (RESULTS / "paper-rivals.md").read_text()
    assert written == rivals.markdown(found, opensets.Plan(columns=("cifar10",)))


def test_a_number_that_was_never_printed_is_told(capsys):
    plan = opensets.Plan(columns=("cifar10",), tracks=("cifar100",), rows=("energy",))
    key = ("cifar10", "cifar100", "energy", "common", None)
    names = ("column", "background", "row", "recipe", "detector")
    cell = dict(zip(names, key, strict=True)) | {
        "auroc": {"mean": 0.9, "sd": None, "values": [0.9]}
    }
    table1._print(plan, "auroc", published.AUROC, {key: cell})
    out = capsys.readouterr().out
    assert "90.0 (93.3)" in out
    assert "Energy: commented out in the source of the paper's table, so never printed." in out


def test_published_rows_fit_the_columns():
    for rows in (published.AUROC, published.ACCURACY):
        assert all(len(cells) == len(published.COLUMNS) for cells in rows.values())
    assert set(published.WITH_BACKGROUND) | set(published.UNPRINTED) <= set(published.AUROC)
    assert published.AUROC["Energy"][1] == (93.3, None)
    assert published.cell(None) == "–"
    assert published.cell((81.6, None)) == "81.6"


def test_readme_shows_what_the_records_say():
    root = Path(__file__).parents[1]
    assert update(root / "README.md", root / "results") == (root / "README.md").read_text()


def test_readme_shows_what_a_cell_has_less_and_more(tmp_path):
    about = {"background": "none", "row": "eq. 7", "detector": None, "recipe": "once"}
    few = {"mean": 0.5, "sd": None, "values": [0.5]}
    many = {"mean": 0.6, "sd": 0.1, "values": [0.5, 0.7]}
    cells = [
        about | {"column": "cifar10", "epochs": 9, "auroc": few},
        about | {"column": "mnist", "epochs": 600, "auroc": many},
        about | {"column": "mnist", "epochs": 600, "auroc": many, "recipe": "strong"},
        about | {"column": "mnist", "epochs": 600, "auroc": many, "detector": "joined"},
        about | {"column": "mnist", "epochs": 100, "auroc": many, "recipe": "common"},
    ]
    (tmp_path / "paper-table1.json").write_text(json.dumps({"cells": cells, "trials": 2}))
    *rows, best, _ = [line.strip("| ").split(" | ") for line in open_set(tmp_path).splitlines()[2:]]
    assert rows == [
        ["eq. 7", "–", "60.0 ± 10.0", "–"],
        ["eq. 7, once", "–", "60.0 ± 10.0", "50.0 (9 epochs, 1 of 2 trials)"],
    ]
    assert best[0] == "best published"


def test_readme_shows_the_paper_below_the_closed_set(tmp_path):
    cells = [
        {
            "column": c, "row": r, "epochs": 9, "train images": images,
            "accuracy": {"mean": 0.5, "sd": None},
        }
        for c, images in (("cifar10", 50000), ("mnist", 60000))
        for r in ("dsc", "softmax")
    ]  # fmt: skip
    # Trainings shorter than both rows have, or of other rows alone, are not shown.
    cells += [cells[0] | {"row": "center", "epochs": epochs} for epochs in (3, 99)]
    cells.append(cells[0] | {"row": "softmax", "epochs": 50})
    (tmp_path / "paper-table2.json").write_text(json.dumps({"cells": cells}))
    lines = closed_set(tmp_path).splitlines()
    title, *columns = [word.strip() for word in lines[0].strip("|").split("|")]
    assert title == "accuracy in %"
    assert columns == ["cifar10, 9 epochs of 50 000 images", "mnist, 9 epochs of 60 000 images"]
    assert lines[2:4] == ["| dsc | 50.0 | 50.0 |", "| softmax | 50.0 | 50.0 |"]
    assert lines[4:] == [
        "| the paper's DSC | 95.9 | 99.7 |",
        "| the paper's softmax | 94.4 | 99.4 |",
    ]


def test_a_damaged_record_is_told(here, capsys):
    (here / "paper-table1.json").write_text('{"cells": [')
    assert paper("claims", "--results", str(here)) == 1
    error = capsys.readouterr().err
    assert "expected a record in" in error
    assert "paper-table1.json; got a damaged file (" in error
    assert error.rstrip().endswith("put it back, or delete it")
    with pytest.raises(DeepSimplexError, match="a damaged file"):
        open_set(here)


def test_no_row_is_not_every_row(here, capsys):
    assert paper("table1", "--quick", "--rows", "") == 1
    assert "got ''; choose" in capsys.readouterr().err


def test_readme_without_its_markers_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("# nothing\n")
    with pytest.raises(DeepSimplexError, match="training speed"):
        update(tmp_path / "README.md", tmp_path)


def test_a_study_mirrors_where_its_recipe_does(tmp_path):
    images, labels = toys.pictures(60)
    look = {"it": images, "its mirror image": images[:, :, ::-1].copy()}
    for mirror in (True, False):
        plan = toys.quick(epochs=1, mirror=mirror)
        study = Study(f"mirror-{mirror}", images, labels, ["a", "b", "c"], plan, look)
        (outcome,) = conduct([study], tmp_path, "cpu")
        assert np.allclose(*outcome.outputs.values(), atol=1e-6) == mirror
