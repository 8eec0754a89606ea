"""Codes of 2 to 8 bits in 32-bit words and back: element i of a row is the bits from i * bits on, little-endian."""

from functools import reduce
from typing import Final

import mlx.core as mx

# Bits of a code: how many codes make whole bytes, the integer that holds them, and how many of its bytes they fill.
_PACKS: Final = {
    2: (16, mx.uint32, 4),
    3: (8, mx.uint32, 3),
    4: (8, mx.uint32, 4),
    5: (8, mx.uint64, 5),
    6: (4, mx.uint32, 3),
    8: (4, mx.uint32, 4),
}


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes as `mx.quantize` packs them.

    Args:
        codes: `[..., K]`, integers below 2^bits; K fills whole words.
        bits: 2, 3, 4, 5, 6 or 8.

    Returns:
        `[..., K * bits / 32]`, uint32.
    """
    count, dtype, filled = _PACKS[bits]
    parts = codes.reshape(*codes.shape[:-1], -1, count).astype(dtype)
    words = reduce(mx.bitwise_or, (parts[..., index] << mx.array(index * bits, dtype) for index in range(count)))
    octets = mx.view(words[..., None], mx.uint8)[..., :filled]
    return mx.view(octets.reshape(*codes.shape[:-1], -1), mx.uint32)


def unpack(words: mx.array, bits: int) -> mx.array:
    """The codes of packed words.

    Args:
        words: `[..., K * bits / 32]`, uint32.
        bits: 2, 3, 4, 5, 6 or 8.

    Returns:
        `[..., K]`, uint8.
    """
    count, dtype, filled = _PACKS[bits]
    rows, packs_per_row = words.shape[:-1], words.shape[-1] * 4 // filled
    octets = mx.view(words, mx.uint8).reshape(*rows, packs_per_row, filled)
    padding = mx.zeros((*octets.shape[:-1], dtype.size - filled), mx.uint8)
    packs = mx.view(mx.concatenate([octets, padding], axis=-1), dtype)
    shifts = mx.arange(count).astype(dtype) * bits
    codes = (packs >> shifts) & mx.array(2**bits - 1, dtype)
    return codes.astype(mx.uint8).reshape(*rows, packs_per_row * count)
