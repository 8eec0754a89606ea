"""What the element-wise ops are proved, counted and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from forge_mlx.kernels import elementwise
from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.elementwise import reference
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

FACTOR: Final = 0.37
"""The s of the cases that have one."""


@dataclass(frozen=True)
class ElementwiseCase(OpCase):
    """An op of this room with its gradients.

    Attributes:
        shape: Of the first array and the result.
        dtype: Of the first array.
        other: Dtype of the second array; None: the same.
        values: What the first array holds, as `random_values` takes it.
        layout: How the arrays of that shape lie in memory, as `laid_out` takes it.
        factor: Dtype of s as an array; None for a number. Only scale and axpy have it.
    """

    first: ClassVar[str] = "x"
    second: ClassVar[str | None] = "y"
    has_factor: ClassVar[bool] = False

    shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    other: mx.Dtype | None = None
    values: str = "normal"
    layout: str = "contiguous"
    factor: mx.Dtype | None = mx.float32

    @property
    def name(self) -> str:
        """A readable id."""
        parts = [self.op, "x".join(map(str, self.shape)) or "scalar", dtype_name(self.dtype)]
        parts += [] if self.other is None else [dtype_name(self.other)]
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        if self.factor is None:
            parts.append("number")
        elif self.factor != mx.float32:
            parts.append(f"s-{dtype_name(self.factor)}")
        return "-".join(parts)

    @property
    def second_dtype(self) -> mx.Dtype:
        """Of the second array."""
        return self.dtype if self.other is None else self.other

    @property
    def result_dtype(self) -> mx.Dtype:
        """Of the result."""
        return mx.result_type(mx.zeros((), self.dtype), mx.zeros((), self.second_dtype))

    def inputs(self) -> dict[str, mx.array]:
        """The arrays, and s if it is one."""
        arrays = {self.first: self._array(0, self.shape, self.dtype, self.values, self.layout)}
        if self.second is not None:
            arrays[self.second] = self._array(1, self.shape, self.second_dtype, "normal", self.layout)
        return arrays | self._factor()

    def cotangents(self) -> dict[str, mx.array]:
        """The one of the result."""
        return {"out": self._array(2, self.shape, self.result_dtype, "normal", self.layout)}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The op of its arrays on an engine; "mlx": MLX's operators."""
        number = (FACTOR,) if self.has_factor and self.factor is None else ()
        if impl == "mlx":
            return lambda *arrays: self.of_mlx(*arrays, *number).astype(self.result_dtype)
        op: Callable[..., mx.array] = getattr(elementwise, self.op)
        return lambda *arrays: op(*arrays, *number, impl=impl)

    def of_mlx(self, *arrays: mx.array | float) -> mx.array:
        """What MLX has instead."""
        raise NotImplementedError

    def _factor(self) -> dict[str, mx.array]:
        return {"s": mx.array(FACTOR).astype(self.factor)} if self.has_factor and self.factor is not None else {}

    def _array(self, seed: int, shape: tuple[int, ...], dtype: mx.Dtype, values: str, layout: str) -> mx.array:
        numbers = random_values(shape, values, np.random.default_rng([seed, len(self.name)]))
        return laid_out(mx.array(numbers).astype(dtype), layout)

    def _wide(self) -> list[np.ndarray]:
        """The inputs and the cotangent in float64."""
        return [to_float64(array) for array in (*self.inputs().values(), *self.cotangents().values())]

    def _bytes(self, *names: str) -> int:
        """Of inputs, and of the result as "out"."""
        arrays = self.inputs() | self.cotangents()
        return sum(arrays[name].nbytes for name in names if name in arrays)


