"""Runs kernels on the cases of their rooms, or only compiles them, and tells what was found kernel by kernel.

A room is a folder of `forge_mlx.kernels` with a `cases.py`, whose `CASES` have a name, a dtype and `run(impl)`; what
their results are compared with is the rooms' own `_common/proof.py`. Both are found by name: nothing here knows an op.
The kernels in `_common` belong to no room: they are seen where the rooms' cases launch them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
import time
from typing import Any
from unittest.mock import patch
import warnings

from forge_mlx.metal import emulator
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.emulator import MetalError, MetalWarning, ToolchainError
from forge_mlx.metal.emulator.settings import settings
from forge_mlx.metal.source import KernelSource, load
import mlx.core as mx

_ROOMS = "forge_mlx.kernels"
_FOLDER = Path(__file__).parents[1] / "kernels"
SHARED = "_common"
"""The folder of what rooms share. In a table it stands where a room does."""
# MLX's names for Metal's types, which stand in the signature that it writes.
SIGNATURE_TYPES = (("float16_t", "half"), ("bfloat16_t", "bfloat"))
WAY_OUT = "FORGE_MLX_ENGINE=reference runs without it."


class AppleCompileError(RuntimeError):
    """Apple's compiler, or the launch of what it made, refused a kernel.

    Attributes:
        kernel: the kernel's name.
    """

    def __init__(self, kernel: str, message: str) -> None:
        super().__init__(f"[{kernel}] Metal says: {message}\n{WAY_OUT}")
        self.kernel = kernel


@dataclass
class Row:
    """What was seen of one kernel in one dtype.

    Attributes:
        room: the room, `SHARED` for a kernel of all rooms, "" for a file that belongs to none.
        kernel: the kernel's name; "" for what no kernel can be named for.
        dtype: its dtype; "" where none is known.
        cases: how many cases launched it.
        launches: how often they did.
        bytes: what the launches read and wrote in device memory; None where that was not counted.
        seconds: what the cases took together, by the clock, each at the kernels that it launched.
        findings: what is wrong, one text each.
    """

    room: str
    kernel: str
    dtype: str
    cases: int = 0
    launches: int = 0
    bytes: int | None = None
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """`ok`, `compiles` for what was not run, or how many findings there are."""
        if self.findings:
            return "1 finding" if len(self.findings) == 1 else f"{len(self.findings)} findings"
        return "ok" if self.cases else "compiles"


@dataclass(frozen=True)
class _Launched:
    kernel: str
    bytes: int | None
    seconds: float


def rooms() -> list[str]:
    """Names of the rooms that have cases."""
    return sorted(name for file in _FOLDER.glob("*/cases.py") if (name := file.parent.name) != SHARED)


def room_of(file: Path) -> str | None:
    """The room that a file lies in, `SHARED` for one that lies beside them, None outside of them all."""
    folder = file.resolve().parent
    return folder.name if folder.parent == _FOLDER.resolve() and folder.name in (*rooms(), SHARED) else None


def check_rooms(
    engine: str,
    schedules: int,
    tell: Callable[[str, int, int], None],
    wanted: Mapping[str, Sequence[str]] | None = None,
) -> list[Row]:
    """Run the cases of rooms.

    Args:
        engine: "emulator" or "metal".
        schedules: orders of threads on the emulator.
        tell: called before each case, with the room, the number of the case (from 1) and how many there are.
        wanted: room -> names of the kernels whose rows are wanted. One of `SHARED` is looked for in every room. None
            stands for all there are.

    Returns:
        One row for each kernel and dtype, and one for each kernel that no case has launched. What rooms share comes
        last, its launches by all rooms in one row.
    """
    complete = wanted is None or SHARED in wanted
    rows: list[Row] = []
    for room in rooms():
        if complete or (wanted is not None and room in wanted):
            rows += RoomCheck(room, engine, schedules, tell).run()
    rows = [row for row in rows if row.room != SHARED] + _summed([row for row in rows if row.room == SHARED])
    if complete:
        rows += _not_launched(SHARED, rows, "no case of any room launches it.")
    if wanted is None:
        return rows
    # What no kernel could be named for may be any of the room's, and any of those that all share.
    return [row for row in rows if row.kernel in wanted.get(row.room, ()) or not row.kernel]


def _summed(rows: Sequence[Row]) -> list[Row]:
    """One row for each kernel and dtype, of what several rooms have seen of it."""
    sums: dict[tuple[str, str], Row] = {}
    for row in rows:
        total = sums.setdefault((row.kernel, row.dtype), Row(row.room, row.kernel, row.dtype))
        total.cases += row.cases
        total.launches += row.launches
        total.seconds += row.seconds
        total.findings += row.findings
        if row.bytes is not None:
            total.bytes = (total.bytes or 0) + row.bytes
    return list(sums.values())


def _not_launched(folder: str, rows: Sequence[Row], why: str) -> list[Row]:
    """A row with a finding for each kernel of a folder that has no row."""
    launched = {row.kernel for row in rows}
    missing = [source.name for source in sources(folder) if source.name not in launched]
    return [Row(folder, name, "", findings=[f"[{name}] {why}"]) for name in missing]


class RoomCheck:
    """Runs a room's cases on an engine.

    Args:
        room: its name.
        engine: "emulator" or "metal".
        schedules: orders of threads on the emulator.
        tell: called before each case, with the room, the number of the case (from 1) and how many there are.
    """

    def __init__(self, room: str, engine: str, schedules: int, tell: Callable[[str, int, int], None]) -> None:
        self.room = room
        self.engine = engine
        self.schedules = schedules
        self._tell = tell
        self._recorder = _Recorder(engine)
        self._rows: dict[tuple[str, str], Row] = {}
        self._shared = {source.name for source in sources(SHARED)}
        # Cases to run once more without MLX's header: the first that launches a kernel in a dtype.
        self._first: dict[tuple[str, str], Any] = {}

    def run(self) -> list[Row]:
        """Run every case.

        Returns:
            One row for each kernel and dtype, and one for each kernel of the room that no case has launched.
        """
        cases = import_module(f"{_ROOMS}.{self.room}.cases").CASES
        for number, case in enumerate(cases, start=1):
            self._tell(self.room, number, len(cases))
            self._case(case)
        if self.engine == "emulator":
            self._without_mlx_header()
        rows = list(self._rows.values())
        return rows + _not_launched(self.room, rows, f"no case of {self.room} launches it.")

    def _row(self, kernel: str, dtype: str) -> Row:
        room = SHARED if kernel in self._shared else self.room
        return self._rows.setdefault((kernel, dtype), Row(room, kernel, dtype))

    def _case(self, case: Any) -> None:
        dtype = dtype_name(case.dtype)
        with _findings() as found:
            with self._recorder.launches() as launched, settings(schedules=self.schedules):
                results = case.run(self.engine)
                mx.eval(results)
            found += [(None, line) for line in _compare(case, results)]
        names = list(dict.fromkeys(each.kernel for each in launched))
        for name in names:
            self._first.setdefault((name, dtype), case)
            mine = [each for each in launched if each.kernel == name]
            row = self._row(name, dtype)
            row.cases += 1
            row.launches += len(mine)
            row.seconds += sum(each.seconds for each in mine)
            counted = [each.bytes for each in mine if each.bytes is not None]
            if counted:
                row.bytes = (row.bytes or 0) + sum(counted)
        self._charge(case, names, found)

    def _charge(self, case: Any, names: list[str], found: list[tuple[str | None, str]], where: str = "") -> None:
        """Write each finding to the kernel that it names, or to all that the case launched."""
        for kernel, text in found:
            for name in [kernel] if kernel is not None else names or [""]:
                row = self._row(name, dtype_name(case.dtype))
                row.findings.append(f"{self.room}, case {case.name}{where}: {text}")

    def _without_mlx_header(self) -> None:
        """The files are whole Metal files: what only MLX's header declares is not theirs to use."""
        done = []
        for (name, _), case in self._first.items():
            if case in done:
                continue
            done.append(case)
            with _findings() as found, settings(mlx_preamble=False, defines=SIGNATURE_TYPES):
                mx.eval(case.run(self.engine))
            self._charge(case, [name], found, " without MLX's header")


