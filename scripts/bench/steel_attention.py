#!/usr/bin/env python
"""What the forward kernels of attention do for each operation that attention needs: MLX's "steel" one beside ours.

MLX's kernel is read from the headers of the installed package, runs on the emulator on the same arrays as ours, and has
to agree with float64 before anything is counted; so has ours. Both write out and lse.

Counts are per ideal FLOP: 4 D for each pair of a query and a key that it sees.

- products: operations of all 8x8x8 matrix products. Over 1 is work on pairs that nobody sees.
- device, threadgroup: bytes that all accesses move. No cache is modelled.
- barriers: of a threadgroup, once for each; of a simdgroup and shuffles (all simdgroup functions but the products),
  once for each simdgroup.
- steps: branches that all threads together take. A GPU's compiler makes selections of many of them.
- bytes an access: of device and of threadgroup memory. Apple's compiler may join accesses that clang does not.

They are of what clang's optimiser leaves of the source, and Apple's may leave something else. They say nothing of
registers, of how many threadgroups fit a core, of bank conflicts, of latency or of time: fewer of one count is less of
that work, not a faster kernel. MLX may take another kernel where the GPU has matrix units of its own (from the M5 on).
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
import json
from pathlib import Path
import sys
from typing import Final

import forge_mlx  # noqa: F401  Before mlx.core: it loads the BLAS.
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.attention import flash_attention, float64
from forge_mlx.kernels.attention.options import Options
from forge_mlx.metal import emulator
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.emulator.counts import MATRIX_FLOPS
from forge_mlx.metal.engine import missing
from forge_mlx.metal.include import SourceError
import mlx.core as mx
import numpy as np
from steel_kernel import KEYS, PARAMETERS, Results, steel

DTYPES: Final = {dtype_name(dtype): dtype for dtype in (mx.bfloat16, mx.float16, mx.float32)}
# Of the largest element: one rounding to the dtype, and what sums in float32 lose.
OUT_RTOL: Final = {mx.bfloat16: 2**-8 + 1e-5, mx.float16: 2**-11 + 1e-5, mx.float32: 1e-5}
LSE_ATOL: Final = 1e-5
_HEAD = (
    "dtype | D | keys | kernel | products | device B | threadgroup B | barriers, threadgroup | barriers, simdgroup | "
    "shuffles | steps | bytes an access | threads | threadgroup memory"
)


@dataclass(frozen=True)
class Row:
    """What one kernel did in one case.

    Attributes:
        kernel: "MLX" or "forge".
        dtype: Of q, k and v.
        head_dim: D.
        causal: Whether the case is.
        ideal_flops: 4 D for each visible pair.
        products: 8x8x8 products.
        device_bytes: Read and written in arrays; scalars, shapes and strides are left out.
        device_accesses: That moved them.
        threadgroup_bytes: Read and written.
        threadgroup_accesses: That moved them.
        threadgroup_barriers: Once a threadgroup.
        simdgroup_barriers: Once a simdgroup.
        shuffles: And the other simdgroup functions but for the products, once a simdgroup.
        steps: Branches of all threads.
        threads: Of a threadgroup.
        threadgroup_memory: Bytes of a threadgroup's arrays.
        out_error: Largest error of out, as a part of its largest element.
        lse_error: Largest error of lse.
    """

    kernel: str
    dtype: str
    head_dim: int
    causal: bool
    ideal_flops: int
    products: int
    device_bytes: int
    device_accesses: int
    threadgroup_bytes: int
    threadgroup_accesses: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    shuffles: int
    steps: int
    threads: int
    threadgroup_memory: int
    out_error: float
    lse_error: float

    @property
    def cells(self) -> str:
        """As a row of the table."""
        thousand, million = self.ideal_flops / 1e3, self.ideal_flops / 1e6
        counts = [f"{self.products * MATRIX_FLOPS / self.ideal_flops:.3f}"]
        counts += [f"{each / thousand:.1f}" for each in (self.device_bytes, self.threadgroup_bytes)]
        counts += [f"{each / million:.1f}" for each in (self.threadgroup_barriers, self.simdgroup_barriers)]
        counts += [f"{self.shuffles / million:.0f}", f"{self.steps / thousand:.1f}"]
        accesses = (self.device_bytes / self.device_accesses, self.threadgroup_bytes / self.threadgroup_accesses)
        counts += [" and ".join(f"{each:.1f}" for each in accesses)]
        names = [self.dtype, str(self.head_dim), "causal" if self.causal else "all", self.kernel]
        return f"| {' | '.join([*names, *counts, str(self.threads), f'{self.threadgroup_memory:,}'])} |"


def ours(q: mx.array, k: mx.array, v: mx.array, *, causal: bool) -> Results:
    """out and lse by this project's kernel on the emulator; arguments as `steel`."""
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True, variant="mma", impl="emulator")
    return out, lse


KINDS: Final = {"MLX": steel, "forge": ours}


