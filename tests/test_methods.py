"""The contract, for every row of METHODS without exception."""

import dataclasses
import functools
import itertools
import math
from typing import get_args, get_type_hints

import numpy as np
import oracles
import pytest
import torch
import toys
from torch import nn

from deepsimplex import engine, inference, losses, metrics, options
from deepsimplex.batches import TrainingSet
from deepsimplex.errors import DeepSimplexError, Stopped
from deepsimplex.fitting import fit_model
from deepsimplex.methods import METHODS, Row, build_method, method_row, settings_for
from deepsimplex.methods.base import Batch, Method, Normalise, Stage, Update
from deepsimplex.methods.dsc import DSC, DSCSettings
from deepsimplex.methods.softmax import Softmax, SoftmaxSettings, logit_class_scores
from deepsimplex.model import Model
from deepsimplex.recipes import Recipe

on_both_devices = pytest.mark.parametrize("device", toys.DEVICES)
every_row = pytest.mark.parametrize("name", METHODS)
with_and_without_background = pytest.mark.parametrize(
    ("name", "background"),
    [
        (name, background)
        for name, row in METHODS.items()
        for background in sorted({row.needs_background, row.uses_background})
    ],
)


def fresh(name, seed=0):
    torch.manual_seed(seed)
    return build_method(name, "small", (1, 8, 8), 3)


def batch(background=False):
    images, labels = toys.tensors(*toys.pictures(12))
    others = toys.tensors(toys.unknown_pictures(5), np.zeros(5))[0] if background else None
    return Batch(images, labels, others, 0)


def recipe(name, epochs, **changes):
    rate = METHODS[name].rate or 0.03
    return dataclasses.replace(toys.quick(name, epochs, **changes), learning_rate=rate)


def fit(name, images, labels, plan, background, **options):
    """A model of the row; background goes to those that need it, or use it and it is offered."""
    row = METHODS[name]
    others = toys.tensors(toys.unknown_pictures(60, seed=5), np.zeros(60))[0]
    wanted = row.needs_background or (background and row.uses_background)
    extra = others if wanted else None
    return fit_model(images, labels, ["a", "b", "c"], plan, background=extra, **options)


FASTER = {("dsc-authors", False): 1.0}
"""Rates for rows that 25 epochs at 0.03 leave near the origin: here the way is u = 200 long."""


@functools.cache
def training(name, shown, /, **settings):
    """Each row trained once, with background or without, and its log."""
    images, labels = toys.tensors(*toys.pictures(90))
    plan, log = recipe(name, 25, background_batch=20, settings=settings), []
    rate = FASTER.get((name, shown), plan.learning_rate)
    plan = dataclasses.replace(plan, learning_rate=rate)
    options = {"device": "cpu", "keep": 0.9, "report": log.append}
    return fit(name, images, labels, plan, shown, **options), log


def trained(name, background=None):
    """Rows that can use background have some, if not told otherwise."""
    return training(name, METHODS[name].uses_background if background is None else background)[0]


@every_row
@pytest.mark.parametrize("background", [False, True])
def test_the_first_loss_is_finite_and_reaches_every_parameter(name, background):
    if METHODS[name].needs_background and not background:
        with pytest.raises(DeepSimplexError, match="background images for method"):
            fit_model(*toys.tensors(*toys.pictures(12)), list("abc"), recipe(name, 1))
        return
    method = fresh(name).train()
    for stage in method.stages(3):
        for update in stage.updates:
            method.zero_grad()
            loss = update.loss(batch(background))
            assert loss.shape == ()
            assert loss.dtype == torch.float32
            assert loss.isfinite()
            loss.backward()
            for parameter in update.parameters:
                assert parameter.grad is not None
                assert 0 < parameter.grad.abs().sum() < math.inf
    trained_by_some = {p for s in method.stages(3) for u in s.updates for p in u.parameters}
    assert trained_by_some == set(method.parameters())


@with_and_without_background
def test_it_learns_and_knowns_score_above_unknowns(name, background):
    images, labels = toys.pictures(60, seed=7)
    model = trained(name, background)
    by_class, known = model.scores(toys.tensors(images, labels)[0])
    assert metrics.accuracy(labels, by_class.argmax(1)) > 0.95
    unknown = toys.tensors(toys.unknown_pictures(), np.zeros(30))[0]
    assert model.score == model.method.scores[0]
    assert metrics.auroc(known, model.scores(unknown)[1]) > 0.8


