"""What the norms are proved, timed and counted on."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.folding import as_rows
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.norms import reference
from forge_mlx.kernels.norms.add_rms_norm_op import add_rms_norm
from forge_mlx.kernels.norms.layer_norm_op import layer_norm
from forge_mlx.kernels.norms.rms_norm_op import rms_norm
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

Arrays64 = dict[str, np.ndarray]


@dataclass(frozen=True)
class NormCase(OpCase):
    """A norm of one input with its gradients.

    Attributes:
        shape: Shape of x.
        dtype: Dtype of x.
        w_dtype: Dtype of w; None for no w.
        values: What x holds, as `random_values` takes it.
        layout: How x lies in memory, as `laid_out` takes it.
        eps: As the op takes it.
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
        parts = [self.op, "x".join(map(str, self.shape)), dtype_name(self.dtype)]
        for argument, dtype in self._others().items():
            if dtype is None:
                parts.append(f"no-{argument}")
            elif dtype != self.dtype:
                parts.append(f"{argument}-{dtype_name(dtype)}")
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        return "-".join(parts if self.eps == 1e-5 else [*parts, f"eps{self.eps:g}"])

    def inputs(self) -> dict[str, mx.array]:
        """x, and the op's other arrays but for those whose dtype is None."""
        random = np.random.default_rng(len(self.name))
        dtypes = {"x": self.dtype, **self._others()}
        return {name: self._array(name, dtype, random) for name, dtype in dtypes.items() if dtype is not None}

    def cotangents(self) -> dict[str, mx.array]:
        """One for each result."""
        random = np.random.default_rng(1000 + len(self.name))
        return {
            name: mx.array(random.normal(size=self.shape).astype(np.float32)).astype(dtype)
            for name, dtype in self._results().items()
        }

    def expected(self) -> Mapping[str, np.ndarray]:
        """Results and gradients in float64, of the inputs as the dtype has rounded them."""
        inputs = {name: to_float64(array) for name, array in self.inputs().items()}
        return self._expected(inputs, {name: to_float64(array) for name, array in self.cotangents().items()})

    def _others(self) -> dict[str, mx.Dtype | None]:
        """The dtypes of the op's arrays but x, in its order."""
        return {"w": self.w_dtype}

    def _results(self) -> dict[str, mx.Dtype]:
        """The dtypes of the results."""
        return {"y": reference.output_dtype(mx.zeros((0,), self.dtype), _empty(self.w_dtype))}

    def _array(self, name: str, dtype: mx.Dtype, random: np.random.Generator) -> mx.array:
        """One of the op's arrays."""
        if name == "x":
            return laid_out(mx.array(random_values(self.shape, self.values, random)).astype(dtype), self.layout)
        return mx.array(random.normal(1, 0.5, self.shape[-1]).astype(np.float32)).astype(dtype)

    @abstractmethod
    def _expected(self, inputs: Arrays64, cotangents: Arrays64) -> Arrays64:
        """Results and gradients in float64."""


def _empty(dtype: mx.Dtype | None) -> mx.array | None:
    return None if dtype is None else mx.zeros((0,), dtype)


def _rows(array: mx.array | None) -> mx.array | None:
    """Weights as a batch of them."""
    return None if array is None else array[None]


def _rms_gradient(values: np.ndarray, weight: np.ndarray, dy: np.ndarray, eps: float) -> tuple[np.ndarray, ...]:
    """The normalised rows times w, and the gradients by the rows and by w."""
    # A row of no elements has no mean, and needs none.
    columns = max(1, values.shape[-1])
    size = np.sqrt(np.sum(values**2, axis=-1, keepdims=True) / columns + eps)
    n, g = values / size, dy * weight
    dx = (g - n * np.sum(g * n, axis=-1, keepdims=True) / columns) / size
    return n * weight, dx, np.sum(dy * n, axis=tuple(range(values.ndim - 1)))


@dataclass(frozen=True)
class RMSNormCase(NormCase):
    """rms_norm of one input with its gradients."""

    op = "rms_norm"

    def function(self, impl: str) -> Callable[..., mx.array]:
        """rms_norm of x and w on an engine; "mlx": mx.fast.rms_norm."""

        def call(x: mx.array, w: mx.array | None = None) -> mx.array:
            if impl == "mlx":
                return mx.fast.rms_norm(x, w, self.eps)
            return rms_norm(x, w, self.eps, impl=impl)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """y, dx and, with w, dw by reference.py."""
        x, w = as_rows(inputs["x"]), _rows(inputs.get("w"))
        y, r = reference.rms_norm_forward(x, w, self.eps)
        dx, dw = reference.rms_norm_backward(x, w, r, as_rows(cotangents["y"]), mx.zeros_like(r))
        results = {"y": y.reshape(self.shape), "dx": dx.reshape(self.shape)}
        return results if dw is None else results | {"dw": dw[0]}

    def _expected(self, inputs: Arrays64, cotangents: Arrays64) -> Arrays64:
        y, dx, dw = _rms_gradient(inputs["x"], inputs.get("w", np.ones(())), cotangents["y"], self.eps)
        return {"y": y, "dx": dx} | ({"dw": dw} if "w" in inputs else {})


