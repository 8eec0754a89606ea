"""The benchmark of the kernels: which cases it finds, what it prints, writes and draws, and what it refuses."""

from dataclasses import dataclass
import json
import re
import sys
from types import ModuleType

from forge_mlx.kernels._common.cases import OpCase
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.metal import check
import matplotlib.image
import mlx.core as mx
import numpy as np
import pytest

from scripts.bench import bench_kernels, kernel_timing
from scripts.bench.kernel_timing import Chain, Timing, time_pass


@dataclass(frozen=True)
class Squares(OpCase):
    """x * x, of which "reference" and "mlx" may be made wrong."""

    op = "squares"

    size: int = 64
    dtype: mx.Dtype = mx.float32
    reference: float = 1.0
    mlx: float = 1.0

    @property
    def name(self):
        return f"{self.size}-{str(self.dtype).removeprefix('mlx.core.')}"

    def inputs(self):
        return {"x": mx.linspace(-2, 2, self.size).astype(self.dtype)}

    def cotangents(self):
        return {"y": mx.ones((self.size,), self.dtype)}

    def function(self, impl):
        factor = {"reference": self.reference, "mlx": self.mlx}[impl]
        return lambda x: x * x if factor == 1 else factor * (x * x)

    def formula(self, inputs, cotangents):
        return {"y": inputs["x"] ** 2, "dx": 2 * inputs["x"] * cotangents["y"]}

    def expected(self):
        x = to_float64(self.inputs()["x"])
        return {"y": x * x, "dx": 2 * x}


@dataclass(frozen=True)
class Total(Squares):
    """The sum of the squares: its result has another shape than its input."""

    op = "total"

    def cotangents(self):
        return {"y": mx.ones((), self.dtype)}

    def function(self, impl):
        squares = super().function(impl)
        return lambda x: squares(x).sum()

    def formula(self, inputs, cotangents):
        return {"y": (inputs["x"] ** 2).sum(), "dx": 2 * inputs["x"] * cotangents["y"]}

    def expected(self):
        expected = super().expected()
        return expected | {"y": np.sum(expected["y"])}


@dataclass(frozen=True)
class Signs(Squares):
    """An op without a gradient."""

    op = "signs"

    def cotangents(self):
        return {}

    def function(self, impl):  # noqa: ARG002
        return mx.sign

    def run(self, impl):
        return {"y": self.function(impl)(self.inputs()["x"])}

    def expected(self):
        return {"y": np.sign(to_float64(self.inputs()["x"]))}


@pytest.fixture
def rooms(monkeypatch):
    """Puts cases into the benchmark in the place of those of the rooms."""

    def put(**cases):
        monkeypatch.setattr(check, "rooms", lambda: list(cases))
        for room, timed in cases.items():
            module = ModuleType("cases")
            if timed is not None:
                module.TIMED = timed
            monkeypatch.setitem(sys.modules, f"forge_mlx.kernels.{room}.cases", module)

    put(one=(Squares(), Squares(dtype=mx.bfloat16)), two=(Total(32), Signs(32)))
    return put


@pytest.fixture
def run(call_main, rooms):  # noqa: ARG001
    def call(*arguments):
        return call_main(bench_kernels.main, "--engine", "reference", *arguments)

    return call


