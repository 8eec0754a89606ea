"""The container of a GGUF file: metadata and tensors, written one after the other."""

from collections.abc import Iterable, Mapping, Sequence
import math
import os
from pathlib import Path
import struct
import tempfile
from typing import Any, BinaryIO, Final, NamedTuple

from forge_mlx.hub.gguf_file import ALIGNMENT, ARRAY, BLOCK_TYPES, BOOL, FLOAT32, INT32, MAGIC, STRING, UINT32, VERSION
import numpy as np
from numpy.typing import NDArray

_TYPE_NUMBERS: Final = {kind.name: number for number, kind in BLOCK_TYPES.items()}


class Outline(NamedTuple):
    """What a header says of a tensor.

    Attributes:
        name: Its name.
        type: The name of its type.
        shape: Rows first.
    """

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        kind = BLOCK_TYPES[_TYPE_NUMBERS[self.type]]
        return math.prod(self.shape) // kind.elements * kind.bytes


def write_container(
    path: Path, metadata: Mapping[str, Any], outlines: Sequence[Outline], contents: Iterable[NDArray[np.uint8]]
) -> None:
    """Write a file, through one beside it, so that one which a full disk cut short is not there.

    Args:
        path: The file.
        metadata: Key -> a string, bool, int or float, or a list of one of them with an element or more.
        outlines: What the header says of each tensor.
        contents: Their bytes, one tensor at a time.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            _write_header(file, metadata, outlines)
            for content in contents:
                _pad(file)
                file.write(content.tobytes())
            _pad(file)
        # A temporary file is for its owner alone.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_header(file: BinaryIO, metadata: Mapping[str, Any], outlines: Sequence[Outline]) -> None:
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(outlines), len(metadata)))
    for key, value in metadata.items():
        file.write(_text(key) + _value(value))
    offset = 0
    for outline in outlines:
        axes = struct.pack(f"<I{len(outline.shape)}Q", len(outline.shape), *outline.shape[::-1])
        file.write(_text(outline.name) + axes + struct.pack("<IQ", _TYPE_NUMBERS[outline.type], offset))
        offset += -(-outline.size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    """A value behind its type."""
    if not isinstance(value, list):
        kind, content = _scalar(value)
        return struct.pack("<I", kind) + content
    kind, _ = _scalar(value[0])
    elements = b"".join(_scalar(each)[1] for each in value)
    # Kinds of tokens, the one list of whole numbers, are signed in every file.
    return struct.pack("<IIQ", ARRAY, INT32 if kind == UINT32 else kind, len(value)) + elements


def _scalar(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return STRING, _text(value)
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    return (UINT32, struct.pack("<I", value)) if isinstance(value, int) else (FLOAT32, struct.pack("<f", value))
