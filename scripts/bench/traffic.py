#!/usr/bin/env python
"""What each kernel reads and writes in device memory, counted on the emulator, beside what its arrays are long.

Without arguments all cases of all rooms are counted and kernels/TRAFFIC.md is written anew. With words only the cases
that hold one of them are counted and printed. `--check` writes nothing: it says where the table is not what is counted,
and where more is moved than the case allows, and ends with status 1 if there is anything.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
import sys
from typing import Final

import forge_mlx  # noqa: F401  Before mlx.core: it loads the BLAS.
from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.report import LaunchRecord
from forge_mlx.metal.engine import missing
from kernel_cases import Entry, choose, entries, listing
import mlx.core as mx

TABLE: Final = Path(__file__).parents[2] / "kernels" / "TRAFFIC.md"
USUAL_LIMIT: Final = 1.05
# An input of at most this part of a launch's largest array may be read once by every threadgroup, as w of a norm is.
_SMALL: Final = 1 / 8
_HEAD = (
    "op",
    "case",
    "pass",
    "bytes",
    "once a threadgroup",
    "ideal",
    "ratio",
    "limit",
    "threadgroups",
    "bytes an access",
)
_INTRODUCTION = """\
# What the kernels read and write

Counted on the emulator by `scripts/bench/traffic.py`, which writes this file. Nothing here was measured on a GPU.

- bytes: what all accesses to device memory move, after the compiler's optimiser. No cache is modelled: what is read
  twice counts twice. Scalars and shapes, which come as constants, are left out.
