"""Turns what the runtime found into an exception or a warning that names threads, lines, buffer and index."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
import re
from typing import Protocol

from forge_mlx.metal.emulator import errors
from forge_mlx.metal.emulator.errors import Location, MetalError, Thread
from forge_mlx.metal.emulator.names import ARRAY_TYPE, users_names
from forge_mlx.metal.emulator.native import Finding, Party
from forge_mlx.metal.limits import SIMDGROUP, THREADGROUP_BYTES

MAX_WARNINGS = 8


class Kind(IntEnum):
    """`finding_kind` of runtime/state.h."""

    NONE = 0
    OUTSIDE = 1
    WILD = 2
    READ_ONLY = 3
    OTHER_STACK = 4
    PRIVATE_INDEX = 5
    RACE = 6
    UNINITIALISED = 7
    ALIGNMENT = 8
    DIVISION = 9
    STEPS = 10
    STACK = 11
    FAULT = 12
    BARRIER_MISSING = 13
    BARRIER_TWO = 14
    DEADLOCK = 15
    MATRIX_PART = 16
    INACTIVE_LANE = 17
    LIMIT = 18
    REDUCE_PART = 19
    LOCKSTEP = 20


_EXCEPTIONS: dict[Kind, type[MetalError]] = {
    Kind.OUTSIDE: errors.BoundsError,
    Kind.WILD: errors.BoundsError,
    Kind.READ_ONLY: errors.BoundsError,
    Kind.OTHER_STACK: errors.BoundsError,
    Kind.PRIVATE_INDEX: errors.BoundsError,
    Kind.RACE: errors.RaceError,
    Kind.UNINITIALISED: errors.UninitialisedError,
    Kind.ALIGNMENT: errors.AlignmentError,
    Kind.DIVISION: errors.DivisionError,
    Kind.STEPS: errors.StepBudgetError,
    Kind.STACK: errors.StackError,
    Kind.FAULT: errors.MetalError,
    Kind.BARRIER_MISSING: errors.BarrierError,
    Kind.BARRIER_TWO: errors.BarrierError,
    Kind.DEADLOCK: errors.DeadlockError,
    Kind.MATRIX_PART: errors.BarrierError,
    Kind.INACTIVE_LANE: errors.InactiveLaneError,
    Kind.LIMIT: errors.LimitError,
}

# `access` and `fibre_state` of runtime/state.h.
_ACCESS = ("used", "read", "written", "updated atomically")
_SIMDGROUP_FUNCTION, _SIMDGROUP_BARRIER, _THREADGROUP_BARRIER, _FINISHED = 1, 2, 3, 4
# By `number` of a PRIVATE_INDEX without an index.
_OVERRUN = (
    "a pointer leaves its array, which is private or a constant of the program",
    "what lies beside a private array is overwritten: a pointer into the array, or an index of a vector, goes outside",
)
_WAITING = {
    _SIMDGROUP_FUNCTION: "a simdgroup function",
    _SIMDGROUP_BARRIER: "simdgroup_barrier",
    _THREADGROUP_BARRIER: "threadgroup_barrier",
}


class Kernel(Protocol):
    """What a launch needs of a compiled kernel."""

    @property
    def name(self) -> str:
        """The name that messages give it."""

    @property
    def library(self) -> Path:
        """The shared object with its entry and the runtime."""

    def locate(self, offset: int, /) -> Location | None:
        """The line of the user's source that an instruction at this offset in the image belongs to."""


@dataclass(frozen=True)
class Memory:
    """A buffer or threadgroup array, for messages.

    Attributes:
        name: as the source has it.
        what: "input", "output" or "threadgroup array".
        count: its number of elements.
        item_bytes: bytes of an element.
        device: whether it lies in device or constant memory.
        offset: where the element at index 0 lies, in bytes from its start.
    """

    name: str
    what: str
    count: int
    item_bytes: int
    device: bool
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.what} '{self.name}'"


