"""Charts of the tables: every number of the record in its place, and nothing cut off."""

import itertools
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from deepsimplex.cli import run
from deepsimplex.paper import charts, closedset, opensets
from deepsimplex.paper.requests import COLOURS, Request

RESULTS = Path(__file__).parents[1] / "results"


def summary(mean, sd=0.01):
    return {"mean": mean, "sd": sd, "values": [mean] * 5}


def cell(column, row, track, auroc, recipe="common", detector=None, epochs=100):
    return {
        "column": column, "row": row, "background": track, "recipe": recipe, "detector": detector,
        "epochs": epochs, "auroc": summary(auroc), "accuracy": summary(auroc + 0.01),
    }  # fmt: skip


def marks(axes, marker):
    """(x, row, colour) of every mark of a kind, the row by its label."""
    labels = [label.get_text() for label in axes.figure.axes[0].get_yticklabels()]
    found = []
    for line in axes.lines:
        if line.get_marker() == marker:
            (x,), (y,) = line.get_xdata(), line.get_ydata()
            found.append((round(float(x), 4), labels[round(y)], line.get_color()))
    return found


def made():
    return {
        "measure": "auroc",
        "family": "arpl",
        "cells": [
            cell("cifar10", "softmax", "none", 0.9),
            cell("cifar10", "eq. 7", "cifar100", 0.95),
            cell("cifar10", "eq. 7", "none", 0.89),
            cell("mnist", "eq. 7", "none", 0.99, recipe="long", epochs=50),
            cell("mnist", "eq. 7", "none", 0.98, detector="joined"),
        ],
    }


def test_a_panel_a_column_with_every_cell_in_its_row():
    figure = charts.open_sets(made())
    mnist, cifar10 = figure.axes
    assert (mnist.get_title(), cifar10.get_title()) == ("mnist", "cifar10")
    rows = ["eq. 7", "eq. 7, by joined", "eq. 7, long", "softmax"]
    assert [label.get_text() for label in mnist.get_yticklabels()] == rows
    blue, red = COLOURS[:2]
    assert marks(mnist, "o") == [(99, "eq. 7, long", blue), (98, "eq. 7, by joined", blue)]
    assert marks(mnist, "D") == []  # DSC's published number has a background
    assert marks(cifar10, "o") == [
        (90, "softmax", blue),
        (95, "eq. 7", red),
        (89, "eq. 7", blue),
    ]
    assert marks(cifar10, "D") == [(67.7, "softmax", blue), (93.8, "eq. 7", red)]
    assert all(line.get_mfc() == "white" for line in cifar10.lines if line.get_marker() == "D")
    dashed = [line.get_xdata()[0] for line in cifar10.lines if line.get_linestyle() == "--"]
    assert dashed == [94.5]
    assert [text.get_text() for text in mnist.texts] == ["epochs: 50"]
    drawn = [line for line in cifar10.lines if line.get_marker() in ("o", "D")]
    heights = {round(float(line.get_ydata()[0]), 6) for line in drawn}
    assert len(heights) == len(drawn) == 5  # one over the other, none hidden


def test_cells_of_fewer_trials_or_epochs_are_marked():
    record = made()
    record["cells"][0]["auroc"]["values"] = [0.9]
    record["cells"][3]["auroc"]["values"] = [0.99, 0.99]
    notes = [text.get_text() for axes in charts.open_sets(record).axes for text in axes.texts]
    assert sorted(notes) == ["epochs: 50, trials: 2", "trials: 1"]


def test_accuracies_have_their_own_published_numbers():
    _, cifar10 = charts.open_sets(made() | {"measure": "accuracy"}).axes
    assert marks(cifar10, "o")[0] == (91, "softmax", COLOURS[0])
    assert marks(cifar10, "D") == [(80.1, "softmax", COLOURS[0]), (96.1, "eq. 7", COLOURS[1])]
    assert not [line for line in cifar10.lines if line.get_linestyle() == "--"]


def test_other_splits_have_no_best_line():
    for axes in charts.open_sets(made() | {"family": "neal"}).axes:
        assert not [line for line in axes.lines if line.get_linestyle() == "--"]


def test_closed_sets_mark_an_edge():
    screened = {"0.09": 0.8, "0.3": 0.9, "0.9": 0.7}
    record = {
        "cells": [
            {
                "column": "mnist", "row": row, "epochs": 40, "rate": rate, "screened": screened,
                "accuracy": {"mean": 0.99, "sd": None, "values": [0.99]}, "train images": 60000,
            }
            for row, rate in (("softmax", 0.3), ("triplet", 0.9))
        ]
    }  # fmt: skip
    (axes,) = charts.closed_sets(record, closedset.ROWS).axes
    assert axes.get_title() == "mnist, 40 epochs\nof 60 000 images"
    assert [row for _, row, _ in marks(axes, "o")] == ["softmax", "triplet"]
    assert marks(axes, "D") == [(99.4, "softmax", COLOURS[0])]
    assert [(text.get_text(), round(text.xy[1])) for text in axes.texts] == [("rate at edge", 1)]