def errors(kernel: str, arrays: Sequence[mx.array], results: Results, causal: bool) -> tuple[float, float]:
    """Largest error of out, as a part of its largest element, and of lse.

    Args:
        kernel: Whose results, for the message.
        arrays: q, k, v.
        results: out and lse.
        causal: As they were computed.

    Raises:
        ValueError: One is more than the dtype costs.
    """
    q, k, v = (to_float64(each) for each in arrays)
    options = Options(scale=q.shape[3] ** -0.5, causal=causal, window=None, softcap=None)
    seen = float64.visible(q.shape[2], k.shape[2], options)
    want = float64.attention({"q": q, "k": k, "v": v}, {"out": np.zeros_like(q)}, options, seen)
    out, lse = (to_float64(each) for each in results)
    off = float(np.abs(out - want["out"]).max() / np.abs(want["out"]).max())
    lse_off = float(np.abs(lse - want["lse"]).max())
    # Written so that NaN is an error.
    if not (off <= OUT_RTOL[arrays[0].dtype] and lse_off <= LSE_ATOL):
        raise ValueError(f"{kernel}: out is off by {off:.3g} of its largest element and lse by {lse_off:.3g}.")
    return off, lse_off


def count(kernel: str, length: int, head_dim: int, dtype: mx.Dtype, causal: bool) -> Row:
    """Run a kernel on `[1, 2, length, head_dim]`, judge its results and count.

    Args:
        kernel: Of `KINDS`.
        length: Queries and keys.
        head_dim: D.
        dtype: Of q, k and v.
        causal: Whether no query sees keys after it.

    Raises:
        ValueError: It computes something else than attention.
    """
    generator, shape = np.random.default_rng(0), (1, 2, length, head_dim)
    q, k, v = (mx.array(generator.standard_normal(shape), mx.float32).astype(dtype) for _ in range(3))
    # One check is enough to have the accesses counted.
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        results = KINDS[kernel](q, k, v, causal=causal)
        mx.eval(results)
    launches = emulator.report().launches
    out_error, lse_error = errors(kernel, (q, k, v), results, causal)
    counts = [launch.counts for launch in launches]
    # MLX has its parameters in constant memory, where metal_kernel does not put so many.
    device = [each for one in counts for each in one.buffers if each.space == "device" and each.name != PARAMETERS]
    threadgroup = [each for one in counts for each in one.arrays]
    products = sum(each.matrix_multiply_accumulates for each in counts)
    pairs = shape[1] * (length * (length + 1) // 2 if causal else length**2)
    return Row(
        kernel,
        dtype_name(dtype),
        head_dim,
        causal,
        ideal_flops=4 * head_dim * pairs,
        products=products,
        device_bytes=sum(each.bytes_read + each.bytes_written for each in device),
        device_accesses=sum(each.reads + each.writes for each in device),
        threadgroup_bytes=sum(each.bytes_read + each.bytes_written for each in threadgroup),
        threadgroup_accesses=sum(each.reads + each.writes for each in threadgroup),
        threadgroup_barriers=sum(each.threadgroup_barriers for each in counts),
        simdgroup_barriers=sum(each.simdgroup_barriers for each in counts),
        # The emulator counts a product as one, too.
        shuffles=sum(each.simdgroup_functions for each in counts) - products,
        steps=sum(each.steps for each in counts),
        threads=max(each.threads // each.threadgroups for each in counts),
        threadgroup_memory=max(sum(each.size for each in one.arrays) for one in counts),
        out_error=out_error,
        lse_error=lse_error,
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="queries and keys (default 512)")
    parser.add_argument("--head-dim", type=int, action="append", choices=KEYS, help="default 64 and 128; repeatable")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default bfloat16 and float32; repeatable")
    parser.add_argument("--kernel", choices=KINDS, action="append", help="default both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts, not divided by anything, too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 1 if a kernel's results are wrong or it cannot run."""
    options = parser().parse_args(arguments)
    print(f"MLX {version('mlx')}, [1, 2, {options.length}, D], forward with lse. Bytes and steps are per 1,000 ideal")
    print("FLOP, barriers and shuffles per 1,000,000, products as a ratio.\n")
    print(f"| {_HEAD} |\n|---|---:|---|---|{'---:|' * (_HEAD.count('|') - 3)}")
    rows: list[Row] = []
    try:
        if options.length < 1:
            raise ValueError(f"--length must be at least 1 but got {options.length}.")
        if lack := missing("emulator"):
            raise ValueError(f"engine emulator cannot run: {lack}.")
        for dtype in options.dtype or ("bfloat16", "float32"):
            for head_dim in options.head_dim or (64, 128):
                for causal in (True, False):
                    for kernel in options.kernel or KINDS:
                        rows.append(count(kernel, options.length, head_dim, DTYPES[dtype], causal))
                        print(rows[-1].cells, flush=True)
        if options.json:
            content = {"mlx": version("mlx"), "length": options.length, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError, SourceError, emulator.MetalError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
