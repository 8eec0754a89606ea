"""ggml's blocks as codes of MLX's affine mode, whose value is scale code + bias, or as values; and blocks of values."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 32
"""Neighbours in a row that share a scale, in every type that becomes codes."""

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]


class Codes(NamedTuple):
    """Rows of codes.

    Attributes:
        bits: 4 or 8, what a code has room for.
        codes: uint8 `[R, K]`, one each.
        scales: float32 `[R, K / 32]`.
        biases: float32 `[R, K / 32]`.
    """

    bits: int
    codes: Bytes
    scales: Floats
    biases: Floats

    def packed(self) -> NDArray[np.uint32]:
        """The codes as MLX holds them, uint32 `[R, K bits / 32]`, the first in the lowest bits."""
        codes = self.codes if self.bits == 8 else self.codes[:, ::2] | self.codes[:, 1::2] << 4
        return np.ascontiguousarray(codes).view("<u4")

    def values(self) -> Floats:
        """What the codes stand for, float32 `[R, K]`."""
        groups = self.codes.reshape(*self.scales.shape, GROUP).astype(np.float32)
        with _unwarned():
            return (groups * self.scales[..., None] + self.biases[..., None]).reshape(self.codes.shape)


def decode(type_name: str, rows: Bytes) -> Floats | Codes:
    """Rows of a tensor: float32 `[R, K]`, or codes. Both are exact, biases of codes to their rounding.

    Args:
        type_name: A key of `DECODED`.
        rows: Their blocks, `[R, bytes of a row]`.
    """
    with _unwarned():
        decoded: Floats | Codes = DECODED[type_name](rows)
    return decoded


def encode(type_name: str, rows: Floats) -> Bytes:
    """Rows of values in blocks, `[R, bytes of a row]`, rounded as ggml's own reference does.

    Args:
        type_name: A key of `ENCODED`.
        rows: float32 `[R, K]`, K a multiple of 32 where the type has blocks.
    """
    return np.ascontiguousarray(ENCODED[type_name](rows)).view(np.uint8).reshape(len(rows), -1)


def encode_q4_1(codes: Codes) -> Bytes:
    """Codes of 4 bits in blocks of Q4_1, exact when float16 holds their scales and biases.

    Args:
        codes: Codes of 4 bits.
    """
    ends = np.stack([codes.scales, codes.biases], -1).astype("<f2").view(np.uint8)
    groups = codes.codes.reshape(*codes.scales.shape, GROUP)
    return np.concatenate([ends, _nibbles(groups)], -1).reshape(len(codes.codes), -1)


def _unwarned() -> AbstractContextManager[object]:
    """NumPy without its warnings: whoever decodes looks for what is not finite, and says where it is."""
    return np.errstate(over="ignore", invalid="ignore")


def _blocks(rows: Bytes, size: int) -> Bytes:
    return rows.reshape(len(rows), -1, size)


def _f16(content: Bytes) -> Floats:
    """float32 `[..., n]` of float16 in `[..., 2 n]` bytes."""
    return np.ascontiguousarray(content).view("<f2").astype(np.float32)


def _halves(nibbles: Bytes) -> Bytes:
    """The low four bits of all, then the high four bits of all."""
    return np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], -1)


def _nibbles(groups: Bytes) -> Bytes:
    half = groups.shape[-1] // 2
    nibbles: Bytes = groups[..., :half] | groups[..., half:] << np.uint8(4)
    return nibbles


def _codes(bits: int, codes: Bytes, scales: Floats, biases: Floats) -> Codes:
    num = len(codes)
    return Codes(bits, codes.reshape(num, -1), scales.reshape(num, -1), biases.reshape(num, -1))


def _q4_0(rows: Bytes) -> Codes:
    blocks = _blocks(rows, 18)
    scales = _f16(blocks[..., :2])
    return _codes(4, _halves(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(rows: Bytes) -> Codes:
    blocks = _blocks(rows, 20)
    return _codes(4, _halves(blocks[..., 4:]), _f16(blocks[..., :2]), _f16(blocks[..., 2:4]))


def _fifth_bits(content: Bytes) -> Bytes:
    """32 bits of 4 bytes, each as 0 or 16."""
    bits: Bytes = np.unpackbits(content, axis=-1, bitorder="little") << np.uint8(4)
    return bits


def _q5_0(rows: Bytes) -> Codes:
    blocks = _blocks(rows, 22)
    scales = _f16(blocks[..., :2])
    return _codes(8, _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), scales, -16 * scales)


def _q5_1(rows: Bytes) -> Codes:
    blocks = _blocks(rows, 24)
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _codes(8, codes, _f16(blocks[..., :2]), _f16(blocks[..., 2:4]))


def _q8_0(rows: Bytes) -> Codes:
    blocks = _blocks(rows, 34)
    scales = _f16(blocks[..., :2])
    # Of a signed byte q this is q + 128.
    return _codes(8, blocks[..., 2:] ^ np.uint8(128), scales, -128 * scales)


def _scales_of_super_block(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases `[R, N, 8]` of blocks that begin as those of Q4_K and Q5_K do."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    mins = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    return _f16(blocks[..., :2]) * scales, -_f16(blocks[..., 2:4]) * mins


def _q4_k(rows: Bytes) -> Codes:
    blocks = _blocks(rows, 144)
    nibbles = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    return _codes(4, _halves(nibbles), *_scales_of_super_block(blocks))


def _q5_k(rows: Bytes) -> Codes:
    blocks = _blocks(rows, 176)
    nibbles = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    # Bit n of byte i belongs to element i of group n.
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = _halves(nibbles).reshape(*blocks.shape[:2], 8, 32) | high << np.uint8(4)
    return _codes(8, codes, *_scales_of_super_block(blocks))


def _q6_k(rows: Bytes) -> Floats:
    blocks = _blocks(rows, 210)
    shape = (*blocks.shape[:2], 2)
    low = _halves(blocks[..., :128].reshape(*shape, 64)).reshape(*shape, 4, 32)
    high = blocks[..., 128:192].reshape(*shape, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low | high << 4).astype(np.float32) - 32
    scales = _f16(blocks[..., 208:]) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return (codes.reshape(*scales.shape, 16) * scales[..., None]).reshape(len(rows), -1)


def _bf16(rows: Bytes) -> Floats:
    words = np.ascontiguousarray(rows).view("<u2").astype(np.uint32)
    return (words << 16).view(np.float32)


DECODED: Final[dict[str, Callable[[Bytes], Floats | Codes]]] = {
    "F32": lambda rows: np.ascontiguousarray(rows).view("<f4"),
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Types that can be read. Q6_K has groups of 16, which MLX has not, and so becomes values."""


def _inverse(scales: Floats) -> Floats:
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def _to_q8_0(rows: Floats) -> Bytes:
    groups = rows.reshape(len(rows), -1, GROUP)
    scales = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    scaled = groups * _inverse(scales)
    # Halves away from zero, as C's roundf.
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([scales.astype("<f2").view(np.uint8), codes.view(np.uint8)], -1)


def _to_q4_0(rows: Floats) -> Bytes:
    groups = rows.reshape(len(rows), -1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)
    scales = largest / np.float32(-8)
    codes = np.clip(np.trunc(groups * _inverse(scales) + np.float32(8.5)), 0, 15).astype(np.uint8)
    return np.concatenate([scales.astype("<f2").view(np.uint8), _nibbles(codes)], -1)


ENCODED: Final[dict[str, Callable[[Floats], NDArray[np.generic]]]] = {
    "F32": lambda rows: rows.astype("<f4"),
    "F16": lambda rows: rows.astype("<f2"),
    "Q8_0": _to_q8_0,
    "Q4_0": _to_q4_0,
}
"""Types that can be written."""
