"""A GGUF file's header, checked before anything is read by it: metadata, and where each tensor lies."""

from collections.abc import Iterator, Mapping
import math
from pathlib import Path
import struct
from typing import Any, BinaryIO, Final, NamedTuple

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.regular_files import regular_size
import numpy as np
from numpy.typing import NDArray

MAGIC: Final = b"GGUF"
VERSION: Final = 3
ALIGNMENT: Final = 32
"""Of tensors in the file, unless `general.alignment` says otherwise."""

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
NUMBERS: Final = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", UINT32: "<u4", INT32: "<i4", FLOAT32: "<f4"},
    **{BOOL: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"},
}
"""The number in the file of a type of metadata -> how it is laid out."""

_READ_VERSIONS: Final = (2, 3)
_MOST_AXES: Final = 4
_LONGEST_NAME: Final = 1024
# Of a count in a header no more is believed than the file could hold.
_SMALLEST_ENTRY: Final = 8 + 4 + 1
_SMALLEST_TENSOR: Final = 8 + 4 + 8 + 4 + 8


class BlockType(NamedTuple):
    """How ggml stores a tensor.

    Attributes:
        name: ggml's name.
        elements: Elements of one block, which lies within a row.
        bytes: Bytes of one block.
    """

    name: str
    elements: int
    bytes: int


BLOCK_TYPES: Final = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
"""The number in the file of a type of tensor -> what it is."""


