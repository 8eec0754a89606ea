"""What expert_counts is proved on; cases.py has it together with topk_renorm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.routing import reference
from forge_mlx.kernels.routing.counts_op import expert_counts
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

INTEGERS: Final = (mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64)


@dataclass(frozen=True)
class CountsCase(OpCase):
    """expert_counts, which has no gradient: no cotangents. Judged by how far the counts are off.

    Attributes:
        shape: Shape of the indices, or of the gates.
        experts: num_experts.
        dtype: Dtype of the gates.
        indices: None for gates; else "any", each expert as often; "one", one everywhere; "outside", a third out of
            range; "none", all of them.
        indices_dtype: Dtype of the indices.
        k: Gates that are not 0 in a row.
        layout: As `laid_out` takes it.
    """

    op: ClassVar[str] = "expert_counts"

    shape: tuple[int, ...]
    experts: int
    dtype: mx.Dtype = mx.float32
    indices: str | None = None
    indices_dtype: mx.Dtype = mx.int32
    k: int = 2
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        if self.indices is None:
            parts = ["counts", shape, dtype_name(self.dtype)]
        else:
            parts = ["counts", shape, f"of{self.experts}", self.indices, dtype_name(self.indices_dtype)]
        return "-".join(parts + ([] if self.layout == "contiguous" else [self.layout]))

    def inputs(self) -> dict[str, mx.array]:
        """The indices or the gates."""
        if self.indices is not None:
            return {"indices": laid_out(mx.array(self._numbers()), self.layout)}
        random = np.random.default_rng(len(self.name))
        gates = random.uniform(0.1, 1, self.shape)
        gates[np.argsort(random.random(self.shape), axis=-1) >= self.k] = 0
        return {"indices": laid_out(mx.array(gates.astype(np.float32)).astype(self.dtype), self.layout)}

    def _numbers(self) -> np.ndarray:
        random = np.random.default_rng(len(self.name) + 1)
        numbers = random.integers(0, self.experts, self.shape)
        if self.indices == "one":
            numbers = np.full(self.shape, self.experts // 2)
        elif self.indices in ("outside", "none"):
            limits = mx.iinfo(self.indices_dtype)
            # The last two would be experts if they were cut down to 32 bits.
            names = (limits.min, -1, self.experts, limits.max, 2**32, 1 - 2**32)
            wrong = [each for each in names if limits.min <= each <= limits.max and not 0 <= each < self.experts]
            chosen = random.random(self.shape) < (1 / 3 if self.indices == "outside" else 2)
            numbers = np.where(chosen, random.choice(np.array(wrong, dtype=object), self.shape), numbers)
        return numbers.astype(dtype_name(self.indices_dtype))

    def cotangents(self) -> dict[str, mx.array]:
        """None: there is no gradient."""
        return {}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The counts on an engine; "mlx": by comparisons."""

        def by_mlx(indices: mx.array) -> mx.array:
            if self.indices is None:
                return mx.sum((indices != 0).reshape(-1, self.experts), axis=0)
            return mx.sum(indices.reshape(-1, 1) == mx.arange(self.experts, dtype=indices.dtype), axis=0)

        return by_mlx if impl == "mlx" else lambda indices: expert_counts(indices, self.experts, impl=impl)

    def run(self, impl: str) -> dict[str, mx.array]:
        """How far the counts are off on an engine; "formula": by reference.py."""
        inputs = self.inputs()
        found = self.formula(inputs, {}) if impl == "formula" else {"counts": self.function(impl)(*inputs.values())}
        off = found["counts"] - mx.array(self.counts().astype(np.int32))
        return {"counts_off": off.astype(mx.float32)}

    def formula(self, inputs: Mapping[str, mx.array], _cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """By reference.py."""
        return {"counts": reference.expert_counts(inputs["indices"], self.experts)}

    def counts(self) -> np.ndarray:
        """The right ones."""
        (array,) = self.inputs().values()
        if self.indices is None:
            return np.asarray(np.count_nonzero(to_float64(array).reshape(-1, self.experts), axis=0))
        # As Python's numbers: NumPy would compare uint64 with int64 in float64.
        known = [number for number in np.array(array).reshape(-1).tolist() if 0 <= number < self.experts]
        return np.bincount(np.array(known, np.int64), minlength=self.experts)

    def expected(self) -> Mapping[str, np.ndarray]:
        """Zeros."""
        return {"counts_off": np.zeros(self.experts)}

    def ideal_bytes(self) -> dict[str, int]:
        """The indices or gates, and the counts."""
        return {"forward": self.inputs()["indices"].nbytes + 4 * self.experts, "backward": 0}


def _counts_cases() -> list[CountsCase]:
    cases = []
    for dtype in FLOATS:
        cases += [
            *(CountsCase((9, experts), experts, dtype, k=min(2, experts)) for experts in (1, 3, 8, 33, 257)),
            *(CountsCase((70, experts), experts, dtype, k=8) for experts in (1023, 1024, 1025, 2100)),
            CountsCase((24,), 24, dtype),
            CountsCase((3, 700, 16), 16, dtype),
            CountsCase((0, 8), 8, dtype),
            *(CountsCase((9, 32), 32, dtype, layout=layout) for layout in LAYOUTS[1:]),
        ]
    cases += [
        CountsCase((), 3, indices="any"),
        CountsCase((3,), 1, indices="any"),
        *(CountsCase((37, 2), experts, indices="any") for experts in (8, 33, 1023, 1024, 1025, 5000)),
        CountsCase((2, 2000, 4), 64, indices="any"),
        CountsCase((3000, 2), 8, indices="one"),
        CountsCase((40, 8), 32, indices="none"),
        CountsCase((0, 8), 32, indices="any"),
        *(CountsCase((40, 8), 32, indices="outside", layout=layout) for layout in LAYOUTS[1:]),
        *(CountsCase((60, 2), 100, indices="outside", indices_dtype=each) for each in INTEGERS),
    ]
    return cases


COUNTS_CASES: Final = tuple(_counts_cases())
