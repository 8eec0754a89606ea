"""Lanes that took different ways meet again behind a branch and behind a loop, and only in one iteration of a loop."""

from collections.abc import Callable
import warnings

from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest

LANES = np.arange(32)


def simd_sums(keys: np.ndarray) -> np.ndarray:
    """For each lane, the number of lanes with its key."""
    return np.array([(keys == key).sum() for key in keys])


def chain(lane: np.ndarray) -> np.ndarray:
    return np.where(lane < 8, 28, np.where(lane < 16, 8, np.where(lane < 24, 23, lane)))


CASES: dict[str, tuple[str, Callable[[], np.ndarray]]] = {
    "behind an if-else chain": (
        """if (lane < 8) v = simd_sum(v); else if (lane < 16) v = simd_sum(1); else if (lane < 24) v = simd_max(v);
        y[lane] = simd_sum(v);""",
        lambda: np.full(32, chain(LANES).sum()),
    ),
    "behind an unlikely branch": (
        "if (__builtin_expect(lane >= 28, 0)) v = simd_sum(v); y[lane] = simd_sum(v);",
        lambda: np.full(32, LANES[:28].sum() + 4 * LANES[28:].sum()),
    ),
    "one iteration at a time": (
        "int s = 0; for (int b = 0; b < 50; b++) { if (int(lane % 5) == b) s += simd_sum(1); } y[lane] = s;",
        lambda: simd_sums(LANES % 5),
    ),
    "behind a loop that lanes leave early": (
        "int s = 0; for (uint j = 0; j <= lane % 4; j++) { s += simd_sum(1); } y[lane] = 100 * s + simd_sum(1);",
        lambda: 100 * np.cumsum([32, 24, 16, 8])[LANES % 4] + 32,
    ),
    "break out of an endless for": (
        """for (;;) { int first = simd_broadcast_first(v % 3); if (first == v % 3) { v = simd_sum(1); break; } }
        y[lane] = v;""",
        lambda: simd_sums(LANES % 3),
    ),
    "while with a condition": (
        "int n = 0; while (simd_any(v > 0)) { v -= 3; n++; } y[lane] = n;",
        lambda: np.full(32, 11),
    ),
    "do while": (
        "int s = 0; int k = 0; do { if (k == v % 4) s = simd_sum(1); k++; } while (k < 40); y[lane] = s + simd_sum(1);",
        lambda: np.full(32, 8 + 32),
    ),
    "nested loops": (
        """int s = 0;
        for (int a = 0; a < 6; a++)
          for (int b = 0; b < 6; b++)
            if (v % 6 == a && v % 4 == b) s = simd_sum(1);
        y[lane] = s;""",
        lambda: simd_sums(LANES % 12),
    ),
    "calls of a function": (
        "if (v % 2) v = total(1); else v = total(2); y[lane] = total(v);",
        lambda: np.full(32, 16 * 16 + 16 * 32),
    ),
    "calls of a method": (
        "Summer summer{1}; if (__builtin_expect(lane > 20, 0)) v = summer.total(v); y[lane] = summer.total(v);",
        lambda: np.full(32, LANES[:21].sum() + 11 * LANES[21:].sum()),
    ),
    "macros": (
        "int s = 0; for (uint j = 0; j <= lane % 4; j++) { ADD(s, 1); } ADD(s, 1); y[lane] = s;",
        lambda: np.cumsum([32, 24, 16, 8])[LANES % 4] + 32,
    ),
    "a macro as the statement of an if": (
        "int s = 0; if (lane < 4) ADD(s, 1); else ADD(s, 2); y[lane] = s;",
        lambda: np.where(LANES < 4, 4, 56),
    ),
    "an unrolled loop": (
        """int s = 0;
        #pragma clang loop unroll(full)
        for (int b = 0; b < 4; b++) { if (v % 4 == b) { s = simd_sum(v); } }
        y[lane] = s;""",
        lambda: np.array([LANES[key == LANES % 4].sum() for key in LANES % 4]),
    ),
}
HEADER = """
#define ADD(sum, x) do { sum += simd_sum(x); } while (0)
template <typename T> T total(T x) { return simd_sum(x); }
struct Summer { int scale; int total(int x) const thread { return scale * simd_sum(x); } };
"""


def run(body: str) -> np.ndarray:
    kernel = emulator.metal_kernel(
        name="meet",
        input_names=[],
        output_names=["y"],
        header=HEADER,
        source=f"uint lane = thread_index_in_simdgroup; int v = lane; {body}",
    )
    with warnings.catch_warnings():
        # A reduction over part of a simdgroup is what these are about.
        warnings.simplefilter("ignore", emulator.MetalWarning)
        outputs = kernel(
            inputs=[], output_shapes=[(32,)], output_dtypes=[mx.int32], grid=(32, 1, 1), threadgroup=(32, 1, 1)
        )
    return np.array(outputs[0])


@pytest.mark.parametrize("instrumented", [True, False], ids=["with hooks", "without hooks"])
@pytest.mark.parametrize("case", CASES)
def test_lanes_meet(case, instrumented):
    body, expected = CASES[case]
    with emulator.settings(schedules=3, checks=emulator.Settings().checks if instrumented else ()):
        np.testing.assert_array_equal(run(body), expected())


def test_matrix_function_behind_a_branch_has_all_lanes():
    body = """threadgroup float s[64];
    if (__builtin_expect(lane >= 28, 0)) v = simd_sum(v);
    s[2 * lane] = v; s[2 * lane + 1] = v;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 m; simdgroup_load(m, s, 8);
    y[lane] = simd_sum(m.thread_elements()[0]);"""
    values = np.where(LANES >= 28, LANES[28:].sum(), LANES)
    np.testing.assert_array_equal(run(body), np.full(32, values.sum()))
