"""What adamw_step is proved, timed and counted on. It has no gradient: its cases have no cotangents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.optimizer import reference
from forge_mlx.kernels.optimizer.op import adamw_step
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

RATE: Final = 0.01
BETAS: Final = (0.9, 0.95)


@dataclass(frozen=True)
class AdamWStepCase(OpCase):
    """One step of one tensor.

    Attributes:
        shape: Shape of w.
        dtype: Dtype of w.
        g_dtype: Dtype of g; None: that of w.
        master: Whether a float32 copy takes the update.
        values: What g holds, as `random_values` takes it; m and v are what such gradients make of them.
        layout: How all arrays lie in memory, as `laid_out` takes it.
        step: The number of the step.
        eps: As adamw_step takes it.
        weight_decay: As adamw_step takes it.
        grad_scale: As adamw_step takes it.
        bias_correction: As adamw_step takes it.
    """

    op = "adamw_step"

    shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    g_dtype: mx.Dtype | None = None
    master: bool = False
    values: str = "normal"
    layout: str = "contiguous"
    step: int = 3
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_scale: float = 0.37
    bias_correction: bool = True

    @property
    def name(self) -> str:
        """A readable id."""
        parts = ["x".join(map(str, self.shape)) or "scalar", dtype_name(self.dtype)]
        parts += [f"g-{dtype_name(self.g_dtype)}"] if self.g_dtype is not None else []
        parts += [word for word, wanted in (("master", self.master), ("biased", not self.bias_correction)) if wanted]
        parts += [each for each in (self.values, self.layout) if each not in ("normal", "contiguous")]
        usual = {"step": 3, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.37}
        return "-".join(
            parts + [f"{name}{getattr(self, name):g}" for name in usual if getattr(self, name) != usual[name]]
        )

    def inputs(self) -> dict[str, mx.array]:
        """w, g, m, v and, with a master, the float32 numbers that w is rounded from."""
        random = np.random.default_rng(len(self.name))
        g, before = (random_values(self.shape, self.values, random) for _ in range(2))
        master = random.normal(size=self.shape).astype(np.float32)
        # In float32, where tiny squares are 0.
        arrays = {"w": master, "g": g, "m": before * np.float32(0.1), "v": np.square(before) * np.float32(0.05)}
        dtypes = {"w": self.dtype, "g": self.g_dtype or self.dtype}
        made = {
            name: laid_out(mx.array(array).astype(dtypes.get(name, mx.float32)), self.layout)
            for name, array in (arrays | ({"master": master} if self.master else {})).items()
        }
        return made

    def cotangents(self) -> dict[str, mx.array]:
        """None: there is no gradient."""
        return {}

    def function(self, impl: str) -> Callable[..., Arrays]:
        """The step of the arrays on an engine; "mlx": that of mlx.optimizers.AdamW, in float32."""

        def call(w: mx.array, g: mx.array, m: mx.array, v: mx.array, master: mx.array | None = None) -> Arrays:
            if impl == "mlx":
                return self._by_mlx(w, g, m, v, master)
            return adamw_step(w, g, m, v, master=master, impl=impl, **self._settings)

        return call

    def formula(self, inputs: Mapping[str, mx.array], _cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The results by reference.py."""
        w, g, m, v = (inputs[name] for name in ("w", "g", "m", "v"))
        return self._named(reference.adamw_step(w, g, m, v, master=inputs.get("master"), **self._settings))

    def run(self, impl: str) -> dict[str, mx.array]:
        """The results by name on an engine; "formula": by reference.py."""
        inputs = self.inputs()
        if impl == "formula":
            return self.formula(inputs, {})
        return self._named(self.function(impl)(*inputs.values()))

    def expected(self) -> Mapping[str, np.ndarray]:
        """The results in float64, of the inputs as the dtypes have rounded them."""
        inputs = {name: to_float64(array) for name, array in self.inputs().items()}
        g = self.grad_scale * inputs["g"]
        b1, b2 = BETAS
        m, v = b1 * inputs["m"] + (1 - b1) * g, b2 * inputs["v"] + (1 - b2) * g**2
        c1, c2 = (1 - b1**self.step, 1 - b2**self.step) if self.bias_correction else (1, 1)
        w = inputs.get("master", inputs["w"]) * (1 - RATE * self.weight_decay)
        w = w - RATE / c1 * m / (np.sqrt(v / c2) + self.eps)
        return {"new_w": w, "new_m": m, "new_v": v} | ({"new_master": w} if self.master else {})

    def ideal_bytes(self) -> dict[str, int]:
        """Every array once; w is not read where a master takes the update."""
        inputs = {name: array.nbytes for name, array in self.inputs().items()}
        written = sum(inputs.values()) - inputs["g"]
        return {"forward": sum(inputs.values()) - (inputs["w"] if self.master else 0) + written, "backward": 0}

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            **{"lr": RATE, "betas": BETAS, "eps": self.eps, "weight_decay": self.weight_decay, "step": self.step},
            **{"grad_scale": self.grad_scale, "bias_correction": self.bias_correction},
        }

    def _named(self, results: Arrays) -> dict[str, mx.array]:
        return dict(zip(("new_w", "new_m", "new_v", "new_master"), results, strict=False))

    def _by_mlx(self, w: mx.array, g: mx.array, m: mx.array, v: mx.array, master: mx.array | None) -> Arrays:
        optimizer = optim.AdamW(RATE, list(BETAS), self.eps, self.weight_decay, self.bias_correction)
        optimizer.state["step"] = mx.array(self.step, mx.uint64)
        state = {"m": m, "v": v}
        weight = (w if master is None else master).astype(mx.float32)
        weight = optimizer.apply_single(g.astype(mx.float32) * self.grad_scale, weight, state)
        return (weight.astype(w.dtype), state["m"], state["v"], weight)[: 3 if master is None else 4]


