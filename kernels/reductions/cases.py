"""What sum and sum_squares are proved, timed and counted on."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.reductions import op, reference
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

Shape = tuple[int, ...]
SCALE: Final = 0.37
"""The mul of the cases that have one."""


@dataclass(frozen=True)
class ReductionCase(OpCase):
    """The sum over one array or over a list, with its gradients.

    Attributes:
        shapes: Shape of each array; of more than one, they are given as a list.
        dtype: Dtype of the arrays.
        others: Dtype of every other array of a list; None: the same.
        values: What the arrays hold, as `random_values` takes it.
        layout: How they lie in memory, as `laid_out` takes it.
    """

    shapes: tuple[Shape, ...]
    dtype: mx.Dtype = mx.float32
    others: mx.Dtype | None = None
    values: str = "normal"
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = [self.op, "_".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)]
        parts += [dtype_name(dtype) for dtype in (self.dtype, self.others) if dtype is not None]
        return "-".join(
            [*parts, *(each for each in (self.values, self.layout) if each not in ("normal", "contiguous"))]
        )

    def inputs(self) -> dict[str, mx.array]:
        """x0, x1 and so on."""
        arrays = {}
        for index, shape in enumerate(self.shapes):
            dtype = self.dtype if self.others is None or index % 2 == 0 else self.others
            x = random_values(shape, self.values, np.random.default_rng(index + len(self.name)))
            arrays[f"x{index}"] = laid_out(mx.array(x).astype(dtype), self.layout)
        return arrays

    def cotangents(self) -> dict[str, mx.array]:
        """dtotal."""
        return {"total": mx.array(0.75)}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The op of the arrays on an engine; "mlx": mx.sum, in float32."""

        def call(*arrays: mx.array) -> mx.array:
            if impl == "mlx":
                found = [mx.sum(self.of_one(each.astype(mx.float32))) for each in arrays[: len(self.shapes)]]
                return self.scaled(mx.sum(mx.stack(found)), *arrays[len(self.shapes) :])
            return self.total(impl, *arrays)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The total and the gradients by reference.py."""
        names = [f"x{index}" for index in range(len(self.shapes))]
        squares = isinstance(self, SumSquaresCase)
        rows = reference.as_rows([inputs[name] for name in names])
        total = reference.total(rows, squares)[0] if rows else mx.array(0.0)
        found = {"total": self.scaled(total, *(inputs[name] for name in inputs if name not in names))}
        if "mul" in inputs:
            found["dmul"] = cotangents["total"] * total
        dtotal = cotangents["total"] * inputs.get("mul", mx.array(1.0))
        gradients = iter(reference.gradients(rows, dtotal[None], squares))
        for name in names:
            x = inputs[name]
            found[f"d{name}"] = next(gradients).reshape(x.shape) if x.size else mx.zeros_like(x)
        return found

    @abstractmethod
    def total(self, impl: str, *arrays: mx.array) -> mx.array:
        """The op of this class on an engine."""

    @abstractmethod
    def of_one(self, x: mx.array) -> mx.array:
        """What is added up of an array."""

    def scaled(self, total: mx.array, mul: mx.array | None = None) -> mx.array:
        """The result, of the sum."""
        return total if mul is None else total * mul

    def argument(self, arrays: tuple[mx.array, ...]) -> mx.array | list[mx.array]:
        """The op's x."""
        return arrays[0] if len(self.shapes) == 1 else list(arrays[: len(self.shapes)])


@dataclass(frozen=True)
class SumCase(ReductionCase):
    """`sum`; several arrays have a mul with a gradient."""

    op = "sum"

    def inputs(self) -> dict[str, mx.array]:
        """x0, x1 and so on; mul."""
        return super().inputs() | ({"mul": mx.array(SCALE)} if len(self.shapes) > 1 else {})

    def total(self, impl: str, *arrays: mx.array) -> mx.array:
        """sum on an engine."""
        return op.sum(self.argument(arrays), *arrays[len(self.shapes) :], impl=impl)

    def of_one(self, x: mx.array) -> mx.array:
        """x."""
        return x

    def expected(self) -> Mapping[str, np.ndarray]:
        """The total and the gradients in float64."""
        inputs = {name: to_float64(array) for name, array in self.inputs().items()}
        mul, dtotal = inputs.pop("mul", np.array(1.0)), to_float64(self.cotangents()["total"])
        total = np.array(sum(x.sum() for x in inputs.values()))
        found = {"total": total * mul} | {f"d{name}": np.full(x.shape, mul * dtotal) for name, x in inputs.items()}
        return found | ({"dmul": total * dtotal} if len(self.shapes) > 1 else {})


@dataclass(frozen=True)
class SumSquaresCase(ReductionCase):
    """`sum_squares`."""

    op = "sum_squares"

    def total(self, impl: str, *arrays: mx.array) -> mx.array:
        """sum_squares on an engine."""
        return op.sum_squares(self.argument(arrays), impl=impl)

    def of_one(self, x: mx.array) -> mx.array:
        """x^2."""
        return mx.square(x)

    def expected(self) -> Mapping[str, np.ndarray]:
        """The total and the gradients in float64."""
        inputs = {name: to_float64(array) for name, array in self.inputs().items()}
        dtotal = to_float64(self.cotangents()["total"])
        total = np.array(sum((x**2).sum() for x in inputs.values()))
        return {"total": total} | {f"d{name}": 2 * x * dtotal for name, x in inputs.items()}


def _cases(case: type[ReductionCase]) -> list[ReductionCase]:
    cases = []
    for dtype in FLOATS:
        # The most that one threadgroup adds up before there are two.
        group = 4 * 256 * 16 // dtype.size
        # Around a vector, a simdgroup, a threadgroup, one and several threadgroups; a prime.
        sizes = (1, 7, 8, 31, 32, 33, 1023, 1025, group - 1, group, group + 1, 3 * group + 5, 10007)
        cases += [
            *(case(((size,),), dtype) for size in sizes),
            case(((),), dtype),
            case(((0, 5),), dtype),
            case(((3, 0), (7,), (0,)), dtype),
            case(((2, 3, 5), (1,), (40, 33), (group + 3,)), dtype),
            *(case(((5, 72),), dtype, values=values) for values in ("zeros", "ranges", "ties")),
            *(case(((6, 48),), dtype, layout=layout) for layout in LAYOUTS[1:]),
            case(((3, group),), dtype, layout="shifted"),
        ]
    cases += [
        case(((5, 72),), dtype, values=scale) for dtype in (mx.float32, mx.bfloat16) for scale in ("1e-30", "1e15")
    ]
    cases.append(case(((9, 5), (40,), (7, 3), (1025,)), mx.bfloat16, mx.float32))
    return cases


CASES: Final = (*_cases(SumCase), SumCase(((5, 72),), values="1e30"), *_cases(SumSquaresCase))

_TIMED = [((4096, 4096),), ((768,),), tuple([(768, 768)] * 8 + [(768,)] * 8)]

TIMED: Final = tuple(
    case(shapes, dtype)
    for case in (SumCase, SumSquaresCase)
    for dtype in (mx.float32, mx.bfloat16)
    for shapes in _TIMED
)

_COUNTED = [((1024, 1024),), ((3000, 7),), tuple([(256, 256)] * 4 + [(1000,)] * 2)]

TRAFFIC: Final = tuple(
    case(shapes, dtype)
    for case in (SumCase, SumSquaresCase)
    for dtype in (mx.float32, mx.bfloat16)
    for shapes in _COUNTED
)
