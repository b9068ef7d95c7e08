"""The benchmarks: the clock's arithmetic, what is said when a variant cannot run, the records."""

import json
import sys
import types

import pytest
import torch
import torch.nn.functional as F
import toys

from deepsimplex import losses as plain
from deepsimplex.bench import aurocs, losses, memory, records, scores, startup, timing
from deepsimplex.cli import run
from deepsimplex.errors import DeepSimplexError
from deepsimplex.simplex import Simplex, centres

CPU = torch.device("cpu")
FIELDS = {"command", "what", "seed", "repeats", "environment", "rows"}
ROW = {"variant", "outcome", "seconds", "rounds_s", "ratio", "first_call_s", "peak_bytes"}


class Clock:
    """A clock that only the calls move."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def taking(self, *seconds):
        """A call whose n-th run takes the n-th of `seconds`, later ones the last."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_variants_take_turns_and_ratios_are_by_round(monkeypatch):
    clock = Clock(monkeypatch)
    order = []

    def noted(name, call):
        return lambda: (order.append(name), call())

    found = timing.interleaved(
        {
            "a": noted("a", clock.taking(9.0, 1.0, 1.0, 2.0, 4.0, 1.0, 2.0)),
            "b": noted("b", clock.taking(7.0, 3.0, 2.0, 2.0, 16.0, 3.0, 10.0)),
        },
        repeats=5,
    )
    assert order == ["a", "a", "b", "b", *["a", "b"] * 5]  # two of warm-up each, then turns
    assert found["a"].first == pytest.approx(9.0)
    assert found["a"].seconds == pytest.approx([1, 2, 4, 1, 2])
    assert timing.ratios(found["b"], found["a"]) == pytest.approx([2, 1, 4, 3, 5])
    assert timing.quartiles([2, 1, 4, 3, 5]) == {"median": 3, "q1": 2, "q3": 4}
    row = records.row(found["b"], found["a"], variant="b")
    assert row["ratio"]["median"] == pytest.approx(3)
    assert records.ratio_cell(row["ratio"]) == "3.00× (2.00 – 4.00)"
    assert set(row) == ROW


def test_a_short_call_fills_its_turn_and_is_divided(monkeypatch):
    clock = Clock(monkeypatch)
    runs = []
    call = clock.taking(1e-3)
    found = timing.interleaved({"a": lambda: (runs.append(1), call())}, 5, least=5e-3)
    assert found["a"].seconds == pytest.approx([1e-3] * 5)
    assert len(runs) in (2 + 5 * 5, 2 + 5 * 6)  # 5 ms / 1 ms, rounded up


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_a_row_and_the_others_go_on(error):
    def greedy():
        raise error

    found = timing.interleaved({"lean": lambda: None, "greedy": greedy}, 5)
    assert found["greedy"].failed == memory.OUT_OF_MEMORY
    assert found["lean"].failed is None
    assert timing.ratios(found["greedy"], found["lean"]) == []
    row = records.row(found["greedy"], found["lean"], variant="greedy")
    assert row["outcome"] == records.seconds_cell(row) == "out of memory"
    assert row["ratio"] is None
    assert records.ratio_cell(None) == records.bytes_cell(None) == "–"


def test_out_of_memory_in_a_later_round():
    left = [1, 1, 1]

    def late():
        if not left:
            raise torch.OutOfMemoryError("out of memory")
        left.pop()

    found = timing.interleaved({"late": late}, 5, least=0.0)
    assert found["late"].failed == memory.OUT_OF_MEMORY
    assert records.row(found["late"], variant="late")["rounds_s"] == []


def test_other_errors_are_not_swallowed():
    def broken():
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        timing.interleaved({"broken": broken}, 5)
    with pytest.raises(timing.Unavailable, match="does not compile here: RuntimeError"):
        timing.Prepared(lambda: broken, "does not compile here")()


def test_what_cannot_run_is_not_kept():
    def build():
        def call():
            raise torch.OutOfMemoryError("out of memory")

        return call

    variant = timing.Prepared(build, "fails")
    assert timing.interleaved({"v": variant}, 5)["v"].failed == memory.OUT_OF_MEMORY
    assert variant.call is None


def test_main_memory_is_asked_before_it_is_taken(monkeypatch):
    assert memory.free_memory() > 0
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    memory.claim(1000, CPU)
    memory.claim(10**15, torch.device("cuda"))  # which refuses by itself
    with pytest.raises(torch.OutOfMemoryError, match="1,001 bytes wanted"):
        memory.claim(1001, CPU)


def test_cells_carry_their_unit():
    for middle, cell in ((2e-6, "2 µs (1 – 3)"), (2e-3, "2 ms (1 – 3)"), (2.0, "2 s (1 – 3)")):
        spread = {"median": middle, "q1": middle / 2, "q3": 1.5 * middle}
        assert records.seconds_cell({"seconds": spread, "outcome": "measured"}) == cell
    assert [records.bytes_cell(n) for n in (2500, 2_500_000, 4 * 10**9)] == [
        "2.5 kB",
        "2.5 MB",
        "4 GB",
    ]


