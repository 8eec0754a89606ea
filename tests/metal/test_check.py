"""The command `python -m forge_mlx.metal check`: what it runs, what it finds, what it prints."""

from pathlib import Path
import platform
import re
import sys

from forge_mlx.metal import check, emulator
from forge_mlx.metal.__main__ import main, table
from forge_mlx.metal.check import Row
from forge_mlx.metal.emulator import compile
import mlx.core as mx
import pytest

KERNEL = """
#include <metal_stdlib>
using namespace metal;

template <typename T>
[[kernel]] void double_it(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(1)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  uint i = thread_position_in_grid.x;
  y[i] = x[i] + x[i];
}
"""
CASES = """
from dataclasses import dataclass
from pathlib import Path

from forge_mlx.metal import MetalKernel
import mlx.core as mx
import numpy as np

kernel = MetalKernel(Path(__file__).parent / "double.metal")


@dataclass(frozen=True)
class Case:
    dtype: mx.Dtype
    size: int
    name = "doubled"

    def run(self, impl):
        x = mx.arange(self.size).astype(self.dtype)
        launch = {"grid": (self.size, 1, 1), "threadgroup": (32, 1, 1), "template": {"T": self.dtype}}
        (y,) = kernel([x], output_shapes=[x.shape], output_dtypes=[x.dtype], engine=impl, **launch)
        return {"y": y}


CASES = (Case(mx.float32, 40), Case(mx.float16, 40))
"""
PROOF = """
import mlx.core as mx


def compare(case, results):
    right = mx.array_equal(results["y"], 2 * mx.arange(case.size).astype(case.dtype))
    return [] if right else [f"{case.name}: y must be twice x"]
"""


@pytest.fixture
def room(tmp_path, monkeypatch, request) -> Path:
    """A package of rooms with one room of one kernel."""
    package = f"rooms_of_{request.node.name.partition('[')[0]}"
    folder = tmp_path / package
    for name, text in {"double/cases.py": CASES, "double/double.metal": KERNEL, "_common/proof.py": PROOF}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check, "_ROOMS", package)
    monkeypatch.setattr(check, "_FOLDER", folder)
    yield folder / "double"
    for module in [module for module in sys.modules if module.startswith(package)]:
        del sys.modules[module]


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.mark.usefixtures("room")
def test_room_without_a_finding(call_main):
    status, out, err = call_main(main, "check")
    assert (status, err) == (0, ""), out
    head, float32, float16, empty, summary, machine = out.splitlines()
    assert cells(head) == ["kernel", "dtype", "cases", "result", "launches", "bytes", "time"]
    # 40 elements, each read and written.
    assert cells(float32)[:-1] == ["double: double_it", "float32", "1", "ok", "1", "320 bytes"]
    assert cells(float16)[:-1] == ["double: double_it", "float16", "1", "ok", "1", "160 bytes"]
    assert (empty, summary) == ("", "1 kernel on engine emulator (float32, float16): no finding")
    assert re.match(rf"forge-mlx \S+, mlx {re.escape(mx.__version__)}, {re.escape(platform.platform())}", machine)


def test_finding_is_told_in_full_and_fails(room, call_main):
    change(room / "double.metal", "y[i] = x[i] + x[i];", "y[i] = x[i] + x[i + 1];")
    status, out, _ = call_main(main, "check", room / "double.metal")
    assert status == 1
    assert [cells(line)[3] for line in out.splitlines()[1:3]] == ["1 finding", "1 finding"]
    assert "case doubled: BoundsError: [double_it] thread 7 of threadgroup 1 at double/double.metal:11" in out
    assert "\n1 kernel on engine emulator (float32, float16): 2 findings\n" in out


def test_wrong_result_is_a_finding(room, call_main):
    change(room / "double.metal", "x[i] + x[i];", "x[i] + x[0];")
    status, out, _ = call_main(main, "check")
    assert status == 1
    assert "case doubled: y must be twice x" in out


def test_warning_is_a_finding(room, call_main):
    change(
        room / "double.metal",
        "  y[i] = x[i] + x[i];",
        "  y[i] = x[i] + x[i];\n  if (i % 32 < 3) {\n    y[i] = x[i] * simd_max(T(2));\n  }",
    )
    status, out, _ = call_main(main, "check")
    assert status == 1
    assert "case doubled: warning: [double_it] a simdgroup function at double/double.metal:13" in out


def test_what_only_mlx_declares_is_a_finding(room, call_main):
    change(room / "double.metal", "x[i] + x[i]", "x[i] + x[i] + T(log1p(0.0f))")
    status, out, _ = call_main(main, "check")
    assert status == 1
    assert "case doubled without MLX's header: CompileError: [double_it] double/double.metal:11" in out
    assert "log1p" in out


