"""As much of Mach-O as debug lines need: sections and symbols of 64-bit little-endian files."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
import struct

_MAGIC = 0xFEEDFACF
_SEGMENT, _SYMTAB = 0x19, 0x2
# Bits of a type of symbol: any of _DEBUGGER marks a debugger's; _IN_SECTION under _KIND marks one with an address.
_DEBUGGER, _KIND, _IN_SECTION = 0xE0, 0x0E, 0x0E


@dataclass(frozen=True)
class Section:
    """A section.

    Attributes:
        address: where it lies in the image, or in an object file's own numbering.
        data: its bytes.
    """

    address: int
    data: bytes


class MachO:
    """An object file or a shared library.

    Args:
        path: the file.

    Raises:
        ValueError: it is of another format.
    """

    def __init__(self, path: Path) -> None:
        self._image = path.read_bytes()
        if len(self._image) < 32 or struct.unpack_from("<I", self._image)[0] != _MAGIC:
            raise ValueError(f"{path} is not a 64-bit little-endian Mach-O file")

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Sections by name."""
        found = {}
        for kind, start in self._commands():
            count = struct.unpack_from("<I", self._image, start + 64)[0] if kind == _SEGMENT else 0
            for index in range(count):
                entry = struct.unpack_from("<16s16s2QI", self._image, start + 72 + 80 * index)
                name, _, address, size, offset = entry
                found[_text(name)] = Section(address, self._image[offset : offset + size])
        return found

    @cached_property
    def symbols(self) -> dict[str, int]:
        """Addresses of what is defined, by name."""
        found = {}
        for kind, start in self._commands():
            if kind != _SYMTAB:
                continue
            table, count, strings, _ = struct.unpack_from("<4I", self._image, start + 8)
            for index in range(count):
                name, bits, _, _, value = struct.unpack_from("<IBBHQ", self._image, table + 16 * index)
                if not bits & _DEBUGGER and bits & _KIND == _IN_SECTION:
                    end = self._image.index(b"\0", strings + name)
                    found[_text(self._image[strings + name : end])] = value
        return found

    def _commands(self) -> list[tuple[int, int]]:
        """Kind and offset of each load command."""
        (count,) = struct.unpack_from("<I", self._image, 16)
        commands, offset = [], 32
        for _ in range(count):
            kind, size = struct.unpack_from("<2I", self._image, offset)
            commands.append((kind, offset))
            offset += size
        return commands


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")
