"""The paper's figures in their quick form: records, pictures, resuming, and what they compute."""

import json
import re

import numpy as np
import pytest

from deepsimplex import engine
from deepsimplex.errors import DeepSimplexError
from deepsimplex.paper import drawings, semantic
from deepsimplex.paper.requests import Request
from deepsimplex.paper.studies import clear

COMMANDS = {
    "simplex": drawings.simplex,
    "embeddings": drawings.embeddings,
    "imbalance": drawings.imbalance,
    "semantic": semantic.semantic,
}


def request_in(folder, seeds=2):
    return Request(
        quick=True,
        device="cpu",
        root=folder / "no-data",
        out=folder / "runs",
        results=folder / "results",
        figures=folder / "figures",
        seeds=seeds,
        epochs=1,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Every command, run once on few images: the folder, and each record."""
    folder = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPSIMPLEX_COMMIT", "tests")  # asking git takes longer than an epoch
        patch.setattr(drawings, "QUICK", 20)
        for command in COMMANDS.values():
            command(request_in(folder))
    found = {}
    for name in COMMANDS:
        text = (folder / "results" / f"paper-{name}-quick.json").read_text()
        found[name] = json.loads(text)
    return folder, found


@pytest.mark.parametrize("name", COMMANDS)
def test_both_pictures_and_a_birth_certificate(name, done):
    folder, records = done
    for suffix, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        content = (folder / "figures" / f"{name}-quick{suffix}").read_bytes()
        assert content.startswith(start)
        assert len(content) > 5000
    for field in ("command", "environment", "quick", "seeds", "seconds", "published"):
        assert field in records[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_again_reads_back_without_training(name, done, monkeypatch, capsys):
    folder, records = done

    def fail(*arguments, **options):
        raise AssertionError("trained again")

    monkeypatch.setattr(engine, "training", fail)
    monkeypatch.setenv("DEEPSIMPLEX_COMMIT", "tests")
    monkeypatch.setattr(drawings, "QUICK", 20)
    if name != "embeddings":  # one picture drawn again is enough; drawing takes the time
        monkeypatch.setattr(Request, "draw", lambda *arguments: None)
    picture = folder / "figures" / f"{name}-quick.svg"
    before = picture.read_bytes()
    COMMANDS[name](request_in(folder))
    assert picture.read_bytes() == before
    again = json.loads((folder / "results" / f"paper-{name}-quick.json").read_text())
    differ = {"seconds", "command"}
    assert {k: v for k, v in again.items() if k not in differ} == {
        k: v for k, v in records[name].items() if k not in differ
    }
    out = capsys.readouterr().out
    assert "Record:" in out
    said = re.search(r"^(.+): (\d+) of (\d+) trainings were done before", out, re.MULTILINE)
    title, before_now, every = said.groups()
    assert before_now == every
    assert sum(line.startswith(f"{title}:") for line in out.splitlines()) == 1  # and none begins


def test_simplex_has_a_panel_for_each_dimension(done):
    panels = done[1]["simplex"]["panels"]
    assert [(p["classes"], p["dimension"]) for p in panels] == [(2, 1), (3, 2), (4, 3)]
    assert [len(p["distances_between_means"]) for p in panels] == [1, 3, 6]
    assert panels[1]["nominal_distance"] == pytest.approx(np.sqrt(3))


def test_embeddings_compare_the_three_losses(done):
    record = done[1]["embeddings"]
    assert list(record["losses"]) == ["eq. 4", "eq. 6", "eq. 7"]
    for found in record["losses"].values():
        assert 0 <= found["test_accuracy"] <= 1
        assert found["test_spread"] > 0
    settings = {title: recipe["settings"] for title, recipe in record["recipes"].items()}
    assert all(one["head"] == "none" for one in settings.values())
    # u = 5 at unit radius: a tenth of the distance 5√3 between vertices, and u² in the exponent.
    assert settings["eq. 6"]["margin"] == pytest.approx(0.5 * np.sqrt(3) / 25)
    assert settings["eq. 7"]["temperature"] == pytest.approx(1 / 25)


def test_imbalance_counts_every_class_of_every_seed(done):
    record = done[1]["imbalance"]
    assert list(record["losses"]) == ["eq. 4", "eq. 6", "eq. 7", "softmax", "center loss", "CAC"]
    for title, seeds in record["losses"].items():
        assert [one["cut"] for one in seeds] == [0, 1]
        for one, lost in zip(seeds, record["lost"][title], strict=True):
            for kind in ("balanced", "imbalanced"):
                for where in (kind, f"{kind}, training images"):
                    assert len(one[where]) == 3
                    assert all(0 <= share <= 1 for share in one[where])
            assert lost == one["balanced"][one["cut"]] - one["imbalanced"][one["cut"]]
    assert len(record["notes"]) == 7


def test_imbalance_cuts_one_class_to_a_tenth(tmp_path):
    parts = drawings._three(request_in(tmp_path))
    row = drawings.SIMPLEX_LOSSES[0]
    whole = drawings._planar(request_in(tmp_path), parts, row, 0)
    assert np.bincount(whole.labels).tolist() == [50, 50, 50]
    for seed, cut in ((0, 0), (1, 1), (2, 2)):
        study = drawings._planar(request_in(tmp_path), parts, row, seed, cut)
        expected = [50, 50, 50]
        expected[cut] = 5
        assert np.bincount(study.labels).tolist() == expected
        assert len(study.images) == 105
        assert study.look["test"] is parts.test[0]


def test_a_cut_keeps_the_others_and_depends_on_the_seed():
    labels = np.arange(300) % 3
    one = drawings.cut_to_share(labels, 2, 0.1, seed=0)
    two = drawings.cut_to_share(labels, 2, 0.1, seed=1)
    assert set(np.flatnonzero(labels != 2)) <= set(one)
    assert np.bincount(labels[one]).tolist() == [100, 100, 10]
    assert set(one) != set(two)
    assert np.array_equal(one, drawings.cut_to_share(labels, 2, 0.1, seed=0))


def test_verdicts_follow_from_the_numbers():
    lost = {
        "good": [0.1, 0.11, 0.09, 0.1],
        "bad": [0.4, 0.41, 0.39, 0.4],
        "even": [0.2, 0.3, 0.2, 0.1],
        "softmax": [0.2, 0.21, 0.2, 0.2],
    }
    control, good, bad, even = drawings.verdicts(lost, "softmax")
    assert control.startswith("softmax: the cut class loses 20.2 ± 0.5 points")
    assert "less in 4 of 4 seeds: less than softmax" in good
    assert "10.2 ± 0.5 less" in good
    assert "less in 0 of 4 seeds: more than softmax" in bad
    assert " more than under softmax" in bad
    assert "no clear difference" in even
    one = drawings.verdicts({"good": [0.1], "softmax": [0.2]}, "softmax")
    assert "one seed decides nothing" in one[1]


def test_what_is_clear_is_what_scipy_says_of_pairs():
    from scipy.stats import ttest_rel

    random = np.random.default_rng(0)
    found = []
    for shift in (-1.5, 0.0, 0.8, 1.5) * 10:
        ours, theirs = random.normal(shift, 1, 6), random.normal(0, 1, 6)
        p = ttest_rel(ours, theirs).pvalue
        found.append(clear(ours - theirs))
        assert found[-1] == (np.sign((ours - theirs).mean()) if p < 0.05 else 0)
    assert set(found) == {-1, 0, 1}
    assert clear(np.array([3.0])) == 0


def test_parts_are_numbered_in_the_order_asked(tmp_path):
    parts = drawings.load_parts(request_in(tmp_path), [7, 3])
    back = drawings.load_parts(request_in(tmp_path), [3, 7])
    assert parts.classes == ("7", "3")
    assert np.array_equal(parts.train[1], 1 - back.train[1])
    assert np.array_equal(parts.train[0], back.train[0])


def test_nearest_class_on_a_hand_made_example():
    """Trained at (1, 0), (4, 0), (0, 4); unseen at (3, 1) and (1, 8)."""
    means = np.array([[1, 0], [4, 0], [0, 4], [3, 1], [1, 8]], float)
    labels = np.repeat(np.arange(5), 2)
    shift = np.tile([[0.5, -0.5], [-0.5, 0.5]], (5, 1))
    found = semantic.class_means(means[labels] + shift, labels)
    assert np.allclose(found, means)
    apart = semantic.distances(found)
    assert apart[0, 1] == pytest.approx(3)
    assert apart[3, 1] == pytest.approx(np.sqrt(2))
    assert np.allclose(apart, apart.T)
    assert semantic.nearest(apart, 3) == [1, 2]
    turned = semantic.cosines(found)
    assert turned[3, 0] == pytest.approx(3 / np.sqrt(10))
    assert turned[0, 2] == pytest.approx(0)
    assert semantic.nearest(-turned, 3)[1] == 2


def test_nearest_looks_at_trained_classes_only():
    means = np.array([[0.0], [10.0], [6.0], [6.1]])
    assert semantic.nearest(semantic.distances(means), 2) == [1, 1]


def test_a_training_whose_model_is_gone_is_told(tmp_path):
    parts = drawings._three(request_in(tmp_path))
    row = next(row for row in drawings.CONTROLS if row.space != "outputs")
    study = drawings._planar(request_in(tmp_path), parts, row, 0)
    with pytest.raises(DeepSimplexError, match=f"its results without it; delete .*{study.name}"):
        drawings.look(row, study, None, "test", request_in(tmp_path), "imbalance")


def test_semantic_record_is_complete(done):
    record = done[1]["semantic"]
    assert record["trained"] == list("012345")
    for runs in record["methods"].values():
        assert [run["seed"] for run in runs] == [0, 1]
        for run in runs:
            assert np.shape(run["distances"]) == np.shape(run["cosines"]) == (10, 10)
            matrix = np.array(run["distances"])
            unseen = dict(zip("6789", semantic.nearest(matrix, 6), strict=True))
            assert run["nearest"] == {name: str(j) for name, j in unseen.items()}
            low, high = run["trained_pairs"]
            assert 0 < low <= high
    for counts in record["agreed"].values():
        assert all(sum(seen.values()) == 2 for seen in counts.values())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_method_has_its_panel_and_no_panel_is_empty(count):
    matrix = np.abs(np.subtract.outer(np.arange(5.0), np.arange(5.0)))
    found = {f"m{k}": [{"distances": matrix.tolist()}] * 2 for k in range(count)}
    figure = semantic._figure(found, list("abcde"), 3)
    titles = [axes.get_title().partition(":")[0] for axes in figure.axes]
    assert titles == list(found)


def test_claims_are_counted_by_seed(capsys):
    def run(dog, ship):
        return {
            "nearest": {"dog": dog, "ship": ship},
            "nearest_by_cosine": {"dog": dog, "ship": ship},
        }

    found = {"DSC": [run("cat", "airplane"), run("cat", "bird"), run("deer", "bird")]}
    claims = {"dog": "cat", "ship": "airplane"}
    agreed = semantic._print_nearest(found, ["dog", "ship"], claims)
    assert agreed["DSC, distance"] == {
        "dog": {"cat": 2, "deer": 1},
        "ship": {"bird": 2, "airplane": 1},
    }
    text = capsys.readouterr().out
    assert "cat: 2 of 3 (deer: 1)" in text
    assert "airplane: 1 of 3 (bird: 2)" in text
    assert "nearest in 3 of 6 cases; by chance 1.0" in text
