"""`python -m forge_mlx.metal check`: compile and check Metal kernels, and print what was found."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
import platform
import sys

from forge_mlx._console import print_what_fits
from forge_mlx._text import count, size
from forge_mlx.metal.check import Row, check_rooms, room_of
from forge_mlx.metal.check_file import DTYPES, check_file
from forge_mlx.metal.emulator import ToolchainError
from forge_mlx.metal.engine import missing
from forge_mlx.metal.source import load
import mlx.core as mx

_HEAD = ("kernel", "dtype", "cases", "result", "launches", "bytes", "time")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forge_mlx.metal", description="Metal kernels and their checks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="check")
    check = commands.add_parser(
        "check",
        help="compile and check kernels",
        description="Compile Metal kernels and run them on the cases of their rooms, with every check of the "
        "emulator; print a table. Exit status 1 if anything is found, 2 if the command cannot run.",
    )
    check.add_argument("files", nargs="*", type=Path, metavar="FILE.metal", help="kernels (default: all rooms)")
    check.add_argument(
        "--engine",
        choices=("emulator", "metal"),
        default="emulator",
        help="emulator: on the CPU, with checks (default); metal: on a Mac, with Apple's compiler",
    )
    check.add_argument("--schedules", type=int, default=3, help="orders of threads on the emulator (default 3)")
    check.add_argument(
        "--template",
        action="append",
        default=[],
        metavar="NAME=1,2",
        help="values of an int template parameter, for a file that belongs to no room",
    )
    return parser


def _template(given: Sequence[str]) -> dict[str, list[int]]:
    """`["D=64,128"]` -> `{"D": [64, 128]}`."""
    values = {}
    for text in given:
        name, _, numbers = text.partition("=")
        try:
            values[name] = [int(number) for number in numbers.split(",")]
        except ValueError:
            raise ValueError(f"--template must be NAME=INT,INT,... but got {text!r}.") from None
    return values


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table with one line for each row."""
    cells = [_HEAD]
    for row in rows:
        name = f"{row.room}: {row.kernel}" if row.room and row.kernel else row.kernel or row.room
        ran = row.cases > 0
        cells.append(
            (
                name,
                row.dtype or "-",
                str(row.cases) if ran else "-",
                row.result,
                str(row.launches) if ran else "-",
                "-" if row.bytes is None else size(row.bytes),
                f"{row.seconds:.1f} s" if ran else "-",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    to_the_left = {0, 1, 3}
    return [
        "  ".join(
            cell.ljust(width) if column in to_the_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _progress() -> Callable[[str, int, int], None]:
    """Says on a terminal which case runs; nothing in a file or a pipe."""
    if not sys.stderr.isatty():
        return lambda _room, _number, _total: None

    def tell(room: str, number: int, total: int) -> None:
        end = "" if number < total else "\r\033[K"
        print(f"\r\033[K{room}: case {number} of {total}", end=end, file=sys.stderr, flush=True)

    return tell


def _rows(options: argparse.Namespace) -> list[Row]:
    template, tell = _template(options.template), _progress()
    if not options.files:
        return check_rooms(options.engine, options.schedules, tell)
    wanted: dict[str, list[str]] = {}
    rows = []
    for file in options.files:
        if (room := room_of(file)) is not None:
            wanted.setdefault(room, []).append(load(file).name)
        elif options.engine == "metal":
            raise ValueError(f"{file}: belongs to no room, and only their cases say how to launch a kernel on Metal.")
        else:
            rows += check_file(file, DTYPES, template)
    return rows + (check_rooms(options.engine, options.schedules, tell, wanted) if wanted else [])


def _machine() -> str:
    """What a reader of the table must know about where it comes from."""
    parts = [f"{name} {metadata.version(name)}" for name in ("forge-mlx", "mlx")]
    parts += [platform.platform(), str(mx.device_info().get("device_name", ""))]
    return ", ".join(part for part in parts if part)


def _summary(rows: Sequence[Row], engine: str) -> str:
    kernels = len({(row.room, row.kernel) for row in rows if row.kernel})
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows if row.dtype))
    findings = len({text for row in rows for text in row.findings})
    found = count(findings, "finding") if findings else "no finding"
    return f"{count(kernels, 'kernel')} on engine {engine}{f' ({dtypes})' if dtypes else ''}: {found}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    print_what_fits()
    try:
        if lack := missing(options.engine):
            raise ValueError(f"engine {options.engine} cannot run: {lack}.")
        if options.schedules < 1:
            raise ValueError(f"--schedules must be at least 1 but got {options.schedules}.")
        rows = _rows(options)
    except (ValueError, OSError, ToolchainError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    print("\n".join(table(rows)))
    for text in dict.fromkeys(text for row in rows for text in row.findings):
        print(f"\n{text}")
    print(f"\n{_summary(rows, options.engine)}\n{_machine()}")
    return 1 if any(row.findings for row in rows) else 0


if __name__ == "__main__":
    # The reader may have had enough, as `head` does.
    with suppress(BrokenPipeError):
        sys.exit(main())