@pytest.mark.parametrize(
    ("verdict", "colour"),
    [
        ("holds", COLOURS[2]),
        ("holds for every loss", COLOURS[2]),
        ("holds only with a background set", COLOURS[4]),
        ("holds with training images, not clear with test images", COLOURS[5]),
        ("not clear", COLOURS[5]),
        ("does not hold without it, not clear with it (mnist not measured)", COLOURS[5]),
        ("holds with a background set (mnist not measured)", COLOURS[2]),
        ("does not hold", COLOURS[1]),
        ("not measured", "#b2b2b2"),
    ],
)
def test_verdicts_have_their_colours(verdict, colour):
    records = ["paper-radius.json", "paper-dam.json"]
    claim = {"claim": "a", "verdict": verdict, "because": "b", "records": records}
    (axes,) = charts.claims({"claims": [claim]}).axes
    (mark,) = (line for line in axes.lines if line.get_marker() != "None")
    assert to_hex(mark.get_color()) == colour
    texts = [text.get_text() for text in axes.texts]
    assert texts[:3] == ["the paper's claim", "verdict", "because (record)"]
    assert texts[3:] == ["a", textwrap.fill(verdict, 30), "b (paper-radius, paper-dam)"]


def boxes(figure):
    """Where each text of a figure stands, in pixels, and the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = list(figure.texts)  # its title
    texts += [text for axes in figure.axes for text in (*axes.texts, axes.title)]
    texts += [label for axes in figure.axes[:1] for label in axes.get_yticklabels()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    shown = [text for text in texts if text.get_visible() and text.get_text()]
    found = {text.get_text(): text.get_window_extent(canvas.get_renderer()) for text in shown}
    return found, figure.bbox


def every_row(*columns):
    """A record with a cell wherever there can be one."""
    random = np.random.default_rng(0)
    places = itertools.product(columns, opensets.TRACKS, opensets.ROWS)
    cells = [cell(c, r, t, random.uniform(0.7, 1)) for c, t, r in places if opensets.fits(r, t)]
    return {"measure": "auroc", "family": "arpl", "cells": cells}


@pytest.mark.parametrize("name", ["claims", "table1", "closed", "table2", "mnist cifar10", "mnist"])
def test_no_text_is_cut_off_or_over_another(name):
    draw = {
        "claims": charts.claims,
        "table2": lambda record: charts.closed_sets(record, closedset.ROWS),
    }.get(name, charts.open_sets)
    path = RESULTS / f"paper-{name}.json"
    record = json.loads(path.read_text()) if path.exists() else every_row(*name.split())
    found, whole = boxes(draw(record))
    assert len(found) > 4
    for text, box in found.items():
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text
    for (one, a), (other, b) in itertools.combinations(found.items(), 2):
        assert not a.overlaps(b), (one, other)


def test_every_command_draws_its_whole_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEEPSIMPLEX_COMMIT", "tests")
    seen = {}
    original = Request.draw

    def spy(request, name, figure):
        seen[name] = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        if name != "table2":  # one fewer to wait for
            original(request, name, figure)

    monkeypatch.setattr(Request, "draw", spy)

    def paper(name, *words):
        common = ("--quick", "--device", "cpu", "--figures", str(tmp_path / "figures"))
        assert run(["paper", name, *common, *words]) == 0

    for row in ("softmax", "eq. 7"):
        paper("table1", "--epochs", "1", "--trials", "1", "--track", "none", "--rows", row)
        paper("rivals", "--epochs", "1", "--rows", row)
    paper("closed", "--epochs", "1", "--trials", "1", "--track", "none", "--rows", "softmax")
    for row in ("softmax", "dsc"):
        paper("table2", "--epochs", "1", "--seeds", "1", "--rows", row)
    paper("claims")
    assert seen.pop("claims") == []
    assert seen == {
        "table1": ["eq. 7", "softmax"],
        "rivals": ["eq. 7", "softmax"],
        "closed": ["eq. 7", "softmax"],
        "table2": ["dsc", "softmax"],
    }
    for name in ("table1", "rivals", "closed", "claims"):
        assert (tmp_path / f"figures/{name}-quick.svg").read_bytes().startswith(b"<?xml")
        assert (tmp_path / f"figures/{name}-quick.png").read_bytes().startswith(b"\x89PNG")
