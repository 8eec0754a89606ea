"""What the emulator raises: one exception for each kind of finding, all under `MetalError`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thread:
    """One thread of a launch.

    Attributes:
        group: position of its threadgroup in the grid, `(x, y, z)`.
        position: its own position in the threadgroup, `(x, y, z)`.
        index: its linear index in the threadgroup; lane `index % 32` of simdgroup `index // 32`.
    """

    group: tuple[int, int, int]
    position: tuple[int, int, int]
    index: int

    def __str__(self) -> str:
        return f"thread {self.index} of threadgroup {_position(self.group)}"


@dataclass(frozen=True)
class Location:
    """A line of the user's source.

    Attributes:
        file: the `.metal` file, or `<name> body` / `<name> header` for a source given as a string.
        line: counted from 1 within that file or string.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _position(xyz: tuple[int, int, int]) -> str:
    x, y, z = xyz
    return f"({x}, {y}, {z})" if y or z else str(x)


class MetalError(RuntimeError):
    """A kernel that must not run on a GPU as it is, or that cannot run here.

    Attributes:
        kernel: the kernel's name.
        locations: lines of the user's source, the offending access first, then the one that it conflicts with.
        threads: the threads that took part, in the same order.
        buffer: name of the buffer or threadgroup array, where one is concerned.
        index: index of the element in it.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        locations: tuple[Location, ...] = (),
        threads: tuple[Thread, ...] = (),
        buffer: str | None = None,
        index: int | None = None,
    ) -> None:
        super().__init__(f"[{kernel}] {message}" if kernel else message)
        self.kernel = kernel
        self.locations = locations
        self.threads = threads
        self.buffer = buffer
        self.index = index


class ToolchainError(MetalError):
    """The compiler that the emulator needs is missing or does not run; the message has the install line."""


class CompileError(MetalError):
    """The source is not Metal: the compiler's message, with lines of the user's source."""


class LanguageError(CompileError):
    """The source compiles here and not on every supported Metal: a pointer without address space, a lambda, ..."""


class LimitError(MetalError):
    """Over 32 KiB of threadgroup memory, 1024 threads a threadgroup or 31 buffers."""


class BoundsError(MetalError):
    """An access outside its buffer or array."""


class RaceError(MetalError):
    """Two threads on one location, one of them writing, and nothing that orders them."""


class UninitialisedError(MetalError):
    """A read of threadgroup memory or output that nobody wrote, or an output element that was never written."""


class BarrierError(MetalError):
    """A barrier or simdgroup_matrix function that only part of its threads reach, or two barriers met by one group."""


class InactiveLaneError(BarrierError):
    """A shuffle or broadcast that reads a lane which does not take part."""


class DeadlockError(BarrierError):
    """Threads wait for each other at different places and none can go on."""


class AlignmentError(MetalError):
    """A vector access whose address is not a multiple of its size."""


class DivisionError(MetalError):
    """An integer division or remainder by zero, or of the least integer by -1: Metal leaves the result open."""


class StepBudgetError(MetalError):
    """A thread ran more steps than the budget: most likely an endless loop."""


class StackError(MetalError):
    """A thread used more private memory than its stack holds: endless recursion or very large private arrays."""


class ScheduleError(MetalError):
    """The result changes with the order in which threads or threadgroups run."""


class MetalWarning(UserWarning):
    """Legal, and often a mistake: a reduction over part of a simdgroup, lanes that rely on running in lockstep."""