@pytest.fixture
def small(monkeypatch):
    """The quick sizes, smaller still."""
    monkeypatch.setattr(losses, "QUICK", (10, 40))
    monkeypatch.setattr(scores, "QUICK", (10, 40))
    monkeypatch.setattr(scores, "QUICK_BATCH", 70)
    monkeypatch.setattr(aurocs, "QUICK", (1000,))
    starts = dict(list(startup.STARTS.items())[:2])
    monkeypatch.setattr(startup, "QUICK", tuple(starts))
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", None)


@pytest.mark.parametrize("name", ["loss", "score", "auroc", "startup"])
def test_every_command_prints_a_table_and_writes_a_record(name, small, tmp_path, capsys):
    out = tmp_path / "new" / "record.json"
    device = ["--device", "cpu"] if name in ("loss", "score") else []
    words = ["bench", name, "--quick", "--repeats", "5", "--out", str(out), *device]
    assert run(words) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert "1.00× (1.00 – 1.00)" in text
    assert str(out) in text
    record = json.loads(out.read_text())
    assert set(record) >= FIELDS
    assert record["command"].startswith(f"deepsimplex bench {name}")
    assert str(tmp_path) not in record["command"]
    assert record["environment"]["torch"] == torch.__version__
    for row in record["rows"]:
        assert set(row) >= ROW
        if row["outcome"] == "measured":
            assert row["seconds"]["q1"] <= row["seconds"]["median"] <= row["seconds"]["q3"]
            assert len(row["rounds_s"]) == 5
            assert row["first_call_s"] > 0
            assert row["peak_bytes"] is None  # on the CPU
    if name == "loss":
        said = {(r["group"], r["variant"]): r["outcome"] for r in record["rows"]}
        assert said["with head", "ArcFace"] == "not installed"
        assert said["loss alone", "simplex, kernel"] == "needs a GPU"
        assert said["with head", "cross-entropy, compiled"] == "left out by --quick"
        for word in ("not installed", "needs a GPU", "with head", "loss alone"):
            assert word in text
        assert record["kernel_note"] in text
    if name == "score":
        for row in record["rows"]:
            assert row["error"] < 1e-5
            if row["variant"] == "formula":
                assert row["error_near"] < 1e-6
            else:
                assert row["error_near"] > 1e-3  # ‖f‖² + 1 − 2f·v cancels


@pytest.mark.parametrize("name", ["train", "loss", "score", "auroc", "startup"])
def test_few_repeats_are_refused(name, capsys, tmp_path):
    if name == "train":
        pytest.importorskip("deepsimplex.bench.training", reason="not there yet")
    assert run(["bench", name, "--repeats", "4", "--out", str(tmp_path / "r.json")]) == 1
    assert "expected 5 or more repeats; got 4; " in capsys.readouterr().err
    with pytest.raises(DeepSimplexError):
        timing.check_repeats(4)
    timing.check_repeats(5)


