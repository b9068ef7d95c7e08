"""`paper radius`, `paper dam`, the bottleneck head and the almost-equidistant sets."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
import toys
from matplotlib.figure import Figure

from deepsimplex.errors import DeepSimplexError
from deepsimplex.heads import DAM, build_head
from deepsimplex.methods import build_method, settings_for
from deepsimplex.paper import dam as dams
from deepsimplex.paper import equidistant, studies
from deepsimplex.paper import radius as radii
from deepsimplex.paper.requests import Request
from deepsimplex.recipes import Recipe
from deepsimplex.simplex import Simplex


def asked(folder, seeds=1):
    return Request(True, "cpu", folder, folder / "runs", folder, folder, seeds, epochs=1)


def no_training(*_):
    raise AssertionError("an outcome on disk was trained again")


def few_digits(monkeypatch, count):
    whole = radii._data

    def cut(data):
        return dataclasses.replace(data, images=data.images[:count], labels=data.labels[:count])

    monkeypatch.setattr(radii, "_data", lambda request: tuple(cut(d) for d in whole(request)))


@pytest.mark.parametrize(
    ("epochs", "seeds", "name"),
    [
        (9, 2, "radius"),
        (9, 3, "radius"),
        (10, 1, "radius-10-epochs"),
        (8, 2, "radius-8-epochs-2-seeds"),
        (8, 9, "radius-8-epochs-9-seeds"),
        (9, 1, "radius-9-epochs"),
    ],
)
def test_a_shorter_study_stands_beside_a_longer_one(epochs, seeds, name, tmp_path, capsys):
    def publish(epochs, seeds):
        where = {"out": tmp_path / "runs", "results": tmp_path, "figures": tmp_path}
        content = {"recipe": {"epochs": epochs}, "data": {"name": "letters", "train images": 7000}}
        figure = Figure()
        Request(False, "cpu", tmp_path, **where, seeds=seeds).publish(
            "radius", content, figure, "u"
        )
        return figure.texts[0].get_text()

    assert publish(9, 2) == "7 000 images of letters, 9 epochs, 2 seeds, u"
    standing = tmp_path / "paper-radius.json"
    first = json.loads(standing.read_text())
    capsys.readouterr()
    publish(epochs, seeds)
    record = json.loads((tmp_path / f"paper-{name}.json").read_text())
    assert (record["recipe"]["epochs"], record["seeds"]) == (epochs, seeds)
    assert (tmp_path / f"{name}.svg").exists()
    out = " ".join(capsys.readouterr().out.split())
    if name == "radius":
        assert "stays" not in out
    else:
        assert json.loads(standing.read_text()) == first
        assert "7 000 images of letters, 9 epochs, 2 seeds, stays; this one is " + name in out


def test_what_a_figure_was_drawn_from_stands_clear_of_its_legend(tmp_path):
    """A legend outside the panels moves when a figure is cut to what is drawn."""
    request = Request(False, "cpu", tmp_path, tmp_path, tmp_path, tmp_path)
    figure = Figure(layout="constrained")
    figure.subplots().plot([0, 1], label="line")
    figure.legend(loc="outside lower center")
    request.draw("legend", figure, "9 epochs")
    assert figure.legends[0].get_title().get_text() == "9 epochs"
    assert not figure.texts
    figure = Figure(layout="constrained")
    figure.subplots().set_xlabel("label")
    request.draw("label", figure, "9 epochs")
    (below,) = figure.texts
    label = figure.axes[0].xaxis.label.get_window_extent()
    assert below.get_window_extent().y1 < label.y0


def test_radius_trains_draws_and_resumes(tmp_path, monkeypatch, capsys):
    few_digits(monkeypatch, 128)
    monkeypatch.setattr(radii, "RADII", (1, 64))
    request = asked(tmp_path)
    content = radii.radius(request)
    for end in ("svg", "png"):
        assert (tmp_path / f"radius-quick.{end}").stat().st_size > 1000
    record = json.loads((tmp_path / "paper-radius-quick.json").read_text())
    assert record["cells"] == content["cells"]
    assert record["data"]["train images"] == 128
    assert record["published"] == {"32": 76.2, "64": 79.5, "100": 79.4, "150": 79.9, "200": 79.0}
    assert set(record["cells"]) == set(radii.COLUMNS)
    assert record["cells"]["unit"]["1"] == record["cells"]["unit"]["64"]
    assert len(record["cells"]["unit"]["1"]["accuracy"]["values"]) == 1
    assert "79.5" in capsys.readouterr().out
    monkeypatch.setattr(studies, "fitting", no_training)
    assert radii.radius(request)["cells"] == content["cells"]


def test_a_training_that_diverges_is_shown(tmp_path, monkeypatch, capsys):
    few_digits(monkeypatch, 320)
    monkeypatch.setattr(radii, "RADII", (1000,))
    hot = Recipe(backbone="small", epochs=2, batch_size=64, learning_rate=1.0)
    monkeypatch.setattr(radii, "_recipe", lambda request: hot)
    found = radii.radius(asked(tmp_path))["cells"]
    cells = found["literal"]["1000"]
    assert cells["accuracy"] is None
    assert cells["last loss"] == [None]
    (step,) = cells["diverged"]
    assert 0 <= step < 20
    assert f"diverged at step {step}" in capsys.readouterr().out
    assert found["literal-clipped"]["1000"]["diverged"] == []
    axes = radii._figure(asked(tmp_path), "toys", found).axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [line.get_ydata() for line in crosses] == [[0.0]]
    (gone,), (there,) = (
        line.get_ydata() for mark in "os" for line in axes.lines if line.get_marker() == mark
    )
    assert np.isnan(gone)
    assert there == 100 * found["literal-clipped"]["1000"]["accuracy"]["mean"]
    below = (tmp_path / "radius-quick.svg").read_text()
    assert ", rate 1 -->" in below
    assert "<!-- unit radius, clipped, is u = 1" in below
    whole = dataclasses.replace(asked(tmp_path), quick=False)
    legend = radii._figure(whole, "toys", found).axes[0].get_legend()
    assert "published, all 50 000 images" in [text.get_text() for text in legend.get_texts()]


def test_some_diverged_seeds_stay_visible():
    cell = {"accuracy": {"mean": 0.5, "sd": None, "values": [0.5]}, "diverged": [4, None, 9]}
    assert radii._text(cell) == "50.0 (3 diverged at step 4–9)"
    assert radii._text({"accuracy": None, "diverged": [None]}) == "diverged"
    assert radii.step_of("NaN or infinity at step 12; lower") == 12
    assert radii.step_of("NaN or infinity in head.fc.weight") is None


def test_dam_trains_draws_and_resumes(tmp_path, monkeypatch, capsys):
    images, labels = toys.pictures(40, classes=10, size=10)
    problem = dams.Problem("toys", images, labels, images[:20], labels[:20], tuple("0123456789"))
    monkeypatch.setattr(dams, "_problem", lambda request: problem)
    monkeypatch.setattr(dams, "DIMENSIONS", (3, 8))
    request = asked(tmp_path, seeds=2)
    content = dams.dam(request)
    for name, end in itertools.product(("dam-quick", "dam-module-quick"), ("svg", "png")):
        assert (tmp_path / f"{name}.{end}").stat().st_size > 1000
    record = json.loads((tmp_path / "paper-dam-quick.json").read_text())
    rows = {row["name"]: row for row in record["variants"]}
    assert list(rows) == [variant.name for variant in dams.variants(10)]
    assert rows["doubled-plane"]["fits"] == "6 centres at most; 10 need d ≥ 4"
    assert rows["linear"]["head weights"] == 3 * 9
    assert rows["dam"]["head weights"] == 3 * 9 + 10 * 9
    assert rows["unpooled"]["features"] == 4 * rows["pooled"]["features"] == 512
    assert rows["linear"]["least loss"] == pytest.approx(1 - 2 / 9)
    assert rows["dam"]["least loss"] == pytest.approx(0)
    assert rows["bottleneck"]["least loss"] == pytest.approx(1 - 5 / 9)
    assert len(rows["dam"]["accuracy"]["test"]["values"]) == 2
    assert [found["missing triples"] for found in record["almost-equidistant sets"]] == [0, 0]
    assert "the paper prints no number" in capsys.readouterr().out
    monkeypatch.setattr(studies, "fitting", no_training)
    assert dams.dam(request)["variants"] == content["variants"]


@pytest.mark.parametrize("classes", [5, 10, 20, 21])
def test_every_variant_builds(classes):
    for variant in dams.variants(classes):
        if variant.fits is None:
            settings = settings_for("dsc", variant.settings)
            with torch.device("meta"):
                build_method("dsc", variant.backbone, (3, 32, 32), classes, settings)


def test_the_quick_problem_tells_pooled_from_unpooled(tmp_path):
    problem = dams._problem(asked(tmp_path))
    assert problem.shape == (1, 10, 10)
    assert set(problem.labels) == set(range(10))


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_least_loss_is_what_the_best_plane_leaves(rank):
    """Fitted by hand: project the centres, repeated by class, on their principal directions."""
    labels = np.array([0] * 5 + [1] * 3 + [2] * 2 + [3, 4, 5])
    simplex = Simplex(6, 5)
    targets = simplex.centres(torch.from_numpy(labels), torch.float64).numpy()
    centred = targets - targets.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    best = vectors[:, np.argsort(values)[::-1][:rank]]
    left = np.square(centred - centred @ best @ best.T).sum(1).mean()
    centres = simplex.centres(torch.arange(6), torch.float64).numpy()
    assert dams.least_loss(centres, labels, rank) == pytest.approx(left, abs=1e-12)


def test_bottleneck_shapes_and_gradients():
    head = build_head("dam", 2, 19, hidden=8)
    assert isinstance(head, DAM)
    assert sum(p.numel() for p in head.parameters()) == 3 * 8 + 9 * 19
    head(torch.randn(64, 2)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    for kind in ("linear", "none"):
        with pytest.raises(DeepSimplexError, match="no hidden width"):
            build_head(kind, 3, 3, hidden=2)


def test_hidden_is_a_setting_of_dsc():
    for head in ("auto", "dam"):
        settings = settings_for("dsc", {"head": head, "hidden": 4})
        method = build_method("dsc", "lenet++", (1, 8, 8), 20, settings)
        assert [tuple(p.shape) for p in method.head.parameters()] == [(4, 2), (4,), (19, 4), (19,)]
    recipe = Recipe(settings=settings_for("dsc", {"hidden": 4}))
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(DeepSimplexError, match="hidden"):
            settings_for("dsc", {"hidden": wrong})


@pytest.mark.parametrize("dim", range(3, 9))
def test_among_any_three_points_two_are_at_distance_one(dim):
    random = np.random.default_rng(dim)
    turns = [np.linalg.qr(random.normal(size=(dim - 2, dim - 2)))[0] for _ in range(2)]
    sets = [equidistant.almost_equidistant(dim), equidistant.almost_equidistant(dim, *turns)]
    if dim > 3:
        turn = equidistant.colliding_turn(dim, gap=1e-4)
        sets.append(equidistant.almost_equidistant(dim, turn, turn))
        assert equidistant.smallest(sets[-1])["smallest"] == pytest.approx(1e-4, rel=1e-6)
    for points in sets:
        assert points.shape == (2 * dim + 4, dim)
        apart = {}
        for i, j in itertools.combinations(range(len(points)), 2):
            apart[i, j] = float(np.linalg.norm(points[i] - points[j]))
        assert min(apart.values()) > 1e-5
        for i, j, k in itertools.combinations(range(len(points)), 3):
            triple = np.array([apart[i, j], apart[i, k], apart[j, k]])
            assert np.abs(triple - 1).min() < 1e-9
        assert equidistant.missing_triples(points) == 0


@pytest.mark.parametrize("dim", [16, 128])
def test_the_construction_holds_in_many_dimensions(dim):
    points = equidistant.almost_equidistant(dim)
    assert len(points) == 2 * dim + 4
    assert equidistant.missing_triples(points) == 0


def test_missing_triples_counts():
    line = np.array([[0.0], [3.0], [7.0], [8.0]])  # only the last two are 1 apart
    assert equidistant.missing_triples(line) == 2


def test_two_doubled_simplices_hold_as_many_points_farther_apart():
    for dim in (4, 5, 8, 33):
        points = equidistant.two_doubled(dim)
        assert points.shape == (2 * dim + 4, dim)
        np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1)
        least = equidistant.smallest(points)["smallest"]
        assert least == pytest.approx(np.sqrt(2 - 2 / (dim // 2)))
        assert least == pytest.approx(Simplex(dim, dim // 2, "doubled").margin)
        assert least > equidistant.measured(dim, turns=5)["best turn"]["in unit ball"]
    assert equidistant.two_doubled(3) is None


def test_too_few_dimensions_are_refused():
    with pytest.raises(DeepSimplexError, match="3 or more"):
        equidistant.almost_equidistant(2)
    with pytest.raises(DeepSimplexError, match="4 or more"):
        equidistant.colliding_turn(3)
