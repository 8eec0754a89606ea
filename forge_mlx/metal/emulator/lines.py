"""From an address in a compiled kernel to the line of the source that it belongs to, through DWARF line tables.

On Linux the lines lie in the library. On macOS they stay in the object file beside it, whose functions are found in the
library by their names; that part reads libraries that were linked for macOS elsewhere, and has not run on macOS.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
import inspect
import io
from pathlib import Path

from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DwarfConfig, DWARFInfo
from elftools.elf.elffile import ELFFile
from forge_mlx.metal.emulator.macho import MachO


@dataclass(frozen=True)
class _Row:
    """From `address` on, code belongs to a line; to none where `file` is None."""

    address: int
    file: str | None
    line: int


class LineTable:
    """The lines of one library, read at the first question.

    Args:
        library: the shared object, as `toolchain.compile_source` returns it.
    """

    def __init__(self, library: Path) -> None:
        self._library = library

    def lookup(self, offset: int) -> tuple[str, int] | None:
        """The line that an address belongs to.

        Args:
            offset: of the address from where the library is loaded. Of a return address hand in one less: it may be
                the first of another line.

        Returns:
            File and line as the text's `#line` directives name them; None for code without lines.
        """
        index = bisect_right(self._addresses, offset) - 1
        row = self._rows[index] if index >= 0 else None
        return None if row is None or row.file is None else (row.file, row.line)

    @cached_property
    def _rows(self) -> list[_Row]:
        read = _macho_rows if self._library.suffix == ".dylib" else _elf_rows
        # A stable sort: where one function ends at the address at which another begins, the beginning counts.
        rows = sorted(read(self._library), key=lambda row: (row.address, row.file is not None))
        return rows

    @cached_property
    def _addresses(self) -> list[int]:
        return [row.address for row in self._rows]


def _elf_rows(library: Path) -> Iterator[_Row]:
    with library.open("rb") as stream:
        image = ELFFile(stream)
        base = min(segment["p_vaddr"] for segment in image.iter_segments("PT_LOAD"))
        for row in _dwarf_rows(image.get_dwarf_info()):
            yield _Row(row.address - base, row.file, row.line)


def _macho_rows(library: Path) -> Iterator[_Row]:
    compiled, image = MachO(library.with_suffix(".o")), MachO(library)
    # Functions of the object file by address, with the distance that each has moved in the library.
    starts, moved = [], []
    for name, address in sorted(compiled.symbols.items(), key=lambda item: item[1]):
        if name in image.symbols:
            starts.append(address)
            moved.append(image.symbols[name] - address)
    for row in _dwarf_rows(_macho_dwarf(compiled)):
        # The row that ends a function lies where the next one begins.
        index = bisect_right(starts, row.address - (row.file is None)) - 1
        if index >= 0:
            yield _Row(row.address + moved[index], row.file, row.line)


def _macho_dwarf(compiled: MachO) -> DWARFInfo:
    # DWARFInfo wants every section that it knows, by keyword; absent ones are None.
    known = [name for name in inspect.signature(DWARFInfo).parameters if name.endswith("_sec")]
    sections: dict[str, DebugSectionDescriptor | None] = dict.fromkeys(known)
    for name in ("debug_info", "debug_abbrev", "debug_str", "debug_line"):
        section = compiled.sections[f"__{name}"]
        stream = io.BytesIO(section.data)
        sections[f"{name}_sec"] = DebugSectionDescriptor(stream, name, 0, len(section.data), section.address)
    return DWARFInfo(config=DwarfConfig(True, "AArch64", 8), **sections)


def _dwarf_rows(dwarf: DWARFInfo) -> Iterator[_Row]:
    for unit in dwarf.iter_CUs():
        program = dwarf.line_program_for_CU(unit)
        if program is None:
            continue
        folders = [folder.decode(errors="replace") for folder in program["include_directory"]]
        files = []
        for entry in program["file_entry"]:
            name = entry.name.decode(errors="replace")
            # The compiler splits a name at its last slash; directory 0 is the one it ran in.
            files.append(f"{folders[entry.dir_index - 1]}/{name}" if entry.dir_index else name)
        last: tuple[str, int] | None = None
        for state in (entry.state for entry in program.get_entries() if entry.state is not None):
            if state.end_sequence:
                last = None
            elif state.line:
                last = (files[state.file - 1], state.line)
            # Line 0 is code that the compiler made up between others: it counts to the line before.
            yield _Row(state.address, *(last or (None, 0)))