@dataclass(frozen=True)
class AddRMSNormCase(NormCase):
    """add_rms_norm of two inputs with their gradients.

    Attributes:
        residual_dtype: Dtype of residual; None: that of x.
    """

    op = "add_rms_norm"

    residual_dtype: mx.Dtype | None = None

    def function(self, impl: str) -> Callable[..., tuple[mx.array, mx.array]]:
        """add_rms_norm of x, residual and w on an engine; "mlx": a sum and mx.fast.rms_norm."""

        def call(x: mx.array, residual: mx.array, w: mx.array | None = None) -> tuple[mx.array, mx.array]:
            if impl == "mlx":
                total = x + residual
                return mx.fast.rms_norm(total, w, self.eps), total
            return add_rms_norm(x, residual, w, self.eps, impl=impl)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """y, r, dx, dresidual and, with w, dw by reference.py."""
        x, residual, w = as_rows(inputs["x"]), as_rows(inputs["residual"]), _rows(inputs.get("w"))
        dy, dr = (as_rows(cotangents[name]) for name in ("y", "r"))
        y, r, s = reference.add_rms_norm_forward(x, residual, w, self.eps)
        dx, dresidual, dw = reference.add_rms_norm_backward(x, residual, w, r, s, dy, dr, mx.zeros_like(s))
        results = {"y": y, "r": r, "dx": dx, "dresidual": dresidual}
        results = {name: array.reshape(self.shape) for name, array in results.items()}
        return results if dw is None else results | {"dw": dw[0]}

    def ideal_bytes(self) -> dict[str, int]:
        """Backward: r in place of x and residual, and one gradient for both. Forward: each array once."""
        inputs = self.inputs()
        rows, weights = inputs["x"].nbytes, inputs["w"].nbytes if "w" in inputs else 0
        # r, dy, dr and the gradient; w and dw. For x and residual of one dtype.
        return super().ideal_bytes() | {"backward": 4 * rows + 2 * weights}

    def _others(self) -> dict[str, mx.Dtype | None]:
        return {"residual": self.residual_dtype or self.dtype, "w": self.w_dtype}

    def _results(self) -> dict[str, mx.Dtype]:
        r = mx.result_type(self.dtype, self.residual_dtype or self.dtype)
        return {"y": reference.output_dtype(mx.zeros((0,), r), _empty(self.w_dtype)), "r": r}

    def _array(self, name: str, dtype: mx.Dtype, random: np.random.Generator) -> mx.array:
        return super()._array("x" if name == "residual" else name, dtype, random)

    def _expected(self, inputs: Arrays64, cotangents: Arrays64) -> Arrays64:
        # The norm is that of the rounded sum. float32 holds the sum of two 16-bit numbers exactly, or rounds it once.
        rounded = mx.array((inputs["x"] + inputs["residual"]).astype(np.float32)).astype(self._results()["r"])
        r = to_float64(rounded)
        y, of_norm, dw = _rms_gradient(r, inputs.get("w", np.ones(())), cotangents["y"], self.eps)
        dx = cotangents["r"] + of_norm
        return {"y": y, "r": r, "dx": dx, "dresidual": dx} | ({"dw": dw} if "w" in inputs else {})


