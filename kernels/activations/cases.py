"""What the activations are proved, counted and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import math
from typing import Final

from forge_mlx.kernels import activations
from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.activations import reference
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import mlx.nn as nn
import numpy as np

Pair = tuple[np.ndarray, np.ndarray]

_erfc: Final = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True)
class ActivationCase(OpCase):
    """An activation with its gradients, of x or of a gate and what it multiplies.

    Attributes:
        shape: Of every array.
        dtype: Of every array.
        values: What x or the gate holds, as `random_values` takes it; "normal" is three times as wide here, for the
            tails.
        layout: How it lies in memory, as `laid_out` takes it.
        option: `approximate` of gelu and geglu, the cap of softcap; None for no argument.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    values: str = "normal"
    layout: str = "contiguous"
    option: str | float | None = None

    @property
    def name(self) -> str:
        """A readable id."""
        option = "" if self.option is None else str(self.option)
        parts = [self.op, option, "x".join(map(str, self.shape)) or "scalar", dtype_name(self.dtype)]
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        return "-".join(part for part in parts if part)

    @property
    def is_gated(self) -> bool:
        """Whether the function's result multiplies a second array."""
        return self.op in ("swiglu", "geglu")

    @property
    def activation(self) -> reference.Function:
        """The function of one array, as reference.py names it."""
        names: dict[str, reference.Function] = {each: each for each in _EXACT}
        names |= {"swiglu": "silu", "geglu": "gelu"}
        return "gelu_tanh" if self.option == "tanh" else names[self.op]

    @property
    def cap(self) -> float:
        """The bound of softcap; the others do not look at it."""
        return self.option if isinstance(self.option, float) else 1.0

    def inputs(self) -> dict[str, mx.array]:
        """x, or gate and up."""
        first = laid_out(self._array(0, self.values), self.layout)
        return {"gate": first, "up": self._array(1, "normal")} if self.is_gated else {"x": first}

    def cotangents(self) -> dict[str, mx.array]:
        """The one of y."""
        return {"y": self._array(2, "normal")}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The op of its arrays on an engine; "mlx": MLX's own functions."""
        if impl == "mlx":
            of_mlx = _OF_MLX.get(self.activation, lambda x: mx.tanh(x / self.cap) * self.cap)
            return (lambda gate, up: of_mlx(gate) * up) if self.is_gated else of_mlx
        op: Callable[..., mx.array] = getattr(activations, self.op)
        options = () if self.option is None else (self.option,)
        return lambda *arrays: op(*arrays, *options, impl=impl)

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """y and the gradients by reference.py."""
        dy = cotangents["y"]
        if not self.is_gated:
            y = reference.forward(self.activation, inputs["x"], self.cap)
            return {"y": y, "dx": reference.backward(self.activation, inputs["x"], dy, self.cap)}
        gate, up = inputs["gate"], inputs["up"]
        dgate, dup = reference.gated_backward(self.activation, gate, up, dy)
        return {"y": reference.gated_forward(self.activation, gate, up), "dgate": dgate, "dup": dup}

    def expected(self) -> Mapping[str, np.ndarray]:
        """y and the gradients in float64."""
        first, *rest = (to_float64(array) for array in self.inputs().values())
        dy = to_float64(self.cotangents()["y"])
        value, slope = _EXACT[self.activation](first / self.cap)
        value = value * self.cap
        if not rest:
            return {"y": value, "dx": dy * slope}
        return {"y": value * rest[0], "dgate": dy * rest[0] * slope, "dup": dy * value}

    def _array(self, seed: int, values: str) -> mx.array:
        numbers = random_values(self.shape, values, np.random.default_rng([seed, len(self.name)]))
        return mx.array(numbers * (3 if values == "normal" else 1)).astype(self.dtype)


class SigmoidCase(ActivationCase):
    """sigmoid."""

    op = "sigmoid"


class SiluCase(ActivationCase):
    """silu."""

    op = "silu"


class GeluCase(ActivationCase):
    """gelu."""

    op = "gelu"


class Relu2Case(ActivationCase):
    """relu2."""

    op = "relu2"