class AddCase(ElementwiseCase):
    """add."""

    op = "add"

    def of_mlx(self, *arrays: mx.array | float) -> mx.array:
        """x + y."""
        x, y = arrays
        return mx.add(x, y)

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The result and the gradients by reference.py."""
        x, y = inputs.values()
        dx, dy = reference.add_backward(x, y, cotangents["out"])
        out = reference.add_forward(x, y, self.result_dtype)
        return {"out": out, f"d{self.first}": dx, f"d{self.second}": dy}

    def expected(self) -> Mapping[str, np.ndarray]:
        """The result and the gradients in float64."""
        x, y, dout = self._wide()
        return {"out": x + y, f"d{self.first}": dout, f"d{self.second}": dout}


class AccumulateCase(AddCase):
    """accumulate."""

    op = "accumulate"
    first = "dst"
    second = "src"

    @property
    def result_dtype(self) -> mx.Dtype:
        """That of dst."""
        return self.dtype


class MulCase(ElementwiseCase):
    """mul."""

    op = "mul"

    def of_mlx(self, *arrays: mx.array | float) -> mx.array:
        """x y."""
        x, y = arrays
        return mx.multiply(x, y)

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The result and the gradients by reference.py."""
        x, y = inputs.values()
        dx, dy = reference.mul_backward(x, y, cotangents["out"])
        return {"out": reference.mul_forward(x, y), "dx": dx, "dy": dy}

    def expected(self) -> Mapping[str, np.ndarray]:
        """The result and the gradients in float64."""
        x, y, dout = self._wide()
        return {"out": x * y, "dx": dout * y, "dy": dout * x}


class ScaleCase(ElementwiseCase):
    """scale."""

    op = "scale"
    second: ClassVar[str | None] = None
    has_factor = True

    @property
    def result_dtype(self) -> mx.Dtype:
        """That of x."""
        return self.dtype

    def of_mlx(self, *arrays: mx.array | float) -> mx.array:
        """x s."""
        x, s = arrays
        return mx.multiply(x, s)

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The result and the gradients by reference.py."""
        x, s = inputs["x"], reference.factor(inputs.get("s", FACTOR))
        dx, ds = reference.scaled_backward(x[None], s, cotangents["out"][None])
        found = {"out": reference.scaled(x[None], s, x.dtype)[0], "dx": dx[0]}
        return found | ({"ds": ds[0].astype(inputs["s"].dtype)} if "s" in inputs else {})

    def expected(self) -> Mapping[str, np.ndarray]:
        """The result and the gradients in float64."""
        x, *s, dout = self._wide()
        factor = s[0] if s else FACTOR
        found = {"out": x * factor, "dx": dout * factor}
        return found | ({"ds": np.array((x * dout).sum())} if s else {})

    def ideal_bytes(self) -> dict[str, int]:
        """As usual, but that the gradient by x alone does not read x."""
        return {"forward": self._bytes("x", "s", "out"), "backward": self._bytes("x", "out") + self._of_factor("x")}

    def _of_factor(self, name: str) -> int:
        """What the gradient of s needs more: the array that it multiplied, s and ds."""
        return 0 if self.factor is None else self._bytes(name) + 2 * self._bytes("s")


class AxpyCase(ScaleCase):
    """axpy."""

    op = "axpy"
    first = "dst"
    second = "src"

    def of_mlx(self, *arrays: mx.array | float) -> mx.array:
        """dst + s src."""
        dst, src, s = arrays
        return mx.add(dst, mx.multiply(s, src))

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The result and the gradients by reference.py."""
        dst, src, s = inputs["dst"], inputs["src"], reference.factor(inputs.get("s", FACTOR))
        dsrc, ds = reference.scaled_backward(src[None], s, cotangents["out"][None])
        out = reference.added_scaled(dst[None], src[None], s)[0]
        found = {"out": out, "ddst": cotangents["out"], "dsrc": dsrc[0]}
        return found | ({"ds": ds[0].astype(inputs["s"].dtype)} if "s" in inputs else {})

    def expected(self) -> Mapping[str, np.ndarray]:
        """The result and the gradients in float64."""
        dst, src, *s, dout = self._wide()
        factor = s[0] if s else FACTOR
        found = {"out": dst + factor * src, "ddst": dout, "dsrc": factor * dout}
        return found | ({"ds": np.array((src * dout).sum())} if s else {})

    def ideal_bytes(self) -> dict[str, int]:
        """As usual, but that the gradient of dst is the cotangent itself."""
        forward = self._bytes("dst", "src", "s", "out")
        return {"forward": forward, "backward": self._bytes("src", "out") + self._of_factor("src")}


