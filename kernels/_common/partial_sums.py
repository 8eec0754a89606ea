"""The second stage of sums over rows: what each threadgroup found is added up, always in the same order."""

from functools import cache
from pathlib import Path
from typing import Final

from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import SIMDGROUP
import mlx.core as mx

_THREADS: Final = 256
_COLUMNS: Final = 128


@cache
def _kernel() -> MetalKernel:
    return MetalKernel(Path(__file__).parent / "sum_parts.metal")


def sum_parts(engine: EngineName, parts: mx.array, dtype: mx.Dtype) -> mx.array:
    """The sum of `[B, P, C]` over P, in float32 and rounded once; the order follows from the shape alone.

    Args:
        engine: "metal", "cuda" or "emulator".
        parts: `[B, P, C]` in float32, P and C at least 1.
        dtype: Of the result.

    Returns:
        `[B, C]`.
    """
    batches, count, columns = parts.shape
    threads = min(_THREADS, count * SIMDGROUP)
    (total,) = _kernel()(
        {"parts": parts},
        output_shapes=[(batches, columns)],
        output_dtypes=[dtype],
        grid=(-(-columns // _COLUMNS) * threads, batches, 1),
        threadgroup=(threads, 1, 1),
        template={"T": dtype},
        engine=engine,
    )
    return total
