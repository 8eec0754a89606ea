"""How the kernel of delta is launched: what dq and dkv both take from the rows of out and of its cotangent."""

from functools import cache
from pathlib import Path
from typing import Final

from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx

_SOURCE: Final = Path(__file__).parent / "flash_attention_delta.metal"
_LANES: Final = 32
_THREADS: Final = 256


@cache
def _kernel() -> MetalKernel:
    # Only dout has strides.
    return MetalKernel(_SOURCE, ensure_row_contiguous=False)


def delta(engine: EngineName, out: mx.array, dout: mx.array, dlse: mx.array) -> mx.array:
    """rowsum(dout * out) - dlse, `[B, H, T]` in float32, so that dS = P (dP - delta).

    Args:
        engine: "metal", "cuda" or "emulator".
        out: `[B, H, T, Dv]`, not empty.
        dout: Cotangent of out, of its dtype; any strides.
        dlse: Cotangent of lse, `[B, H, T]` float32.
    """
    batch, heads, length, size = out.shape
    lanes = _lanes_per_row(size, out.dtype)
    # Whole simdgroups, and no more of them than a head's rows fill.
    threads = min(_THREADS, -(-length * lanes // _LANES) * _LANES)
    (found,) = _kernel()(
        {"o": mx.contiguous(out), "dout": dout, "dlse": mx.contiguous(dlse)},
        output_shapes=[dlse.shape],
        output_dtypes=[mx.float32],
        grid=(-(-length * lanes // threads) * threads, heads, batch),
        threadgroup=(threads, 1, 1),
        template={"T": out.dtype, "DV": size, "LANES": lanes},
        engine=engine,
    )
    return found


def _lanes_per_row(size: int, dtype: mx.Dtype) -> int:
    """Lanes that share a row: a power of two, one for each vector of 16 bytes as far as a simdgroup suffices."""
    vectors = size * dtype.size // 16
    return min(_LANES, 1 << (vectors - 1).bit_length())