class AddBiasCase(ElementwiseCase):
    """add_bias."""

    op = "add_bias"
    second = None

    def inputs(self) -> dict[str, mx.array]:
        """x and b."""
        return super().inputs() | {"b": self._array(1, self.shape[-1:], self.second_dtype, "normal", "contiguous")}

    def of_mlx(self, *arrays: mx.array | float) -> mx.array:
        """x + b."""
        x, b = arrays
        return mx.add(x, b)

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The result and the gradients by reference.py."""
        x, b, dout = inputs["x"], inputs["b"], cotangents["out"]
        dx, db = reference.add_bias_backward(x, b, dout.flatten(0, -2)[None] if x.ndim > 1 else dout[None, None])
        return {"out": reference.add_bias(x, b), "dx": dx.reshape(x.shape), "db": db[0]}

    def expected(self) -> Mapping[str, np.ndarray]:
        """The result and the gradients in float64."""
        x, b, dout = self._wide()
        return {"out": x + b, "dx": dout, "db": dout.sum(axis=tuple(range(x.ndim - 1)))}

    def ideal_bytes(self) -> dict[str, int]:
        """As usual, but that the gradient of x is the cotangent itself, and that nothing else is read."""
        return {"forward": self._bytes("x", "b", "out"), "backward": self._bytes("out", "b")}


PAIRS: Final[tuple[type[ElementwiseCase], ...]] = (AddCase, MulCase, AccumulateCase, AxpyCase)
KINDS: Final[tuple[type[ElementwiseCase], ...]] = (*PAIRS, ScaleCase, AddBiasCase)
# Around a vector, a simdgroup and a threadgroup of both sizes of element; a prime.
_SIZES: Final = (1, 3, 7, 8, 31, 32, 33, 1023, 1025, 2049, 2053)
# Rows that lie above each other in a threadgroup, one block of columns and two, one pass and several threadgroups.
_BIASED: Final = (
    (1, 1),
    (2600, 1),
    (700, 8),
    (300, 31),
    (40, 32),
    (100, 33),
    (5, 1023),
    (70, 1025),
    (3, 2053),
    (90, 520),
)


def _cases() -> list[ElementwiseCase]:
    cases: list[ElementwiseCase] = []
    kind: type[ElementwiseCase]
    for kind in KINDS:
        for dtype in FLOATS:
            cases += [kind((7, 33), dtype), kind((6, 48), dtype, layout="shifted")]
            extremes = ("1e3", "1e-5") if dtype == mx.float16 else ("1e30", "1e-30")
            cases += [kind((5, 16), dtype, values=each) for each in extremes]
        cases += [kind((5, 16), values=each) for each in ("zeros", "ranges", "ties")]
        cases += [kind((6, 48), layout=layout) for layout in ("transposed", "sliced", "broadcast")]
        cases += [kind(shape, mx.bfloat16) for shape in ((0,), (5, 0), (2, 3, 5, 24))]
    for kind in (MulCase, AxpyCase):
        for dtype in (mx.float32, mx.bfloat16):
            cases += [kind((size,), dtype) for size in _SIZES]
            cases.append(kind((), dtype))
    # From one threadgroup for the sum over to several.
    cases += [
        ScaleCase(shape, dtype) for dtype in (mx.float32, mx.bfloat16) for shape in ((4097,), (10007,), (3, 8192))
    ]
    cases += [AddBiasCase(shape, dtype) for dtype in (mx.float32, mx.bfloat16) for shape in (*_BIASED, (33,))]
    mixed = ((mx.float32, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.float16, mx.bfloat16))
    cases += [kind((7, 41), one, other) for kind in KINDS if kind is not ScaleCase for one, other in mixed]
    for kind in (ScaleCase, AxpyCase):
        cases += [kind((7, 33), dtype, factor=factor) for dtype in FLOATS for factor in (None, mx.bfloat16)]
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(kind((4096, 4096), dtype) for dtype in (mx.float32, mx.bfloat16) for kind in KINDS)

TRAFFIC: Final = (
    AddCase((512, 2000), mx.bfloat16),
    MulCase((512, 2000)),
    MulCase((1000, 33), mx.float16),
    ScaleCase((512, 2000), mx.bfloat16),
    AxpyCase((512, 2000)),
    AccumulateCase((512, 2000), mx.float32, mx.bfloat16),
    AddBiasCase((4096, 33), mx.float16),
    AddBiasCase((2048, 768), mx.bfloat16),
    AddBiasCase((512, 4096)),
)
