"""What the engine "metal" hands to MLX is what each .metal file says, and what MLX would compile, without Metal."""

from dataclasses import replace
from pathlib import Path

from forge_mlx.metal import apple
from forge_mlx.metal.emulator import patch
from forge_mlx.metal.source import load
import mlx.core as mx
import pytest
from signatures import differences, some_launch, traced

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "kernels").rglob("*.metal"))
ROOMS = sorted(file.parent for file in (ROOT / "kernels").glob("*/__init__.py") if file.parent.name[0] != "_")
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

KERNEL = """\
#include <metal_stdlib>
using namespace metal;

template <typename T, int N>
[[kernel]] void scale(
    const device T* x [[buffer(0)]],  // rows
    constant int* x_shape [[buffer(1)]],
    const constant float& factor [[buffer(2)]],
    constant uchar* few [[buffer(3)]],
    device T* out [[buffer(4)]],
    device half* total [[buffer(5)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]) {
  uint i = thread_position_in_grid.x;
  out[i] = x[i] * T(factor) * N + few[0] + x_shape[0];
  total[0] = simdgroup_index_in_threadgroup;
}
"""


@pytest.fixture
def planted(tmp_path):
    file = tmp_path / "scale.metal"
    file.write_text(KERNEL)
    return file


def test_every_room_has_kernels_but_that_of_chunks():
    # linear_cross_entropy goes through chunks of rows with cross_entropy's.
    assert [room.name for room in ROOMS if not list(room.glob("*.metal"))] == ["linear_cross_entropy"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_mlx_writes_the_signature_of_the_file(file, dtype):
    assert differences(file, load(file), dtype) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_mlx_gets_the_text_of_the_file(file):
    source = load(file)
    text = traced(some_launch(source, mx.float32))
    assert text.startswith(source.header)
    assert f") {{\n{source.body}\n}}\n" in text


def test_signature_of_a_planted_kernel(planted):
    assert differences(planted, load(planted), mx.bfloat16) == []


CHANGES = {
    "order of inputs": (
        "const constant float& factor [[buffer(2)]],\n    constant uchar* few [[buffer(3)]]",
        "constant uchar* few [[buffer(2)]],\n    const constant float& factor [[buffer(3)]]",
        2,
    ),
    "name": ("constant uchar* few", "constant uchar* fewer", 1),
    "type": ("device half* total", "device float* total", 1),
    "address space": ("constant uchar* few", "const device uchar* few", 1),
    "reference": ("constant float& factor", "constant float* factor", 1),
    "missing shape": ("    constant int* x_shape [[buffer(1)]],\n", "", 5),
    "output that is read": ("device half* total", "const device half* total", 1),
    "attribute": (
        "uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]",
        "uint threads_per_simdgroup [[threads_per_simdgroup]]",
        2,
    ),
    "type of an attribute": ("uint3 thread_position_in_grid", "uint2 thread_position_in_grid", 2),
}


@pytest.mark.parametrize(("before", "after", "count"), CHANGES.values(), ids=CHANGES)
def test_a_difference_is_found(planted, before, after, count):
    source = load(planted)
    text = KERNEL.replace(before, after)
    assert text != KERNEL
    for index in range(6):
        text = text.replace(f" [[buffer({index})]]", "")
    planted.write_text(text)
    assert len(differences(planted, source, mx.float32)) >= count


def test_a_wrong_source_is_found(planted):
    source = load(planted)
    assert differences(planted, replace(source, inputs=source.inputs[::-1]), mx.float32) != []
    assert differences(planted, replace(source, body=source.body + "// threads_per_grid"), mx.float32) == [
        "only from MLX: ('uint3', 'threads_per_grid')"
    ]


def test_options_reach_mlx(planted, monkeypatch):
    built, called = [], []

    def kernel(**call):
        called.append(call)
        return ["out"]

    def build(**options):
        built.append(options)
        return kernel

    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    source = load(planted)
    launch = replace(
        some_launch(source, mx.float16),
        ensure_row_contiguous=False,
        math_mode="fast",
        init_value=2.0,
        verbose=True,
        grid=(64, 2, 1),
        threadgroup=(32, 2, 1),
    )
    assert apple.run(launch) == ["out"]
    assert apple.run(launch) == ["out"]
    assert built == [
        {
            "name": "scale",
            "input_names": ["x", "factor", "few"],
            "output_names": ["out", "total"],
            "source": source.body,
            "header": source.header,
            "ensure_row_contiguous": False,
            "atomic_outputs": False,
            "compile_options": {"math_mode": "fast"},
        }
    ]
    assert len(called) == 2
    assert {key: called[0][key] for key in ("grid", "threadgroup", "template", "init_value", "verbose")} == {
        "grid": (64, 2, 1),
        "threadgroup": (32, 2, 1),
        "template": [("T", mx.float16), ("N", 8)],
        "init_value": 2.0,
        "verbose": True,
    }
    assert called[0]["output_dtypes"] == [mx.float16, mx.float16]


def test_atomic_outputs_reach_mlx(tmp_path):
    file = tmp_path / "count.metal"
    file.write_text("kernel void count(const device int* a, device atomic_uint* out) {\n  out[0] = 1;\n}")
    assert differences(file, load(file), mx.float32) == []
    assert "device atomic<uint32_t>* out" in traced(some_launch(load(file), mx.float32))


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal the kernel runs")
def test_without_metal_mlx_says_so(planted):
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        apple.run(some_launch(load(planted), mx.float32))


def test_kernels_of_the_emulator_are_kept_apart(planted):
    launch = some_launch(load(planted), mx.float32)
    with patch():
        assert apple._kernel(mx.fast.metal_kernel, launch.source, True, "safe").__class__.__name__ == "EmulatedKernel"
    assert apple._kernel(mx.fast.metal_kernel, launch.source, True, "safe").__class__.__name__ != "EmulatedKernel"
