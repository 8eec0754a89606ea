"""What rms_norm is proved and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.folding import as_rows
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.rms_norm import op, reference
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class RMSNormCase:
    """rms_norm of one input with its gradients.

    Attributes:
        shape: Shape of x.
        dtype: Dtype of x.
        w_dtype: Dtype of w; None for no w.
        values: What x holds: "normal"; "zeros"; a factor on normal numbers, as "1e-30"; "ranges", rows of magnitudes
            from 1e-6 to 1e4; "spike", one large element a row; "ties", one number everywhere.
        layout: "contiguous", "transposed", "sliced" (every other column of a larger array), "broadcast" (one row
            repeated) or "shifted" (begins one element into its buffer).
        eps: As rms_norm takes it.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    w_dtype: mx.Dtype | None = mx.float32
    values: str = "normal"
    layout: str = "contiguous"
    eps: float = 1e-5

    @property
    def name(self) -> str:
        """A readable id."""
        parts = ["x".join(map(str, self.shape)), dtype_name(self.dtype)]
        if self.w_dtype is None:
            parts.append("no-w")
        elif self.w_dtype != self.dtype:
            parts.append(f"w-{dtype_name(self.w_dtype)}")
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        return "-".join(parts if self.eps == 1e-5 else [*parts, f"eps{self.eps:g}"])

    def arrays(self) -> tuple[mx.array, mx.array | None, mx.array]:
        """x, w and the cotangent of the result."""
        random = np.random.default_rng(len(self.name))
        x = mx.array(self._x(random)).astype(self.dtype)
        w = None
        if self.w_dtype is not None:
            w = mx.array(random.normal(1, 0.5, self.shape[-1]).astype(np.float32)).astype(self.w_dtype)
        dy = mx.array(random.normal(size=self.shape).astype(np.float32)).astype(reference.output_dtype(x, w))
        return self._laid_out(x), w, dy

    def function(self, impl: str) -> Callable[..., mx.array]:
        """rms_norm of x and w on an engine; "mlx": mx.fast.rms_norm."""

        def call(x: mx.array, w: mx.array | None = None) -> mx.array:
            if impl == "mlx":
                return mx.fast.rms_norm(x, w, self.eps)
            return op.rms_norm(x, w, self.eps, impl=impl)

        return call

    def run(self, impl: str) -> dict[str, mx.array]:
        """y, dx and, with w, dw on an engine; "formula": by reference.py."""
        x, w, dy = self.arrays()
        if impl == "formula":
            return self._run_formula(x, w, dy)
        primals = [x] if w is None else [x, w]
        (y,), gradients = mx.vjp(self.function(impl), primals, [dy])
        return dict(zip(("y", "dx", "dw"), [y, *gradients], strict=False))

    def _run_formula(self, x: mx.array, w: mx.array | None, dy: mx.array) -> dict[str, mx.array]:
        rows, weight = as_rows(x), None if w is None else w[None]
        y, r = reference.forward(rows, weight, self.eps)
        dx, dw = reference.backward(rows, weight, r, dy.reshape(rows.shape), mx.zeros_like(r))
        results = {"y": y.reshape(x.shape), "dx": dx.reshape(x.shape)}
        return results if dw is None else results | {"dw": dw[0]}

    def expected(self) -> Mapping[str, np.ndarray]:
        """y, dx and dw in float64, of the inputs as the dtype has rounded them."""
        x, w, dy = self.arrays()
        values, g = to_float64(x), to_float64(dy)
        # A row of no elements has no mean, and needs none.
        columns = max(1, x.shape[-1])
        size = np.sqrt(np.sum(values**2, axis=-1, keepdims=True) / columns + self.eps)
        normed = values / size
        weight = 1.0 if w is None else to_float64(w)
        dw = np.sum(g * normed, axis=tuple(range(x.ndim - 1)))
        g = g * weight
        dx = (g - normed * np.sum(g * normed, axis=-1, keepdims=True) / columns) / size
        results = {"y": normed * weight, "dx": dx}
        return results if w is None else results | {"dw": dw}

    def _x(self, random: np.random.Generator) -> np.ndarray:
        x = random.normal(size=self.shape)
        if self.values == "zeros":
            x *= 0
        elif self.values == "ranges":
            x *= np.geomspace(1e-6, 1e4, x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
        elif self.values == "spike":
            x[..., x.shape[-1] // 2] = 1e3
        elif self.values == "ties":
            x[...] = 0.75
        elif self.values != "normal":
            x *= float(self.values)
        return x.astype(np.float32)

    def _laid_out(self, x: mx.array) -> mx.array:
        """The same elements in another order in memory."""
        if self.layout == "transposed":
            return mx.contiguous(mx.swapaxes(x, -1, -2)).swapaxes(-1, -2)
        if self.layout == "sliced":
            return mx.repeat(x, 2, axis=-1)[..., ::2]
        if self.layout == "broadcast":
            return mx.broadcast_to(x[:1], x.shape)
        if self.layout == "shifted":
            return mx.concatenate([mx.zeros((1,), x.dtype), x.flatten()])[1:].reshape(x.shape)
        return x


def _cases() -> list[RMSNormCase]:
    cases = []
    for dtype in FLOATS:
        limit = 16384 // dtype.size
        # Around a lane's vector, a simdgroup, a threadgroup and the longest row that one holds.
        for columns in (1, 7, 8, 31, 32, 33, 257, 1023, 1025, limit - 1, limit, limit + 1, 2 * limit + 8):
            cases.append(RMSNormCase((3, columns), dtype, dtype))
        cases += [
            RMSNormCase((1, 1), dtype, dtype),
            RMSNormCase((2, 3, 5, 24), dtype, dtype),
            RMSNormCase((67, 40), dtype, None),
            RMSNormCase((3, 264), dtype, None),
            RMSNormCase((2, 2 * limit), dtype, None),
            RMSNormCase((5, 0), dtype, dtype),
            RMSNormCase((0, 5), dtype, dtype),
            *(RMSNormCase((5, 72), dtype, dtype, values) for values in ("zeros", "ranges", "spike", "ties")),
            *(
                RMSNormCase((6, 48), dtype, dtype, layout=layout)
                for layout in ("transposed", "sliced", "broadcast", "shifted")
            ),
            RMSNormCase((4, limit + 64), dtype, dtype, layout="shifted"),
            RMSNormCase((4, 40), dtype, dtype, eps=1e-12),
            RMSNormCase((4, 40), dtype, dtype, eps=0.5),
        ]
    mixed = [(mx.bfloat16, mx.float32), (mx.float16, mx.float32), (mx.float32, mx.bfloat16), (mx.float16, mx.bfloat16)]
    cases += [RMSNormCase((4, 40), dtype, w_dtype) for dtype, w_dtype in mixed]
    cases += [RMSNormCase((4, 300), mx.bfloat16, mx.float32), RMSNormCase((3, 4100), mx.float32, mx.float16)]
    for dtype in (mx.float32, mx.bfloat16):
        cases += [RMSNormCase((5, 72), dtype, dtype, scale) for scale in ("1e-30", "1e-15", "1e15")]
    cases.append(RMSNormCase((5, 72), mx.float16, mx.float16, "1e4"))
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    RMSNormCase(shape, dtype, dtype)
    for dtype in (mx.float32, mx.bfloat16)
    for shape in ((4096, 1024), (32768, 128), (64, 32000))
)
