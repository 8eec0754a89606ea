"""What the tests of quantize's kernels share: weights of every kind in one array, and how results are compared."""

from collections.abc import Iterable
from dataclasses import dataclass

from forge_mlx.kernels._common.cases import laid_out
from forge_mlx.kernels.quantize import exact
from forge_mlx.kernels.quantize.options import Options, checked_options
from forge_mlx.metal import emulator
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.emulator import MetalError, MetalWarning
import mlx.core as mx
import numpy as np
import pytest

KINDS = (
    "normal",
    "constant",
    "symmetric",
    "zeros",
    "positive",
    "negative",
    "wide",
    "huge",
    "small",
    "subnormal",
    "ties",
    "not finite",
)
NAMES = {"ids": lambda case: case.name}
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class QuantizeCase:
    """One weight `[kinds, rows, K]`, each kind of numbers a matrix of its own.

    Attributes:
        mode: The mode.
        dtype: Dtype of w.
        bits: As the op takes it.
        group_size: As the op takes it.
        granularity: As the op takes it.
        rows: Rows of each matrix.
        columns: K.
        kinds: What the matrices hold.
        layout: How w lies in memory, as `laid_out` takes it.
    """

    mode: str
    dtype: mx.Dtype = mx.float32
    bits: int | None = None
    group_size: int | None = None
    granularity: str | None = None
    rows: int = 3
    columns: int = 256
    kinds: tuple[str, ...] = KINDS
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = [self.mode, *(str(each) for each in (self.bits, self.group_size, self.granularity) if each)]
        shape = "x".join(map(str, (len(self.kinds), self.rows, self.columns)))
        return "-".join(
            [*parts, dtype_name(self.dtype), shape, *([] if self.layout == "contiguous" else [self.layout])]
        )

    @property
    def options(self) -> Options:
        """With the mode's defaults."""
        return checked_options("test", self.mode, self.bits, self.group_size, self.granularity)

    def weights(self) -> mx.array:
        """w."""
        random = np.random.default_rng(len(self.name))
        w = np.stack([self._matrix(kind, random) for kind in self.kinds])
        return laid_out(mx.array(w).astype(self.dtype), self.layout)

    def cotangent(self) -> mx.array:
        """dout, without zeros."""
        shape = (len(self.kinds), self.rows, self.columns)
        return mx.array(np.random.default_rng(7).uniform(0.5, 1, shape).astype(np.float32)).astype(self.dtype)

    def oracle(self, scales: np.ndarray | None = None) -> exact.Exact:
        """What NumPy makes of it."""
        w = np.array(self.weights().astype(mx.float32))
        return exact.quantize(w, self.options, self.dtype, scales)

    def _matrix(self, kind: str, random: np.random.Generator) -> np.ndarray:
        w = random.normal(size=(self.rows, self.columns)).astype(np.float32)
        is_half = self.dtype == mx.float16
        if kind == "constant":
            w[:] = -0.37
        elif kind == "symmetric":
            # Both ends are as far from 0.
            w = w.clip(-1.5, 1.5)
            w[..., ::16], w[..., 1::16] = 1.5, -1.5
        elif kind == "zeros":
            w = np.copysign(np.float32(0), w)
        elif kind in ("positive", "negative"):
            w = (np.abs(w) + 0.5) * np.float32(1 if kind == "positive" else -1)
        elif kind == "wide":
            w *= np.float32(10) ** random.uniform(-5, 0, w.shape).astype(np.float32)
        elif kind == "huge":
            w *= np.float32(1e4 if is_half else 5e37)
        elif kind == "small":
            w *= np.float32(1e-3 if is_half else 1e-6) * random.integers(0, 2, w.shape).astype(np.float32)
        elif kind == "subnormal":
            w *= np.float32(1e-6 if is_half else 1e-38)
        elif kind == "ties":
            return self._ties(random)
        elif kind == "not finite":
            for row, value in zip(w, (np.nan, np.inf, -np.inf), strict=False):
                row[random.integers(self.columns)] = value
        return w

    def _ties(self, random: np.random.Generator) -> np.ndarray:
        """Numbers whose scale is a power of two, many of them in the middle between two codes."""
        shape = (self.rows, self.columns)
        if self.mode == "ternary":
            w = np.tile(np.array([0.5, 1.5], np.float32), (self.rows, self.columns // 2))
        else:
            largest = {"int8": 127, "int4": 7, "fp8_e4m3": 448, "mxfp8": 448}.get(self.mode, 6)
            w = (random.integers(-2 * largest, 2 * largest + 1, shape) / 2).clip(-127.5, 127.5).astype(np.float32)
            w[..., ::16] = -largest
            if self.mode == "nvfp4":
                # The largest scale is 448, of which these are 7 and nearly.
                w[-1, 1::2] = np.resize([3136, 3120, -3136, -3120], self.columns // 2)
            if self.mode == "affine":
                # Steps of 1 from the edge on.
                last = 2 ** (self.bits or 4) - 1
                w = np.minimum(np.abs(w), last - 0.5)
                w[..., ::16], w[..., 1::16] = last, 0
        return w


def _variants() -> list[QuantizeCase]:
    found = []
    for dtype in DTYPES:
        found += [QuantizeCase("affine", dtype, bits, 64 if bits % 2 else 32) for bits in (4, 2, 3, 5, 6, 8)]
        found += [QuantizeCase("affine", dtype, 4, size) for size in (64, 128)]
        found += [QuantizeCase(mode, dtype) for mode in ("mxfp4", "mxfp8", "nvfp4")]
        found += [QuantizeCase(mode, dtype) for mode in ("int8", "int4")]
        found += [
            QuantizeCase(mode, dtype, granularity=each)
            for mode in ("ternary", "fp8_e4m3")
            for each in ("row", "tensor")
        ]
    return found


# Every mode, option and dtype.
VARIANTS = _variants()


def _row(mode: str) -> str | None:
    return "row" if mode == "ternary" else None


def _sizes() -> list[QuantizeCase]:
    found = []
    for dtype in DTYPES:
        most = 16384 // dtype.size
        # Around a lane's vector, a simdgroup, a threadgroup and the longest row that one holds.
        # int8 has vectors of 16 bytes of which a row ends in the middle, the others words that lanes share.
        for mode, width in (("int8", 4), ("int4", 8), ("ternary", 16)):
            for columns in (width, 3 * width, most // 32 - width, most // 32, most // 32 + width, most // 4 + width):
                found.append(
                    QuantizeCase(mode, dtype, granularity=_row(mode), columns=columns, kinds=("normal", "huge"))
                )
        for mode, columns in (("int8", most), ("int8", most + 4), ("ternary", most + 16)):
            found.append(QuantizeCase(mode, dtype, None, None, _row(mode), 2, columns, ("normal",)))
        for mode in ("ternary", "fp8_e4m3"):
            for rows, columns in ((1, 16), (5, 48), (33, 1040)):
                found.append(QuantizeCase(mode, dtype, None, None, "tensor", rows, columns, ("normal", "zeros")))
        found += [QuantizeCase("affine", dtype, 4, 32, rows=rows, columns=32, kinds=("normal",)) for rows in (1, 5, 67)]
        found.append(QuantizeCase("nvfp4", dtype, rows=1, columns=16, kinds=("normal",)))
    return found


# Every way through the kernels, at its edges.
SIZES = _sizes()

LAYOUTS = [
    QuantizeCase(mode, mx.bfloat16, granularity=granularity, layout=layout, kinds=("normal", "zeros", "positive"))
    for mode, granularity in (("affine", None), ("int4", None), ("ternary", "tensor"))
    for layout in ("transposed", "sliced", "broadcast", "shifted")
]


def chosen(cases: Iterable[QuantizeCase], fast: Iterable[tuple[str, mx.Dtype]]) -> list[object]:
    """Cases for `parametrize`: of each mode and dtype named the first, the others slow."""
    wanted, found = list(fast), []
    for case in cases:
        is_fast = (case.mode, case.dtype) in wanted
        if is_fast:
            wanted.remove((case.mode, case.dtype))
        found.append(case if is_fast else pytest.param(case, marks=pytest.mark.slow))
    assert not wanted
    return found


def bits_of(array: mx.array | np.ndarray) -> np.ndarray:
    """Bits for comparison, one pattern for every NaN; floats of any dtype as float32."""
    if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    array = np.array(array)
    if not np.issubdtype(array.dtype, np.floating):
        return array
    array = array.astype(np.float32)
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


def findings(check, *arguments) -> list[str]:
    """What a check finds, or the name of what it raised. Warnings are errors in tests."""
    try:
        return check(*arguments)
    except (MetalError, MetalWarning) as error:
        return [f"{type(error).__name__}: {error}"]


def launches(function, *arguments) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Each launch of a call: its kernel, and buffer -> (bytes, accesses) read or written."""
    with emulator.settings(checks=("bounds",)):
        emulator.reset()
        mx.eval(function(*arguments))
    return [
        (
            launch.name,
            {
                each.name: (each.bytes_read, each.reads) if each.bytes_read else (each.bytes_written, each.writes)
                for each in launch.counts.buffers
            },
        )
        for launch in emulator.report().launches
    ]