class GGUFTensor(NamedTuple):
    """Where a tensor lies.

    Attributes:
        name: Its name in the file.
        shape: Rows first, as MLX and PyTorch have it; the file has it reversed.
        type: How it is stored.
        start: Where its bytes begin, from the start of the file.
        size: How many they are.
        file: The file, of a split model one of its parts.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    size: int
    file: Path


class GGUFFile(NamedTuple):
    """What a header says.

    Attributes:
        path: The file; of a split model the first of its parts.
        metadata: Key -> string, bool, int, float, list of strings, or array of numbers.
        tensors: By name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def read(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 `[size]`.

        Args:
            tensor: One of `tensors`.

        Raises:
            HubError: The file has become shorter.
            OSError: It cannot be read.
        """
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            content = np.fromfile(file, np.uint8, tensor.size)
        if content.size < tensor.size:
            raise HubError(f"{tensor.file}: {tensor.name}: the file ends in the middle of it. Download it again.")
        return content


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file of version 2 or 3; no tensor is read.

    Every count and length is compared with the size of the file before anything of that size is made, and every
    tensor lies within the file and apart from the others.

    Args:
        path: The file.

    Raises:
        HubError: It is no GGUF file, is damaged or cut short, or has a tensor of a type that is not known.
        OSError: It cannot be read.
    """
    size = regular_size(path)
    with path.open("rb") as file:
        reader = _Reader(path, file, size)
        _check_start(reader)
        num_tensors, num_entries = reader.number("<u8", "its start"), reader.number("<u8", "its start")
        reader.require_room(num_entries * _SMALLEST_ENTRY, f"{num_entries} entries of metadata")
        metadata = _unique(path, "key", (_entry(reader, index) for index in range(num_entries)))
        reader.require_room(num_tensors * _SMALLEST_TENSOR, f"a table of {num_tensors} tensors")
        table = _unique(path, "tensor", (_tensor(reader, index) for index in range(num_tensors)))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise HubError(f"{path}: general.alignment must be a power of 2, at least 8, but got {alignment!r}.")
        base = -(-file.tell() // alignment) * alignment
        tensors = {name: each._replace(start=base + each.start) for name, each in table.items()}
        _check_places(path, tensors, alignment, reader.size)
    return GGUFFile(path, metadata, tensors)


class _Reader:
    """Reads numbers and strings, none beyond the file's end."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self._file, self.size = path, file, size

    def require_room(self, length: int, what: str) -> None:
        """Raise unless so many bytes are left."""
        if length > self.size - self._file.tell():
            raise HubError(
                f"{self.path}: is cut short or damaged: {what} cannot fit in a file of {self.size} bytes. "
                "Download it again."
            )

    def bytes(self, length: int, what: str) -> bytes:
        """The next bytes."""
        self.require_room(length, what)
        return self._file.read(length)

    def number(self, layout: str, what: str) -> Any:
        """The next number, as Python's."""
        kind = np.dtype(layout)
        return np.frombuffer(self.bytes(kind.itemsize, what), kind)[0].item()

    def text(self, what: str) -> str:
        """The next string."""
        (length,) = struct.unpack("<Q", self.bytes(8, what))
        try:
            return self.bytes(length, what).decode()
        except UnicodeDecodeError:
            raise HubError(f"{self.path}: {what} must be UTF-8 but is not. The file is damaged.") from None


def _check_start(reader: _Reader) -> None:
    found = reader.bytes(len(MAGIC), "its first 4 bytes")
    if found != MAGIC:
        raise HubError(f"{reader.path}: must be a GGUF file, which begins with GGUF, but begins with {found!r}.")
    version = reader.number("<u4", "its version")
    if version not in _READ_VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        was = f"{swapped}, big-endian" if swapped in _READ_VERSIONS else version
        raise HubError(
            f"{reader.path}: the GGUF version must be 2 or 3, little-endian, but got {was}. Convert it with a current "
            "llama.cpp."
        )


def _unique(path: Path, what: str, entries: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entries:
        if name in found:
            raise HubError(f"{path}: the {what} {name} must be there once but is there twice. The file is damaged.")
        found[name] = value
    return found


def _entry(reader: _Reader, index: int) -> tuple[str, Any]:
    key = _name(reader, f"key {index} of the metadata")
    kind = reader.number("<u4", key)
    if kind != ARRAY:
        return key, _scalar(reader, key, kind)
    kind, length = reader.number("<u4", key), reader.number("<u8", key)
    if kind == STRING:
        reader.require_room(8 * length, f"{key}, a list of {length} strings")
        return key, [reader.text(key) for _ in range(length)]
    if kind not in NUMBERS:
        raise _unknown_kind(reader, key, kind)
    layout = np.dtype(NUMBERS[kind])
    return key, np.frombuffer(reader.bytes(length * layout.itemsize, f"{key}, {length} numbers"), layout)


def _name(reader: _Reader, what: str) -> str:
    """The next string, fit to be shown in one line."""
    name = reader.text(what)
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise HubError(f"{reader.path}: {what} must be short and printable but is {name[:20]!r}. It is damaged.")
    return name


def _scalar(reader: _Reader, key: str, kind: int) -> Any:
    if kind == STRING:
        return reader.text(key)
    if kind not in NUMBERS:
        raise _unknown_kind(reader, key, kind)
    value = reader.number(NUMBERS[kind], key)
    # As it was written: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value))) if kind == FLOAT32 else value


def _unknown_kind(reader: _Reader, key: str, kind: int) -> HubError:
    return HubError(f"{reader.path}: {key}: the type of a value must be one of GGUF's but got {kind}. It is damaged.")


def _tensor(reader: _Reader, index: int) -> tuple[str, GGUFTensor]:
    """An entry of the table; `start` counts from where the tensors begin."""
    name = _name(reader, f"the name of tensor {index}")
    num_axes = reader.number("<u4", name)
    if not 1 <= num_axes <= _MOST_AXES:
        raise HubError(f"{reader.path}: {name}: must have 1 to {_MOST_AXES} axes but has {num_axes}. It is damaged.")
    shape = tuple(reader.number("<u8", name) for _ in range(num_axes))[::-1]
    number, offset = reader.number("<u4", name), reader.number("<u8", name)
    if number not in BLOCK_TYPES:
        raise HubError(
            f"{reader.path}: {name}: its type must be one that is known but got number {number}. Convert the model "
            "to F16 or Q8_0."
        )
    kind = BLOCK_TYPES[number]
    if min(shape) < 1 or shape[-1] % kind.elements:
        raise HubError(
            f"{reader.path}: {name}: a {kind.name} must have rows of whole blocks of {kind.elements} but has the "
            f"shape {shape}. The file is damaged."
        )
    return name, GGUFTensor(name, shape, kind, offset, math.prod(shape) // kind.elements * kind.bytes, reader.path)


def _check_places(path: Path, tensors: Mapping[str, GGUFTensor], alignment: int, file_size: int) -> None:
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start % alignment:
            raise HubError(f"{path}: {tensor.name}: must begin at a multiple of {alignment} but does not.")
        if tensor.start + tensor.size > file_size:
            raise HubError(
                f"{path}: is cut short: {tensor.name} needs {tensor.start + tensor.size} bytes of the file but it has "
                f"{file_size}. Download it again."
            )
        if tensor.start < end:
            raise HubError(f"{path}: {tensor.name}: must lie apart from {before} but overlaps it. The file is damaged.")
        end, before = tensor.start + tensor.size, tensor.name
