"""What the tests of the Metal headers share: C functions compiled as kernels are, and NumPy's view of Metal's types."""

from collections.abc import Iterable
import ctypes
from typing import Any

from forge_mlx.metal.emulator import toolchain
import numpy as np

INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
FLOATS = ("half", "bfloat", "float")
SCALARS = ("bool", *INTEGERS, *FLOATS)
# A bfloat is seen as its 16 bits.
NUMPY: dict[str, Any] = {
    "bool": np.bool_,
    "char": np.int8,
    "uchar": np.uint8,
    "short": np.int16,
    "ushort": np.uint16,
    "int": np.int32,
    "uint": np.uint32,
    "long": np.int64,
    "ulong": np.uint64,
    "half": np.float16,
    "bfloat": np.uint16,
    "float": np.float32,
}

# Every library carries the runtime, which needs a kernel.
_BEGIN = '#include "prelude.h"\nusing namespace metal;\nextern "C" void emu_entry(void* const*, const emu_ids*) {}\n'


def compile_functions(text: str, *, preamble: bool = False) -> ctypes.CDLL:
    """Compile C functions written in Metal, after translation, with the flags of kernels that are not instrumented."""
    return ctypes.CDLL(str(toolchain.compile_source(_BEGIN + text, instrument=False, preamble=preamble)))


def error_of(text: str, *, preamble: bool = False) -> str:
    """What the compiler says of a text, empty where it compiles it."""
    try:
        compile_functions(text, preamble=preamble)
    except toolchain.CompilerFailure as failure:
        return failure.stderr
    return ""


def accepted(lines: Iterable[str], begin: str = "") -> list[str]:
    """Which of these pieces of text, each a declaration on one line, the compiler has nothing against."""
    numbered = list(enumerate(lines, start=1))
    error = error_of(begin + "".join(f'\n#line {n} "piece"\n{line}' for n, line in numbered))
    return [line for n, line in numbered if f"piece:{n}:" not in error]


def call(library: ctypes.CDLL, name: str, *arguments: np.ndarray | int) -> None:
    """Call `name` with pointers to the arrays and with whole numbers as `long`."""
    for argument in arguments:
        assert isinstance(argument, int) or argument.flags.c_contiguous
    pointers = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_void_p(a.ctypes.data) for a in arguments]
    library[name](*pointers)


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 32 bytes, as a vector of four 64-bit numbers needs."""
    space = np.zeros(x.nbytes + 32, dtype=np.uint8)
    start = -space.ctypes.data % 32
    copy = space[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def bfloat_bits(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat, ties to even: of numbers that are exact in float64."""
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(x)
        # Eight bits of precision, and no bit below the least denormal.
        quantum = np.exp2(np.maximum(exponent - 8.0, -133.0))
        rounded = np.where(np.isfinite(x), np.rint(x / quantum) * quantum, x)
        bits = rounded.astype(np.float32).view(np.uint32) >> 16
    return np.where(np.isnan(x), 0x7FC0, bits).astype(np.uint16)


def bfloat_values(bits: np.ndarray) -> np.ndarray:
    """The numbers that bits of bfloats stand for, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def values_of(name: str, stored: np.ndarray) -> np.ndarray:
    """An array of a Metal type as NumPy computes with it: bfloat as float32, everything else itself."""
    return bfloat_values(stored) if name == "bfloat" else stored


def stored_as(name: str, x: np.ndarray) -> np.ndarray:
    """Float64 numbers rounded once to a Metal type of floating point."""
    with np.errstate(all="ignore"):
        return bfloat_bits(x) if name == "bfloat" else np.asarray(x, dtype=np.float64).astype(NUMPY[name])


def samples(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Values of a Metal type: its special ones, small ones, and random ones of every magnitude."""
    random = np.random.default_rng(seed)
    if name == "bool":
        return random.integers(0, 2, count).astype(np.bool_)
    if name in INTEGERS:
        info = np.iinfo(NUMPY[name])
        edges = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 5, 127, info.max // 2, info.max // 3]
        edges += [-1, -2, -7] if info.min < 0 else []
        wide = random.integers(info.min, info.max, count, dtype=NUMPY[name], endpoint=True)
        shifted = wide >> random.integers(0, info.bits, count).astype(NUMPY[name])
        return np.concatenate([np.array(edges, dtype=NUMPY[name]), shifted])[:count]
    mantissa, least, greatest = {"half": (10, -14, 15), "bfloat": (7, -126, 127), "float": (23, -126, 127)}[name]
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 255.0, 256.0, 65504.0]
    edges += [2.0**least, -(2.0**least), 2.0 ** (least - mantissa), 1.5 * 2.0**least, 2.0**greatest * 1.875]
    magnitudes = np.exp2(random.uniform(least - mantissa, greatest + 0.9, count // 4))
    ordinary = random.uniform(-300, 300, count)
    signed = magnitudes * random.choice([-1.0, 1.0], magnitudes.size)
    return stored_as(name, np.concatenate([edges, signed, ordinary])[:count])
