"""Real bugs are found, with the right line and threads; the corrected kernels are not accused."""

from bug_pattern import Pattern, check_refused, check_twin_passes
from forge_mlx.metal.emulator import (
    AlignmentError,
    BarrierError,
    BoundsError,
    CompileError,
    LanguageError,
    LimitError,
    RaceError,
    ScheduleError,
    UninitialisedError,
)
import mlx.core as mx
import numpy as np
import pytest

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

MEMORY = [
    Pattern(
        name="a shared array is read and overwritten without a barrier",
        error=RaceError,
        body="""
    threadgroup float shared[64];
    uint i = thread_position_in_threadgroup.x;
    shared[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float other = shared[(i + 32) % 64];  // here
    // between reads and writes
    shared[i] = other * 2.0f;  // and here
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[63 - i];
""",
        fix={"// between reads and writes": BARRIER},
        want=lambda x: 2 * np.roll(x, 32)[::-1],
        threads=(32, 0),
        buffer="shared",
        index=0,
    ),
    Pattern(
        name="a loop writes what the round before still reads",
        error=RaceError,
        body="""
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    float sum = 0.0f;
    for (uint block = 0; block < 4; block++) {
        tile[i] = x[block * 64 + i];  // and here
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += tile[63 - i];  // here
        // end of a round
    }
    out[i] = sum;
""",
        fix={"// end of a round": BARRIER},
        want=lambda x: x.reshape(4, 64).sum(0)[::-1],
        threads=(32, 31),
        buffer="tile",
        index=31,
        inputs={"x": mx.arange(256, dtype=mx.float32)},
    ),
    Pattern(
        name="a barrier with mem_none guards threadgroup memory",
        error=RaceError,
        body="""
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    tile[i] = x[i];  // and here
    threadgroup_barrier(mem_flags::mem_none);
    out[i] = tile[63 - i];  // here
""",
        fix={"mem_none": "mem_threadgroup"},
        want=lambda x: x[::-1],
        threads=(0, 63),
        buffer="tile",
        index=63,
    ),
    Pattern(
        name="a barrier for threadgroup memory guards device memory",
        error=RaceError,
        body="""
    uint i = thread_position_in_threadgroup.x;
    scratch[i] = x[i];  // and here
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = scratch[63 - i];  // here
""",
        fix={"mem_flags::mem_threadgroup": "mem_flags::mem_device"},
        want=lambda x: x[::-1],
        threads=(0, 63),
        buffer="scratch",
        index=63,
        output_names=("out", "scratch"),
    ),
    Pattern(
        name="a sum over one simdgroup is taken for the sum over two",
        error=RaceError,
        body="""
    float total = simd_sum(x[thread_position_in_threadgroup.x]);
    if (thread_index_in_simdgroup == 0) {
        out[0] = total;  // both here
    }
""",
        fix={
            "    if (thread_index_in_simdgroup == 0) {\n        out[0] = total;  // both here": """
    threadgroup float partial[2];
    if (thread_index_in_simdgroup == 0) {
        partial[simdgroup_index_in_threadgroup] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_position_in_threadgroup.x == 0) {
        out[0] = partial[0] + partial[1];"""
        },
        want=lambda x: x.sum(),
        threads=(32, 0),
        buffer="out",
        index=0,
        shape=(1,),
    ),
    Pattern(
        name="two threadgroups add to one float without atomics",
        error=RaceError,
        body="""
    float total = simd_sum(x[thread_position_in_grid.x]);
    if (thread_index_in_simdgroup == 0) {
        out[0] += total;  // both here
    }
""",
        fix={"out[0] += total;": "atomic_fetch_add_explicit(&out[0], total, memory_order_relaxed);"},
        want=lambda x: x.sum(),
        threads=(0, 0),
        groups=(1, 0),
        buffer="out",
        index=0,
        shape=(1,),
        threadgroup=(32, 1, 1),
        init_value=0,
        launch={"atomic_outputs": True},
    ),
    Pattern(
        name="a threadgroup reads what another one writes",
        error=RaceError,
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = x[i] * 2.0f;  // and here
    if (threadgroup_position_in_grid.x > 0) {
        out[i] += out[i - 32];  // here
    }
""",
        fix={"out[i - 32]": "x[i - 32] * 2.0f"},
        want=lambda x: 2 * x + np.where(np.arange(64) < 32, 0, 2 * np.roll(x, 32)),
        threads=(0, 0),
        groups=(1, 0),
        buffer="out",
        index=0,
        threadgroup=(32, 1, 1),
    ),
    Pattern(
        name="a threadgroup array is read before it is written",
        error=UninitialisedError,
        body="""
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    if (i % 2 == 0) {
        tile[i] = x[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[63 - i];  // here
""",
        fix={"if (i % 2 == 0) {": "{"},
        want=lambda x: x[::-1],
        threads=(0,),
        buffer="tile",
        index=63,
    ),
    Pattern(
        name="a row of the output is never written",
        error=UninitialisedError,
        body="""
    uint column = thread_position_in_grid.x;
    uint row = thread_position_in_grid.y;
    if (row + 1 < rows) {
        out[row * 8 + column] = x[row * 8 + column] + 1.0f;
    }
""",
        fix={"row + 1 < rows": "row < rows"},
        want=lambda x: x + 1,
        buffer="out",
        index=32,
        inputs={"x": mx.arange(40, dtype=mx.float32).reshape(5, 8)},
        shape=(5, 8),
        grid=(8, 8, 1),
        threadgroup=(8, 4, 1),
        template=(("rows", 5),),
    ),
    Pattern(
        name="one element past the partial last threadgroup",
        error=BoundsError,
        body="""
    uint i = thread_position_in_grid.x;
    uint last = x_shape[0] - 1;
    out[i] = i <= last ? x[i + 1] - x[i] : 0.0f;  // here
""",
        fix={"i <= last": "i < last"},
        want=lambda x: np.append(np.diff(x), 0),
        threads=(3,),
        groups=(3,),
        buffer="x",
        index=100,
        inputs={"x": mx.arange(100, dtype=mx.float32) ** 2},
        shape=(100,),
        grid=(100, 1, 1),
        threadgroup=(32, 1, 1),
    ),
    Pattern(
        name="an index overflows int",
        error=BoundsError,
        body="""
    uint i = thread_position_in_grid.x;
    int position = int(i) * stride[0];
    out[i] = x[position >> 29];  // here
""",
        fix={"int position = int(i) * stride[0];": "long position = long(i) * stride[0];"},
        want=lambda x, _stride: x,
        threads=(4,),
        buffer="x",
        index=-4,
        inputs={"x": mx.arange(8, dtype=mx.float32), "stride": mx.array([1 << 29])},
        shape=(8,),
        grid=(8, 1, 1),
    ),
    Pattern(
        name="a float4 is loaded from an array that starts at its second element",
        error=AlignmentError,
        body="""
    uint i = thread_position_in_grid.x;
    float4 v = ((const device float4*)x)[i];  // here
    out[i] = v.x + v.y + v.z + v.w;
""",
        fix={"((const device float4*)x)[i]": "float4(((const device packed_float4*)x)[i])"},
        want=lambda x: x.reshape(16, 4).sum(1),
        threads=(0,),
        buffer="x",
        index=0,
        inputs={"x": mx.arange(65, dtype=mx.float32)[1:]},
        shape=(16,),
        grid=(16, 1, 1),
    ),
]

BARRIERS_AND_ORDER = [
    Pattern(
        name="a barrier stands inside a divergent branch",
        error=BarrierError,
        body="""
    threadgroup float tile[64];
    uint i = thread_position_in_threadgroup.x;
    if (i < 40) {
        tile[i] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);  // here
        out[i] = tile[39 - i];
    } else {
        out[i] = 0.0f;
    }
""",
        fix={
            "        threadgroup_barrier(mem_flags::mem_threadgroup);  // here\n": (
                "    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (i < 40) {\n"
            ),
        },
        want=lambda x: np.concatenate([x[:40][::-1], np.zeros(24)]),
        threads=(0, 40),
    ),
    Pattern(
        name="the result depends on which thread comes first",
        error=ScheduleError,
        body="""
    threadgroup atomic_uint next[1];
    uint i = thread_position_in_threadgroup.x;
    if (i == 0) {
        atomic_store_explicit(&next[0], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint place = atomic_fetch_add_explicit(&next[0], 1u, memory_order_relaxed);
    out[place] = x[i];
""",
        fix={"out[place] = x[i];": "out[i] = x[i] + float(place - place);"},
        want=lambda x: x,
        buffer="out",
        index=0,
        settings={"schedules": 3},
    ),
]

LANGUAGE_AND_LIMITS = [
    Pattern(
        name="40 KiB of threadgroup memory",
        error=LimitError,
        body="""
    threadgroup float tile[ROWS * 1024];  // here
    uint i = thread_position_in_threadgroup.x;
    tile[i * ROWS] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[(63 - i) * ROWS];
""",
        fix={},
        want=lambda x: x[::-1],
        threads=(0,),
        says="40,?960",
        template=(("ROWS", 10),),
        launch={"template": (("ROWS", 8),)},
    ),
    Pattern(
        name="a device pointer is passed as a threadgroup one",
        error=CompileError,
        header="inline float last(const threadgroup float* values, uint n) { return values[n - 1]; }",
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = last(x, i + 1);  // here
""",
        fix={"const threadgroup float* values": "const device float* values"},
        want=lambda x: x,
    ),
    Pattern(
        name="a pointer has no address space",
        error=LanguageError,
        body="""
    uint i = thread_position_in_grid.x;
    const float* row = x + 4 * i;  // here
    out[i] = row[0] + row[3];
""",
        fix={"const float* row": "const device float* row"},
        want=lambda x: x.reshape(16, 4)[:, [0, 3]].sum(1),
        says="address space",
        shape=(16,),
        grid=(16, 1, 1),
    ),
    Pattern(
        name="a helper takes a reference without address space",
        error=LanguageError,
        header="""
inline void grow(float& value) {  // here
    value *= 2.0f;
}
""",
        body="""
    uint i = thread_position_in_grid.x;
    float value = x[i];
    grow(value);
    out[i] = value;
""",
        fix={"float& value": "thread float& value"},
        want=lambda x: 2 * x,
        says="address space",
    ),
    Pattern(
        name="recursion",
        error=LanguageError,
        header="""
inline int triangle(int n) {  // here
    return n == 0 ? 0 : n + triangle(n - 1);
}
""",
        body="""
    uint i = thread_position_in_grid.x;
    out[i] = triangle(x[i]);
""",
        fix={"n == 0 ? 0 : n + triangle(n - 1)": "n * (n + 1) / 2"},
        want=lambda x: x * (x + 1) // 2,
        says="recurs",
        inputs={"x": mx.arange(64, dtype=mx.int32)},
        dtype=mx.int32,
    ),
    Pattern(
        name="a lambda",
        error=LanguageError,
        body="""
    uint i = thread_position_in_grid.x;
    auto twice = [](float value) { return 2.0f * value; };  // here
    out[i] = twice(x[i]);
""",
        fix={
            "    auto twice = [](float value) { return 2.0f * value; };  // here\n": "",
            "twice(x[i])": "2.0f * x[i]",
        },
        want=lambda x: 2 * x,
        says="lambda",
    ),
]

PATTERNS = [pytest.param(pattern, id=pattern.name) for pattern in (*MEMORY, *BARRIERS_AND_ORDER, *LANGUAGE_AND_LIMITS)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bug_is_found(pattern):
    check_refused(pattern)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_corrected_kernel_passes(pattern):
    check_twin_passes(pattern)