def table(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_case_in_every_pass_that_it_has(run):
    status, out, err = run("--turns", "1")
    assert (status, err) == (0, "")
    passes = ["forward", "backward", "both"]
    want = [["squares", name, which] for name in ("64-float32", "64-bfloat16") for which in passes]
    want += [["total", "32-float32", which] for which in passes] + [["signs", "32-float32", "forward"]]
    assert [row[:3] for row in table(out)] == want
    assert all(float(row[5]) > 0 for row in table(out))
    assert out.startswith(f"kernels on engine reference beside MLX {mx.__version__}: Device(cpu, 0)")
    assert "\nchains of 2, 1 turns in both orders, medians\n" in out


@pytest.mark.parametrize(
    ("options", "cases"),
    [
        (["squares"], ["64-float32", "64-bfloat16"]),
        (["two/"], ["32-float32", "32-float32"]),
        (["tot", "bfloat"], ["64-bfloat16", "32-float32"]),
        (["--dtype", "bfloat16"], ["64-bfloat16"]),
    ],
    ids=["op", "room", "two words", "dtype"],
)
def test_words_and_dtypes_choose(run, options, cases):
    status, out, _ = run("--list", *options)
    assert status == 0
    assert [row[2] for row in table(out)] == cases


def test_quick_takes_the_smallest_case_of_each_op(run, rooms):
    rooms(one=(Squares(128), Squares(), Squares(96)), two=(Total(32), Signs(32)))
    status, out, _ = run("--quick", "--pass", "both", "--pass", "forward")
    assert status == 0
    assert [row[:3] for row in table(out)] == [
        ["squares", "64-float32", "forward"],
        ["squares", "64-float32", "both"],
        ["total", "32-float32", "forward"],
        ["total", "32-float32", "both"],
        ["signs", "32-float32", "forward"],
    ]


def test_json_has_what_was_measured_and_on_what(run, tmp_path):
    file = tmp_path / "times.json"
    assert run("total", "--turns", "2", "--chain", "3", "--json", file)[0] == 0
    content = json.loads(file.read_text())
    assert content["machine"]["mlx"] == mx.__version__
    assert (content["engine"], content["chain"], content["turns"]) == ("reference", 3, 2)
    assert content["refused"] == []
    assert [each["pass"] for each in content["results"]] == ["forward", "backward", "both"]
    for each in content["results"]:
        assert (each["room"], each["op"], each["case"], each["dtype"]) == ("two", "total", "32-float32", "float32")
        assert each["speed"] == pytest.approx(each["seconds"]["mlx"] / each["seconds"]["ours"])
        # Both sides are the same operations.
        assert each["peak_bytes"]["ours"] == each["peak_bytes"]["mlx"] > 0
        assert each["memory"] == 1


def test_plot_is_a_picture(run, tmp_path):
    file = tmp_path / "times.png"
    assert run("--quick", "--plot", file)[0] == 0
    height, width, _ = matplotlib.image.imread(file).shape
    assert width > height > 300


WRONG = {
    "ours": (Squares(128, reference=1.1), "128-float32: y must be within"),
    "MLX's": (Squares(128, mlx=2.0), "128-float32: MLX's y is something else, off by 4"),
}


@pytest.mark.parametrize(("case", "finding"), WRONG.values(), ids=WRONG)
def test_op_with_a_wrong_result_is_not_timed_and_the_others_are(run, rooms, tmp_path, case, finding):
    rooms(one=(Squares(), case, Total(32)))
    file = tmp_path / "times.json"
    status, out, _ = run("--turns", "1", "--json", file)
    assert status == 1
    assert {row[0] for row in table(out)} == {"total"}
    assert f"\nsquares (one): refused, so these are no times of it\n  {finding}" in out
    (refused,) = json.loads(file.read_text())["refused"]
    assert (refused["room"], refused["op"]) == ("one", "squares")
    assert refused["findings"][0].startswith(finding)


class Raises(Squares):
    """An op that its engine cannot run."""

    def function(self, impl):
        if impl == "reference":
            raise RuntimeError("[squares] no such kernel")
        return super().function(impl)


def test_op_that_raises_is_refused(run, rooms):
    rooms(one=(Raises(), Total(32)))
    status, out, _ = run("--quick")
    assert status == 1
    assert {row[0] for row in table(out)} == {"total"}
    assert "64-float32: RuntimeError: [squares] no such kernel" in out


def test_op_that_cannot_be_timed_is_refused(run, monkeypatch):
    def no_memory(case, *_):
        if case.op == "squares":
            raise RuntimeError("[malloc] no memory")
        return Timing((1.0, 2.0), (4, 2), 1)

    monkeypatch.setattr(bench_kernels, "time_pass", no_memory)
    status, out, _ = run("--quick", "--pass", "both")
    assert status == 1
    assert table(out) == [
        ["total", "32-float32", "both", "1000.000 ms", "2000.000 ms", "2", "4 bytes", "2 bytes", "0.5"]
    ]
    assert "64-bfloat16: both: [malloc] no memory" in out


MISTAKES = {
    "word": (["squarez"], "no room, op or case has 'squarez' in its name. Did you mean squares?"),
    "far word": (["attention"], "no room, op or case has 'attention' in its name. --list shows what there is."),
    "dtype": (["total", "--dtype", "float16"], "no case of these has the dtype float16."),
    "chain": (["--chain", "0"], "--chain must be at least 1 but got 0."),
    "turns": (["--turns", "-1"], "--turns must be at least 1 but got -1."),
    "folder": (["--json", "gone/times.json"], "--json: there is no folder gone."),
    "picture": (["--plot", "times.txt"], "--plot must end in .png or .svg or .pdf but got times.txt."),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(run, options, message):
    assert run(*options) == (2, "", f"error: {message}\n")


def test_room_without_timed_cases_is_named(run, rooms):
    rooms(one=None)
    assert run()[2] == "error: kernels/one/cases.py must have a tuple TIMED of cases.\n"


@pytest.mark.usefixtures("rooms")
def test_emulator_is_not_timed(call_main, monkeypatch):
    monkeypatch.setenv("FORGE_MLX_ENGINE", "emulator")
    status, _, err = call_main(bench_kernels.main)
    assert status == 2
    assert "error: engine emulator (FORGE_MLX_ENGINE is set): its time says nothing." in err


class Exponential(Squares):
    """exp(x), whose gradient needs the result."""

    def function(self, impl):  # noqa: ARG002
        return mx.exp


def chain(case):
    inputs, cotangents = tuple(case.inputs().values()), tuple(case.cotangents().values())
    mx.eval(inputs, cotangents)
    return Chain(case, "reference", inputs, cotangents)


def test_calls_of_a_chain_hand_their_result_on():
    x = np.linspace(-2, 2, 64)
    (y,) = chain(Squares()).built("forward", 3)
    np.testing.assert_allclose(np.array(y), x**8, rtol=1e-4)
    (dx,) = chain(Squares()).built("backward", 3)
    np.testing.assert_allclose(np.array(dx), (2 * x) ** 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("which", "sums", "gradients", "waits"),
    [("forward", 3, 0, 2), ("backward", 0, 3, 2), ("both", 3, 3, 4)],
    ids=["forward", "backward", "both"],
)
def test_what_is_left_to_evaluate_is_the_pass_alone(tmp_path, which, sums, gradients, waits):
    """Three sums that are no input of each other still wait for one another; their gradients are broadcast."""
    file = tmp_path / "graph.dot"
    mx.export_to_dot(str(file), *chain(Total(32)).built(which, 3))
    names = re.findall(r'label ="(\w+)"', file.read_text())
    assert [names.count(name) for name in ("Sum", "Broadcast", "Depends")] == [sums, gradients, waits]


def test_peak_is_of_one_call_beside_its_inputs():
    nbytes = 4 << 18
    assert chain(Squares(1 << 18)).peak("forward") == (nbytes, 0)
    # The result is held for the gradient.
    peak, held = chain(Exponential(1 << 18)).peak("backward")
    assert held == nbytes
    # The gradient takes the result's place.
    assert peak == nbytes
    # What is gone in between counts too: x * x, of which only the sum is left.
    assert chain(Total(1 << 18)).peak("forward")[0] > nbytes


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_peak_does_not_depend_on_buffers_left_over(which):
    """A larger buffer that is free would be used again for the result."""
    measured = chain(Exponential(64))
    mx.clear_cache()
    fresh = measured.peak(which)
    mx.clear_cache()
    mx.eval([mx.zeros((72,)) + k for k in range(20)])
    assert measured.peak(which) == fresh
    assert fresh[0] == 4 * 64


def test_both_orders_and_the_median(monkeypatch):
    order = []

    def seconds(self, which, length):
        assert (which, length) == ("forward", 5)
        order.append(self.impl)
        return {"reference": 1.0, "mlx": 3.0}[self.impl] * (100 if len(order) == 1 else 1)

    monkeypatch.setattr(Chain, "seconds", seconds)
    timing = time_pass(Squares(), "reference", "forward", 5, 2)
    assert order == ["reference", "mlx", "mlx", "reference", "mlx", "reference", "reference", "mlx"]
    assert (timing.seconds, timing.speed, timing.memory) == ((1.0, 3.0), 3.0, 1.0)


def test_chain_is_shorter_where_it_would_hold_too_much(monkeypatch):
    monkeypatch.setattr(kernel_timing, "_HELD_AT_MOST", 3 * 4 * 64)
    assert time_pass(Exponential(), "mlx", "backward", 20, 1).chain == 3
    assert time_pass(Exponential(), "mlx", "forward", 20, 1).chain == 20
