"""How a kernel is timed beside MLX's own op: passes, chains, turns in both orders, and peak memory."""

from collections.abc import Sequence
from dataclasses import dataclass
import gc
import statistics
import time
from typing import Final, Literal

from forge_mlx.kernels._common.cases import OpCase
import mlx.core as mx

Pass = Literal["forward", "backward", "both"]
PASSES: Final[tuple[Pass, ...]] = ("forward", "backward", "both")
_HELD_AT_MOST: Final = 2**31
_PEAK_CALLS: Final = 5


@dataclass(frozen=True)
class Timing:
    """One pass of a case on an engine and on MLX's op.

    Attributes:
        seconds: Of one call, ours and MLX's: medians over the turns.
        peaks: Most bytes at a time during one call beside its inputs, ours and MLX's; in the backward pass with
            what the forward pass has left for it.
        chain: Calls that were evaluated at once.
    """

    seconds: tuple[float, float]
    peaks: tuple[int, int]
    chain: int

    @property
    def speed(self) -> float:
        """MLX's time in units of ours: over 1 is faster."""
        return self.seconds[1] / self.seconds[0]

    @property
    def memory(self) -> float:
        """MLX's peak in units of ours: over 1 needs less. No byte counts as one."""
        return max(1, self.peaks[1]) / max(1, self.peaks[0])


@dataclass(frozen=True)
class Chain:
    """Calls of one op that wait for one another.

    Each call's first argument is the result before it where it is of the same shape and dtype; else the argument
    itself, made to wait for that result. So no call can be left out, merged with another or run beside it.

    Attributes:
        case: Whose op.
        impl: An engine, or "mlx".
        inputs: The op's arguments, evaluated.
        cotangents: Of its results, evaluated.
    """

    case: OpCase
    impl: str
    inputs: tuple[mx.array, ...]
    cotangents: tuple[mx.array, ...]

    def built(self, which: Pass, length: int) -> list[mx.array]:
        """The arrays whose evaluation is the pass: built and not evaluated yet.

        For "backward" the results, and with them what is saved for the gradient, are evaluated already: as in
        training, where a gradient begins long after its forward pass.
        """
        function, arguments, given = self.case.function(self.impl), list(self.inputs), list(self.cotangents)
        forwards: list[mx.array] = []
        last: list[mx.array] = []
        for _ in range(length):
            if which == "forward":
                found = function(*arguments)
                last = [found] if isinstance(found, mx.array) else list(found)
                arguments[0] = _after(arguments[0], last)
                continue
            results, gradients = mx.vjp(function, arguments, given)
            given[0] = _after(given[0], gradients)
            if which == "both":
                arguments[0] = _after(arguments[0], results)
                last = [*results, *gradients]
            else:
                forwards += results
                last = gradients
        mx.eval(forwards)
        return last

    def seconds(self, which: Pass, length: int) -> float:
        """Time of a call, of a chain of them evaluated at once. What builds the graph does not count."""
        arrays = self.built(which, length)
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(arrays)
        return (time.perf_counter() - began) / length

    def peak(self, which: Pass) -> tuple[int, int]:
        """Of one call: most bytes at a time beside the inputs, and how many of them were there before it.

        The most of some calls: what one operation needs may be taken before the one before has given back its own.
        """
        peaks, held = [], 0
        # What is collected in between would be missing.
        gc.collect()
        for _ in range(_PEAK_CALLS):
            mx.synchronize()
            # A buffer left over by another call may be used again for a smaller array, and counts whole.
            mx.clear_cache()
            before = mx.get_active_memory()
            arrays = self.built(which, 1)
            mx.synchronize()
            held = mx.get_active_memory() - before
            mx.reset_peak_memory()
            mx.eval(arrays)
            # Without an allocation MLX knows of no peak.
            peaks.append(max(mx.get_peak_memory() - before, held))
            del arrays
        return max(peaks), held


def _after(argument: mx.array, results: Sequence[mx.array]) -> mx.array:
    """An array to call with next, that is there only when all results are."""
    same = results[0].shape == argument.shape and results[0].dtype == argument.dtype
    waiting: list[mx.array] = mx.depends([results[0] if same else argument], list(results))
    return waiting[0]


def time_pass(case: OpCase, engine: str, which: Pass, length: int, turns: int) -> Timing:
    """Time a pass of a case on an engine beside MLX's op, after some calls of each that tell the peaks and warm up.

    Args:
        case: What to time.
        engine: On what.
        which: The pass.
        length: Calls that are evaluated at once; fewer where what the backward passes hold would be over 2 GiB.
        turns: How often each is timed, twice a turn: ours, MLX's, MLX's, ours, and the other way round in the next.
    """
    inputs, cotangents = tuple(case.inputs().values()), tuple(case.cotangents().values())
    mx.eval(inputs, cotangents)
    chains = [Chain(case, impl, inputs, cotangents) for impl in (engine, "mlx")]
    peaks = []
    for chain in chains:
        peak, held = chain.peak(which)
        peaks.append(peak)
        length = max(1, min(length, _HELD_AT_MOST // max(1, held)))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for index in (0, 1, 1, 0) if turn % 2 == 0 else (1, 0, 0, 1):
            seconds[index].append(chains[index].seconds(which, length))
    medians = statistics.median(seconds[0]), statistics.median(seconds[1])
    return Timing(medians, (peaks[0], peaks[1]), length)
