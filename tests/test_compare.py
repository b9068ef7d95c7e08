"""Evaluation and tables on numbers made by hand; a model that two trials share."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from deepsimplex.compare import Evaluation, gather_scores, running
from deepsimplex.data.protocols import digits_trial
from deepsimplex.data.sources import to_tensor
from deepsimplex.lanes import drive
from deepsimplex.model import Model
from deepsimplex.recipes import digits_recipe
from deepsimplex.tables import summary


class Judge:
    """Just enough of a model: its score and one limit."""

    score = "distance"

    def limits(self, predicted):
        return np.full(len(predicted), -0.5)


def test_a_report_by_hand():
    evaluation = Evaluation(
        labels=np.array([0, 0, 1, 1]),
        known_predicted=np.array([0, 1, 1, 1]),
        known_scores={"distance": np.array([-0.1, -0.2, -0.6, -0.5]), "dot": np.arange(4.0)},
        unknown_predicted=np.array([0, 1]),
        unknown_scores={"distance": np.array([-0.3, -0.9]), "dot": np.array([9.0, 9.0])},
    )
    report = evaluation.report(Judge())
    assert report["accuracy"] == 0.75
    assert report["known_kept"] == 0.75  # −0.5 itself is kept
    assert report["unknown_rejected"] == 0.5
    assert report["auroc"] == pytest.approx((2 + 2 + 1 + 1) / 8)
    assert report["auroc_by_score"] == {"distance": report["auroc"], "dot": 0.0}
    # decided: 0 1 ? 1 | 0 ?; F1 of 0: 2/4, of 1: 2/4, of unknown: 2/4
    assert report["macro_f1"] == pytest.approx(0.5)
    arrays = evaluation.arrays()
    assert arrays["label"].tolist() == [0, 0, 1, 1, -1, -1]
    assert arrays["predicted"].tolist() == [0, 1, 1, 1, 0, 1]
    assert arrays["dot"].tolist() == [0, 1, 2, 3, 9, 9]


def test_summary_is_the_sample_sd():
    table = summary([{"a": 1.0}, {"a": 2.0}, {"a": 4.0}], ("a",))["a"]
    assert table["mean"] == pytest.approx(7 / 3)
    assert table["sd"] == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert summary([{"a": 1.0}], ("a",))["a"]["sd"] is None


def test_scores_of_several_runs_in_one_file(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "scores.npz", label=np.array([1, 2]))
    gather_scores(tmp_path / "all.npz", sorted(tmp_path.glob("*/scores.npz")))
    with np.load(tmp_path / "all.npz") as file:
        assert file.files == ["x.label", "y.label"]


def test_what_was_held_out_and_mirror_images(tmp_path):
    recipe = dataclasses.replace(digits_recipe("dsc", seed=1), epochs=2)
    trial, where = digits_trial(0), torch.device("cpu")

    def run(name, **changes):
        plan = dataclasses.replace(recipe, **changes)
        return drive([running(trial, plan, tmp_path / name, where, keep=0.95)], where)[0]

    plain = run("plain")
    model = Model.load(tmp_path / "plain" / "model.safetensors")
    images, labels = trial.calibration
    right = sum(
        int(model.judge(to_tensor(images[[k]])).predicted[0] == labels[k])
        for k in range(len(labels))
    )
    assert plain["held_out_accuracy"] == right / len(labels)
    assert plain["auroc_mirrored"] is None  # training mirrors nothing
    once, both = run("once", augment="flip"), run("both", augment="flip", mirror=True)
    assert both["auroc_mirrored"] is None
    assert once["auroc_mirrored"] == both["auroc"] != once["auroc"]
    assert once["auroc_one_view"] is None
    assert [(r["mirror"], r["shift"]) for r in (once, both)] == [(False, 0), (True, 0)]
    assert both["auroc_one_view"] == once["auroc"]
    moved = run("moved", shift=1)
    assert moved["auroc_one_view"] == plain["auroc"] != moved["auroc"]


def test_equal_trainings_are_done_once(tmp_path):
    recipe = dataclasses.replace(digits_recipe("dsc", seed=1), epochs=1)
    trial = digits_trial(0)
    other = dataclasses.replace(
        trial,
        name="other",
        unknown_test=trial.unknown_test[:50],
        unknown_names=trial.unknown_names[:50],
    )
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    lines = []

    def run(trial, recipe, folder, *donors):
        job = running(
            trial,
            recipe,
            folder,
            torch.device("cpu"),
            keep=0.95,
            donors=donors,
            report=lines.append,
        )
        return drive([job], torch.device("cpu"))[0]

    one = run(trial, recipe, first)
    assert (one["trained by"], len(lines)) == (None, 1)
    two = run(other, recipe, second, tmp_path / "nobody", first)
    assert two["trained by"].endswith("/first")
    assert len(lines) == 1
    assert (two["accuracy"], two["counts"]["unknown test"]) == (one["accuracy"], 50)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    again = run(other, recipe, third, tmp_path / "nobody")
    assert (again["trained by"], len(lines)) == (None, 2)
    assert again["auroc"] == two["auroc"]
    # The commit is the one that trained, and what cannot be read is trained anew.
    told = json.loads((first / "results.json").read_text())
    (first / "results.json").write_text(json.dumps(told | {"commit": "old", "hardware": "abacus"}))
    sixth = run(other, recipe, tmp_path / "sixth", first)
    assert (sixth["commit"], sixth["hardware"]) == ("old", "abacus")
    (second / "model.safetensors").write_bytes(b"of another version")
    seventh = run(other, recipe, tmp_path / "seventh", second, first)
    assert seventh["trained by"].endswith("/first")
    eighth = run(other, recipe, tmp_path / "eighth", second)
    assert (eighth["trained by"], eighth["commit"]) == (None, told["commit"])
    views = dataclasses.replace(recipe, shift=1)  # look at the same training otherwise
    moved = run(other, views, tmp_path / "ninth", first)
    assert moved["trained by"].endswith("/first")
    assert moved["auroc"] == run(other, views, tmp_path / "tenth")["auroc"] != two["auroc"]
    changed = dataclasses.replace(recipe, seed=2)
    assert run(other, changed, tmp_path / "fourth", first)["trained by"] is None
    fewer = dataclasses.replace(other, train=tuple(part[:-1] for part in other.train))
    assert run(fewer, recipe, tmp_path / "fifth", first)["trained by"] is None