def test_kernel_that_no_case_launches_is_a_finding(room, call_main):
    (room / "other.metal").write_text(KERNEL.replace("double_it", "other"))
    status, out, _ = call_main(main, "check")
    assert status == 1
    assert "[other] no case of double launches it." in out
    # Asked for alone, the kernel that has cases is not blamed.
    assert call_main(main, "check", room / "double.metal")[0] == 0


def test_mistake_in_a_room_is_a_finding(room, call_main):
    change(room / "cases.py", '"threadgroup": (32, 1, 1)', '"threadgroup": (32, 1)')
    status, out, _ = call_main(main, "check")
    assert status == 1
    assert "ValueError: [double_it] threadgroup must be three ints" in out


@pytest.mark.usefixtures("room")
def test_every_order_of_threads_that_is_asked_for_is_run(call_main, monkeypatch):
    seen = []
    original = check.settings
    monkeypatch.setattr(check, "settings", lambda **changes: seen.append(changes) or original(**changes))
    assert call_main(main, "check", "--schedules", 2)[0] == 0
    assert {"schedules": 2} in seen


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "alone.metal"
    path.write_text(KERNEL)
    return path


def test_file_of_no_room_is_compiled_for_each_dtype(file, call_main):
    status, out, _ = call_main(main, "check", file)
    assert status == 0
    rows = [cells(line) for line in out.splitlines()[1:4]]
    assert rows == [
        ["double_it", dtype, "-", "compiles", "-", "-", "-"] for dtype in ("float32", "float16", "bfloat16")
    ]


def test_file_has_to_compile_for_short_inputs(file, call_main):
    change(file, "uint i = thread_position_in_grid.x;", "uint i = thread_position_in_grid.x; const device T* p = x;")
    status, out, _ = call_main(main, "check", file)
    assert status == 1
    assert "for inputs of fewer than 8 elements: CompileError: [double_it]" in out


def test_file_is_checked_for_the_language(file, call_main):
    change(file, "uint i = thread_position_in_grid.x;", "uint i = thread_position_in_grid.x; const T* p = y;")
    status, out, _ = call_main(main, "check", file)
    assert status == 1
    assert "LanguageError: [double_it]" in out
    assert "address space" in out


