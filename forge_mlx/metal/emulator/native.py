"""The runtime inside a compiled kernel, as ctypes sees it: its structures (runtime/state.h) and its functions."""

from contextlib import suppress
import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
import sys

from forge_mlx.metal.emulator.errors import ToolchainError

FRAMES = 12


class Party(Structure):
    """`emu_party`: a thread of a finding and where it stands."""

    _fields_ = (
        ("group", c_uint32),
        ("thread", c_uint32),
        ("access", c_uint32),
        ("state", c_uint32),
        ("pc_count", c_uint32),
        ("pcs", c_uint32 * FRAMES),
    )


class Finding(Structure):
    """`emu_finding`."""

    _fields_ = (
        ("kind", c_uint32),
        ("parties", c_uint32),
        ("party", Party * 2),
        ("region", c_int32),
        ("size", c_uint32),
        ("offset", c_int64),
        ("address", c_uint64),
        ("number", c_int64 * 3),
        ("text", c_char_p),
    )


class BufferRequest(Structure):
    """`emu_buffer`."""

    _fields_ = (
        ("bytes", c_uint64),
        ("offset", c_uint64),
        ("item_bytes", c_uint32),
        ("misalignment", c_uint32),
        ("writable", c_uint32),
        ("initialised", c_uint32),
        ("address", c_void_p),
    )


class LaunchRequest(Structure):
    """`emu_launch`."""

    _fields_ = (
        ("buffers", POINTER(BufferRequest)),
        ("stacks", c_uint64),
        ("max_steps", c_uint64),
        ("buffer_count", c_uint32),
        ("stack_count", c_uint32),
        ("stack_bytes", c_uint32),
        ("checks", c_uint32),
        ("grid", c_uint32 * 3),
        ("threadgroup", c_uint32 * 3),
    )


class RunCounts(Structure):
    """`emu_counts`."""

    _fields_ = (
        ("threadgroup_barriers", c_uint64),
        ("simdgroup_barriers", c_uint64),
        ("simdgroup_functions", c_uint64),
        ("matrix_lanes", c_uint64),
        ("steps", c_uint64),
        ("threads", c_uint64),
    )


class Region(Structure):
    """`emu_region`: a buffer or threadgroup array and its counts."""

    _fields_ = (
        ("base", c_uint64),
        ("bytes", c_uint64),
        ("cells", c_void_p),
        ("seen", c_void_p),
        ("accesses", (c_uint64 * 5) * 2),
        ("other_accesses", c_uint64 * 2),
        ("other_bytes", c_uint64 * 2),
        ("distinct", c_uint64 * 2),
        ("atomics", c_uint64),
        ("mapped", c_uint64),
        ("name", c_char_p),
        ("generation", c_uint32),
        ("item_bytes", c_uint32),
        ("granule_shift", c_uint32),
        ("device", c_uint32),
        ("writable", c_uint32),
        ("undefined", c_uint32),
    )


# In the order of emu_sizes.
_STRUCTURES = (Finding, BufferRequest, LaunchRequest, RunCounts, Region)

_FUNCTIONS = {
    "emu_map_stacks": (c_uint64, (c_uint32, c_uint32)),
    "emu_unmap_stacks": (None, (c_uint64, c_uint32, c_uint32)),
    "emu_open": (c_int32, (POINTER(LaunchRequest),)),
    "emu_close": (None, ()),
    "emu_start": (c_int32, (c_uint32, c_uint64)),
    "emu_run": (c_uint32, (c_uint64,)),
    "emu_finish": (None, ()),
    "emu_sizes": (POINTER(c_uint32), ()),
    "emu_finding": (POINTER(Finding), ()),
    "emu_warnings": (POINTER(Finding), ()),
    "emu_warning_count": (c_uint32, ()),
    "emu_counts": (POINTER(RunCounts), ()),
    "emu_region_table": (POINTER(Region), ()),
    "emu_region_total": (c_uint32, ()),
    "emu_unwritten": (c_uint64, (c_uint32, POINTER(c_uint64))),
}


@cache
def load(library: Path) -> ctypes.CDLL:
    """Load a compiled kernel; it stays loaded, as its code may not move under a running launch.

    Args:
        library: the shared object.

    Returns:
        Its functions, with their argument types set.

    Raises:
        ToolchainError: the system does not load it, or its structures are not those above.
    """
    if sys.platform == "linux":
        # Kernels call the C library's math functions without naming the library they are in. Where glibc is not what
        # the system has, they are in the C library itself.
        with suppress(OSError):
            ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    try:
        image = ctypes.CDLL(str(library))
    except OSError as error:
        raise ToolchainError(
            f"a compiled kernel cannot be loaded: {error}. Where the folder does not allow programs (noexec), set "
            "FORGE_MLX_CACHE to one that does."
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(image, name)
        function.restype, function.argtypes = result, arguments
    sizes = tuple(image.emu_sizes()[: len(_STRUCTURES)])
    if sizes != tuple(map(ctypes.sizeof, _STRUCTURES)):
        raise ToolchainError(
            f"the runtime's structures and native.py's differ: {sizes} bytes. Install forge-mlx again."
        )
    return image


class StackPool:
    """Stacks of the threads, kept from one launch to the next: they are the same for every kernel."""

    def __init__(self) -> None:
        self.address = 0
        self.count = 0
        self.bytes = 0

    def reserve(self, image: ctypes.CDLL, count: int, stack_bytes: int) -> None:
        """Have at least `count` stacks of exactly `stack_bytes`.

        Args:
            image: any loaded kernel, whose runtime does the work.
            count: number of threads.
            stack_bytes: bytes of one stack, a multiple of the page size.

        Raises:
            MemoryError: the address space does not hold them.
        """
        if self.address and self.bytes == stack_bytes and self.count >= count:
            return
        if self.address:
            image.emu_unmap_stacks(self.address, self.count, self.bytes)
        self.address, self.count, self.bytes = image.emu_map_stacks(count, stack_bytes), count, stack_bytes
        if not self.address:
            raise MemoryError(f"[emulator] no memory for {count} stacks of {stack_bytes} bytes. Lower stack_bytes.")
