#!/usr/bin/env python
"""What the emulator costs: compiling, and running flash attention with and without its checks.

Prints Markdown tables for `scripts/bench/LOG.md`. Times are processor seconds of this process and of the compilers that
it starts: all of it runs on one core, and other programs do not change them much. Nothing here says how fast a kernel
is on a GPU.
"""

import argparse
from collections.abc import Callable
import os
from pathlib import Path
import resource
from statistics import median
import sys
import tempfile

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.settings import CHECKS
import mlx.core as mx
import numpy as np

# Causal attention with one thread a query; 32 keys and values at a time are shared by the threadgroup.
SCALAR = """
    constexpr int BLOCK = 32;
    threadgroup float keys[BLOCK * D], values[BLOCK * D];
    uint lane = thread_position_in_threadgroup.x;
    uint row = thread_position_in_grid.x;
    uint head = thread_position_in_grid.y;
    int length = q_shape[2];
    auto queries = q + (head * length + row) * D;
    float query[D], sum[D];
    for (int d = 0; d < D; d++) {
        query[d] = queries[d] * scale;
        sum[d] = 0.0f;
    }
    float largest = -INFINITY, total = 0.0f;
    int blocks = threadgroup_position_in_grid.x + 1;
    for (int block = 0; block < blocks; block++) {
        for (int k = lane; k < BLOCK * D; k += BLOCK) {
            int from = (head * length + block * BLOCK) * D + k;
            keys[k] = k_in[from];
            values[k] = v_in[from];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int j = 0; j < BLOCK && block * BLOCK + j <= int(row); j++) {
            float score = 0.0f;
            for (int d = 0; d < D; d++) {
                score += query[d] * keys[j * D + d];
            }
            float maximum = metal::max(largest, score);
            float keep = metal::precise::exp(largest - maximum), p = metal::precise::exp(score - maximum);
            total = total * keep + p;
            for (int d = 0; d < D; d++) {
                sum[d] = sum[d] * keep + p * values[j * D + d];
            }
            largest = maximum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int d = 0; d < D; d++) {
        out[(head * length + row) * D + d] = sum[d] / total;
    }
"""
# Each line takes one check out; the last has none that looks at memory.
CHECKS = {
    "every check": frozenset(CHECKS),
    "without races": frozenset(CHECKS) - {"races", "lockstep"},
    "bounds only": frozenset({"bounds", "barriers", "limits", "language"}),
    "no check of memory": frozenset({"barriers", "limits", "language"}),
    "none": frozenset(),
}
SHAPE = (1, 2, 128, 64)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each setting, of which the median counts")
    parser.add_argument("--schedules", type=int, default=1, help="orders of threads in each run (default 1)")
    return parser.parse_args()


def inputs() -> list[mx.array]:
    """q, k, v of `SHAPE`, float32."""
    rng = np.random.default_rng(0)
    return [mx.array(rng.standard_normal(SHAPE).astype(np.float32)) for _ in range(3)]


def plain_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Causal attention by MLX's own operation."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=SHAPE[-1] ** -0.5, mask="causal")


def scalar_attention(name: str) -> Callable[..., mx.array]:
    """The kernel above, under a name of its own, so that it is compiled anew."""
    kernel = emulator.metal_kernel(
        name=name, input_names=["q", "k_in", "v_in", "scale"], output_names=["out"], source=SCALAR
    )

    def run(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return kernel(
            inputs=[q, k, v, SHAPE[-1] ** -0.5],
            template=[("D", SHAPE[-1])],
            grid=(SHAPE[2], SHAPE[0] * SHAPE[1], 1),
            threadgroup=(32, 1, 1),
            output_shapes=[SHAPE],
            output_dtypes=[mx.float32],
        )[0]

    return run


def peer_attention() -> Callable[..., mx.array] | None:
    """mlx-train-perf's kernel of simdgroup matrices; None if it is not installed."""
    try:
        with emulator.patch():
            from mlx_train_perf.attention.kernel.launch import TileShape, launch_flash_fwd
    except ImportError:
        return None

    def run(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        with emulator.patch():
            tile = TileShape(variant="mma")
            return launch_flash_fwd(q, k, v, scale=SHAPE[-1] ** -0.5, causal=True, tile=tile)[0]

    return run


def processor_seconds() -> float:
    """Of this process and of the processes that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def seconds(run: Callable[..., mx.array], arrays: list[mx.array]) -> float:
    """What one call takes, its result included."""
    began = processor_seconds()
    mx.eval(run(*arrays))
    return processor_seconds() - began


def compile_times(arrays: list[mx.array], runs: int) -> list[tuple[str, float]]:
    """Seconds until the first result: with an empty cache, with headers compiled before, and from the cache."""
    rows = []
    for checks, label in ((CHECKS["every check"], "with hooks"), (CHECKS["none"], "without hooks")):
        with tempfile.TemporaryDirectory() as folder, emulator.settings(checks=checks):
            before = os.environ.get("FORGE_MLX_CACHE")
            os.environ["FORGE_MLX_CACHE"] = folder
            try:
                first = scalar_attention("first")
                cold = seconds(first, arrays)
                warm = median(seconds(first, arrays) for _ in range(runs))
                rows.append((f"first kernel ever, {label}", cold - warm))
                each = [seconds(scalar_attention(f"next{n}"), arrays) - warm for n in range(runs)]
                rows.append((f"each further kernel, {label}", median(each)))
            finally:
                os.environ.pop("FORGE_MLX_CACHE")
                if before is not None:
                    os.environ["FORGE_MLX_CACHE"] = before
    return rows


def main() -> int:
    """Measure and print. Returns the exit status."""
    options = parse()
    arrays = inputs()
    want = plain_attention(*arrays)
    kernels = {"scalar, own": scalar_attention("scalar"), "simdgroup matrices, mlx-train-perf": peer_attention()}
    print(f"{Path(sys.argv[0]).name}: flash attention forward {list(SHAPE)} float32, {options.schedules} schedule(s)\n")
    print("| processor seconds, median of " + f"{options.runs} | " + " | ".join(kernels) + " |")
    print("|---|" + "---|" * len(kernels))
    for label, checks in CHECKS.items():
        cells = []
        for run in kernels.values():
            if run is None:
                cells.append("not installed")
                continue
            with emulator.settings(checks=checks, schedules=options.schedules):
                if not mx.allclose(run(*arrays), want, rtol=1e-4, atol=1e-5):
                    print(f"the result is wrong ({label}): no time is worth telling", file=sys.stderr)
                    return 1
                cells.append(f"{median(seconds(run, arrays) for _ in range(options.runs)):.3f}")
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("\n| compile and load, scalar kernel | processor seconds |\n|---|---|")
    for label, value in compile_times(arrays, options.runs):
        print(f"| {label} | {value:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