BACKWARDS = {
    ("gcpl", "distance"): "cross-entropy sends features past their prototype",
}
"""Scores that may rank unknowns first, as their method's docstring says, and why."""


@with_and_without_background
def test_every_score_ranks_knowns_above_unknowns(name, background):
    model = trained(name, background)
    known = model.all_scores(toys.tensors(*toys.pictures(60, seed=7))[0])[1]
    unknown = model.all_scores(toys.tensors(toys.unknown_pictures(), np.zeros(30))[0])[1]
    assert set(known) == set(model.method.scores)
    for score in set(known) - {score for row, score in BACKWARDS if row == name}:
        assert metrics.auroc(known[score], unknown[score]) > 0.5, score


ADVERSARIAL = {
    "critic": "what it tells apart grows alike",
    "generator": "its critic learns too",
}
"""Updates whose loss need not fall, by name, and why. (OSRCI's "paint" is mostly pixel error.)"""

LONGER = {"osrci": {"open_epochs": 1.0}, "g-openmax": {"open_epochs": 1.0, "ceiling": 0.9}}
"""Where the row gives the toy eight steps at a rate of 5e-5, or keeps hardly a painted image."""


@with_and_without_background
def test_every_loss_falls(name, background):
    (model, log), epochs = training(name, background, **LONGER.get(name, {})), {}
    for record in log:
        for update, loss in record["loss"].items():
            epochs.setdefault((record["stage"], update), []).append(loss)
    assert {stage for stage, _ in epochs} == {s.name for s in model.method.stages(25)}
    for (stage, update), means in epochs.items():
        if update not in ADVERSARIAL:
            assert means[-1] < means[0], (stage, update)


@every_row
def test_scores_are_finite_ordered_and_of_the_right_shape(name):
    method = trained(name).method
    outputs = inference.outputs(method, batch().images)
    decisions = set()
    for score in method.scores:
        by_class = method.class_scores(outputs, score)
        assert by_class.shape == (12, 3)
        knownness = method.knownness(outputs, score)
        assert knownness.shape == (12,)
        assert knownness.isfinite().all()
        decisions.add(tuple(by_class.argmax(1).tolist()))
    assert len(decisions) == 1  # the score may differ, the decision may not
    for judge in (method.class_scores, method.knownness):
        with pytest.raises(DeepSimplexError, match="a score among"):
            judge(outputs, "mahalanobis")


@every_row
def test_same_seed_same_weights(name):
    images, labels = toys.tensors(*toys.pictures(40))
    one, two = (fit(name, images, labels, recipe(name, 2), True, device="cpu") for _ in "ab")
    for (key, a), b in zip(
        one.method.state_dict().items(), two.method.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), key


@every_row
def test_dtypes(name):
    full, half = (
        [update for stage in fresh(name).train().stages(1) for update in stage.updates]
        for _ in range(2)
    )
    for one, two in zip(full, half, strict=True):
        torch.manual_seed(0)  # some draw
        expected = one.loss(batch(background=True)).item()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = two.loss(batch(background=True))
            assert loss.dtype == torch.float32
            loss.backward()
        assert loss.item() == pytest.approx(expected, rel=2**-7, abs=2**-10)  # 2⁻⁷: bf16's step
    method = fresh(name).eval()
    single = method(batch().images)
    double = method.double()(batch().images)
    assert double.dtype == torch.float64
    assert torch.allclose(single.double(), double, atol=1e-3)
    for score in method.scores:
        assert method.knownness(double, score).dtype == torch.float64


def first_losses(name, background, where, seed):
    """Of a fresh net, by stage and update."""
    method, few = fresh(name).to(where).train(), batch(background)
    images, labels, others = (
        None if part is None else part.to(where)
        for part in (few.images, few.labels, few.background)
    )
    found = {}
    for stage in method.stages(3):
        for update in stage.updates:
            torch.manual_seed(seed)
            loss = update.loss(Batch(images, labels, others, torch.tensor(0, device=where)))
            found[stage.name, update.name] = loss.item()
    return found


