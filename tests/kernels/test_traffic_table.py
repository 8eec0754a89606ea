"""kernels/TRAFFIC.md is what the emulator counts today, and how bytes are counted and judged."""

from dataclasses import dataclass, replace
import sys
from types import ModuleType

from forge_mlx.kernels._common.cases import OpCase
from forge_mlx.metal import MetalKernel, check
import mlx.core as mx
import pytest

from scripts.bench import traffic
from scripts.bench.kernel_cases import Entry, by_op, entries

ROOMS = check.rooms()


def table():
    return traffic.written(traffic.TABLE.read_text(encoding="utf-8"))


def test_table_has_every_case():
    assert {key[:2] for key in table()} == {(entry.op, entry.case.name) for entry in entries("TRAFFIC")}


def test_nothing_written_is_over_its_limit():
    cases = {(entry.op, entry.case.name): entry.case for entry in entries("TRAFFIC")}
    over = []
    for key, row in table().items():
        ratio, limit = (float(cell) for cell in row.split("|")[7:9])
        case = cases[key[:2]]
        assert limit == case.max_ratio
        assert limit <= traffic.USUAL_LIMIT or case.max_ratio_reason
        if ratio > limit:
            over.append(row)
    assert over == []


@pytest.mark.parametrize("room", ROOMS)
def test_smallest_case_of_each_room_is_as_written(room):
    own = [entry for entry in entries("TRAFFIC") if entry.room == room]
    smallest = min(own, key=lambda entry: entry.case.ideal_bytes()["forward"])
    assert traffic.differences(traffic.count(smallest), table(), complete=False) == []


@pytest.mark.slow
def test_whole_table_is_as_written(call_main):
    status, out, err = call_main(traffic.main, "--check")
    assert (status, err) == (0, ""), out


KERNEL = """
#include <metal_stdlib>
using namespace metal;

[[kernel]] void weigh(
    const device float* x [[buffer(0)]],
    const device float* w [[buffer(1)]],
    constant float& factor [[buffer(2)]],
    device float* y [[buffer(3)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]]) {
  uint i = thread_position_in_grid.x;
  y[i] = factor * x[i] * w[thread_position_in_threadgroup.x];
}
"""
THREADS, GROUPS = 32, 20
X, W = 4 * THREADS * GROUPS, 4 * THREADS


@dataclass(frozen=True)
class Weigh(OpCase):
    """x of 20 threadgroups, each times the same w; its gradient, of x alone, is the same kernel of the cotangent."""

    op = "weigh"

    kernel: MetalKernel
    dtype: mx.Dtype = mx.float32
    name: str = "20x32"
    max_ratio: float = 1.05
    max_ratio_reason: str = ""
    has_gradient: bool = True

    def inputs(self):
        return {"x": mx.ones((GROUPS * THREADS,))}

    def constants(self):
        return {"w": mx.arange(THREADS).astype(mx.float32)}

    def cotangents(self):
        return {"y": mx.ones((GROUPS * THREADS,))} if self.has_gradient else {}

    def ideal_bytes(self):
        return {"forward": 2 * X + W, "backward": 2 * X + W}

    def function(self, impl):
        (w,) = self.constants().values()
        launch = {"grid": (GROUPS * THREADS, 1, 1), "threadgroup": (THREADS, 1, 1), "engine": impl}

        @mx.custom_function
        def weigh(x):
            return self.kernel([x, w, 2.0], output_shapes=[x.shape], output_dtypes=[x.dtype], **launch)[0]

        @weigh.vjp
        def vjp(_x, dy, _y):
            return weigh(dy)

        return weigh

    def formula(self, *_):
        raise AssertionError

    def expected(self):
        raise AssertionError


@pytest.fixture
def case(tmp_path):
    file = tmp_path / "weigh.metal"
    file.write_text(KERNEL)
    return Weigh(MetalKernel(file))