@dataclass(frozen=True)
class Geometry:
    """The shape of a launch.

    Attributes:
        grid: threads along each axis.
        threadgroup: threads of a whole threadgroup along each axis.
    """

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    @property
    def groups(self) -> tuple[int, int, int]:
        """Threadgroups along each axis."""
        x, y, z = (-(-all_ // part) for all_, part in zip(self.grid, self.threadgroup, strict=True))
        return x, y, z

    def group_position(self, group: int) -> tuple[int, int, int]:
        """Position of a threadgroup, given its linear index."""
        across, down, _ = self.groups
        return group % across, group // across % down, group // across // down

    def group_size(self, group: int) -> tuple[int, int, int]:
        """Threads of a threadgroup along each axis: fewer at the grid's edge."""
        position = self.group_position(group)
        x, y, z = (
            min(part, all_ - part * at) for all_, part, at in zip(self.grid, self.threadgroup, position, strict=True)
        )
        return x, y, z

    def thread(self, group: int, index: int) -> Thread:
        """The thread with a linear index in a threadgroup with a linear index."""
        x, y, _ = self.group_size(group)
        return Thread(self.group_position(group), (index % x, index // x % y, index // x // y), index)


class Reporter:
    """Writes the messages of one launch.

    Args:
        kernel: gives its name and its lines.
        geometry: the launch's shape.
        memory: buffers, then threadgroup arrays, in the runtime's order.
    """

    def __init__(self, kernel: Kernel, geometry: Geometry, memory: Sequence[Memory]) -> None:
        self._kernel = kernel
        self._geometry = geometry
        self._memory = memory

    def exception(self, finding: Finding) -> MetalError:
        """The exception for the finding that stopped a launch."""
        parties = [finding.party[i] for i in range(finding.parties)]
        located = [self._locate(party) for party in parties]
        region, index = self._element(finding)
        return _EXCEPTIONS[Kind(finding.kind)](
            self.message(finding),
            kernel=self._kernel.name,
            locations=tuple(each for each in located if each),
            threads=tuple(self._geometry.thread(party.group, party.thread) for party in parties),
            buffer=region.name if region else None,
            index=index,
        )

    def warnings(self, findings: Sequence[Finding]) -> tuple[str, ...]:
        """A message for each kind and place, of a few of them: an unrolled loop is one place to the user."""
        messages: dict[object, str] = {}
        for finding in findings:
            places = [self._locate(finding.party[i]) for i in range(finding.parties)]
            messages.setdefault((finding.kind, frozenset(places)), self.message(finding))
        return tuple(messages.values())[:MAX_WARNINGS]

    def message(self, finding: Finding) -> str:
        """One sentence or two on what happened, where, and to which element."""
        kind = Kind(finding.kind)
        if kind in (Kind.OUTSIDE, Kind.WILD, Kind.READ_ONLY, Kind.OTHER_STACK, Kind.PRIVATE_INDEX):
            return self._bounds(kind, finding)
        if kind in (Kind.RACE, Kind.LOCKSTEP):
            return self._race(kind, finding)
        if kind in (Kind.BARRIER_MISSING, Kind.BARRIER_TWO, Kind.DEADLOCK):
            return self._barrier(kind, finding)
        if kind in (Kind.MATRIX_PART, Kind.REDUCE_PART, Kind.INACTIVE_LANE):
            return self._lanes(kind, finding)
        if kind in (Kind.UNINITIALISED, Kind.ALIGNMENT):
            return self._element_message(kind, finding)
        return self._other(kind, finding)

    def _locate(self, party: Party) -> Location | None:
        for pc in party.pcs[: party.pc_count]:
            location = self._kernel.locate(pc)
            if location:
                return location
        return None

    def _where(self, party: Party) -> str:
        location = self._locate(party)
        return str(location) if location else "a line that is not known"

    def _thread(self, party: Party) -> str:
        thread = self._geometry.thread(party.group, party.thread)
        return str(thread) if max(self._geometry.groups) > 1 else f"thread {thread.index}"

    def _at(self, party: Party) -> str:
        location = self._locate(party)
        return f"{self._thread(party)} at {location}" if location else self._thread(party)

    def _element(self, finding: Finding) -> tuple[Memory | None, int | None]:
        if Kind(finding.kind) is Kind.PRIVATE_INDEX:
            index = None if finding.text is None else finding.number[0]
            return self._array_of_type(finding.text), index
        if not 0 <= finding.region < len(self._memory):
            return None, None
        region = self._memory[finding.region]
        return region, (finding.offset - region.offset) // region.item_bytes

    def _array_of_type(self, text: bytes | None) -> Memory | None:
        """The threadgroup array that has a type of its own, as the translation gives each of them one."""
        found = re.search(rf"{ARRAY_TYPE}(\w+)", (text or b"").decode())
        matches = [each for each in self._memory if not each.device and found and each.name == found[1]]
        return matches[0] if matches else None

    def _bounds(self, kind: Kind, finding: Finding) -> str:
        party = finding.party[0]
        by = self._at(party)
        did = {1: "reads", 2: "writes", 3: "updates"}.get(party.access, "uses memory")
        region, index = self._element(finding)
        if kind is Kind.PRIVATE_INDEX and finding.text is None:
            return f"{by}: {_OVERRUN[finding.number[0]]}."
        if kind is Kind.PRIVATE_INDEX:
            array = region or f"an array of type {_type(finding.text)}"
            return f"index {index} is outside {array}: {by}."
        if region and kind is Kind.READ_ONLY:
            return f"{region} is read-only and is written at index {index}: {by}."
        if region:
            end = region.count * region.item_bytes
            over = -finding.offset if finding.offset < 0 else finding.offset + finding.size - end
            side = "before its start" if finding.offset < 0 else "past its end"
            return (
                f"{by} {did} outside {region}: index {index}, {over} bytes {side}. It has "
                f"{region.count} elements of {region.item_bytes} bytes."
            )
        if kind is Kind.OTHER_STACK:
            return f"{by} {did} in the private memory of thread {finding.number[0]}."
        return (
            f"{by} {did} at {finding.address:#x}, which is in no buffer and no array: a pointer without a value, "
            "or an index that is far off (an integer overflow?)."
        )

    def _race(self, kind: Kind, finding: Finding) -> str:
        now, before = finding.party[0], finding.party[1]
        region, index = self._element(finding)
        assert region is not None
        both = (
            f"on {region} at index {index}: {_ACCESS[now.access]} by {self._at(now)}, "
            f"{_ACCESS[before.access]} by {self._at(before)}"
        )
        flag = "mem_device" if region.device else "mem_threadgroup"
        if kind is Kind.LOCKSTEP:
            return (
                f"lanes of one simdgroup rely on lockstep {both}, no simdgroup_barrier({flag}) between. The emulator "
                "runs lanes one after the other."
            )
        if now.group != before.group:
            return f"race {both}. Nothing orders two threadgroups of one launch; only atomic operations may meet."
        mixed = " An atomic operation does not order plain accesses." if 3 in (now.access, before.access) else ""
        return f"race {both}, no threadgroup_barrier({flag}) between.{mixed}"

    def _barrier(self, kind: Kind, finding: Finding) -> str:
        here, other = finding.party[0], finding.party[1]
        there, missing = finding.number[0], finding.number[1]
        barrier = _WAITING[here.state]
        whole = "simdgroup" if here.state == _SIMDGROUP_BARRIER else "threadgroup"
        if kind is Kind.BARRIER_MISSING:
            return (
                f"{barrier} at {self._where(here)} needs every thread of its {whole}: {there} of {there + missing} "
                f"wait there ({self._thread(here)} is one) and {self._thread(other)} has returned."
            )
        if kind is Kind.BARRIER_TWO:
            return (
                f"two barriers met by one {whole}: {self._thread(here)} waits at {barrier} at {self._where(here)}, "
                f"{self._at_barrier(other)}. Every thread must come to the same one ({there} of {there + missing} did)."
            )
        return (
            f"deadlock: {self._thread(here)} waits at {barrier} at {self._where(here)}, {self._at_barrier(other)}, "
            "and neither can go on before the other."
        )

    def _at_barrier(self, party: Party) -> str:
        return f"{self._thread(party)} at {_WAITING[party.state]} at {self._where(party)}"

    def _lanes(self, kind: Kind, finding: Finding) -> str:
        party = finding.party[0]
        if kind is Kind.INACTIVE_LANE:
            lane, active = finding.number[0], finding.number[1]
            return (
                f"{self._at(party)} reads lane {lane} of its simdgroup, which does not take part: "
                f"only {_lane_list(active)} do. What it receives is undefined."
            )
        mask, lanes = finding.number[0], finding.number[1]
        if kind is Kind.MATRIX_PART:
            rest = f" The simdgroup has only {lanes} threads." if lanes < SIMDGROUP else ""
            rest += f" {self._elsewhere(finding.party[1])}." if finding.parties > 1 else ""
            return (
                f"a simdgroup_matrix function at {self._where(party)} needs all {SIMDGROUP} lanes, and only "
                f"{_lane_list(mask)} of the simdgroup of {self._thread(party)} take part.{rest}"
            )
        return (
            f"a simdgroup function at {self._where(party)} is reached by {_lane_list(mask)} only of the simdgroup of "
            f"{self._thread(party)}; the result leaves out the others. {self._elsewhere(finding.party[1])}."
        )

    def _elsewhere(self, party: Party) -> str:
        thread = self._thread(party)
        thread = thread[0].upper() + thread[1:]
        if party.state == _FINISHED:
            return f"{thread} has returned"
        return f"{thread} waits at {_WAITING[party.state]} at {self._where(party)}"

    def _element_message(self, kind: Kind, finding: Finding) -> str:
        party = finding.party[0]
        region, index = self._element(finding)
        if kind is Kind.UNINITIALISED:
            return f"{region} is read at index {index} before anything is written there: {self._at(party)}."
        if region is None:
            return (
                f"{self._at(party)}: the processor refused a vector access that is not aligned to its size, "
                "or an impossible address."
            )
        return (
            f"an access of {finding.size} bytes to {region} at index {index} is not aligned: its address is "
            f"{finding.address % finding.size} more than a multiple of {finding.size} ({self._at(party)})."
        )

    def _other(self, kind: Kind, finding: Finding) -> str:
        by = self._at(finding.party[0])
        first, second = finding.number[0], finding.number[1]
        if kind is Kind.DIVISION:
            if finding.text is None:
                # The processor stopped at it; a divisor of zero is found before that.
                return f"the least integer is divided by -1: {by}. Metal leaves the result undefined."
            return f"{first} is divided by {second}, as {_type(finding.text)}: {by}. Metal leaves the result undefined."
        if kind is Kind.STEPS:
            return f"{by} went past its budget of {first} steps: an endless loop? settings(max_steps=...) raises it."
        if kind is Kind.STACK:
            return (
                f"{by} used up its private memory: endless recursion, or very large private arrays. "
                "settings(stack_bytes=...) raises the limit."
            )
        if kind is Kind.LIMIT:
            return self._limit(finding)
        return f"{by} ran into code that the compiler holds unreachable: a function that ends without its return?"

    def _limit(self, finding: Finding) -> str:
        by = self._at(finding.party[0])
        name = (finding.text or b"").decode()
        if finding.number[1] == 0:
            return (
                f"{finding.number[0]} bytes of threadgroup memory with array '{name}' declared at "
                f"{self._where(finding.party[0])}; Metal has {THREADGROUP_BYTES}."
            )
        if finding.number[1] == 1:
            return f"the emulator has no room for threadgroup array '{name}': {by}."
        return f"the emulator has no memory left to follow an access byte by byte: {by}."


def _type(text: bytes | None) -> str:
    """The compiler's name of a type, `'float[8]'`, without its address-space words."""
    name = (text or b"''").decode().strip("'")
    for word in ("__private ", "__local ", "__global ", "__constant ", "__generic "):
        name = name.replace(word, "")
    return f"'{users_names(name)}'"


def _lane_list(mask: int) -> str:
    """`lanes 0-15, 20`: the set bits of a mask."""
    runs: list[list[int]] = []
    for lane in range(SIMDGROUP):
        if not mask >> lane & 1:
            continue
        if runs and runs[-1][1] == lane - 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    parts = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return f"lane {parts}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"lanes {parts}"