@toys.on_gpu
@with_and_without_background
def test_on_a_gpu(name, background, tmp_path):
    """Every row: losses are the CPU's, it learns, ranks, and its file gives the CPU its scores."""
    here, drawn, there = (
        first_losses(name, background, *how) for how in (("cpu", 1), ("cpu", 2), ("cuda", 1))
    )
    for update, loss in here.items():
        if drawn[update] == loss:  # does not depend on what is drawn
            assert there[update] == pytest.approx(loss, rel=1e-3, abs=1e-4), update
    images, labels = toys.pictures(90)
    plan = recipe(name, 25, background_batch=20)
    rate = FASTER.get((name, background), plan.learning_rate)
    plan = dataclasses.replace(plan, learning_rate=rate)
    model = fit(name, *toys.tensors(images, labels), plan, background, device="cuda")
    pixels = toys.tensors(images, labels)[0]
    by_class, known = model.scores(pixels)
    assert metrics.accuracy(labels, by_class.argmax(1)) > 0.95
    unknown = toys.tensors(toys.unknown_pictures(), np.zeros(30))[0]
    assert metrics.auroc(known, model.scores(unknown)[1]) > 0.8
    model.save(tmp_path / "m.safetensors")
    again = Model.load(tmp_path / "m.safetensors", "cpu").scores(pixels)
    for here, there in zip((by_class, known), again, strict=True):
        assert np.allclose(here, there, rtol=1e-3, atol=1e-3 * np.abs(here).max())


@every_row
def test_the_model_file_gives_identical_scores(name, tmp_path):
    model, images = trained(name), batch().images
    model.save(tmp_path / "m.safetensors")
    again = Model.load(tmp_path / "m.safetensors", "cpu")
    for a, b in zip(model.scores(images), again.scores(images), strict=True):
        assert np.array_equal(a, b)
    (decided, known), (anew, found) = model.all_scores(images), again.all_scores(images)
    assert np.array_equal(decided, anew)
    assert [*known] == [*found] == [*model.method.scores]
    for score, values in known.items():
        assert np.array_equal(values, found[score]), score
    assert again.recipe == model.recipe
    assert again.threshold == model.threshold
    assert again.decide(images) == model.decide(images)


class StopAt:
    """A keeper in memory that stops once after so many steps, and counts those of each stage."""

    def __init__(self, steps=-1):
        self.steps, self.checkpoint = steps, None
        self.taken, self.stages = 0, {}

    def load(self):
        return self.checkpoint

    def save(self, checkpoint):
        self.checkpoint = checkpoint

    def log(self, record):
        self.stages[record["stage"]] = self.taken

    def due(self):
        return False

    def stopping(self):
        self.taken += 1
        return 15 if self.taken == self.steps else None


@every_row
@on_both_devices
def test_resume_in_the_middle_of_every_stage(name, device):
    images, labels = toys.tensors(*toys.pictures(60))
    others = toys.tensors(toys.unknown_pictures(30), np.zeros(30))[0]
    data = TrainingSet(images, labels, others)
    plan = recipe(name, 3, background_batch=10, augment="crop", deterministic=device == "cuda")
    whole, count = fresh(name), StopAt()
    engine.train(whole, data, plan, device=device, keeper=count)
    ends = [0, *count.stages.values()]
    assert len(ends) == 1 + sum(stage.epochs > 0 for stage in whole.stages(plan.epochs))
    for begin, end in itertools.pairwise(ends):
        keeper = StopAt((begin + end) // 2 + 1)
        with pytest.raises(Stopped):
            engine.train(fresh(name), data, plan, device=device, keeper=keeper)
        again = fresh(name, seed=9)
        engine.train(again, data, plan, device=device, keeper=keeper)
        for key, tensor in whole.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor), key


@every_row
def test_bad_input(name):
    with pytest.raises(DeepSimplexError):
        build_method(name, "small", (1, 8, 8), 1)
    with pytest.raises(DeepSimplexError, match="settings of"):
        settings_for(name, {"temprature": 2.0})
    for field, hint in get_type_hints(type(method_row(name).settings)).items():
        # Of every type some, and none that a field could take.
        for value in ("a word", math.nan, math.inf, [1], {}, *(() if hint is bool else (True,))):
            with pytest.raises(DeepSimplexError, match=field):
                settings_for(name, {field: value})
        if type(None) not in get_args(hint):
            with pytest.raises(DeepSimplexError, match=field):
                settings_for(name, {field: None})
        if "margin_" not in field:  # Energy's may lie anywhere
            with pytest.raises(DeepSimplexError, match=field):
                settings_for(name, {field: -1})