def test_help_lists_the_benchmarks(capsys):
    assert run(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("train", "loss", "score", "auroc", "startup"):
        assert name in text


def test_a_table_without_room_is_shown_beside_the_formula(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    rows = {row["variant"]: row for row in scores.compare(40, 8, CPU, 5)}
    assert rows["cdist"]["outcome"] == rows["GEMM"]["outcome"] == "out of memory"
    assert rows["cdist"]["error"] is rows["cdist"]["ratio"] is None
    assert rows["formula"]["outcome"] == "measured"
    assert "out of memory" in scores._cells(rows["cdist"])


def test_the_ways_agree_on_the_nearest_centre():
    simplex = Simplex(40, 39)
    ordinary, near = scores.features(simplex, 100, CPU)
    for given in (ordinary, near):
        answers = [way(given)[0] for way in scores.scores(simplex, CPU).values()]
        assert torch.equal(answers[0], answers[1])
        assert torch.equal(answers[0], answers[2])


class ArcFace(torch.nn.Module):
    """Stands in for pytorch-metric-learning's."""

    def __init__(self, num_classes, embedding_size):
        super().__init__()
        self.W = torch.nn.Parameter(torch.randn(embedding_size, num_classes))

    def forward(self, embeddings, labels):
        return F.cross_entropy(embeddings @ self.W, labels)


def test_variants_that_cannot_run_say_why(monkeypatch):
    module = types.ModuleType("pytorch_metric_learning.losses")
    module.ArcFaceLoss = ArcFace
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", types.ModuleType("p"))
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", module)

    def no_compiler(function):
        raise RuntimeError("no C++ compiler found")

    def no_room(simplex, features, labels):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(losses, "compile_", no_compiler)
    monkeypatch.setattr(losses, "own_squared_distance", no_room)
    setting = losses.Setting(12, CPU, batch=4, width=3)
    said = {key: measured.failed for key, measured in losses.measure(setting, 5).items()}
    assert said["with head", "simplex"] == said["loss alone", "simplex"] == "out of memory"
    assert said["with head", "simplex, compiled"] == "does not compile here: RuntimeError"
    assert said["with head", "ArcFace"] is said["loss alone", "cross-entropy"] is None


def test_main_memory_too_small_for_the_heads(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    setting = losses.Setting(12, CPU, compiled=False, batch=4, width=3)
    rows = losses.block(setting, losses.measure(setting, 5))
    simplex = next(row for row in rows if row["variant"] == "simplex")
    assert simplex["outcome"] == "out of memory"


@pytest.mark.parametrize("classes", [2, 10, 300])
def test_the_fusible_form_is_the_loss(classes):
    simplex = Simplex(classes, classes - 1)
    labels = torch.arange(8) % classes
    f = centres(simplex, labels) + 1e-3 * torch.randn(8, classes - 1)
    true = plain.simplex_loss(simplex, f.double(), labels)
    assert losses.fusible_simplex_loss(simplex, f, labels) == pytest.approx(true.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("median", "said"),
    [(1.31, "beats the compiled formula by 1.3×"), (1.29, "does not beat the compiled formula")],
)
def test_the_kernel_must_earn_its_place(median, said):
    def gain(classes, median):
        spread = {"median": median, "q1": median, "q3": median}
        return {"classes": classes, "precision": "float32", "ratio": spread}

    assert said in losses.verdict([gain(10, 0.5), gain(10_000, 2.0), gain(100_000, median)])
    assert "not measured" in losses.verdict([gain(10, 2.0)])


@toys.on_gpu
class TestKernel:
    @pytest.fixture(autouse=True)
    def kernel(self):
        pytest.importorskip("triton", reason="needs Triton")
        from deepsimplex.kernels import loss

        return loss

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("classes", "dim", "n", "kind"),
        [
            (2, 1, 1, "regular"),
            (10, 9, 128, "regular"),
            (1000, 999, 33, "regular"),
            (9001, 9000, 17, "regular"),
            (100_000, 99_999, 16, "regular"),
            (100, 130, 9, "regular"),
            (100, 130, 9, "truncated"),
            (200, 130, 9, "doubled"),
        ],
    )
    @pytest.mark.parametrize("upstream", [1.0, 3.0])
    def test_value_and_gradient(self, kernel, classes, dim, n, kind, dtype, upstream):
        torch.manual_seed(0)
        simplex = Simplex(classes, dim, kind)
        labels = torch.randint(classes, (n,), device="cuda")
        labels[0] = 0
        f = (torch.randn(n, dim, device="cuda") / dim**0.5).to(dtype)
        ours, true = f.clone().requires_grad_(), f.double().requires_grad_()
        value = kernel.fused_simplex_loss(simplex, ours, labels)
        expected = plain.simplex_loss(simplex, true, labels)
        (upstream * value).backward()
        (upstream * expected).backward()
        assert value.dtype == torch.float32
        assert ours.grad.dtype == dtype
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)
        # One rounding to the features' dtype, another after the factor.
        rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
        atol = rtol * true.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.double(), true.grad, rtol=rtol, atol=atol)

    @pytest.mark.parametrize("classes", [10, 1000, 100_000])
    def test_precise_near_a_vertex(self, kernel, classes):
        torch.manual_seed(0)
        simplex = Simplex(classes, classes - 1)
        labels = torch.randint(classes, (16,), device="cuda")
        step = torch.randn(16, classes - 1, device="cuda", dtype=torch.float64)
        step *= 1e-3 / step.norm(dim=1, keepdim=True)
        f = (centres(simplex, labels, torch.float64) + step).float()
        true = plain.simplex_loss(simplex, f.double(), labels).item()
        assert kernel.fused_simplex_loss(simplex, f, labels).item() == pytest.approx(true, rel=1e-6)

    def test_same_bits_twice(self, kernel):
        simplex = Simplex(5000, 4999)
        labels = torch.randint(5000, (64,), device="cuda")
        f = torch.randn(64, 4999, device="cuda")
        values = [kernel.fused_simplex_loss(simplex, f, labels) for _ in range(2)]
        assert torch.equal(*values)

    def test_many_classes_take_it(self, kernel):
        simplex = Simplex(plain.MANY, plain.MANY - 1)
        labels = torch.randint(plain.MANY, (8,), device="cuda")
        f = torch.randn(8, plain.MANY - 1, device="cuda", requires_grad=True)
        value = plain.simplex_loss(simplex, f, labels)
        assert "SimplexLoss" in type(value.grad_fn).__name__
        assert torch.equal(value, kernel.fused_simplex_loss(simplex, f, labels))
        assert plain.simplex_loss(simplex, f.double(), labels).dtype == torch.float64

    def test_a_second_backward_is_refused(self, kernel):
        f = torch.randn(4, 9, device="cuda", requires_grad=True)
        value = kernel.fused_simplex_loss(Simplex(10, 9), f, torch.arange(4, device="cuda"))
        value.backward(retain_graph=True)
        with pytest.raises(DeepSimplexError, match="one backward pass"):
            value.backward()

    @pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch 2.11's own
    def test_every_variant_runs_and_has_a_peak(self, kernel):
        setting = losses.Setting(1000, torch.device("cuda"), compiled=False)
        for (_, variant), measured in losses.measure(setting, 5).items():
            if measured.failed is None:
                assert measured.peak > 0
            else:
                assert variant == "ArcFace" or "compiled" in variant
