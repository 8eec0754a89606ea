"""The least work and traffic of flash attention's kernels, from who sees whom: what their counts are measured by."""

from typing import Protocol

from forge_mlx.kernels.attention.tiles import Kernel, tiles
import mlx.core as mx
import numpy as np


class Sizes(Protocol):
    """What of a case decides its counts."""

    @property
    def batch(self) -> int:
        """B."""

    @property
    def heads(self) -> int:
        """H."""

    @property
    def kv_heads(self) -> int:
        """Hkv."""

    @property
    def queries(self) -> int:
        """T."""

    @property
    def keys(self) -> int:
        """S."""

    @property
    def head_dim(self) -> int:
        """D."""

    @property
    def v_size(self) -> int:
        """Dv."""

    @property
    def dtype(self) -> mx.Dtype:
        """Of q, k and v."""

    def seen(self) -> np.ndarray:
        """`[B or 1, 1, T, S]`: which keys a query sees."""


def pairs(case: Sizes, rows: int, columns: int) -> np.ndarray:
    """`[B, blocks of queries, blocks of keys]`: whether any query of a block sees any key of another.

    Args:
        case: The sizes and what is seen.
        rows: Queries in a block.
        columns: Keys in a block.
    """
    seen = np.broadcast_to(case.seen()[:, 0], (case.batch, case.queries, case.keys))
    padded = np.pad(seen, ((0, 0), (0, -case.queries % rows), (0, -case.keys % columns)))
    blocks = padded.reshape(case.batch, padded.shape[1] // rows, rows, padded.shape[2] // columns, columns)
    met: np.ndarray = np.any(blocks, axis=(2, 4))
    return met


def products(case: Sizes) -> dict[str, int]:
    """Products of 8x8x8 of each kernel: those of the 8x8 tiles of scores that hold a pair that sees each other.

    Args:
        case: The sizes and what is seen.
    """
    tiles = case.heads * int(pairs(case, 8, 8).sum())
    of_qk, of_v = -(-case.head_dim // 8), -(-case.v_size // 8)
    return {
        "forward": tiles * (of_qk + of_v),
        "dq": tiles * (2 * of_qk + of_v),
        "dkv": tiles * (2 * of_qk + 2 * of_v),
    }


def device_bytes(case: Sizes) -> dict[str, int]:
    """Bytes of each kernel. Own rows once; of the other side what every visited pair of blocks needs.

    Forward and dQ visit keys, and dK/dV visits the queries of every head that shares its keys.

    Args:
        case: The sizes and what is seen.
    """
    size, both = case.dtype.size, case.head_dim + case.v_size
    rows = case.batch * case.heads * case.queries
    own = {
        # q, out and lse.
        "forward": rows * (both * size + 4),
        # out, dout, dlse and D.
        "delta": rows * (2 * case.v_size * size + 8),
        # q, dout, lse, D and dq.
        "dq": rows * ((both + case.head_dim) * size + 8),
        # k, v, dk and dv.
        "dkv": case.batch * case.kv_heads * case.keys * 2 * both * size,
    }
    visits: tuple[tuple[Kernel, int], ...] = (("forward", both * size), ("dq", both * size), ("dkv", both * size + 8))
    for kernel, of_row in visits:
        own[kernel] += case.heads * _visited(case, kernel) * of_row
    return own


def _visited(case: Sizes, kernel: Kernel) -> int:
    """Rows of the other side that a kernel reads for one head: those of each block, once for each own block."""
    tile = tiles(kernel, case.head_dim, case.v_size, case.dtype)
    if kernel == "dkv":
        met, length = pairs(case, tile.step, tile.own).sum((0, 2)), case.queries
    else:
        met, length = pairs(case, tile.own, tile.step).sum((0, 1)), case.keys
    in_block = np.minimum(tile.step, length - tile.step * np.arange(len(met)))
    return int((met * in_block).sum())
