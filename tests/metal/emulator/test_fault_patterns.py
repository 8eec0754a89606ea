"""What would hang or kill a process, or pass unseen on a GPU, raises; the corrected kernels are not accused."""

from dataclasses import replace

from bug_pattern import Pattern, check_refused, check_twin_passes
from forge_mlx.metal.emulator import (
    BarrierError,
    BoundsError,
    CompileError,
    DivisionError,
    InactiveLaneError,
    LimitError,
    MetalWarning,
    StackError,
    StepBudgetError,
)
import mlx.core as mx
import numpy as np
import pytest

INTS = {"x": mx.arange(64, dtype=mx.int32), "y": mx.arange(64, dtype=mx.int32) % 8}

RUNAWAYS = [
    Pattern(
        name="an integer is divided by zero",
        error=DivisionError,
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = x[i] / y[i];  // here
""",
        fix={"x[i] / y[i]": "y[i] == 0 ? 0 : x[i] / y[i]"},
        want=lambda x, y: np.where(y == 0, 0, x // np.maximum(y, 1)),
        threads=(0,),
        inputs=INTS,
        dtype=mx.int32,
    ),
    Pattern(
        name="a remainder by zero",
        error=DivisionError,
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = x[i] % y[i];  // here
""",
        fix={"x[i] % y[i]": "y[i] == 0 ? x[i] : x[i] % y[i]"},
        want=lambda x, y: np.where(y == 0, x, x % np.maximum(y, 1)),
        threads=(0,),
        inputs=INTS,
        dtype=mx.int32,
    ),
    Pattern(
        name="the least int is divided by minus one",
        error=DivisionError,
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = x[i] / -int(y[i]);  // here
""",
        fix={"x[i] / -int(y[i])": "y[i] == 1 ? 0 : x[i] / -int(y[i])"},
        want=lambda _x, y: np.where(y == 1, 0, 1 << 30),
        threads=(1,),
        inputs={"x": mx.full((8,), -(2**31), dtype=mx.int32), "y": mx.array([2, 1] * 4)},
        dtype=mx.int32,
        shape=(8,),
        grid=(8, 1, 1),
    ),
    Pattern(
        name="a private array is overrun",
        error=BoundsError,
        body="""
    uint i = thread_position_in_grid.x;
    int taps[4] = {1, 2, 3, 4};
    out[i] = taps[y[i]];  // here
""",
        fix={"taps[y[i]]": "taps[y[i] % 4]"},
        want=lambda _x, y: y % 4 + 1,
        threads=(4,),
        index=4,
        inputs=INTS,
        dtype=mx.int32,
    ),
    Pattern(
        name="a loop waits for memory that does not change",
        error=StepBudgetError,
        body="""
    uint i = thread_position_in_grid.x;
    int k = 0;
    while (x[i] < 100) {  // here
        k++;
    }
    out[i] = k;
""",
        fix={"x[i] < 100": "x[i] + k < 100"},
        want=lambda x, _y: 100 - x,
        threads=(0,),
        inputs=INTS,
        dtype=mx.int32,
        settings={"max_steps": 10_000},
    ),
    Pattern(
        name="a loop without any memory access does not end",
        error=StepBudgetError,
        body="""
    uint i = thread_position_in_grid.x;
    uint k = i * 2 + 1;
    while (k != 0) {
        k = k * 5 + 4;  // here
    }
    out[i] = int(k);
""",
        # k -> 5 k + 4 keeps k odd: it never becomes 0.
        fix={"k = k * 5 + 4;": "k = k >> 1;"},
        want=lambda _x, _y: 0,
        threads=(0,),
        inputs=INTS,
        dtype=mx.int32,
        settings={"max_steps": 10_000},
    ),
    Pattern(
        name="private arrays larger than the stack",
        error=StackError,
        body="""
    uint i = thread_position_in_grid.x;
    int large[SIZE];
    for (int k = 0; k < SIZE; k++) {
        large[k] = x[(i + k) % 64];
    }
    out[i] = large[y[i] * (SIZE / 8)];
""",
        fix={},
        want=lambda x, y: (x + y * 16) % 64,
        threads=(0,),
        inputs=INTS,
        dtype=mx.int32,
        template=(("SIZE", 1 << 20),),
        launch={"template": (("SIZE", 128),)},
    ),
]

LANES = [
    Pattern(
        name="a shuffle reads a lane that has left",
        error=InactiveLaneError,
        body="""
    uint i = thread_position_in_grid.x;
    float v = x[i];
    if (thread_index_in_simdgroup < 16) {
        v += simd_shuffle_down(v, 16);  // here
    }
    out[i] = v;
""",
        fix={
            "    if (thread_index_in_simdgroup < 16) {\n        v += simd_shuffle_down(v, 16);  // here": (
                "    float upper = simd_shuffle_down(v, 16);\n    if (thread_index_in_simdgroup < 16) {\n"
                "        v += upper;"
            )
        },
        want=lambda x: x + np.where(np.arange(64) % 32 < 16, np.roll(x, -16), 0),
        threads=(0,),
    ),
    Pattern(
        name="two different barriers meet",
        error=BarrierError,
        body="""
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    tile[i] = x[i];
    if (i < 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // here
        out[i] = tile[63 - i];
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // and here
        out[i] = tile[63 - i] + 1.0f;
    }
""",
        fix={
            "    if (i < 32) {\n        threadgroup_barrier(mem_flags::mem_threadgroup);  // here": (
                "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (i < 32) {"
            ),
            "        threadgroup_barrier(mem_flags::mem_threadgroup);  // and here\n": "",
        },
        want=lambda x: x[::-1] + (np.arange(64) >= 32),
        threads=(0, 32),
    ),
    Pattern(
        name="half a simdgroup multiplies matrices",
        error=BarrierError,
        body="""
    simdgroup_float8x8 a, b, c;
    if (thread_index_in_simdgroup < 16) {
        simdgroup_load(a, x, 8);  // here
        simdgroup_load(b, x, 8);
        simdgroup_multiply(c, a, b);
        simdgroup_store(c, out, 8);
    }
""",
        fix={"if (thread_index_in_simdgroup < 16) {": "{"},
        want=lambda x: x.reshape(8, 8) @ x.reshape(8, 8),
        threads=(0, 16),
        inputs={"x": mx.arange(64, dtype=mx.float32) % 7},
        shape=(8, 8),
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    ),
    Pattern(
        name="a sum over part of a simdgroup",
        error=MetalWarning,
        body="""
    uint i = thread_position_in_grid.x;
    float total = 0.0f;
    if (i % 32 < 20) {
        total = simd_sum(x[i]);  // here
    }
    out[i] = total;
""",
        fix={
            "    if (i % 32 < 20) {\n        total = simd_sum(x[i]);  // here": (
                "    float part = simd_sum(i % 32 < 20 ? x[i] : 0.0f);\n    if (i % 32 < 20) {\n        total = part;"
            )
        },
        want=lambda x: np.where(np.arange(64) % 32 < 20, np.repeat(x.reshape(2, 32)[:, :20].sum(1), 32), 0),
    ),
    Pattern(
        name="lanes rely on running in lockstep",
        error=MetalWarning,
        body="""
    threadgroup float tile[32];
    uint i = thread_position_in_threadgroup.x;
    tile[i] = 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile[i] = x[i];  // and here
    // exchange
    out[i] = tile[31 - i];  // here
""",
        fix={"// exchange": "simdgroup_barrier(mem_flags::mem_threadgroup);"},
        want=lambda x: x[:32][::-1],
        shape=(32,),
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
    ),
]

ACCESSES = [
    Pattern(
        name="an input is written",
        error=CompileError,
        body="""
    uint i = thread_position_in_grid.x;
    x[i] = x[i] + 1.0f;  // here
    out[i] = x[i];
""",
        fix={"x[i] = x[i] + 1.0f;  // here": "float v = x[i] + 1.0f;", "out[i] = x[i];": "out[i] = v;"},
        want=lambda x: x + 1,
    ),
    Pattern(
        name="an input is written through a cast",
        error=BoundsError,
        body="""
    uint i = thread_position_in_grid.x;
    device float* writable = (device float*)x;
    writable[i] = 1.0f;  // here
    out[i] = 1.0f;
""",
        fix={"writable[i] = 1.0f;  // here": "(void)writable;"},
        want=lambda _x: 1,
        threads=(0,),
        buffer="x",
        index=0,
    ),
    Pattern(
        name="a negative index",
        error=BoundsError,
        body="""
    int i = thread_position_in_grid.x;
    out[i] = x[i - 1];  // here
""",
        fix={"x[i - 1]": "i == 0 ? 0.0f : x[i - 1]"},
        want=lambda _x: np.maximum(np.arange(64) - 1, 0),
        threads=(0,),
        buffer="x",
        index=-1,
    ),
    Pattern(
        name="a buffer of halves is read as floats",
        error=BoundsError,
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = ((const device float*)x)[i];  // here
""",
        fix={"((const device float*)x)[i]": "float(x[i])"},
        want=lambda x: x,
        threads=(32,),
        buffer="x",
        index=64,
        inputs={"x": mx.arange(64, dtype=mx.float16)},
    ),
    Pattern(
        name="past the end of a threadgroup array",
        error=BoundsError,
        body="""
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    tile[i + 1] = x[i];  // here
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = i == 0 ? 0.0f : tile[i];
""",
        fix={"float tile[64]": "float tile[65]"},
        want=lambda x: np.append(0, x[:-1]),
        threads=(63,),
        buffer="tile",
        index=64,
    ),
    Pattern(
        name="past the end of a constant input",
        error=BoundsError,
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = x[i % 4];  // here
""",
        fix={"i % 4": "i % 3"},
        want=lambda x: x[np.arange(64) % 3],
        threads=(3,),
        buffer="x",
        index=3,
        inputs={"x": mx.array([1.0, 2.0, 3.0])},
    ),
]


def many(count: int) -> dict[str, mx.array]:
    """Small inputs `x0`, `x1`, ..."""
    return {f"x{n}": mx.array([float(n)]) for n in range(count)}


LIMITS = [
    Pattern(
        name="more than 1024 threads in a threadgroup",
        error=LimitError,
        body="""
    out[thread_position_in_grid.x] = float(thread_position_in_threadgroup.x);
""",
        fix={},
        want=lambda _x: np.arange(2048) % 1024,
        says="1,?024",
        shape=(2048,),
        grid=(2048, 1, 1),
        threadgroup=(2048, 1, 1),
        launch={"threadgroup": (1024, 1, 1)},
    ),
    Pattern(
        name="more than 31 buffers",
        error=LimitError,
        body="""
    out[thread_position_in_grid.x] = x0[0] + x1[0] + x29[0];
""",
        fix={},
        want=lambda *_: 30,
        says="31",
        inputs=many(31),
        launch={"inputs": many(30)},
    ),
]

PATTERNS = [pytest.param(pattern, id=pattern.name) for pattern in (*RUNAWAYS, *LANES, *ACCESSES, *LIMITS)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_fault_is_found(pattern):
    check_refused(pattern)


@pytest.mark.parametrize("pattern", [pytest.param(pattern, id=pattern.name) for pattern in RUNAWAYS])
def test_process_survives_without_any_check(pattern):
    check_refused(replace(pattern, settings={**pattern.settings, "checks": ()}))


def test_process_survives_an_access_far_outside():
    far = Pattern(
        name="far outside",
        error=BoundsError,
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = x[i + (1 << 30)];  // here
""",
        fix={},
        want=lambda x: x,
        threads=(0,),
        settings={"checks": ()},
    )
    check_refused(far)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_corrected_kernel_passes(pattern):
    check_twin_passes(pattern)