@every_row
def test_bad_data(name):
    images, labels = toys.tensors(*toys.pictures(12))
    others = toys.tensors(toys.unknown_pictures(12), np.zeros(12))[0]
    row, plan, holed = METHODS[name], recipe(name, 1), others.float()
    holed[3, 0, 2, 5] = math.nan
    for wrong in (labels + 1, labels - 1):
        extra = others if row.needs_background else None
        with pytest.raises(DeepSimplexError, match="labels in 0 … 2"):
            fit_model(images, wrong, list("abc"), plan, background=extra, device="cpu")
    with pytest.raises(DeepSimplexError, match="labels as whole numbers from 0; got float32"):
        fit_model(images, labels.float(), list("abc"), plan, device="cpu")
    extra = others.float() if row.needs_background else None
    for wrong in (math.nan, math.inf):
        bad = images.float()
        bad[2, 0, 1, 4] = wrong
        with pytest.raises(DeepSimplexError, match="images of finite numbers; got NaN or infinity"):
            fit_model(bad, labels, list("abc"), plan, background=extra, device="cpu")
        with pytest.raises(DeepSimplexError, match="calibration images of finite numbers"):
            fit_model(
                images.float(), labels, list("abc"), plan, calibration=bad, background=extra,
                device="cpu",
            )  # fmt: skip
    for extra, words in (
        (others[:, :, :6], "background of shape"),
        (others[:0], "background images of finite numbers; got no image"),
        (holed, "background images of finite numbers; got NaN or infinity"),
    ):
        words = words if row.uses_background else "no background for method"
        with pytest.raises(DeepSimplexError, match=words):
            fit_model(images.float(), labels, list("abc"), plan, background=extra, device="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 2.0},
        {"loss": "hinge", "label_smoothing": 0.1},
        {"loss": "softmax", "blend": 2.0},
        {"loss": "blend", "radius": 5.0},
        {"margin": 0.1},
        {"loss": "authors", "background": "hinge-A"},
        {"loss": "authors", "background_weight": 0.5},
    ],
)
def test_a_setting_that_the_loss_does_not_read_is_refused(settings):
    with pytest.raises(DeepSimplexError, match=f"{[*settings][-1]} = .* which it does not"):
        settings_for("dsc", settings)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dsc-literal", {"background_weight": 0.5}),
        ("dsc-literal", {"background": "hinge-B"}),
        ("dsc-literal", {"background": "hinge-B", "margin": 0.3}),
        ("entropic", {"radius": 5.0}),
        ("oe", {"radius": 5.0}),
        ("center", {"delta": 2.0}),
        ("osrci", {"attempts": 3}),
        ("osrci", {"ceiling": 0.2}),
        ("g-openmax", {"steps": 9}),
        ("g-openmax", {"step_size": 0.1}),
        ("g-openmax", {"distance": 2.0}),
        ("sphereface", {"rate": 0.9}),
        ("regularface", {"power": 0}),
        ("regularface", {"half_space": False}),
        ("mhe", {"hidden": 0.0, "half_space": False}),
    ],
)
def test_a_setting_that_the_row_does_not_read_is_refused(name, settings):
    with pytest.raises(DeepSimplexError, match=f"expected settings that '{name}', as it is set"):
        settings_for(name, settings)


ANOTHER = {
    "alpha": 1, "tail": 2, "ceiling": 0.35, "width": 13, "hidden": 5, "power": 1, "margin_out": 3.0,
}  # fmt: skip
"""Values that matter on the toy, where half of a number and a little, or one more, would not."""


def another(field, hint, value):
    if hint is bool:
        return not value
    if field in ANOTHER:
        return ANOTHER[field]
    if isinstance(value, int):
        return value + 1
    return 0.37 if isinstance(value, str) else value / 2 + 0.13