class SoftcapCase(ActivationCase):
    """softcap."""

    op = "softcap"


class SwigluCase(ActivationCase):
    """swiglu."""

    op = "swiglu"


class GegluCase(ActivationCase):
    """geglu."""

    op = "geglu"


def _logistic(x: np.ndarray) -> np.ndarray:
    values: np.ndarray = np.exp(-np.logaddexp(0, -x))
    return values


def _sigmoid(x: np.ndarray) -> Pair:
    return _logistic(x), _logistic(x) * _logistic(-x)


def _silu(x: np.ndarray) -> Pair:
    s, slope = _sigmoid(x)
    return x * s, s + x * slope


def _gelu(x: np.ndarray) -> Pair:
    below = 0.5 * _erfc(-x * math.sqrt(0.5))
    return x * below, below + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: np.ndarray) -> Pair:
    s, slope = _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return x * s, s + x * slope * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x**2)


def _relu2(x: np.ndarray) -> Pair:
    return np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)


def _tanh(x: np.ndarray) -> Pair:
    return np.tanh(x), 4 * _logistic(2 * x) * _logistic(-2 * x)


# Value and derivative in float64; of softcap with a cap of 1.
_EXACT: Final[dict[reference.Function, Callable[[np.ndarray], Pair]]] = {
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "softcap": _tanh,
}

_OF_MLX: Final[dict[reference.Function, Callable[[mx.array], mx.array]]] = {
    "sigmoid": mx.sigmoid,
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_approx,
    "relu2": nn.relu2,
}

# Each function once; the option in it distinguishes forms of one op.
OPS: Final[tuple[tuple[type[ActivationCase], str | float | None], ...]] = (
    (SigmoidCase, None),
    (SiluCase, None),
    (GeluCase, None),
    (GeluCase, "tanh"),
    (Relu2Case, None),
    (SoftcapCase, 15.0),
    (SwigluCase, None),
    (GegluCase, None),
    (GegluCase, "tanh"),
)
# Around a vector, a simdgroup and a threadgroup of both sizes of element; a prime.
_SIZES: Final = (1, 3, 7, 8, 31, 32, 33, 1023, 1025, 2049, 2053)


def _cases() -> list[ActivationCase]:
    cases: list[ActivationCase] = []
    kind: type[ActivationCase]
    for kind in (SiluCase, SwigluCase):
        for dtype in (mx.float32, mx.bfloat16):
            cases += [kind((size,), dtype) for size in _SIZES]
            cases += [kind(shape, dtype) for shape in ((), (0,), (5, 0), (2, 3, 5, 24))]
        cases += [kind((6, 48), layout=layout) for layout in ("transposed", "sliced", "broadcast", "shifted")]
        cases.append(kind((6, 48), mx.float16, layout="shifted"))
    for kind, option in OPS:
        for dtype in FLOATS:
            cases.append(kind((7, 33), dtype, option=option))
            # The largest whose results are finite.
            if kind is Relu2Case:
                values = ("50", "1e-3") if dtype == mx.float16 else ("1e17", "1e-18")
            else:
                values = ("2e3", "1e-5") if dtype == mx.float16 else ("1e30", "1e-30")
            cases += [kind((5, 16), dtype, each, option=option) for each in (*values, "30", "zeros")]
    cases += [SoftcapCase((64,), dtype, option=cap) for dtype in FLOATS for cap in (0.5, 3.0)]
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    kind((4096, 4096), dtype, option=option) for dtype in (mx.float32, mx.bfloat16) for kind, option in OPS
)

TRAFFIC: Final = (
    SigmoidCase((512, 2000), mx.bfloat16),
    SiluCase((512, 2000), mx.float32),
    GeluCase((512, 2000), mx.bfloat16),
    Relu2Case((512, 2000), mx.float16),
    SoftcapCase((4, 128256), mx.bfloat16, option=15.0),
    SwigluCase((512, 2000), mx.float32),
    SwigluCase((1000, 33), mx.float16),
    GegluCase((512, 2000), mx.bfloat16),
)
