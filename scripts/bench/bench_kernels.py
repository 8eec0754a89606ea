#!/usr/bin/env python
"""Kernels beside MLX's own ops, in one process: time and peak memory of the forward pass, the backward pass, and both.

Every room's cases are found by themselves. An op is timed only if its results are right in every case that is chosen;
else it is refused, the others are still timed, and the exit status is 1. Times are medians over turns in both orders,
of chains of calls in which each waits for the one before; the ratio is what counts, on any machine. The backward pass
is timed alone: the results, and what they save for the gradient, were evaluated before. The peak is that of one call
beside its inputs. What the kernels read and write is counted by traffic.py.
"""

import argparse
from collections.abc import Collection, Sequence
import json
from pathlib import Path
import platform
import sys
from typing import Any

import forge_mlx  # noqa: F401  Before mlx.core: it loads the BLAS.
from forge_mlx._text import size
from forge_mlx.kernels._common.cases import OpCase
from forge_mlx.kernels._common.proof import compare, to_float64
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.emulator import MetalError
from forge_mlx.metal.engine import resolve
from kernel_cases import Entry, by_op, choose, entries, listing
from kernel_plot import PICTURES, plot
from kernel_timing import PASSES, Pass, Timing, time_pass
import mlx.core as mx
import numpy as np

DTYPES = tuple(dtype_name(dtype) for dtype in (mx.float32, mx.float16, mx.bfloat16))
# MLX's op may round where ours does not; one that computes something else is off by more.
_MLX_RTOL = 0.1
_HEAD = ("op", "case", "pass", "ours / call", "MLX / call", "MLX / ours", "peak, ours", "peak, MLX", "MLX / ours")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="part of a room's, an op's or a case's name: any of them"
    )
    parser.add_argument("--dtype", action="append", default=[], choices=DTYPES, help="only this dtype; may be repeated")
    parser.add_argument(
        "--pass", dest="passes", action="append", choices=PASSES, help="only this pass; may be repeated"
    )
    parser.add_argument("--engine", choices=("metal", "cuda", "reference"), help="default: the automatic one")
    parser.add_argument("--chain", type=int, help="calls that are evaluated at once (default 20, on a CPU 2)")
    parser.add_argument("--turns", type=int, help="pairs of times in both orders (default 7)")
    parser.add_argument("--quick", action="store_true", help="one turn of each op's smallest case: whether all runs")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results and what they were measured on")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios, op by op")
    return parser


def completed(options: argparse.Namespace) -> argparse.Namespace:
    """The options with what they stand for where they are not given.

    Raises:
        ValueError: A number under 1, a folder that is not there, or an engine that no time is taken on.
        RuntimeError: The engine cannot run here.
    """
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    options.chain = options.chain if options.chain is not None else 20 if on_gpu else 2
    options.turns = options.turns if options.turns is not None else 1 if options.quick else 7
    options.passes = tuple(each for each in PASSES if not options.passes or each in options.passes)
    for name in ("chain", "turns"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1 but got {getattr(options, name)}.")
    for name in ("json", "plot"):
        file = getattr(options, name)
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"--{name}: there is no folder {file.parent}.")
    if options.plot is not None and options.plot.suffix not in PICTURES:
        raise ValueError(f"--plot must end in {' or '.join(PICTURES)} but got {options.plot}.")
    engine = resolve("bench_kernels", options.engine)
    if engine.name == "emulator":
        raise ValueError(f"engine {engine}: its time says nothing. scripts/bench/traffic.py counts on it.")
    options.engine = engine.name
    return options


def wrong(case: OpCase, engine: str) -> list[str]:
    """What is wrong with a case's results on an engine, and with what they would be timed beside."""
    try:
        ours = case.run(engine)
        found = compare(case, ours)
        if not found:
            found = _other_than(case, ours)
    except (ValueError, RuntimeError, TypeError, MetalError) as error:
        found = [f"{case.name}: {type(error).__name__}: {error}"]
    return found