def fingerprint(name, settings):
    """All that a setting may change: stages, losses, weights, buffers, scores."""
    images, labels = toys.tensors(*toys.pictures(60))
    plan, log = recipe(name, 2, background_batch=10), []
    plan = dataclasses.replace(plan, settings=settings)
    model = fit(name, images, labels, plan, True, device="cpu", report=log.append)
    own = [
        (stage.name, stage.epochs, stage.background_batch, numbers(update.optimiser))
        for stage in model.method.stages(100)
        for update in stage.updates
    ]
    by_class, known = model.all_scores(images)
    found = {k: torch.as_tensor(v) for k, v in {"by class": by_class, **known}.items()}
    said = str((own, [line["loss"] for line in log]))
    return said, found | dict(model.method.state_dict())


def numbers(optimiser):
    """An optimiser without functions, whose names are of one run."""
    if optimiser is None or optimiser.schedule is None:
        return optimiser
    return dataclasses.replace(optimiser, schedule=[optimiser.schedule(k, 10) for k in range(10)])


def alike(one, other):
    (said, these), (told, those) = one, other
    return (
        said == told
        and these.keys() == those.keys()
        and all(torch.equal(these[k], those[k]) for k in these)
    )


def refused(name, settings):
    try:
        settings_for(name, settings)
    except DeepSimplexError as error:
        if "which it does not" not in str(error):
            raise
        return True
    return False


@every_row
def test_a_setting_is_read_or_refused(name):
    settings = method_row(name).settings
    plain = fingerprint(name, settings)
    assert alike(plain, fingerprint(name, settings))
    for field, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, field)
        word = isinstance(value, str) and float not in get_args(hint)
        others = {*get_args(hint)} - {value} if word else {another(field, hint, value)}
        for other in sorted(others):
            idle = refused(name, {field: other})
            if word and not idle:
                continue  # what it chooses has tests of its own
            try:
                found = fingerprint(name, dataclasses.replace(settings, **{field: other}))
            except DeepSimplexError:  # a bottleneck for no head
                assert (idle, field) == (True, "hidden")
                continue
            assert alike(plain, found) == idle, (field, other)


@pytest.mark.parametrize(
    ("name", "set_so", "read"),
    [
        ("dsc", {"loss": "literal"}, {"background_weight": 0.5}),
        ("dsc", {"loss": "literal", "background": "hinge-B"}, {"margin": 0.1}),
        ("dsc", {"background": "hinge-A"}, {"margin": 0.1}),
        ("dsc-authors", {}, {"margin": 0.1}),
        ("dsc", {"loss": "softmax"}, {"label_smoothing": 0.2}),
        ("entropic", {"ring": 0.1}, {"radius": 3.0}),
        ("center", {"term": "contrastive"}, {"delta": 3.0}),
        ("osrci", {"unknowns": "between"}, {"attempts": 1}),
        ("sphereface", {"uniform": 0.5}, {"rate": 0.9}),
        ("regularface", {"output": 0.5}, {"power": 0}),
        ("regularface", {"hidden": 0.5}, {"power": 0}),
        ("regularface", {"hidden": 0.5}, {"half_space": False}),
    ],
)
def test_a_setting_that_another_wakes_is_read(name, set_so, read):
    assert not refused(name, set_so | read)
    settings = dataclasses.replace(METHODS[name].settings, **set_so)
    plain = fingerprint(name, settings)
    assert not alike(plain, fingerprint(name, dataclasses.replace(settings, **read)))


def test_what_a_loss_does_not_read_stays_in_a_file():
    """A row's own margin is not the user's to leave out, nor is a file's."""
    assert settings_for("dsc-hinge", {"loss": "blend"}).margin == 0.01
    assert settings_for("dsc", {"radius": 64.0}) == method_row("dsc").settings
    record = Recipe(settings=DSCSettings(margin=0.1)).to_json()
    assert Recipe.from_json(record).settings.margin == 0.1


def test_choices_as_numpy_has_them():
    assert settings_for("dsc", {"loss": np.str_("hinge")}).loss == "hinge"
    assert settings_for("mhe", {"power": np.int64(1)}).power == 1
    for value in (True, 1.0, np.float64(1)):
        with pytest.raises(DeepSimplexError, match="power among 0, 1, 2"):
            settings_for("mhe", {"power": value})


def test_words_of_settings():
    assert options.settings(["a=True", "b=false", "c=none", "d=-3", "e=1e-3"]) == {
        "a": True, "b": False, "c": "none", "d": -3, "e": 1e-3,
    }  # fmt: skip


