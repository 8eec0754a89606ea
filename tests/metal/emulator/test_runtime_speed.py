"""What one hooked access and one meeting of threads cost: run with -s to see the table."""

import time

import numpy as np
import pytest
from runtime_launch import ALL, start

X = np.arange(4096, dtype=np.float32)
THREADS = 256
TILE = "threadgroup float tile[1024];\nfor (uint k = 0; k < 4; k++) tile[i * 4 + k] = 0.0f;\n"
TILE += "threadgroup_barrier(mem_flags::mem_threadgroup);\nfloat s = 0.0f;\n"
# Name: body, operations that each thread makes, nanoseconds that none of them may come near even on a busy machine.
CASES = {
    "read of an input": ("float s = 0.0f;\nfor (uint k = 0; k < 4000; k++) s += x[(k * 7 + i) & 4095];", 4000, 100),
    "read of four floats": (
        "float s = 0.0f;\nfor (uint k = 0; k < 4000; k++) s += ((const device float4*)x)[(k * 7 + i) & 1023].y;",
        4000,
        150,
    ),
    "read of a shared array": (TILE + "for (uint k = 0; k < 4000; k++) s += tile[(k * 7 + i) & 1023];", 4000, 100),
    "write to a shared array": (TILE + "for (uint k = 0; k < 4000; k++) tile[i * 4 + (k & 3)] = float(k);", 4000, 150),
    "simd_sum of a lane": ("float s = 0.0f;\nfor (uint k = 0; k < 500; k++) s += simd_sum(s + float(k));", 500, 2000),
    "barrier of a thread": (
        "float s = 0.0f;\nfor (uint k = 0; k < 1000; k++) threadgroup_barrier(mem_flags::mem_none);",
        1000,
        1000,
    ),
}


def cost(body: str, operations: int, checks: frozenset[str]) -> float:
    """Nanoseconds of processor time for each operation, least of five runs."""
    body = f"uint i = thread_position_in_threadgroup.x;\n{body}\nout[i] = s;"
    times = []
    for _ in range(6):
        begin = time.process_time()
        start(body, {"x": X}, grid=THREADS, checks=checks)
        times.append(time.process_time() - begin)
    # The first one compiles.
    return min(times[1:]) / (THREADS * operations) * 1e9


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_cost(name: str):
    body, operations, most = CASES[name]
    checked, plain = cost(body, operations, ALL), cost(body, operations, frozenset())
    print(f"\n{name}: {checked:.1f} ns with all checks, {plain:.1f} ns without")
    assert checked < most