def test_template_values_of_a_file(file, call_main):
    text = file.read_text().replace("typename T", "int N, bool B").replace("device T*", "device float*")
    file.write_text(text.replace("x[i] + x[i];", "B ? x[i] * N : x[i] / (4 / N);"))
    assert "the template parameter N needs a value. Add --template N=..." in call_main(main, "check", file)[2]
    assert call_main(main, "check", file, "--template", "N=1,2")[0] == 0
    status, _, err = call_main(main, "check", file, "--template", "M=1")
    assert (status, "has no int template parameter M" in err) == (2, True)
    assert "--template must be NAME=INT,INT,... but got 'N=x'" in call_main(main, "check", file, "--template", "N=x")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "metal"], "error: engine metal cannot run: MLX finds no Metal device here"),
        (["gone.metal"], "error: [Errno 2] No such file or directory"),
        (["--schedules", "0"], "error: --schedules must be at least 1 but got 0."),
    ],
    ids=["no Metal", "no file", "no schedule"],
)
def test_what_the_command_cannot_do(arguments, message, call_main):
    if mx.metal.is_available() and "metal" in arguments:
        pytest.skip("there is Metal here")
    status, out, err = call_main(main, "check", *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("alone", [False, True], ids=["rooms", "file"])
def test_compiler_that_does_not_work_is_no_finding(alone, room, file, call_main, monkeypatch):
    def compile_source(*_, **__):
        raise emulator.ToolchainError("no compiler")

    monkeypatch.setattr(compile, "compile_source", compile_source)
    # A kernel that no other test has compiled.
    for path in (file, room / "double.metal"):
        change(path, "double_it", "new_to_the_compiler")
    status, out, err = call_main(main, "check", *([file] if alone else []))
    assert (status, out, err) == (2, "", "error: no compiler\n")


@pytest.fixture
def mac():
    """An engine "metal" that the emulator plays: nothing of this was run on a Mac."""
    # What a test changes is put back before the patch ends.
    with emulator.patch(), pytest.MonkeyPatch.context() as changes:
        yield changes


@pytest.mark.usefixtures("room", "mac")
def test_metal_runs_the_rooms_and_prints_one_table(call_main):
    status, out, _ = call_main(main, "check", "--engine", "metal")
    assert status == 0
    assert cells(out.splitlines()[1])[:-1] == ["double: double_it", "float32", "1", "ok", "1", "-"]
    assert "\n1 kernel on engine metal (float32, float16): no finding\n" in out


@pytest.mark.usefixtures("room")
def test_error_of_apples_compiler_names_kernel_message_and_way_out(mac, call_main):
    def metal_kernel(**_):
        def run(**_):
            raise RuntimeError("[metal::Device] Unable to build metal library from source: program_source:3: error: x")

        return run

    mac.setattr(mx.fast, "metal_kernel", metal_kernel)
    status, out, _ = call_main(main, "check", "--engine", "metal")
    assert status == 1
    assert "AppleCompileError: [double_it] Metal says: [metal::Device] Unable to build metal library" in out
    assert "program_source:3: error: x\nFORGE_MLX_ENGINE=reference runs without it." in out


@pytest.mark.usefixtures("mac")
def test_metal_needs_a_room(file, call_main):
    status, _, err = call_main(main, "check", file, "--engine", "metal")
    assert status == 2
    assert "belongs to no room, and only their cases say how to launch a kernel on Metal" in err


def test_table_is_aligned():
    rows = [
        Row("rms_norm", "rms_norm_forward", "float32", 12, 24, 2_500_000, 1.25),
        Row("", "mine", "", findings=["a", "b"]),
    ]
    assert table(rows) == [
        "kernel                      dtype    cases  result      launches   bytes   time",
        "rms_norm: rms_norm_forward  float32     12  ok                24  2.5 MB  1.2 s",
        "mine                        -            -  2 findings         -       -      -",
    ]


def test_rooms_are_those_with_cases():
    assert "norms" in check.rooms()
    # It has a file of that name, and no case.
    assert "_common" not in check.rooms()
    assert check.room_of(check._FOLDER / "norms" / "rms_norm_forward.metal") == "norms"
    assert check.room_of(check._FOLDER / "_common" / "sum_parts.metal") == check.SHARED
    assert check.room_of(Path(__file__)) is None


TWICE = "halve = MetalKernel(Path(__file__).parents[1] / '_common' / 'halve.metal')\n"
LAUNCH = """\
        (z,) = halve([y + y], output_shapes=[x.shape], output_dtypes=[x.dtype], engine=impl, **launch)
        return {"y": z}
"""


@pytest.fixture
def shared(room) -> Path:
    """A kernel beside two rooms, each of which launches it once a case."""
    file = room.parent / "_common" / "halve.metal"
    file.write_text(KERNEL.replace("double_it", "halve").replace("x[i] + x[i]", "x[i] / T(2)"))
    change(room / "cases.py", "\n\n@dataclass", f"{TWICE}\n\n@dataclass")
    change(room / "cases.py", '        return {"y": y}\n', LAUNCH)
    other = room.parent / "second"
    other.mkdir()
    (other / "cases.py").write_text((room / "cases.py").read_text())
    (other / "double.metal").write_text(KERNEL.replace("double_it", "double_too"))
    return file


@pytest.mark.parametrize("alone", [False, True], ids=["all rooms", "its file"])
def test_shared_kernel_has_one_row_with_the_launches_of_all_rooms(alone, shared, call_main):
    status, out, _ = call_main(main, "check", *([shared] if alone else []))
    assert status == 0, out
    rows = [cells(line)[:-1] for line in out.splitlines() if "_common: halve" in line]
    assert rows == [
        ["_common: halve", "float32", "2", "ok", "2", "640 bytes"],
        ["_common: halve", "float16", "2", "ok", "2", "320 bytes"],
    ]
    assert ("double: double_it" in out, "second: double_too" in out) == (not alone, not alone)


def test_finding_in_a_shared_kernel_names_the_room_and_the_case(shared, call_main):
    change(shared, "x[i] / T(2)", "x[i + 1] / T(2)")
    status, out, _ = call_main(main, "check")
    assert status == 1
    for room in ("double", "second"):
        assert f"\n{room}, case doubled: BoundsError: [halve] thread 7" in out
    assert [cells(line)[3] == "ok" for line in out.splitlines()[1:7]] == [True, True, True, True, False, False]


@pytest.mark.parametrize("alone", [False, True], ids=["all rooms", "its file"])
@pytest.mark.usefixtures("room")
def test_shared_kernel_that_no_room_launches_is_a_finding(alone, room, call_main):
    file = room.parent / "_common" / "halve.metal"
    file.write_text(KERNEL.replace("double_it", "halve"))
    status, out, _ = call_main(main, "check", *([file] if alone else []))
    assert status == 1
    assert "[halve] no case of any room launches it." in out
    # A room's own file is not to blame.
    assert call_main(main, "check", room / "double.metal")[0] == 0


@pytest.mark.slow
def test_all_kernels_of_this_project_pass(call_main):
    status, out, _ = call_main(main, "check")
    assert status == 0, out


def test_warning_about_a_file_is_a_finding(tmp_path, call_main):
    file = tmp_path / "one.metal"
    file.write_text(
        KERNEL.replace("template <", "struct A { float a; float get() const { return a; } };\n\ntemplate <")
    )
    status, out, _ = call_main(main, "check", file)
    assert status == 1
    assert f"warning: [double_it] {file.parent.name}/one.metal:5: methods of A without address space" in out