def test_method_names_are_suggested():
    with pytest.raises(DeepSimplexError, match="did you mean 'softmax'"):
        method_row("sofmax")
    with pytest.raises(DeepSimplexError, match="choose one of dsc"):
        Recipe(method="resnet")


@pytest.mark.parametrize("term", ["centroid", "hinge-A", "hinge-B", "hinge-C"])
def test_each_background_term_falls_on_background_it_has_not_seen(term):
    images, labels = toys.tensors(*toys.pictures(90))
    others, unseen = (
        toys.tensors(toys.unknown_pictures(60, seed=seed), np.zeros(60))[0] for seed in (3, 4)
    )
    settings = {"background": term} | ({} if term == "centroid" else {"margin": 1.0})
    recipe = toys.quick("dsc", 20, settings=settings, background_batch=30)
    with_background, without = (
        fit_model(images, labels, list("abc"), recipe, background=b, device="cpu").method
        for b in (others, None)
    )

    def value(method):
        features, background = inference.outputs(method, images), inference.outputs(method, unseen)
        if term == "centroid":
            return float(losses.centroid_pull(method.simplex, background))
        reading = term[-1]
        return float(
            losses.pair_hinge(method.simplex, features, labels, background, 1.0, reading=reading)
        )

    assert value(with_background) < 0.7 * value(without)


def test_heads_and_simplices_of_dsc():
    def build(classes, **settings):
        return build_method("dsc", "mlp", (6,), classes, DSCSettings(**settings))

    assert build(5).simplex.dim == 4
    assert type(build(5).head).__name__ == "LinearHead"
    assert type(build(500).head).__name__ == "DAM"
    assert build(5, simplex="truncated", width=9).simplex.free == 5
    assert build(20, simplex="doubled", width=9, head="linear").simplex.classes == 20
    none = build(5, head="none", simplex="truncated")
    assert none.simplex.dim == none.encoder.features
    for bad, words in (
        ({"loss": "hinge", "margin": "auto"}, "a number as margin"),
        ({"loss": "sofmax"}, "loss among squared, hinge"),
        ({"loss": 5}, "loss among squared, hinge"),
        ({"margin": "large"}, "margin among auto"),
        ({"margin": -1.0}, "margin of 0 or more"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"simplex": "cubic"}, "simplex among regular"),
    ):
        with pytest.raises(DeepSimplexError, match=words):
            DSCSettings(**bad)
    with pytest.raises(DeepSimplexError, match="label_smoothing below 1"):
        SoftmaxSettings(label_smoothing=1.0)


