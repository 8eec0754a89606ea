"""Runs Metal kernels on a CPU, with the checks that no Metal tool has: for tests and for counts, never for speed.

`metal_kernel` takes and returns what `mx.fast.metal_kernel` does. `patch()` puts it in its place for any library, and
`pytest --metal-emulator` does that for a test run. A finding is an exception under `MetalError`; `report()` counts what
the last launches did. It needs the extra `emulator`.

What it cannot see:
- Apple's compiler: a kernel that compiles here may need more registers there, and a launch may then be refused.
- Time. Counts are of what clang's optimiser left of the source; Apple's may leave something else.
- A jump from one buffer right into another: only the zones around buffers and arrays are guarded.
- Private memory that is read before it is written, and some overruns of private arrays and of constant tables through a
  pointer. Where the compiler can follow the pointer to its array the access is stopped, up to the array's alignment.
  In a function that stays a call, a write is noticed when the caller returns, by the word above its arrays: not one
  that ends in a neighbouring array, and no read. A write that the optimiser knows to be outside it just drops.
- Parts of an element of a threadgroup array, such as a vector's component: they may be read without a value together
  with others that have one.
- On arm64 processors, the least integer divided by -1.
- What `math_mode` "relaxed" and "fast" change: it computes as in "safe", and a kernel that asks for them warns once.
- Orders of threads that it did not run. Races are found by their barriers, in any order; what depends on the order in
  another way (atomics) shows only where `schedules` orders differ in their results.
- Whatever is not compute: textures, samplers, ray tracing; and matrices other than simdgroup_matrix.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forge_mlx.metal.emulator.errors import (
    AlignmentError,
    BarrierError,
    BoundsError,
    CompileError,
    DeadlockError,
    DivisionError,
    InactiveLaneError,
    LanguageError,
    LimitError,
    Location,
    MetalError,
    MetalWarning,
    RaceError,
    ScheduleError,
    StackError,
    StepBudgetError,
    Thread,
    ToolchainError,
    UninitialisedError,
)
from forge_mlx.metal.emulator.report import report, reset
from forge_mlx.metal.emulator.settings import Settings, settings

if TYPE_CHECKING:
    from forge_mlx.metal.emulator.kernel_api import metal_kernel
    from forge_mlx.metal.emulator.patching import patch

# Loaded when they are used: they bring the compiler, and the engines read what MLX's signatures are from here.
_LATER = {"metal_kernel": "kernel_api", "patch": "patching"}

__all__ = [
    "AlignmentError",
    "BarrierError",
    "BoundsError",
    "CompileError",
    "DeadlockError",
    "DivisionError",
    "InactiveLaneError",
    "LanguageError",
    "LimitError",
    "Location",
    "MetalError",
    "MetalWarning",
    "RaceError",
    "ScheduleError",
    "Settings",
    "StackError",
    "StepBudgetError",
    "Thread",
    "ToolchainError",
    "UninitialisedError",
    "metal_kernel",
    "patch",
    "report",
    "reset",
    "settings",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "elftools":
            raise
        raise ToolchainError('the emulator needs the package pyelftools: pip install "forge-mlx[emulator]"') from error
