"""Evaluation and tables on numbers made by hand."""

import numpy as np
import pytest

from deepsimplex.compare import Evaluation, gather_scores
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