def test_normalisation_comes_from_the_training_images():
    images = torch.randint(0, 255, (50, 3, 4, 5), dtype=torch.uint8)
    images[:, 2] = 7
    layer = Normalise((3, 4, 5))
    layer.fit(images)
    out = layer(images)
    assert out.dtype == torch.float32
    assert torch.allclose(out[:, :2].mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(out[:, :2].std((0, 2, 3), correction=0), torch.ones(2), atol=1e-4)
    assert torch.equal(out[:, 2], torch.zeros(50, 4, 5))
    columns = Normalise((4,))
    columns.fit(torch.randn(30, 4) * 3 + 5)
    assert columns.mean.shape == (4,)


class Given(nn.Module):
    """An encoder that hands its input on: losses can be checked on features made by hand."""

    features = 4

    def forward(self, images):
        return images


def test_a_hot_probability_is_the_lead_over_the_mean_logit():
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hot = logit_class_scores(logits, "max_probability", 1e6).amax(1)
    lead = logits.amax(1) - logits.mean(1)
    assert torch.equal(hot.argsort(), lead.argsort())
    assert torch.allclose(1e6 * (hot + math.log(6)), lead, atol=1e-5)


def by_hand(settings, classes=5):
    method = DSC(Given(), classes, settings)
    method.head = nn.Identity()
    return method


def hand_batch():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    background = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return Batch(features, torch.arange(9) % 5, background, 0)


@pytest.mark.parametrize(
    ("settings", "oracle"),
    [
        ({}, lambda f, y, b, c: oracles.eq4(f, y, c) + np.mean((b**2).sum(1))),
        (
            {"background_weight": 0.3},
            lambda f, y, b, c: oracles.eq4(f, y, c) + 0.3 * np.mean((b**2).sum(1)),
        ),
        (
            {"loss": "hinge", "margin": 0.7, "background_weight": 0.0},
            lambda f, y, b, c: oracles.eq6(f, y, c, 0.7),
        ),
        (
            {"loss": "softmax", "temperature": 0.2, "background_weight": 0.0},
            lambda f, y, b, c: oracles.eq7(f, y, c, scale=5.0),
        ),
        (
            {"loss": "literal", "radius": 3.0, "background_weight": 0.3},  # f and b are raw
            lambda f, y, b, c: oracles.eq4(f, y, 3 * c) + 0.3 * np.mean((b**2).sum(1)),
        ),
        (
            {"loss": "blend", "blend": 2.0, "temperature": 0.2, "background_weight": 0.0},
            lambda f, y, b, c: oracles.eq7(f, y, c, scale=5.0) + 2 * oracles.eq4(f, y, c),
        ),
        *(
            (
                {"background_weight": 0.3, **settings},
                lambda f, y, b, c, known=known: known(f, y, c) + 0.3 * np.mean((b**2).sum(1)),
            )
            for settings, known in (
                ({"loss": "hinge", "margin": 0.7}, lambda f, y, c: oracles.eq6(f, y, c, 0.7)),
                ({"loss": "softmax"}, oracles.eq7),
                ({"loss": "blend"}, lambda f, y, c: oracles.eq7(f, y, c) + oracles.eq4(f, y, c)),
            )
        ),
        (
            {"loss": "authors", "margin": 0.4, "radius": 3.0},  # f are raw: u = 3, m = 0.4·u²
            lambda f, y, b, c: oracles.authors_three_terms(f, y, b, 3 * c, 0.4 * 9),
        ),
        *(
            (
                {"background": f"hinge-{reading}", "margin": 0.6},
                lambda f, y, b, c, m=m, plain=plain: oracles.eq5(f, y, b, c, m, 1 / 108, plain),
            )
            for reading, m, plain in (("A", 0.6, False), ("B", 0.36, False), ("C", 0.6, True))
        ),
    ],
)
def test_dsc_descends_the_loss_its_settings_name(settings, oracle):
    batch = hand_batch()
    centres = oracles.simplex_centres(5, 4, "regular")
    arrays = batch.images.numpy(), batch.labels.tolist(), batch.background.numpy()
    value = by_hand(DSCSettings(**settings)).loss(batch)
    assert float(value) == pytest.approx(oracle(*arrays, centres), rel=1e-10)


def test_the_row_of_the_authors_is_their_script():
    """u = 200, m = 48, and of the d + 1 vertices in R^d the first C."""
    row = METHODS["dsc-authors"]
    method = row.build(Given(), 3, row.settings)
    centres = oracles.simplex_centres(3, 4, "truncated")
    random, labels = np.random.default_rng(0), np.arange(9) % 3
    features = 200 * centres[labels] + 100 * random.normal(size=(9, 4))
    background = 100 * random.normal(size=(6, 4))
    known, others = torch.from_numpy(features), torch.from_numpy(background)
    value = method.loss(Batch(known, torch.from_numpy(labels), others, 0))
    expected = oracles.authors_three_terms(features, labels, background, 200 * centres, 48)
    assert float(value) == pytest.approx(expected, rel=1e-10)
    # Their second score: squared distances over the length of all C of them.
    outputs = method(known)
    scores = method.class_scores(outputs, "relative").numpy()
    for found, f in zip(scores, features, strict=True):
        squares = [oracles.squared_distance(f, 200 * centre) for centre in centres]
        length = math.sqrt(sum(square**2 for square in squares))
        assert found == pytest.approx([-square / length for square in squares], rel=1e-10)
    assert torch.equal(method.knownness(outputs, "relative"), torch.from_numpy(scores.max(1)))


@pytest.mark.parametrize("reading", ["A", "B", "C"])
def test_rows_of_eq5_are_the_paper_at_radius_64(reading):
    batch, u = hand_batch(), 64.0
    row = by_hand(METHODS[f"dsc-eq5-{reading.lower()}"].settings)
    f, y, b = u * batch.images, batch.labels, u * batch.background
    known = losses.literal_simplex_loss(row.simplex, f, y, u)
    hinge = losses.literal_background_loss(row.simplex, f, y, b, u, reading=reading) - known
    assert hinge > 0
    unit = u if reading == "C" else u**2  # the hinge is a length in C, a square in A and B
    expected = known / u**2 + hinge / unit
    assert float(row.loss(batch)) == pytest.approx(float(expected), rel=1e-10)


def test_scores_against_their_formulas():
    batch = hand_batch()
    f = batch.images.numpy()
    centres = oracles.simplex_centres(5, 4, "regular")
    method = by_hand(DSCSettings())
    dots = f @ centres.T
    lengths = np.linalg.norm(f, axis=1, keepdims=True)
    distances = np.linalg.norm(f[:, None] - centres, axis=2)
    for score, expected in (("distance", -distances), ("dot", dots), ("cosine", dots / lengths)):
        assert np.allclose(method.class_scores(batch.images, score), expected)
        assert np.allclose(method.knownness(batch.images, score), expected.max(1))
    assert by_hand(DSCSettings(loss="blend")).scores == ("dot", "cosine", "distance")
    free = by_hand(DSCSettings(loss="softmax"))  # eq. 7 leaves the length free
    assert free.scores == ("dot", "cosine")
    with pytest.raises(DeepSimplexError, match="a score among dot, cosine"):
        free.knownness(batch.images, "distance")
    softmax = Softmax(Given(), 4, SoftmaxSettings(label_smoothing=0.2))
    softmax.head = nn.Identity()
    p = np.exp(f) / np.exp(f).sum(1, keepdims=True)
    for score, expected in (
        ("max_logit", f.max(1)),
        ("max_probability", np.log(p.max(1))),
        ("energy", np.log(np.exp(f).sum(1))),
        ("neg_entropy", (p * np.log(p)).sum(1)),
    ):
        assert np.allclose(softmax.knownness(batch.images, score), expected)
    labels = batch.labels % 4
    smooth = np.full((9, 4), 0.05)
    smooth[np.arange(9), labels] += 0.8
    value = softmax.loss(Batch(batch.images, labels, None, 0))
    assert float(value.detach()) == pytest.approx(-(smooth * np.log(p)).sum(1).mean(), rel=1e-5)
    softmax.settings = SoftmaxSettings()
    value = float(softmax.loss(Batch(batch.images, labels, None, 0)).detach())
    assert value == pytest.approx(oracles.cross_entropy(f, labels.tolist()), rel=1e-5)


def test_a_constant_on_all_logits_moves_the_logit_and_not_the_probability():
    logits = hand_batch().images
    softmax = Softmax(Given(), 4, SoftmaxSettings())
    for score, shift in (
        ("max_probability", 0.0),
        ("neg_entropy", 0.0),
        ("max_logit", 3.0),
        ("energy", 3.0),
    ):
        before, after = (softmax.knownness(z, score) for z in (logits, logits + 3))
        assert torch.allclose(after, before + shift, rtol=0, atol=1e-12)


class Prototypes(Method):
    """Scores with a Parameter and a buffer: what most rivals do."""

    def __init__(self, encoder, classes, settings):
        super().__init__()
        self.scores = ("distance",)
        self.encoder = encoder
        self.points = nn.Parameter(torch.randn(classes, encoder.features))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images):
        return self.encoder(images)

    def stages(self, epochs):
        return (Stage("fit", (Update("fit", self.loss, tuple(self.parameters())),), epochs),)

    def loss(self, batch):
        distances = torch.cdist(self(batch.images).float(), self.points)
        return nn.functional.cross_entropy(-distances, batch.labels)

    def class_scores(self, outputs, score):
        return -torch.cdist(outputs.float(), self.points.float()) * self.scale

    def knownness(self, outputs, score):
        return self.class_scores(outputs, score).amax(1)


@on_both_devices
def test_scores_may_use_parameters_and_buffers(monkeypatch, device):
    monkeypatch.setitem(METHODS, "prototypes", Row(Prototypes, SoftmaxSettings(), "a toy"))
    images, labels = toys.pictures(90)
    plan = toys.quick("prototypes", 20)
    model = fit_model(*toys.tensors(images, labels), list("abc"), plan, keep=0.9, device=device)
    predicted = model.judge(toys.tensors(images, labels)[0]).predicted
    assert metrics.accuracy(labels, predicted) > 0.95
