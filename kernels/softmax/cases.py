"""What softmax is proved and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.softmax import reference
from forge_mlx.kernels.softmax.op import softmax
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class SoftmaxCase(OpCase):
    """softmax of one input with its gradient.

    Attributes:
        shape: Shape of x.
        dtype: Dtype of x.
        values: What x holds, as `random_values` takes it, or "masked": normal numbers, every third of them -inf;
            or "low": around -1000.
        layout: How x lies in memory, as `laid_out` takes it.
    """

    op = "softmax"

    shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    values: str = "normal"
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = ["x".join(map(str, self.shape)), dtype_name(self.dtype)]
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        return "-".join(parts)

    def inputs(self) -> dict[str, mx.array]:
        """x."""
        kind = "normal" if self.values in ("masked", "low") else self.values
        x = random_values(self.shape, kind, np.random.default_rng(len(self.name)))
        if self.values == "masked":
            x[..., ::3] = -np.inf
        elif self.values == "low":
            x -= 1000
        return {"x": laid_out(mx.array(x).astype(self.dtype), self.layout)}

    def cotangents(self) -> dict[str, mx.array]:
        """dp."""
        random = np.random.default_rng(1000 + len(self.name))
        return {"p": mx.array(random.normal(size=self.shape).astype(np.float32)).astype(self.dtype)}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """softmax of x on an engine; "mlx": mx.softmax."""

        def call(x: mx.array) -> mx.array:
            return mx.softmax(x, axis=-1, precise=True) if impl == "mlx" else softmax(x, impl=impl)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """p and dx by reference.py."""
        p = reference.softmax(inputs["x"])
        return {"p": p, "dx": reference.backward(p, cotangents["p"])}

    def expected(self) -> Mapping[str, np.ndarray]:
        """p and dx in float64, of x as the dtype has rounded it."""
        x, dp = to_float64(self.inputs()["x"]), to_float64(self.cotangents()["p"])
        if not x.size:
            return {"p": x, "dx": x}
        exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
        p = exponentials / exponentials.sum(axis=-1, keepdims=True)
        return {"p": p, "dx": p * (dp - np.sum(p * dp, axis=-1, keepdims=True))}


class LongSoftmaxCase(SoftmaxCase):
    """The same of rows that no threadgroup holds."""

    max_ratio = 1.75
    max_ratio_reason = (
        "a row of more than 16 KiB does not fit in the registers of a threadgroup, so it is read twice: 3 arrays for 2 "
        "forward, 5 for 3 backward"
    )


def _cases() -> list[SoftmaxCase]:
    cases = []
    for dtype in FLOATS:
        limit = 16384 // dtype.size
        # Around a lane's vector, a simdgroup, a threadgroup and the longest row that one holds.
        for columns in (1, 7, 8, 31, 32, 33, 257, 1023, 1025, limit - 1, limit, limit + 1, 2 * limit + 8):
            cases.append(SoftmaxCase((3, columns), dtype))
        cases += [
            SoftmaxCase((1,), dtype),
            SoftmaxCase((13,), dtype),
            SoftmaxCase((2, 3, 5, 24), dtype),
            SoftmaxCase((67, 40), dtype),
            SoftmaxCase((5, 0), dtype),
            SoftmaxCase((0, 5), dtype),
            *(
                SoftmaxCase((5, 72), dtype, values)
                for values in ("zeros", "ranges", "spike", "ties", "masked", "low", "20")
            ),
            *(SoftmaxCase((3, columns), dtype, "masked") for columns in (300, limit + 100)),
            *(SoftmaxCase((6, 48), dtype, layout=layout) for layout in LAYOUTS[1:]),
            *(SoftmaxCase((4, columns), dtype, layout="shifted") for columns in (264, limit + 64)),
        ]
    for dtype in (mx.float32, mx.bfloat16):
        cases += [SoftmaxCase((5, 72), dtype, scale) for scale in ("1e-30", "1e30")]
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    SoftmaxCase(shape, dtype)
    for dtype in (mx.float32, mx.bfloat16)
    for shape in ((4096, 1024), (32768, 128), (64, 32000))
)

TRAFFIC: Final = (
    SoftmaxCase((16384, 64)),
    SoftmaxCase((4096, 264), mx.bfloat16),
    SoftmaxCase((480, 4096)),
    SoftmaxCase((240, 8192), mx.float16),
    LongSoftmaxCase((8, 128256), mx.bfloat16),
)