@dataclass(frozen=True)
class LayerNormCase(NormCase):
    """layer_norm of one input with its gradients.

    Attributes:
        b_dtype: Dtype of b; None for no b.
        offset: Added to every element of x.
    """

    op = "layer_norm"

    b_dtype: mx.Dtype | None = mx.float32
    offset: float = 0

    @property
    def name(self) -> str:
        """A readable id."""
        return f"{super().name}-offset{self.offset:g}" if self.offset else super().name

    def function(self, impl: str) -> Callable[..., mx.array]:
        """layer_norm of x, w and b on an engine; "mlx": mx.fast.layer_norm."""
        given = [name for name, dtype in self._others().items() if dtype is not None]

        def call(x: mx.array, *weights: mx.array) -> mx.array:
            named = dict(zip(given, weights, strict=True))
            w, b = named.get("w"), named.get("b")
            if impl == "mlx":
                return mx.fast.layer_norm(x, w, b, self.eps)
            return layer_norm(x, w, b, self.eps, impl=impl)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """y, dx, with w dw and with b db by reference.py."""
        x, w, b = as_rows(inputs["x"]), _rows(inputs.get("w")), _rows(inputs.get("b"))
        y, mean, s = reference.layer_norm_forward(x, w, b, self.eps)
        of_rows, zeros = as_rows(cotangents["y"]), mx.zeros_like(s)
        dx, dw, db = reference.layer_norm_backward(x, w, b, mean, s, of_rows, zeros, zeros)
        results = {"y": y.reshape(self.shape), "dx": dx.reshape(self.shape)}
        return results | {name: array[0] for name, array in (("dw", dw), ("db", db)) if array is not None}

    def _others(self) -> dict[str, mx.Dtype | None]:
        return {"w": self.w_dtype, "b": self.b_dtype}

    def _results(self) -> dict[str, mx.Dtype]:
        x = mx.zeros((0,), self.dtype)
        return {"y": reference.output_dtype(x, _empty(self.w_dtype), _empty(self.b_dtype))}

    def _array(self, name: str, dtype: mx.Dtype, random: np.random.Generator) -> mx.array:
        array = super()._array(name, dtype, random)
        return array + mx.array(self.offset, dtype) if name == "x" and self.offset else array

    def _expected(self, inputs: Arrays64, cotangents: Arrays64) -> Arrays64:
        values, dy = inputs["x"], cotangents["y"]
        columns = max(1, values.shape[-1])
        values = values - np.sum(values, axis=-1, keepdims=True) / columns
        size = np.sqrt(np.sum(values**2, axis=-1, keepdims=True) / columns + self.eps)
        n, g = values / size, dy * inputs.get("w", np.ones(()))
        of_n = g - np.sum(g, axis=-1, keepdims=True) / columns
        dx = (of_n - n * np.sum(g * n, axis=-1, keepdims=True) / columns) / size
        rows = tuple(range(values.ndim - 1))
        y = n * inputs.get("w", np.ones(())) + inputs.get("b", np.zeros(()))
        results = {"y": y, "dx": dx, "dw": np.sum(dy * n, axis=rows), "db": np.sum(dy, axis=rows)}
        return {name: array for name, array in results.items() if name in ("y", "dx") or name[1:] in inputs}


class LongRows:
    """A case of rows that no threadgroup holds."""

    max_ratio = 1.75
    max_ratio_reason = (
        "a row of more than 16 KiB does not fit in the registers of a threadgroup, so it is read twice: 3 arrays for 2 "
        "forward and 5 for 3 backward; of add_rms_norm 5 for 4 and 6 for 4"
    )


class LongRMSNormCase(LongRows, RMSNormCase):
    """rms_norm of long rows."""


class LongAddRMSNormCase(LongRows, AddRMSNormCase):
    """add_rms_norm of long rows."""


class LongLayerNormCase(LongRows, LayerNormCase):
    """layer_norm of long rows."""


def _longest(dtype: mx.Dtype) -> int:
    """The longest row that one threadgroup holds."""
    return 16384 // dtype.size


def _columns(dtype: mx.Dtype) -> tuple[int, ...]:
    """Around a lane's vector, a simdgroup, a threadgroup and the longest row that one holds."""
    limit = _longest(dtype)
    return (1, 7, 8, 31, 32, 33, 257, 1023, 1025, limit - 1, limit, limit + 1, 2 * limit + 8)


def _few_columns(dtype: mx.Dtype) -> tuple[int, ...]:
    """All of them in float32; fewer for dtypes whose kernels differ in nothing else. Each kernel costs a compile."""
    limit = _longest(dtype)
    return {mx.float32: _columns(dtype), mx.float16: (33, limit + 1), mx.bfloat16: (33, 1025, limit, limit + 1)}[dtype]


def _rms_norm_cases() -> list[RMSNormCase]:
    cases = []
    for dtype in FLOATS:
        limit = _longest(dtype)
        cases += [RMSNormCase((3, columns), dtype, dtype) for columns in _columns(dtype)]
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


