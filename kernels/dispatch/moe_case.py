"""Cases of moe_dispatch and moe_combine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.dispatch import moe_combine, moe_dispatch, reference
from forge_mlx.kernels.dispatch.plan import DispatchPlan, make_plan
from forge_mlx.kernels.dispatch.row_scale_case import Named, TokenCase, bytes_of
import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class DispatchCase(TokenCase):
    """moe_dispatch.

    Attributes:
        k: Experts of each token.
        routes: "any", k different experts, each as likely (k at most E); "one", expert E - 1 for all; "repeated", with
            replacement; "outside", a third of the slots -1 or E or more; "none", all -1.
    """

    op: ClassVar[str] = "moe_dispatch"

    k: int = 2
    routes: str = "any"

    @property
    def own_parts(self) -> list[str]:
        """k and the routes."""
        return [f"top{self.k}", *([] if self.routes == "any" else [self.routes])]

    def numbers(self) -> np.ndarray:
        """The indices as NumPy has them, `[N, k]`."""
        random = np.random.default_rng([4, len(self.name)])
        count, k, experts = self.tokens, self.k, self.experts
        if self.routes == "any":
            return np.argsort(random.random((count, experts)), axis=1)[:, :k]
        if self.routes in ("one", "none"):
            return np.full((count, k), experts - 1 if self.routes == "one" else -1)
        found = random.integers(0, experts, (count, k))
        outside = random.choice([-1, -7, experts, 2**31 - 2], (count, k))
        return np.where(random.random((count, k)) < (1 / 3 if self.routes == "outside" else 0), outside, found)

    def constants(self) -> dict[str, mx.array]:
        """The indices."""
        return {"indices": mx.array(self.numbers().astype(np.int32)).reshape(*self.shape[:-1], self.k)}

    def plan(self) -> DispatchPlan:
        """Of the indices."""
        return make_plan(self.constants()["indices"])

    def order(self) -> np.ndarray:
        """The slot of each row, by NumPy."""
        flat = self.numbers().reshape(-1)
        return np.argsort(np.where(flat < 0, -1, flat), kind="stable")

    def inputs(self) -> dict[str, mx.array]:
        """x."""
        return {"x": self.array(0, self.shape, self.dtype, self.values)}

    def cotangents(self) -> dict[str, mx.array]:
        """That of the rows."""
        return {"rows": self.array(2, (self.tokens * self.k, self.shape[-1]), self.dtype)}

    def ideal_bytes(self) -> dict[str, int]:
        """Forward and backward the same: the tokens, the rows, and where they are."""
        moved = bytes_of(self.inputs() | self.cotangents() | self.constants(), "x", "rows", "indices")
        return {"forward": moved, "backward": moved}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The rows on an engine; "mlx": x[tokens] in the order of a sort of the indices."""
        (indices,) = self.constants().values()
        if impl == "mlx":
            return lambda x: x.reshape(self.tokens, -1)[mx.argsort(indices.reshape(-1)) // self.k]
        return lambda x: moe_dispatch(x, indices, impl=impl)[0]

    def formula(self, inputs: Named, cotangents: Named) -> dict[str, mx.array]:
        """By reference.py."""
        plan, x = self.plan(), inputs["x"]
        rows = reference.dispatch_forward(x.reshape(self.tokens, x.shape[-1]), plan.tokens)
        dx = reference.dispatch_backward(cotangents["rows"], plan.positions.reshape(self.tokens, self.k))
        return {"rows": rows, "dx": dx.reshape(self.shape)}

    def expected(self) -> Mapping[str, np.ndarray]:
        """In float64."""
        x, drows = to_float64(self.inputs()["x"]), to_float64(self.cotangents()["rows"])
        tokens, dx = self.order() // self.k, np.zeros((self.tokens, self.shape[-1]))
        np.add.at(dx, tokens, drows)
        return {"rows": x.reshape(self.tokens, self.shape[-1])[tokens], "dx": dx.reshape(self.shape)}


@dataclass(frozen=True)
class CombineCase(DispatchCase):
    """moe_combine of a plan."""

    op: ClassVar[str] = "moe_combine"

    def inputs(self) -> dict[str, mx.array]:
        """y and the gates."""
        shape = (self.tokens * self.k, self.shape[-1])
        return {"y": self.array(0, shape, self.dtype, self.values), "gates": self.gate_array()}

    def cotangents(self) -> dict[str, mx.array]:
        """That of out."""
        return {"out": self.array(2, self.shape, self.dtype)}

    def ideal_bytes(self) -> dict[str, int]:
        """For each slot its expert, its row and its gate; the gradients of all gates, in float32."""
        arrays = self.inputs() | self.cotangents()
        slots = self.tokens * self.k * (8 + self.gates.size)
        dgates = 4 * self.tokens * self.experts
        forward = slots + bytes_of(arrays, "y", "out")
        return {"forward": forward, "backward": forward + bytes_of(arrays, "y") + dgates}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The op on an engine; "mlx": the rows back in the order of the slots, times the gates of these, and summed."""
        plan = self.plan()

        def of_mlx(y: mx.array, gates: mx.array) -> mx.array:
            weights = mx.take_along_axis(gates, plan.indices, axis=-1)
            return (y[plan.positions] * weights[..., None]).sum(axis=-2).astype(y.dtype)

        return of_mlx if impl == "mlx" else lambda y, gates: moe_combine(y, gates, plan, impl=impl)

    def formula(self, inputs: Named, cotangents: Named) -> dict[str, mx.array]:
        """By reference.py."""
        plan, y = self.plan(), inputs["y"]
        gates, positions, indices, dout = (
            each.reshape(self.tokens, each.shape[-1])
            for each in (inputs["gates"], plan.positions, plan.indices, cotangents["out"])
        )
        out = reference.combine_forward(y, gates, positions, indices)
        dy, dgates = reference.combine_backward(y, gates, positions, indices, plan.slots, dout)
        return {"out": out.reshape(self.shape), "dy": dy, "dgates": dgates.reshape(inputs["gates"].shape)}

    def expected(self) -> Mapping[str, np.ndarray]:
        """In float64, row by row."""
        y, gates = (to_float64(each) for each in self.inputs().values())
        wide = gates.reshape(self.tokens, self.experts)
        dout = to_float64(self.cotangents()["out"]).reshape(self.tokens, self.shape[-1])
        out, dy, dgates = np.zeros_like(dout), np.zeros_like(y), np.zeros_like(wide)
        for row, slot in enumerate(self.order()):
            token, expert = slot // self.k, self.numbers().reshape(-1)[slot]
            if 0 <= expert < self.experts:
                out[token] += wide[token, expert] * y[row]
                dy[row] = wide[token, expert] * dout[token]
                dgates[token, expert] += y[row] @ dout[token]
        return {"out": out.reshape(self.shape), "dy": dy, "dgates": dgates.reshape(gates.shape)}