def test_what_is_counted(case):
    forward, backward = traffic.count(Entry("here", case))
    assert (forward.which, backward.which) == ("forward", "backward")
    for line in (forward, backward):
        # The scalar comes as a constant and does not count; w is read once a threadgroup, once of which is ideal.
        assert (line.bytes, line.shared, line.ideal) == (2 * X + GROUPS * W, (GROUPS - 1) * W, 2 * X + W)
        assert (line.threadgroups, line.accesses, line.ratio, line.excess) == (GROUPS, line.bytes // 4, 1.0, None)
    assert forward.cells == "| weigh | 20x32 | forward | 7,680 | 2,432 | 5,248 | 1.000 | 1.05 | 20 | 4.0 |"


def test_case_without_a_gradient_has_one_pass(case):
    (line,) = traffic.count(Entry("here", replace(case, has_gradient=False)))
    assert line.which == "forward"


AGAIN = {
    # Twice a threadgroup is too often.
    "small array twice": (
        "w[thread_position_in_threadgroup.x]",
        "(w[thread_position_in_threadgroup.x] - w[31 - thread_position_in_threadgroup.x])",
        (2 * X + 2 * GROUPS * W) / (2 * X + W),
    ),
    # x is no small array.
    "large array again": ("x[i]", "(x[i] - x[(i + 32) % 640])", (3 * X + W) / (2 * X + W)),
}


@pytest.mark.parametrize(("old", "new", "ratio"), AGAIN.values(), ids=AGAIN)
def test_what_is_read_again_counts(case, tmp_path, old, new, ratio):
    file = tmp_path / "again.metal"
    file.write_text(KERNEL.replace(old, new))
    line = traffic.count(Entry("here", replace(case, kernel=MetalKernel(file))))[0]
    assert line.ratio == pytest.approx(ratio, abs=5e-4)
    assert line.excess == f"here/weigh/20x32: forward moves {line.ratio:.3f} times the ideal, over its limit of 1.05"


def test_higher_limit_needs_a_reason(case):
    lines = traffic.count(Entry("here", replace(case, max_ratio=1.5)))
    assert lines[0].excess == "here/weigh/20x32: max_ratio is 1.5, over 1.05, and max_ratio_reason does not say why"
    lines = traffic.count(Entry("here", replace(case, max_ratio=1.5, max_ratio_reason="x is read twice")))
    assert lines[0].excess is None
    assert traffic.document(lines).endswith("\nLimits over 1.05:\n\n- weigh, 1.5: x is read twice\n")


@pytest.fixture
def script(case, monkeypatch, tmp_path, call_main):
    """The script with that one case and a table of its own."""
    module = ModuleType("cases")
    module.TRAFFIC = (case, replace(case, name="other"))
    monkeypatch.setitem(sys.modules, "forge_mlx.kernels.here.cases", module)
    monkeypatch.setattr(check, "rooms", lambda: ["here"])
    monkeypatch.setattr(traffic, "TABLE", tmp_path / "TRAFFIC.md")
    return lambda *arguments: call_main(traffic.main, *arguments)


def test_table_is_written_and_checked(script):
    status, out, _ = script()
    assert (status, out) == (0, f"4 rows written to {traffic.TABLE}\n")
    text = traffic.TABLE.read_text()
    assert len(traffic.written(text)) == 4
    assert script("--check") == (0, "4 rows, no findings\n", "")
    assert script("--check", "other") == (0, "2 rows, no findings\n", "")


def test_words_print_their_cases_and_write_nothing(script):
    status, out, _ = script("other")
    assert status == 0
    assert [row[1] for row in traffic.written(out)] == ["other", "other"]
    assert not traffic.TABLE.exists()


def test_stale_table_is_found(script):
    script()
    text = traffic.TABLE.read_text()
    row = next(line for line in text.splitlines() if "| other | forward" in line)
    traffic.TABLE.write_text(text.replace(row, row.replace("7,680", "7,681")) + "| weigh | gone | forward | 1 |\n")
    status, out, _ = script("--check")
    assert status == 1
    assert f"TRAFFIC.md has\n  {row.replace('7,680', '7,681')}\nwhere this is counted:\n  {row}" in out
    assert "TRAFFIC.md has a row of no case:\n  | weigh | gone | forward | 1 |" in out
    assert out.endswith("\n4 rows, 2 findings\n")
    # Of the case that was asked for, nothing is wrong.
    assert script("--check", "20x32")[0] == 0


def test_limit_that_is_passed_is_found_and_shown(script, case):
    sys.modules["forge_mlx.kernels.here.cases"].TRAFFIC = (replace(case, max_ratio=0.9),)
    status, out, _ = script()
    assert status == 0
    assert "here/weigh/20x32: forward moves 1.000 times the ideal, over its limit of 0.9" in out
    assert script("--check")[0] == 1


def test_words_that_nothing_holds(script):
    assert script("weight") == (2, "", "error: no room, op or case has 'weight' in its name. Did you mean weigh?\n")


def test_forward_pass_without_a_launch_is_an_error(script, monkeypatch):
    monkeypatch.setattr(Weigh, "function", lambda *_: lambda x: x * 2)
    assert script()[2] == "error: here/weigh/20x32: its forward pass launches no kernel.\n"


def test_more_launches_than_are_kept_are_an_error(script, monkeypatch):
    function = Weigh.function

    def often(self, impl):
        weigh = function(self, impl)

        def many(x):
            for _ in range(256):
                weigh(x)
            return weigh(x)

        return many

    monkeypatch.setattr(Weigh, "function", often)
    assert "more than the emulator keeps. Take a smaller case." in script()[2]


def test_entries_are_grouped_by_op(case):
    one, two = Entry("a", case), Entry("b", case)
    assert by_op([one, two, one]) == {("a", "weigh"): [one, one], ("b", "weigh"): [two]}
