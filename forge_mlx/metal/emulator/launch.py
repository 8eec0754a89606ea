"""Runs a compiled kernel: guarded memory, every schedule, and what was found as an exception."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
import ctypes
from dataclasses import dataclass
import math
import threading
from typing import Any

from forge_mlx.metal.emulator import native
from forge_mlx.metal.emulator.arrays import Bytes
from forge_mlx.metal.emulator.counts import BufferCounts, Counts
from forge_mlx.metal.emulator.errors import LimitError, ScheduleError, UninitialisedError
from forge_mlx.metal.emulator.findings import Geometry, Kernel, Memory, Reporter
from forge_mlx.metal.emulator.settings import Settings
from forge_mlx.metal.limits import MAX_BUFFERS, MAX_THREADS
import numpy as np

# Python sees a Ctrl-C between two slices.
SLICE_NANOSECONDS = 50_000_000
_PAGE = 65536
_CHECKS = {
    "bounds": 1,
    "races": 2,
    "uninitialised": 4,
    "barriers": 8,
    "alignment": 16,
    "limits": 32,
    "lockstep": 64,
}
_FORWARD, _REVERSE, _RANDOM = range(3)
_DONE, _MORE, _FINDING = range(3)

_lock = threading.Lock()
_stacks = native.StackPool()


@dataclass(frozen=True)
class Buffer:
    """An argument of a kernel.

    Attributes:
        name: of the parameter.
        data: its bytes, copied in before every run; of an output that is not initialised only the number counts.
        itemsize: bytes of an element.
        dtype: its MLX name, for messages.
        space: `device` or `constant`.
        writable: whether it is an output.
        initialised: whether `data` is its content; otherwise reading it before a write is an error.
        misalignment: address of the element at index 0, modulo 256.
        offset: where that element lies in `data`, in bytes; not 0 with negative strides.
    """

    name: str
    data: np.ndarray[Any, np.dtype[Any]] | bytes
    itemsize: int
    dtype: str
    space: str = "device"
    writable: bool = False
    initialised: bool = True
    misalignment: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.data.nbytes if isinstance(self.data, np.ndarray) else len(self.data)


@dataclass(frozen=True)
class Outcome:
    """What a launch gave.

    Attributes:
        outputs: the bytes of every writable buffer, in order.
        counts: what was done.
        warnings: what is legal and suspicious, one message each.
    """

    outputs: list[Bytes]
    counts: Counts
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Order:
    order: int
    seed: int = 0

    def __str__(self) -> str:
        return ("forward", "in reverse", f"in random order (seed {self.seed})")[self.order]


def launch(
    kernel: Kernel,
    buffers: Sequence[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    settings: Settings,
) -> Outcome:
    """Run all threads of a grid once for each schedule.

    Args:
        kernel: what to run.
        buffers: its arguments, in the order of its generated signature.
        grid: threads along each axis, each at least 1.
        threadgroup: threads of a threadgroup along each axis; it is cut to the grid.
        settings: checks, schedules, budgets.

    Returns:
        Outputs and counts of the first schedule.

    Raises:
        MetalError: what the checks found, as the exception of its kind.
        MemoryError: the buffers with their shadow do not fit into memory.
        ValueError: a grid with an empty or too long axis.
    """
    geometry = _geometry(kernel, buffers, grid, threadgroup, settings)
    orders = [_Order(_FORWARD), _Order(_REVERSE)][: settings.schedules]
    orders += [_Order(_RANDOM, settings.seed + i) for i in range(settings.schedules - 2)]
    first: Outcome | None = None
    with _lock, _opened(kernel, buffers, geometry, settings) as run:
        for order in orders:
            outcome = run.once(order)
            if first is None:
                first = outcome
            else:
                _compare(kernel, buffers, first, outcome, orders[0], order)
    assert first is not None
    return first


def _geometry(
    kernel: Kernel,
    buffers: Sequence[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    settings: Settings,
) -> Geometry:
    if min(*grid, *threadgroup) < 1 or max(grid) >= 2**32 or max(threadgroup) >= 2**32:
        raise ValueError(f"[{kernel.name}] every axis must be from 1 to 2**32 - 1 but got {grid} and {threadgroup}.")
    x, y, z = (min(part, whole) for part, whole in zip(threadgroup, grid, strict=True))
    if x * y * z > MAX_THREADS:
        raise LimitError(
            f"a threadgroup has at most {MAX_THREADS} threads but got {x} x {y} x {z} = {x * y * z}.",
            kernel=kernel.name,
        )
    if "limits" in settings.checks and len(buffers) > MAX_BUFFERS:
        raise LimitError(
            f"a kernel has at most {MAX_BUFFERS} buffers but this one has {len(buffers)}: inputs, outputs, and each "
            "_shape, _strides and _ndim that it uses.",
            kernel=kernel.name,
        )
    geometry = Geometry(grid, (x, y, z))
    if math.prod(geometry.groups) >= 2**31:
        raise ValueError(f"[{kernel.name}] the emulator runs fewer than 2**31 threadgroups but got {geometry.groups}.")
    return geometry


class _Run:
    """A launch whose memory is open."""

    def __init__(
        self,
        image: ctypes.CDLL,
        request: native.LaunchRequest,
        kernel: Kernel,
        buffers: Sequence[Buffer],
        geometry: Geometry,
        settings: Settings,
    ) -> None:
        self._image = image
        self._request = request
        self._kernel = kernel
        self._buffers = buffers
        self._geometry = geometry
        self._settings = settings

    def once(self, order: _Order) -> Outcome:
        """Fresh memory, all threads in one order."""
        if self._image.emu_start(order.order, order.seed):
            raise MemoryError(f"[{self._kernel.name}] no memory to run the launch.")
        for i, buffer in enumerate(self._buffers):
            if buffer.initialised and buffer.nbytes:
                self._content(i)[:] = np.frombuffer(buffer.data, np.uint8)
        while (status := self._image.emu_run(SLICE_NANOSECONDS)) == _MORE:
            pass
        if status == _FINDING:
            raise self._reporter().exception(self._image.emu_finding().contents)
        self._check_written()
        outputs = [self._content(i).copy() for i, buffer in enumerate(self._buffers) if buffer.writable]
        return Outcome(outputs, self._counts(), self._warnings())

    def _content(self, index: int) -> Bytes:
        """The bytes of a buffer where the kernel sees them."""
        size = self._buffers[index].nbytes
        if not size:
            return np.empty(0, np.uint8)
        address = self._request.buffers[index].address
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def _regions(self) -> list[native.Region]:
        table = self._image.emu_region_table()
        return [table[i] for i in range(self._image.emu_region_total())]

    def _reporter(self) -> Reporter:
        memory = [
            Memory(
                name=each.name,
                what="output" if each.writable else "input",
                count=each.nbytes // each.itemsize,
                item_bytes=each.itemsize,
                device=True,
                offset=each.offset,
            )
            for each in self._buffers
        ]
        for region in self._regions()[len(memory) :]:
            count = region.bytes // region.item_bytes
            memory.append(Memory(region.name.decode(), "threadgroup array", count, region.item_bytes, False))
        return Reporter(self._kernel, self._geometry, memory)

    def _warnings(self) -> tuple[str, ...]:
        found = self._image.emu_warnings()
        return self._reporter().warnings([found[i] for i in range(self._image.emu_warning_count())])

    def _check_written(self) -> None:
        if "uninitialised" not in self._settings.checks:
            return
        for i, buffer in enumerate(self._buffers):
            index = ctypes.c_uint64()
            missing = self._image.emu_unwritten(i, ctypes.byref(index)) if buffer.writable else 0
            if missing:
                raise UninitialisedError(
                    f"output '{buffer.name}': {missing} of {buffer.nbytes // buffer.itemsize} elements are never "
                    f"written, the first at index {index.value}. Write them, or give init_value.",
                    kernel=self._kernel.name,
                    buffer=buffer.name,
                    index=index.value,
                )

    def _counts(self) -> Counts:
        regions = self._regions()
        split = len(self._buffers)
        buffers = [_buffer_counts(r, b.name, b.space) for r, b in zip(regions[:split], self._buffers, strict=True)]
        arrays = [_buffer_counts(region, region.name.decode(), "threadgroup") for region in regions[split:]]
        counted = self._image.emu_counts().contents
        return Counts(
            buffers=tuple(buffers),
            arrays=tuple(arrays),
            instrumented=self._settings.instrumented,
            threads=counted.threads,
            threadgroups=math.prod(self._geometry.groups),
            threadgroup_barriers=counted.threadgroup_barriers,
            simdgroup_barriers=counted.simdgroup_barriers,
            simdgroup_functions=counted.simdgroup_functions,
            matrix_multiply_accumulates=counted.matrix_lanes // 32,
            steps=counted.steps,
        )


def _buffer_counts(region: native.Region, name: str, space: str) -> BufferCounts:
    accesses = [sum(region.accesses[way]) + region.other_accesses[way] for way in (0, 1)]
    moved = [
        sum(count << log2 for log2, count in enumerate(region.accesses[way])) + region.other_bytes[way]
        for way in (0, 1)
    ]
    return BufferCounts(
        name=name,
        space=space,
        size=region.bytes,
        reads=accesses[0],
        writes=accesses[1],
        atomics=region.atomics,
        bytes_read=moved[0],
        bytes_written=moved[1],
        distinct_bytes_read=region.distinct[0],
        distinct_bytes_written=region.distinct[1],
    )


@contextmanager
def _opened(kernel: Kernel, buffers: Sequence[Buffer], geometry: Geometry, settings: Settings) -> Iterator[_Run]:
    image = native.load(kernel.library)
    stack_bytes = -(-settings.stack_bytes // _PAGE) * _PAGE
    threads = math.prod(geometry.threadgroup)
    _stacks.reserve(image, max(threads, 64), stack_bytes)
    requests = (native.BufferRequest * max(len(buffers), 1))()
    for request, buffer in zip(requests, buffers, strict=False):
        request.bytes = buffer.nbytes
        request.item_bytes = buffer.itemsize
        request.offset = buffer.offset
        request.misalignment = (buffer.misalignment - buffer.offset) % 256
        request.writable = buffer.writable
        request.initialised = buffer.initialised
    request = native.LaunchRequest(
        buffers=requests,
        stacks=_stacks.address,
        max_steps=settings.max_steps,
        buffer_count=len(buffers),
        stack_count=_stacks.count,
        stack_bytes=stack_bytes,
        checks=sum(bit for name, bit in _CHECKS.items() if name in settings.checks),
        grid=geometry.grid,
        threadgroup=geometry.threadgroup,
    )
    try:
        if image.emu_open(ctypes.byref(request)):
            raise MemoryError(f"[{kernel.name}] no memory for the buffers and what is known of them.")
        yield _Run(image, request, kernel, buffers, geometry, settings)
    finally:
        image.emu_finish()
        image.emu_close()


def _compare(
    kernel: Kernel,
    buffers: Sequence[Buffer],
    first: Outcome,
    second: Outcome,
    order: _Order,
    other: _Order,
) -> None:
    outputs = [buffer for buffer in buffers if buffer.writable]
    # What was only told of names the line: lanes that rely on lockstep, mostly.
    told = "".join(f" It was told of this: {each}" for each in (*first.warnings, *second.warnings)[:1])
    for buffer, one, two in zip(outputs, first.outputs, second.outputs, strict=True):
        differing = np.flatnonzero(one != two)
        if not differing.size:
            continue
        index = int(differing[0]) // buffer.itemsize
        values = [_value(each, index, buffer) for each in (one, two)]
        raise ScheduleError(
            f"output '{buffer.name}' depends on the order of threads: at index {index} it is {values[0]} when they run "
            f"{order} and {values[1]} {other}.{told}",
            kernel=kernel.name,
            buffer=buffer.name,
            index=index,
        )


def _value(data: Bytes, index: int, buffer: Buffer) -> str:
    """An element as a person writes it."""
    raw = data[index * buffer.itemsize : (index + 1) * buffer.itemsize].tobytes()
    if buffer.dtype == "bfloat16":
        return str(np.frombuffer(b"\0\0" + raw, np.float32)[0])
    try:
        return str(np.frombuffer(raw, np.dtype(buffer.dtype.replace("bool_", "bool")))[0])
    except TypeError:
        return f"0x{raw[::-1].hex()}"