def _add_rms_norm_cases() -> list[AddRMSNormCase]:
    cases = []
    for dtype in FLOATS:
        cases += [
            *(AddRMSNormCase((3, columns), dtype, dtype) for columns in _few_columns(dtype)),
            *(AddRMSNormCase((5, 72), dtype, dtype, values) for values in ("zeros", "ranges", "spike", "ties")),
            AddRMSNormCase((6, 48), dtype, dtype, layout="shifted"),
        ]
    f32 = mx.float32
    cases += [
        AddRMSNormCase((1, 1)),
        AddRMSNormCase((5, 0)),
        AddRMSNormCase((0, 5)),
        AddRMSNormCase((2, 3, 5, 24)),
        AddRMSNormCase((67, 40), f32, None),
        AddRMSNormCase((3, 264), f32, None),
        AddRMSNormCase((2, 8192), f32, None),
        *(AddRMSNormCase((6, 48), layout=layout) for layout in ("transposed", "sliced", "broadcast")),
        AddRMSNormCase((4, 4160), layout="shifted"),
        AddRMSNormCase((4, 40), eps=0.5),
        *(AddRMSNormCase((5, 72), values=scale) for scale in ("1e-30", "1e-15", "1e15")),
        AddRMSNormCase((4, 40), mx.bfloat16, f32),
        AddRMSNormCase((4, 40), mx.bfloat16, mx.bfloat16, residual_dtype=f32),
        AddRMSNormCase((4, 300), f32, f32, residual_dtype=mx.bfloat16),
        AddRMSNormCase((4, 4100), mx.float16, mx.float16, residual_dtype=mx.bfloat16),
    ]
    return cases


def _layer_norm_cases() -> list[LayerNormCase]:
    cases = []
    for dtype in FLOATS:
        cases += [
            *(LayerNormCase((3, columns), dtype, dtype, b_dtype=dtype) for columns in _few_columns(dtype)),
            *(
                LayerNormCase((5, 72), dtype, dtype, values, b_dtype=dtype)
                for values in ("zeros", "ranges", "spike", "ties")
            ),
            *(LayerNormCase((5, each), dtype, dtype, b_dtype=dtype, offset=1000) for each in (72, _longest(dtype) + 8)),
            LayerNormCase((6, 48), dtype, dtype, layout="shifted", b_dtype=dtype),
        ]
    bf16, f32 = mx.bfloat16, mx.float32
    cases += [
        LayerNormCase((1, 1)),
        LayerNormCase((5, 0)),
        LayerNormCase((0, 5)),
        LayerNormCase((2, 3, 5, 24)),
        *(LayerNormCase((rows, each), f32, f32, b_dtype=None) for rows, each in ((67, 40), (3, 264), (2, 8192))),
        *(LayerNormCase((rows, each), f32, None, b_dtype=f32) for rows, each in ((67, 40), (3, 264), (2, 8192))),
        *(LayerNormCase((rows, each), f32, None, b_dtype=None) for rows, each in ((67, 40), (3, 264), (2, 8192))),
        *(LayerNormCase((6, 48), layout=layout) for layout in ("transposed", "sliced", "broadcast")),
        LayerNormCase((4, 4160), layout="shifted"),
        LayerNormCase((4, 40), eps=1e-12),
        LayerNormCase((4, 40), eps=0.5),
        *(LayerNormCase((5, 72), values=scale) for scale in ("1e-30", "1e-15", "1e15")),
        LayerNormCase((3, 5000), bf16, bf16, b_dtype=None),
        # With w in float32 the backward pass of such rows has no registers for one pass.
        LayerNormCase((3, 4104), bf16, f32, b_dtype=f32),
        LayerNormCase((4, 40), mx.float16, f32, b_dtype=bf16),
        LayerNormCase((4, 300), f32, bf16, b_dtype=bf16),
        LayerNormCase((4, 40), bf16, None, b_dtype=f32),
    ]
    return cases


CASES: Final = (*_rms_norm_cases(), *_add_rms_norm_cases(), *_layer_norm_cases())

_SIZES: Final = ((4096, 1024), (32768, 128), (64, 32000))

TIMED: Final = tuple(
    case
    for dtype in (mx.float32, mx.bfloat16)
    for shape in _SIZES
    for case in (
        RMSNormCase(shape, dtype, dtype),
        AddRMSNormCase(shape, dtype, dtype),
        LayerNormCase(shape, dtype, dtype, b_dtype=dtype),
    )
)

_COUNTED: Final = (
    ((16384, 64), mx.float32),
    ((4096, 264), mx.bfloat16),
    ((480, 4096), mx.float32),
    ((240, 8192), mx.float16),
)

TRAFFIC: Final = (
    *(RMSNormCase(shape, dtype, dtype) for shape, dtype in _COUNTED),
    LongRMSNormCase((64, 16384)),
    *(AddRMSNormCase(shape, dtype, dtype) for shape, dtype in _COUNTED),
    LongAddRMSNormCase((64, 16384)),
    *(LayerNormCase(shape, dtype, dtype, b_dtype=dtype) for shape, dtype in _COUNTED),
    LongLayerNormCase((64, 16384)),
)