- once a threadgroup: those over the ideal that read a small array (at most an eighth of the launch's largest) once more
  in every threadgroup, and the partial sums that a second launch adds up.
- ideal: in the forward pass each input and result once; in the backward pass each input, each result's gradient and
  each input's gradient once; or what the case says that it must be.
- ratio: bytes without those once a threadgroup, in units of the ideal. One over its limit fails the tests.
"""


@dataclass(frozen=True)
class Line:
    """One pass of one case.

    Attributes:
        entry: The case.
        which: "forward" or "backward".
        bytes: Moved by all launches of the pass.
        shared: Those over the ideal that a small array costs once a threadgroup.
        accesses: That moved them.
        ideal: Bytes that it has to move.
        threadgroups: Of all launches.
    """

    entry: Entry
    which: str
    bytes: int
    shared: int
    accesses: int
    ideal: int
    threadgroups: int

    @property
    def ratio(self) -> float:
        """Bytes moved, without the shared ones, in units of the ideal."""
        return (self.bytes - self.shared) / self.ideal

    @property
    def excess(self) -> str | None:
        """What is wrong with it, None if it keeps its limit."""
        limit = self.entry.case.max_ratio
        if limit > USUAL_LIMIT and not self.entry.case.max_ratio_reason:
            return (
                f"{self.entry.path}: max_ratio is {limit:g}, over {USUAL_LIMIT}, and max_ratio_reason does not say why"
            )
        if self.ratio > limit:
            return (
                f"{self.entry.path}: {self.which} moves {self.ratio:.3f} times the ideal, over its limit of {limit:g}"
            )
        return None

    @property
    def cells(self) -> str:
        """As a row of the table."""
        cells = [self.entry.op, self.entry.case.name, self.which]
        cells += [f"{each:,}" for each in (self.bytes, self.shared, self.ideal)]
        cells += [f"{self.ratio:.3f}", f"{self.entry.case.max_ratio:g}", f"{self.threadgroups:,}"]
        return f"| {' | '.join(cells)} | {self.bytes / max(1, self.accesses):.1f} |"


def count(entry: Entry) -> list[Line]:
    """Run a case on the emulator, and count each pass that launches kernels.

    Raises:
        ValueError: More launches than the emulator keeps, or a forward pass without one.
    """
    inputs, cotangents = list(entry.case.inputs().values()), list(entry.case.cotangents().values())
    mx.eval(inputs, cotangents)
    function = entry.case.function("emulator")
    forward = 0

    def counted(*arrays: mx.array) -> mx.array | tuple[mx.array, ...]:
        nonlocal forward
        results = function(*arrays)
        # The emulator launches at once: what follows is the backward pass.
        forward = emulator.report().started
        return results

    # One check is enough to have the accesses counted, and this one is the cheapest that also stops a wild one.
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(mx.vjp(counted, inputs, cotangents) if cotangents else counted(*inputs))
    report = emulator.report()
    if report.started > len(report.launches):
        raise ValueError(f"{entry.path}: {report.started} launches, more than the emulator keeps. Take a smaller case.")
    passes = {"forward": report.launches[:forward], "backward": report.launches[forward:]}
    ideal = entry.case.ideal_bytes()
    lines = [_line(entry, which, launches, ideal[which]) for which, launches in passes.items() if launches]
    if not lines or lines[0].which != "forward":
        raise ValueError(f"{entry.path}: its forward pass launches no kernel.")
    return lines


def _line(entry: Entry, which: str, launches: Sequence[LaunchRecord], ideal: int) -> Line:
    buffers = [each for launch in launches for each in launch.counts.buffers if each.space == "device"]
    moved = sum(each.bytes_read + each.bytes_written for each in buffers)
    return Line(
        entry,
        which,
        bytes=moved,
        # Where threads ask for the same element of a small array by what they compute, the ideal has that already.
        shared=min(sum(_shared(launch) for launch in launches), max(0, moved - ideal)),
        accesses=sum(each.reads + each.writes for each in buffers),
        ideal=ideal,
        threadgroups=sum(launch.counts.threadgroups for launch in launches),
    )


def _shared(launch: LaunchRecord) -> int:
    """Bytes of a launch that its threadgroups need once each."""
    buffers = [each for each in launch.counts.buffers if each.space == "device"]
    if launch.name == "sum_parts":
        # Written once by the launch before, and read once here.
        return sum(2 * each.size for each in buffers if each.name == "parts")
    most, total = max(each.size for each in buffers), 0
    for each in buffers:
        again = each.bytes_read - each.distinct_bytes_read
        if each.size <= _SMALL * most and again <= each.size * (launch.counts.threadgroups - 1):
            total += again
    return total


def rows(lines: Sequence[Line]) -> list[str]:
    """The table's lines."""
    return [f"| {' | '.join(_HEAD)} |", "|---|---|---|" + "---:|" * (len(_HEAD) - 3), *(line.cells for line in lines)]


def reasons(lines: Sequence[Line]) -> list[str]:
    """Why some limits are higher than usual, each said once for an op."""
    told: dict[str, None] = {}
    for line in lines:
        if line.entry.case.max_ratio > USUAL_LIMIT:
            case = line.entry.case
            told[f"- {case.op}, {case.max_ratio:g}: {case.max_ratio_reason}"] = None
    return list(told)


def document(lines: Sequence[Line]) -> str:
    """The whole file."""
    text = "\n".join([_INTRODUCTION, *rows(lines), ""])
    if why := reasons(lines):
        text += "\n".join(["", f"Limits over {USUAL_LIMIT}:", "", *why, ""])
    return text


def keys(row: str) -> tuple[str, ...]:
    """Op, case and pass of a row of the table."""
    return tuple(cell.strip() for cell in row.strip("|").split("|")[:3])


def written(text: str) -> dict[tuple[str, ...], str]:
    """The rows of a table that was written before, by op, case and pass."""
    found = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return {keys(row): row for row in found}


def differences(lines: Sequence[Line], table: Mapping[tuple[str, ...], str], complete: bool) -> list[str]:
    """What the table does not say as it was counted, and where a limit is passed.

    Args:
        lines: What was counted.
        table: What is written.
        complete: Whether all cases were counted, so that the table may have no other row.
    """
    found = [line.excess for line in lines if line.excess is not None]
    counted = {keys(line.cells): line.cells for line in lines}
    for key, row in counted.items():
        if table.get(key) != row:
            found.append(f"{TABLE.name} has\n  {table.get(key, 'no such row')}\nwhere this is counted:\n  {row}")
    if complete:
        found += [f"{TABLE.name} has a row of no case:\n  {row}" for key, row in table.items() if key not in counted]
    return list(dict.fromkeys(found))


def _progress() -> Callable[[int, int, Entry], None]:
    """Says on a terminal which case runs; nothing in a file or a pipe."""
    if not sys.stderr.isatty():
        return lambda _number, _total, _entry: None

    def tell(number: int, total: int, entry: Entry) -> None:
        print(f"\r\033[Kcase {number} of {total}: {entry.path}", end="", file=sys.stderr, flush=True)

    return tell


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="part of a room's, an op's or a case's name: any of them"
    )
    parser.add_argument("--check", action="store_true", help="compare with the table and the limits; write nothing")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 1 if --check finds anything, 2 if it cannot run."""
    options = parser().parse_args(arguments)
    try:
        found = entries("TRAFFIC")
        chosen = choose(found, options.words)
        if options.list:
            print("\n".join(listing(chosen)))
            return 0
        if lack := missing("emulator"):
            raise ValueError(f"engine emulator cannot run: {lack}.")
        tell, lines = _progress(), []
        for number, entry in enumerate(chosen, start=1):
            tell(number, len(chosen), entry)
            lines += count(entry)
        table = written(TABLE.read_text(encoding="utf-8")) if options.check else {}
    except (ValueError, OSError, emulator.MetalError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    complete = len(chosen) == len(found)
    if options.check:
        wrong = differences(lines, table, complete)
        print("\n".join([*wrong, f"{len(lines)} rows, {len(wrong) or 'no'} findings"]))
        return 1 if wrong else 0
    excesses = [line.excess for line in lines if line.excess is not None]
    if complete:
        TABLE.write_text(document(lines), encoding="utf-8")
        print("\n".join([f"{len(lines)} rows written to {TABLE}", *excesses]))
    else:
        print("\n".join([*rows(lines), *reasons(lines), *excesses]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
