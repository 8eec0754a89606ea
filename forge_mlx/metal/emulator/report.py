"""What the last launches on the emulator did, and the least time that takes on each Apple chip."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from forge_mlx.metal.emulator.chips import CHIPS, Chip
from forge_mlx.metal.emulator.counts import BufferCounts, Counts

KEPT = 256


@dataclass(frozen=True)
class LaunchRecord:
    """One launch that came to its end.

    Attributes:
        name: the kernel's name.
        grid: its threads along x, y, z.
        threadgroup: threads of a threadgroup as asked for.
        counts: what it did.
    """

    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    counts: Counts

    def floor(self, chip: Chip) -> float:
        """Seconds that the launch takes at least on a chip.

        `max(distinct device bytes / bandwidth, flops of matrix products / float32 rate)`. All other arithmetic,
        threadgroup memory, latency and the launch itself come on top. What the chip still has in its caches from
        an earlier launch need not be read again; that alone can undercut the first term.

        Args:
            chip: with its published rates.

        Returns:
            Seconds.
        """
        memory = self.counts.distinct_device_bytes / (chip.bandwidth * 1e9)
        return max(memory, self.counts.matrix_flops / (chip.float32 * 1e12))

    def __str__(self) -> str:
        counts = self.counts
        lines = [
            f"{self.name}: grid {self.grid}, threadgroup {self.threadgroup}; {counts.threads:,} threads in "
            f"{counts.threadgroups:,} threadgroups",
            f"  barriers: {counts.threadgroup_barriers:,} of a threadgroup, {counts.simdgroup_barriers:,} of a "
            f"simdgroup; simdgroup functions: {counts.simdgroup_functions:,}; 8x8x8 matrix products: "
            f"{counts.matrix_multiply_accumulates:,}",
        ]
        if not counts.instrumented:
            return "\n".join([*lines, "  bytes: not counted, the checks of memory accesses are off"])
        lines += _table(
            ["buffer", "space", "size", "reads", "bytes", "distinct", "writes", "bytes", "distinct", "atomics"],
            [_row(each) for each in (*counts.buffers, *counts.arrays)],
        )
        lines.append("  at least, in microseconds, by distinct bytes and matrix products and published rates:")
        return "\n".join([*lines, *_floors(self)])


@dataclass(frozen=True)
class Report:
    """The last launches.

    Attributes:
        launches: those that came to their end, oldest first, the last 256.
        started: all launches since `reset`, those that raised included.
        warnings: warnings given since `reset`.
    """

    launches: tuple[LaunchRecord, ...]
    started: int
    warnings: int

    def __str__(self) -> str:
        shown = "" if len(self.launches) == self.started else f", {len(self.launches):,} of them below"
        head = f"{self.started:,} launches on the emulator{shown}, {self.warnings:,} warnings"
        blocks = [head]
        for launch, repeated in groupby(self.launches):
            times = sum(1 for _ in repeated)
            blocks.append(f"{launch}\n  the same {times} times" if times > 1 else str(launch))
        return "\n".join(blocks)


_launches: deque[LaunchRecord] = deque(maxlen=KEPT)
# Of this process: launches begun and warnings given, and what they were at the last reset.
_totals = [0, 0]
_at_reset = [0, 0]


def report() -> Report:
    """What the emulator counted since `reset`. Accesses are those that the compiler's optimiser left."""
    started, warnings = (total - before for total, before in zip(_totals, _at_reset, strict=True))
    return Report(tuple(_launches), started, warnings)


def reset() -> None:
    """Forget every launch."""
    _launches.clear()
    _at_reset[:] = _totals


def totals() -> tuple[int, int]:
    """Launches begun and warnings given in this process, whatever was reset."""
    launches, warnings = _totals
    return launches, warnings


def count_launch() -> None:
    """A launch begins."""
    _totals[0] += 1


def count_warning() -> None:
    """A launch gave a warning."""
    _totals[1] += 1


def record(launch: LaunchRecord) -> None:
    """A launch has come to its end.

    Args:
        launch: what it did.
    """
    _launches.append(launch)


def _row(each: BufferCounts) -> list[str]:
    numbers = [each.size, each.reads, each.bytes_read, each.distinct_bytes_read]
    numbers += [each.writes, each.bytes_written, each.distinct_bytes_written, each.atomics]
    return [each.name, each.space, *(f"{number:,}" for number in numbers)]


def _floors(launch: LaunchRecord) -> list[str]:
    """One line per generation of chips."""
    models = ["base", "Pro", "Max", "Ultra"]
    floors: dict[str, dict[str, str]] = {}
    for chip in CHIPS:
        generation, _, model = chip.name.partition(" ")
        floors.setdefault(generation, {})[model or "base"] = f"{launch.floor(chip) * 1e6:,.3g}"
    return _table(
        ["chip", *models], [[name, *(row.get(model, "") for model in models)] for name, row in floors.items()]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: names to the left, numbers to the right."""
    numbers = [all(not row[column][:1].isalpha() for row in rows) for column in range(len(head))]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if numbers[column] else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
