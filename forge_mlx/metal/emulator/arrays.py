"""The bytes of MLX arrays: read where they lie, with their strides and their alignment, and made into arrays again."""

from collections.abc import Sequence
import ctypes
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

# Metal's buffers begin on a page and MLX gives a view an offset into one: what can be told of it from an address on a
# CPU is its last four bits. Only vectors of three or four 64-bit integers need more, which language.py keeps out of
# memory that threads share.
ALIGNMENT = 16

# NumPy has no bfloat16: its bits travel as uint16.
_CARRIERS = {mx.bfloat16: mx.uint16}
_NUMPY = {
    **{mx.bool_: np.bool_, mx.complex64: np.complex64, mx.float16: np.float16, mx.float32: np.float32},
    **{mx.int8: np.int8, mx.int16: np.int16, mx.int32: np.int32, mx.int64: np.int64},
    **{mx.uint8: np.uint8, mx.uint16: np.uint16, mx.uint32: np.uint32, mx.uint64: np.uint64},
}

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class View:
    """What a kernel sees of an input.

    Attributes:
        data: the bytes from the array's first to its last in memory; gaps between its elements are in it.
        offset: where the element at index 0 lies in `data`; not 0 with negative strides.
        misalignment: the address of that element modulo 16 as a GPU has it.
        strides: in elements.
    """

    data: Bytes
    offset: int
    misalignment: int
    strides: tuple[int, ...]


def _address(memory: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    return int(memory.__array_interface__["data"][0])


def _memory(array: mx.array) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    carrier = _CARRIERS.get(array.dtype)
    if carrier is not None:
        array = array.view(carrier)
    return np.asarray(memoryview(array))  # type: ignore[arg-type]


@cache
def _fresh_residue() -> int | None:
    """The address of a new array modulo 16, which on Metal is 0; None where it is not always the same."""
    arrays = [mx.zeros(size, dtype=mx.uint8) for size in (1, 100, 5_000, 300_000)]
    mx.eval(arrays)
    residues = {_address(_memory(array)) % ALIGNMENT for array in arrays}
    return residues.pop() if len(residues) == 1 else None


def read(array: mx.array, *, ensure_row_contiguous: bool) -> View:
    """The memory of an evaluated array, without a copy unless its elements have to be put into row order.

    Args:
        array: the array. Its memory must live as long as the view is used.
        ensure_row_contiguous: copy an array that is not row contiguous.

    Returns:
        Bytes, alignment and strides.
    """
    memory = _memory(array)
    if memory.flags.c_contiguous:
        data = memory.reshape(-1).view(np.uint8)
    elif ensure_row_contiguous:
        copy = np.ascontiguousarray(memory)
        return View(copy.reshape(-1).view(np.uint8), 0, 0, _elements(copy.strides, copy.itemsize))
    else:
        ends = [(size - 1) * stride for size, stride in zip(memory.shape, memory.strides, strict=True)]
        low = _address(memory) + sum(end for end in ends if end < 0)
        span = sum(abs(end) for end in ends) + memory.itemsize
        data = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(low))
    residue = _fresh_residue()
    address = _address(memory)
    misalignment = 0 if residue is None or not array.size else (address - residue) % ALIGNMENT
    offset = address - _address(data) if array.size else 0
    return View(data, offset, misalignment, _elements(memory.strides, memory.itemsize))


def _elements(strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(stride // itemsize for stride in strides)


def filled(value: float | None, shape: Sequence[int], dtype: mx.Dtype) -> Bytes:
    """The bytes of an output before the launch: each element `value`, rounded to the dtype as MLX does it.

    Args:
        value: what to fill with; None leaves zeros, which stand for nothing.
        shape: the output's shape.
        dtype: its type.
    """
    count = int(np.prod(shape, dtype=np.int64))
    if value is None:
        return np.zeros(count * dtype.size, dtype=np.uint8)
    element = mx.array(value, dtype=mx.float32).astype(dtype)
    return np.tile(_memory(element).reshape(-1).view(np.uint8), count)


def to_array(data: Bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An array of its own with these bytes.

    Args:
        data: row-contiguous elements.
        shape: the array's shape.
        dtype: its type.
    """
    carrier = _CARRIERS.get(dtype, dtype)
    array = mx.array(np.ascontiguousarray(data).view(_NUMPY[carrier]).reshape(tuple(shape)))
    return array if carrier == dtype else array.view(dtype)