def _other_than(case: OpCase, ours: dict[str, mx.array]) -> list[str]:
    """Results that MLX's side has not, or that are off by far more than a dtype costs."""
    lines = []
    for name, theirs in case.run("mlx").items():
        if theirs.shape != ours[name].shape or theirs.dtype != ours[name].dtype:
            lines.append(f"{case.name}: MLX's {name} is {theirs.dtype} {theirs.shape}, not as ours")
            continue
        mine, other = to_float64(ours[name]), to_float64(theirs)
        # Written so that NaN is off.
        if mine.size and not np.abs(mine - other).max() <= _MLX_RTOL * np.abs(mine).max():
            lines.append(f"{case.name}: MLX's {name} is something else, off by {np.abs(mine - other).max():.3g}")
    return lines


def passes_of(case: OpCase, passes: Collection[Pass]) -> list[Pass]:
    """Those of the passes that a case has: one without cotangents has no gradient."""
    return [which for which in PASSES if which in passes and (which == "forward" or case.cotangents())]


def result(entry: Entry, which: Pass, timing: Timing) -> dict[str, Any]:
    """One measurement for the JSON file and the plot."""
    return {
        "room": entry.room,
        "op": entry.op,
        "case": entry.case.name,
        "dtype": entry.dtype,
        "pass": which,
        "chain": timing.chain,
        "seconds": {"ours": timing.seconds[0], "mlx": timing.seconds[1]},
        "peak_bytes": {"ours": timing.peaks[0], "mlx": timing.peaks[1]},
        "speed": timing.speed,
        "memory": timing.memory,
    }


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [found["op"], found["case"], found["pass"]]
    cells += [f"{found['seconds'][side] * 1e3:.3f} ms" for side in ("ours", "mlx")] + [f"{found['speed']:.3g}"]
    cells += [size(found["peak_bytes"][side]) for side in ("ours", "mlx")] + [f"{found['memory']:.3g}"]
    return f"| {' | '.join(cells)} |"


def measure(chosen: Sequence[Entry], options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Print a table, row by row. Returns the measurements, and the ops that none was taken of with what is wrong."""
    print(f"| {' | '.join(_HEAD)} |\n|{'---|' * len(_HEAD)}")
    results: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for (room, op), own in by_op(chosen).items():
        own = [min(own, key=lambda entry: entry.case.ideal_bytes()["forward"])] if options.quick else own
        findings = [line for each in own for line in wrong(each.case, options.engine)]
        right = [] if findings else own
        for entry, which in [(each, which) for each in right for which in passes_of(each.case, options.passes)]:
            try:
                timing = time_pass(entry.case, options.engine, which, options.chain, options.turns)
            except RuntimeError as error:
                findings.append(f"{entry.case.name}: {which}: {error}")
                continue
            results.append(result(entry, which, timing))
            print(row(results[-1]), flush=True)
        if findings:
            refused.append({"room": room, "op": op, "findings": findings})
    return results, refused


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    device = mx.device_info().get("device_name", "")
    return {"device": f"{mx.default_device()} {device}", "platform": platform.platform(), "mlx": mx.__version__}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status: 1 if an op was refused, 2 if it cannot run."""
    options = parser().parse_args(arguments)
    try:
        chosen = choose(entries("TIMED"), options.words, options.dtype)
        if options.list:
            print("\n".join(listing(chosen)))
            return 0
        options = completed(options)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = machine()
    title = f"kernels on engine {options.engine} beside MLX {about['mlx']}: {about['device']}"
    print(f"{title}\nchains of {options.chain}, {options.turns} turns in both orders, medians\n")
    results, refused = measure(chosen, options)
    for each in refused:
        print(f"\n{each['op']} ({each['room']}): refused, so these are no times of it")
        print("\n".join(f"  {line}" for line in each["findings"]))
    if options.json:
        settings = {"engine": options.engine, "chain": options.chain, "turns": options.turns}
        content = {"machine": about, **settings, "results": results, "refused": refused}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if options.plot and results:
        plot(options.plot, results, title)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
