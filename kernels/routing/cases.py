"""What topk_renorm and expert_counts are proved, timed and counted on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import math
from typing import ClassVar, Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.routing import reference
from forge_mlx.kernels.routing.counts_cases import COUNTS_CASES, CountsCase
from forge_mlx.kernels.routing.topk_op import topk_renorm
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class TopkCase(OpCase):
    """topk_renorm of some scores with their gradient.

    The indices are judged by how far they are from the right ones, so that no tolerance hides a wrong one.

    Attributes:
        shape: Shape of p.
        k: Experts of each token.
        dtype: Dtype of p.
        bias: None; "experts", one for each; "tokens", one for each element of p; "groups", -inf for all but a quarter
            of the experts and at least k, others for each token; "closed", -inf for all but one expert.
        bias_dtype: Its dtype.
        normalize: As topk_renorm takes it.
        eps: As topk_renorm takes it.
        values: What p holds: "softmax" or "sigmoid" of normal numbers, "few" different numbers with many ties, or as
            `random_values` takes it.
        layout: How p and the cotangent lie in memory, as `laid_out` takes it.
    """

    op: ClassVar[str] = "topk_renorm"

    shape: tuple[int, ...]
    k: int
    dtype: mx.Dtype = mx.float32
    bias: str | None = None
    bias_dtype: mx.Dtype = mx.float32
    normalize: bool = True
    eps: float = 1e-20
    values: str = "softmax"
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = ["x".join(map(str, self.shape)), f"k{self.k}", dtype_name(self.dtype)]
        parts += [] if self.bias is None else [self.bias]
        parts += [] if self.bias_dtype == mx.float32 else [dtype_name(self.bias_dtype)]
        parts += [] if self.normalize else ["unnormalized"]
        parts += [] if self.eps == 1e-20 else [f"eps{self.eps:g}"]
        parts += [text for text, usual in ((self.values, "softmax"), (self.layout, "contiguous")) if text != usual]
        return "-".join(parts)

    def inputs(self) -> dict[str, mx.array]:
        """p."""
        random = np.random.default_rng(len(self.name))
        x = random.normal(size=self.shape)
        if self.values == "softmax":
            x = np.exp(x)
            x /= np.maximum(x.sum(axis=-1, keepdims=True), 1e-30)
        elif self.values == "sigmoid":
            x = 1 / (1 + np.exp(-x))
        elif self.values == "few":
            x = random.integers(0, 3, self.shape) / 4
        else:
            x = random_values(self.shape, self.values, random)
        return {"p": laid_out(mx.array(x.astype(np.float32)).astype(self.dtype), self.layout)}

    def constants(self) -> dict[str, mx.array]:
        """The bias, if there is one."""
        if self.bias is None:
            return {}
        random = np.random.default_rng(len(self.name) + 1)
        experts = self.shape[-1]
        values = random.normal(size=(experts,) if self.bias == "experts" else self.shape) / experts
        if self.bias == "groups":
            kept = max(self.k, experts // 4)
            values[np.argsort(random.random(self.shape), axis=-1) >= kept] = -np.inf
        elif self.bias == "closed":
            values = np.where(np.arange(experts) == experts // 2, 0, -np.inf)
        return {"bias": mx.array(values.astype(np.float32)).astype(self.bias_dtype)}

    def cotangents(self) -> dict[str, mx.array]:
        """That of the gates, and zeros for the indices, which have none."""
        random = np.random.default_rng(len(self.name) + 2)
        dgates = mx.array(random.normal(size=self.shape).astype(np.float32)).astype(self.dtype)
        return {
            "gates": laid_out(dgates, self.layout),
            "indices": mx.zeros((*self.shape[:-1], self.k), mx.int32),
        }

    def function(self, impl: str) -> Callable[..., Arrays]:
        """topk_renorm of p on an engine; "mlx": `mx.argpartition` and what has to follow it."""
        bias = self.constants().get("bias")

        def by_mlx(p: mx.array) -> Arrays:
            scores = p if bias is None else p + bias
            indices = mx.argpartition(-mx.stop_gradient(scores), self.k - 1, axis=-1)[..., : self.k].astype(mx.int32)
            chosen = mx.take_along_axis(p, indices, axis=-1)
            if self.normalize:
                chosen = chosen / (mx.sum(chosen, axis=-1, keepdims=True) + self.eps)
            return mx.put_along_axis(mx.zeros_like(p), indices, chosen, axis=-1), indices

        def call(p: mx.array) -> Arrays:
            return topk_renorm(p, self.k, bias, self.normalize, self.eps, impl=impl)

        return by_mlx if impl == "mlx" else call

    def run(self, impl: str) -> dict[str, mx.array]:
        """Gates, their gradient and how far the indices are off, on an engine; "formula": by reference.py."""
        found = super().run(impl)
        return self._judged(found["gates"], found["indices"], found["dp"])

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """By reference.py."""
        p, bias = inputs["p"], self.constants().get("bias")
        gates, indices = reference.topk_renorm(p, self.k, bias, self.normalize, self.eps)
        if p.size == 0:
            return {"gates": gates, "indices": indices, "dp": gates}
        dp = reference.backward(p, indices, cotangents["gates"], self.normalize, self.eps)
        return {"gates": gates, "indices": indices, "dp": dp}

    def indices(self) -> np.ndarray:
        """The right ones: p + bias in float32, sorted by falling score and rising index. NaN comes first."""
        scores = np.array(self.inputs()["p"].astype(mx.float32))
        for bias in self.constants().values():
            scores = scores + np.array(bias.astype(mx.float32))
        number = np.broadcast_to(np.arange(self.shape[-1]), self.shape)
        order = np.lexsort((number, np.where(np.isnan(scores), 0, -scores), ~np.isnan(scores)), axis=-1)
        return order[..., : self.k]

    def expected(self) -> Mapping[str, np.ndarray]:
        """The gates and their gradient in float64, of p as the dtype has rounded it."""
        p, dgates, indices = to_float64(self.inputs()["p"]), to_float64(self.cotangents()["gates"]), self.indices()
        chosen, g = np.take_along_axis(p, indices, axis=-1), np.take_along_axis(dgates, indices, axis=-1)
        if self.normalize:
            total = chosen.sum(axis=-1, keepdims=True) + self.eps
            chosen = chosen / total
            g = (g - (chosen * g).sum(axis=-1, keepdims=True)) / total
        gates, dp = np.zeros_like(p), np.zeros_like(p)
        np.put_along_axis(gates, indices, chosen, axis=-1)
        np.put_along_axis(dp, indices, g, axis=-1)
        return {"gates": gates, "indices_off": np.zeros(indices.shape), "dp": dp}

    def ideal_bytes(self) -> dict[str, int]:
        """Forward: p, bias, gates and indices. Backward: indices, dp, and of p and the cotangent what they name."""
        named = math.prod(self.shape[:-1]) * self.k
        dense = self.inputs()["p"].nbytes
        read = named * self.dtype.size * (2 if self.normalize else 1)
        return {"forward": super().ideal_bytes()["forward"], "backward": 4 * named + read + dense}

    def _judged(self, gates: mx.array, indices: mx.array, dp: mx.array) -> dict[str, mx.array]:
        off = (indices - mx.array(self.indices().astype(np.int32))).astype(mx.float32)
        return {"gates": gates, "indices_off": off, "dp": dp}


def _topk_cases() -> list[TopkCase]:
    cases = []
    for dtype in FLOATS:
        cases += [
            # Around a lane's vector, the lanes of a simdgroup, and the most that these hold.
            *(TopkCase((3, experts), min(2, experts), dtype) for experts in (1, 4, 7, 8, 9, 33, 64, 127, 129)),
            *(TopkCase((5, experts), 8, dtype) for experts in (31, 32, 65, 257, 513, 1023, 1024)),
            *(TopkCase((3, experts), 1, dtype) for experts in (2, 60, 1024)),
            *(TopkCase((3, experts), experts, dtype) for experts in (8, 33, 256, 1023)),
            TopkCase((13,), 3, dtype),
            TopkCase((2, 3, 5, 24), 4, dtype),
            TopkCase((300, 8), 2, dtype),
            TopkCase((0, 8), 2, dtype),
            *(TopkCase((33, 64), 6, dtype, normalize=False, bias=bias) for bias in (None, "experts")),
            *(TopkCase((2, 33, 64), 6, dtype, bias=bias) for bias in ("experts", "tokens", "groups", "closed")),
            *(TopkCase((7, 300), 8, dtype, bias=bias) for bias in ("experts", "groups")),
            TopkCase((5, 6), 2, dtype, bias="experts"),
            *(TopkCase((40, 24), 4, dtype, bias="tokens", bias_dtype=each) for each in (mx.float16, mx.bfloat16)),
            *(TopkCase((9, 40), 5, dtype, values=values) for values in ("sigmoid", "few", "ties", "spike")),
            TopkCase((9, 40), 5, dtype, values="zeros", eps=0.5),
            TopkCase((9, 300), 40, dtype, values="few"),
            TopkCase((9, 40), 5, dtype, values="few", bias="experts", normalize=False),
            TopkCase((9, 40), 5, dtype, eps=0.5),
            TopkCase((9, 40), 5, dtype, values="normal", normalize=False),
            *(TopkCase((6, 48), 3, dtype, layout=layout) for layout in LAYOUTS[1:]),
        ]
    for dtype in (mx.float32, mx.bfloat16):
        cases += [
            TopkCase((9, 40), 5, dtype, values="1e30", normalize=False),
            TopkCase((9, 40), 5, dtype, values="1e-30", normalize=False),
            TopkCase((9, 40), 40, dtype, values="1e-30"),
            # In float16 a gradient over the sum 0 + eps is infinite.
            *(TopkCase((9, experts), 5, dtype, values="zeros") for experts in (40, 300)),
        ]
    return cases


CASES: Final = (*_topk_cases(), *COUNTS_CASES)

TIMED: Final = (
    *(
        TopkCase((4096, experts), k, dtype, "experts")
        for dtype in (mx.float32, mx.bfloat16)
        for experts, k in ((8, 2), (64, 8), (256, 8))
    ),
    CountsCase((4096, 8), 64, indices="any"),
    CountsCase((4096, 64), 64, k=8),
)

TRAFFIC: Final = (
    TopkCase((4096, 8), 2),
    TopkCase((2048, 64), 8, bias="experts"),
    TopkCase((2048, 64), 8, mx.float16, normalize=False),
    TopkCase((512, 256), 8, mx.bfloat16, "tokens"),
    TopkCase((256, 1024), 8, bias="experts"),
    CountsCase((8192, 8), 64, indices="any"),
    CountsCase((8192, 8), 8, k=2),
    CountsCase((2048, 64), 64, mx.bfloat16, k=8),
)
