"""Cases of row_scale and row_scale_accumulate, and what they share with those of the other ops."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import math
from typing import ClassVar

from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.dispatch import reference, row_scale, row_scale_accumulate
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

Named = Mapping[str, mx.array]


@dataclass(frozen=True)
class TokenCase(OpCase):
    """An op of this room with its gradients.

    Attributes:
        shape: Of x, `[..., C]`; all leading axes together are N tokens.
        experts: E.
        dtype: Of x or y, and of the result.
        gates: Dtype of the gates.
        values: What x or y holds, as `random_values` takes it.
        layout: How the arrays with two axes or more lie in memory, as `laid_out` takes it.
    """

    shape: tuple[int, ...]
    experts: int
    dtype: mx.Dtype = mx.float32
    gates: mx.Dtype = mx.float32
    values: str = "normal"
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = [self.op, "x".join(map(str, self.shape)), f"of{self.experts}", dtype_name(self.dtype), *self.own_parts]
        if self.gates != mx.float32:
            parts.append(f"gates-{dtype_name(self.gates)}")
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        return "-".join(parts)

    @property
    def own_parts(self) -> list[str]:
        """What the name has besides."""
        return []

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.shape[:-1])

    def array(self, seed: int, shape: tuple[int, ...], dtype: mx.Dtype, values: str = "normal") -> mx.array:
        """Numbers that follow from the case's name."""
        numbers = random_values(shape, values, np.random.default_rng([seed, len(self.name)]))
        made = mx.array(numbers).astype(dtype)
        return made if made.ndim < 2 else laid_out(made, self.layout)

    def gate_array(self) -> mx.array:
        """The gates `[..., E]`."""
        return self.array(1, (*self.shape[:-1], self.experts), self.gates)

    def run(self, impl: str) -> dict[str, mx.array]:
        """As `OpCase.run`. The formulas are for arrays with an element or more, all else is zeros."""
        if impl != "formula" or 0 not in self.shape:
            return super().run(impl)
        inputs = {f"d{name}": each for name, each in self.inputs().items()}
        return {name: mx.zeros_like(each) for name, each in (self.cotangents() | inputs).items()}


def bytes_of(arrays: Named, *names: str) -> int:
    """What the named ones of some arrays are long together."""
    return sum(arrays[name].nbytes for name in names)


@dataclass(frozen=True)
class RowScaleCase(TokenCase):
    """row_scale."""

    op: ClassVar[str] = "row_scale"

    @property
    def e(self) -> int:
        """The column of gates."""
        return self.experts // 2

    @property
    def result_dtype(self) -> mx.Dtype:
        """Of out."""
        return self.dtype

    def inputs(self) -> dict[str, mx.array]:
        """x and the gates."""
        return {"x": self.array(0, self.shape, self.dtype, self.values), "gates": self.gate_array()}

    def cotangents(self) -> dict[str, mx.array]:
        """That of out."""
        return {"out": self.array(2, self.shape, self.result_dtype)}

    def ideal_bytes(self) -> dict[str, int]:
        """Of the gates one column, of their gradients all; of dst nothing in the backward pass."""
        arrays = self.inputs() | self.cotangents()
        column = self.tokens * self.gates.size
        forward = sum(array.nbytes for array in arrays.values()) - arrays["gates"].nbytes + column
        return {"forward": forward, "backward": 2 * bytes_of(arrays, "x") + bytes_of(arrays, "out", "gates") + column}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The op on an engine; "mlx": MLX's operators."""
        if impl == "mlx":
            return lambda x, gates: (x * gates[..., self.e, None]).astype(x.dtype)
        return lambda x, gates: row_scale(x, gates, self.e, impl=impl)

    def formula(self, inputs: Named, cotangents: Named) -> dict[str, mx.array]:
        """By reference.py."""
        x, gates, dout = (
            each.reshape(self.tokens, each.shape[-1]) for each in (inputs["x"], inputs["gates"], cotangents["out"])
        )
        dx, dgates = reference.scale_backward(x, gates, self.e, dout)
        found = {"out": reference.scale_forward(x, gates, self.e), "dx": dx, "dgates": dgates}
        return {name: each.reshape(*self.shape[:-1], each.shape[-1]) for name, each in found.items()}

    def expected(self) -> Mapping[str, np.ndarray]:
        """In float64."""
        x, gates = (to_float64(self.inputs()[name]) for name in ("x", "gates"))
        dout = to_float64(self.cotangents()["out"])
        gate, dgates = gates[..., self.e, None], np.zeros_like(gates)
        dgates[..., self.e] = np.einsum("...c,...c->...", x, dout)
        return {"out": x * gate, "dx": dout * gate, "dgates": dgates}


@dataclass(frozen=True)
class RowScaleAccumulateCase(RowScaleCase):
    """row_scale_accumulate.

    Attributes:
        dst: Dtype of dst; None: that of x.
    """

    op: ClassVar[str] = "row_scale_accumulate"

    dst: mx.Dtype | None = None

    @property
    def own_parts(self) -> list[str]:
        """dst."""
        return [] if self.dst is None else [f"dst-{dtype_name(self.dst)}"]

    @property
    def result_dtype(self) -> mx.Dtype:
        """That of dst."""
        return self.dtype if self.dst is None else self.dst

    def inputs(self) -> dict[str, mx.array]:
        """dst, x and the gates."""
        return {"dst": self.array(3, self.shape, self.result_dtype), **super().inputs()}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The op on an engine; "mlx": MLX's operators."""
        if impl == "mlx":
            return lambda dst, x, gates: (dst + x * gates[..., self.e, None]).astype(dst.dtype)
        return lambda dst, x, gates: row_scale_accumulate(dst, x, gates, self.e, impl=impl)

    def formula(self, inputs: Named, cotangents: Named) -> dict[str, mx.array]:
        """By reference.py."""
        found = super().formula(inputs, cotangents)
        dst, x, gates = (each.reshape(self.tokens, each.shape[-1]) for each in inputs.values())
        out = reference.accumulate_forward(dst, x, gates, self.e).reshape(self.shape)
        return {"out": out, "ddst": cotangents["out"], "dx": found["dx"], "dgates": found["dgates"]}

    def expected(self) -> Mapping[str, np.ndarray]:
        """In float64."""
        found = super().expected()
        dst, dout = to_float64(self.inputs()["dst"]), to_float64(self.cotangents()["out"])
        return {"out": dst + found["out"], "ddst": dout, "dx": found["dx"], "dgates": found["dgates"]}
