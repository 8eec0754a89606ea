#!/usr/bin/env python
"""Kernels beside MLX's own ops, in one process: time as a ratio, peak memory, and the bytes that they move.

A case is timed only if its results are right. Times are medians over turns, each pair of turns in both orders, of
chains of launches in which every result is the next one's input; the ratio is what counts, on any machine. Bytes are
counted on the emulator, on any machine too, and stand beside what each array's one trip would cost.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
import statistics
import time

import forge_mlx  # noqa: F401  Before mlx.core: it loads the BLAS.
from forge_mlx.kernels._common.proof import TimedCase, disagreements
from forge_mlx.metal import emulator
from forge_mlx.metal.engine import ENGINES, resolve
import mlx.core as mx

ROOMS = ("rms_norm",)


@dataclass(frozen=True)
class Timing:
    """One case on an engine and on MLX's op.

    Attributes:
        seconds: of one call, ours and MLX's.
        peaks: most bytes at a time during a chain, ours and MLX's.
    """

    seconds: tuple[float, float]
    peaks: tuple[int, int]

    @property
    def ratio(self) -> float:
        """MLX's time in units of ours: over 1 is faster."""
        return self.seconds[1] / self.seconds[0]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"which of {', '.join(ROOMS)} (default: all)")
    parser.add_argument("--engine", choices=ENGINES, help="engine to time (default: the automatic one)")
    parser.add_argument("--chain", type=int, help="calls for each evaluation (default 20, on a CPU 2)")
    parser.add_argument("--turns", type=int, default=7, help="pairs of turns (default 7)")
    parser.add_argument("--counts", action="store_true", help="count bytes on the emulator instead of timing")
    options = parser.parse_args()
    if options.chain is None:
        options.chain = 20 if mx.default_device() == mx.gpu else 2
    unknown = [room for room in options.rooms if room not in ROOMS]
    if unknown:
        parser.error(f"ROOM must be among {', '.join(ROOMS)} but got {', '.join(unknown)}")
    return options


def timed_cases(room: str) -> tuple[TimedCase, ...]:
    """The cases that a room has for the benchmark."""
    return import_module(f"forge_mlx.kernels.{room}.cases").TIMED


def forward(case: TimedCase, impl: str, length: int) -> Callable[[], list[mx.array]]:
    """A chain of calls: each result is the next one's first argument."""
    *arguments, _ = (array for array in case.arrays() if array is not None)
    function = case.function(impl)

    def run() -> list[mx.array]:
        first, *rest = arguments
        for _ in range(length):
            first = function(first, *rest)
        return [first]

    return run


def both(case: TimedCase, impl: str, length: int) -> Callable[[], list[mx.array]]:
    """A chain of calls with their gradients: result and gradient go into the next call, and none is left out."""
    *arguments, cotangent = (array for array in case.arrays() if array is not None)
    function = case.function(impl)

    def run() -> list[mx.array]:
        (first, *rest), given, kept = arguments, cotangent, []
        for _ in range(length):
            (first,), (given, *others) = mx.vjp(function, [first, *rest], [given])
            kept += others
        return [first, given, *kept]

    return run


def compare(runs: tuple[Callable[[], list[mx.array]], ...], length: int, turns: int) -> Timing:
    """Ours and MLX's in turns, in both orders."""
    seconds: tuple[list[float], list[float]] = ([], [])
    peaks = [0, 0]
    for which, run in enumerate(runs):
        mx.eval(run())
        mx.reset_peak_memory()
        mx.eval(run())
        peaks[which] = mx.get_peak_memory()
    for turn in range(turns):
        for which in (0, 1, 1, 0) if turn % 2 == 0 else (1, 0, 0, 1):
            began = time.perf_counter()
            mx.eval(runs[which]())
            seconds[which].append((time.perf_counter() - began) / length)
    return Timing((statistics.median(seconds[0]), statistics.median(seconds[1])), (peaks[0], peaks[1]))


def print_times(room: str, engine: str, options: argparse.Namespace) -> None:
    """A Markdown table of a room's cases."""
    print(f"{room} on {engine} against mx.fast, {mx.default_device()}, chains of {options.chain}\n")
    print("| case | pass | ours / call | MLX / call | MLX / ours | peak, ours | peak, MLX |")
    print("|---|---|---|---|---|---|---|")
    for case in timed_cases(room):
        if wrong := disagreements(case, engine):
            raise SystemExit(f"results are wrong, so no time is reported: {'; '.join(wrong)}")
        for label, chain in (("forward", forward), ("forward and backward", both)):
            runs = tuple(chain(case, impl, options.chain) for impl in (engine, "mlx"))
            result = compare(runs, options.chain, options.turns)
            ours, theirs = (f"{each * 1e3:.3f} ms" for each in result.seconds)
            memory = " | ".join(f"{each / 2**20:.1f} MiB" for each in result.peaks)
            print(f"| {case.name} | {label} | {ours} | {theirs} | {result.ratio:.2f} | {memory} |", flush=True)


def print_counts(room: str) -> None:
    """A Markdown table of the bytes that each launch moves in device memory."""
    print(
        f"{room}: bytes of device memory, counted on the emulator after the optimiser. The large arrays are those of at"
    )
    print("least an eighth of the largest; what is small is read once a threadgroup or a row.\n")
    print("| case | kernel | threadgroups | large arrays, moved | each once | ratio | small arrays | bytes an access |")
    print("|---|---|---|---|---|---|---|---|")
    for case in timed_cases(room):
        with emulator.settings(checks=("bounds",)):
            emulator.reset()
            mx.eval(list(case.run("emulator").values()))
        for launch in emulator.report().launches:
            buffers = [each for each in launch.counts.buffers if each.space == "device"]
            least = max(each.size for each in buffers) / 8
            large = [each for each in buffers if each.size >= least]
            moved, total = (sum(each.bytes_read + each.bytes_written for each in some) for some in (large, buffers))
            once = sum(each.size for each in large)
            accesses = sum(each.reads + each.writes for each in buffers)
            print(
                f"| {case.name} | {launch.name} | {launch.counts.threadgroups:,} | {moved:,} | {once:,} | "
                f"{moved / once:.3f} | {total - moved:,} | {total / accesses:.1f} |",
                flush=True,
            )


def main() -> None:
    """Print one table for each room."""
    options = parse()
    for room in options.rooms or ROOMS:
        if options.counts:
            print_counts(room)
        else:
            print_times(room, resolve(room, options.engine).name, options)


if __name__ == "__main__":
    main()