def _cases() -> list[AdamWStepCase]:
    cases = []
    for dtype in FLOATS:
        sizes = (1, 7, 8, 31, 32, 33, 1023, 1025, 256 * 8 + 1, 3 * 256 * 8 + 5, 10007)
        cases += [
            *(AdamWStepCase((size,), dtype) for size in sizes),
            *(AdamWStepCase(shape, dtype) for shape in ((), (0, 3), (2, 3, 5), (67, 40))),
            *(AdamWStepCase((5, 72), dtype, values=values) for values in ("zeros", "ranges", "ties", "1e-30")),
            *(AdamWStepCase((6, 48), dtype, layout=layout) for layout in LAYOUTS[1:]),
            AdamWStepCase((5, 72), dtype, step=1),
            AdamWStepCase((5, 72), dtype, step=1000),
            AdamWStepCase((5, 72), dtype, eps=0.5),
            AdamWStepCase((5, 72), dtype, weight_decay=0.0),
            AdamWStepCase((5, 72), dtype, grad_scale=1.0),
            AdamWStepCase((5, 72), dtype, bias_correction=False),
        ]
    for dtype in (mx.float16, mx.bfloat16):
        cases += [
            *(AdamWStepCase((size,), dtype, master=True) for size in (1, 7, 33, 1025, 10007)),
            AdamWStepCase((), dtype, master=True),
            AdamWStepCase((0, 3), dtype, master=True),
            AdamWStepCase((67, 40), dtype, mx.float32, master=True),
            AdamWStepCase((67, 41), dtype, mx.float32),
            AdamWStepCase((6, 48), dtype, master=True, layout="shifted"),
        ]
    cases += [AdamWStepCase((67, 41), mx.float32, mx.bfloat16), AdamWStepCase((67, 41), mx.float32, master=True)]
    return cases + [AdamWStepCase((5, 72), dtype, values="1e15") for dtype in (mx.float32, mx.bfloat16)]


CASES: Final = tuple(_cases())

TIMED: Final = (
    *(AdamWStepCase((size,), dtype) for dtype in (mx.float32, mx.bfloat16) for size in (1 << 24, 1 << 18)),
    AdamWStepCase((1 << 24,), mx.bfloat16, master=True),
)

TRAFFIC: Final = (
    AdamWStepCase((512, 1024)),
    AdamWStepCase((999, 7)),
    AdamWStepCase((512, 1024), mx.bfloat16),
    AdamWStepCase((512, 1024), mx.bfloat16, master=True),
)