def _compare(case: Any, results: Mapping[str, mx.array]) -> list[str]:
    lines: list[str] = import_module(f"{_ROOMS}._common.proof").compare(case, results)
    return [line.removeprefix(f"{case.name}: ") for line in lines]


@contextmanager
def _findings() -> Iterator[list[tuple[str | None, str]]]:
    """Collects what a block raises and warns of, with the kernel where it is known."""
    found: list[tuple[str | None, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", MetalWarning)
        try:
            yield found
        except ToolchainError:
            # Says nothing about a kernel.
            raise
        except (MetalError, AppleCompileError) as error:
            found.append((error.kernel or None, f"{type(error).__name__}: {error}"))
        except (ValueError, RuntimeError, TypeError) as error:
            found.append((None, f"{type(error).__name__}: {error}"))
    for warning in caught:
        text = str(warning.message)
        found.append((text[1:].partition("]")[0] if text.startswith("[") else None, f"warning: {text}"))


class _Recorder:
    """Sees every launch that a block makes on an engine.

    Args:
        engine: "emulator" or "metal".
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._on_metal: list[_Launched] = []
        self._build = _observed(mx.fast.metal_kernel, self._on_metal)

    @contextmanager
    def launches(self) -> Iterator[list[_Launched]]:
        """Yields a list that is complete when the block has ended."""
        found: list[_Launched] = []
        if self._engine == "metal":
            self._on_metal.clear()
            try:
                with patch.object(mx.fast, "metal_kernel", self._build):
                    yield found
            finally:
                found += self._on_metal
            return
        emulator.reset()
        began = time.perf_counter()
        try:
            yield found
        finally:
            counted = emulator.report().launches
            each = (time.perf_counter() - began) / max(1, len(counted))
            found += [_Launched(one.name, one.counts.device_bytes, each) for one in counted]


def _observed(build: Callable[..., Any], found: list[_Launched]) -> Callable[..., Any]:
    """`mx.fast.metal_kernel` whose kernels are evaluated at once, so that an error names the kernel that has it."""

    def metal_kernel(**options: Any) -> Callable[..., list[mx.array]]:
        kernel = build(**options)

        def run(**arguments: Any) -> list[mx.array]:
            began = time.perf_counter()
            try:
                outputs: list[mx.array] = kernel(**arguments)
                mx.eval(outputs)
            except MetalError:
                raise
            except RuntimeError as error:
                raise AppleCompileError(options["name"], str(error)) from error
            found.append(_Launched(options["name"], None, time.perf_counter() - began))
            return outputs

        return run

    return metal_kernel


def sources(room: str) -> list[KernelSource]:
    """The kernels of a room or of `SHARED`, one a file."""
    return [load(file) for file in sorted((_FOLDER / room).glob("*.metal"))]
