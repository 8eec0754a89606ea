"""What embedding is proved and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import math
from typing import ClassVar, Final

from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.embedding import op, reference
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

INTEGERS: Final = (mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64)


@dataclass(frozen=True)
class EmbeddingCase(OpCase):
    """embedding of some ids with the gradient of the table.

    Attributes:
        table: V and C.
        ids_shape: Shape of the ids.
        dtype: Dtype of the table.
        ids: "any", each row as likely; "words", the first rows more often, as words are; "one", one id everywhere;
            "runs", whole chunks of two ids with others around them; "outside", a third of them out of range; "none",
            all of them.
        ids_dtype: Dtype of the ids.
        values: As `random_values` takes them.
        layout: Of the table and the cotangent, as `laid_out` takes it.
    """

    op: ClassVar[str] = "embedding"

    table: tuple[int, int]
    ids_shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    ids: str = "any"
    ids_dtype: mx.Dtype = mx.int32
    values: str = "normal"
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        shape = "x".join(map(str, self.ids_shape)) or "scalar"
        parts = ["x".join(map(str, self.table)), shape, dtype_name(self.dtype), self.ids]
        if self.ids_dtype != mx.int32:
            parts.append(dtype_name(self.ids_dtype))
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        return "-".join(parts)

    def inputs(self) -> dict[str, mx.array]:
        """The table."""
        random = np.random.default_rng(len(self.name))
        return {
            "weight": laid_out(mx.array(random_values(self.table, self.values, random)).astype(self.dtype), self.layout)
        }

    def constants(self) -> dict[str, mx.array]:
        """The ids."""
        return {"ids": mx.array(self.numbers()).astype(self.ids_dtype)}

    def numbers(self) -> np.ndarray:
        """The ids as NumPy has them, int64."""
        random = np.random.default_rng(len(self.name) + 1)
        rows, count = self.table[0], math.prod(self.ids_shape)
        if self.ids == "one":
            ids = np.full(count, rows // 2)
        elif self.ids == "words":
            ids = np.minimum(random.zipf(1.3, count) - 1, rows - 1)
        elif self.ids == "runs":
            ids = random.permutation(
                np.sort(random.choice([0, rows // 3, rows - 1, rows // 2], count, p=[0.45, 0.45, 0.05, 0.05]))
            )
        else:
            ids = random.integers(0, max(1, rows), count)
        if self.ids in ("outside", "none"):
            limits = mx.iinfo(self.ids_dtype)
            outside = [each for each in (limits.min, -1, rows, limits.max) if each in range(limits.min, limits.max + 1)]
            chosen = random.random(count) < (1 / 3 if self.ids == "outside" else 2)
            wrong = np.array([each for each in outside if not 0 <= each < rows], dtype=object)
            ids = np.where(chosen, random.choice(wrong, count), ids).astype(object)
            ids = ids.astype(np.uint64 if self.ids_dtype == mx.uint64 else np.int64)
        return ids.reshape(self.ids_shape)

    def cotangents(self) -> dict[str, mx.array]:
        """That of y."""
        random = np.random.default_rng(len(self.name) + 2)
        shape = (*self.ids_shape, self.table[1])
        dy = mx.array(random_values(shape, self.values, random)).astype(self.dtype)
        return {"y": dy if dy.ndim < 2 else laid_out(dy, self.layout)}

    def ideal_bytes(self) -> dict[str, int]:
        """Forward: ids, a row read and a row written for each. Backward: ids, their gradients, the table's gradient."""
        ids, y = self.constants()["ids"].nbytes, self.cotangents()["y"].nbytes
        return {"forward": ids + 2 * y, "backward": ids + y + self.inputs()["weight"].nbytes}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """The rows of weight on an engine; "mlx": weight[ids], which reads beside the table for an id out of range."""
        ids = self.constants()["ids"]

        def call(weight: mx.array) -> mx.array:
            return weight[ids] if impl == "mlx" else op.embedding(weight, ids, impl=impl)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """By reference.py."""
        weight, dy = inputs["weight"], cotangents["y"]
        if weight.size == 0 or dy.size == 0:
            return {"y": mx.zeros(dy.shape, dy.dtype), "dweight": mx.zeros(weight.shape, weight.dtype)}
        ids = reference.flat_ids(self.constants()["ids"], self.table[0])
        dweight = reference.backward(weight, ids, dy.reshape(-1, self.table[1]))
        return {"y": reference.forward(weight, ids).reshape(dy.shape), "dweight": dweight}

    def expected(self) -> Mapping[str, np.ndarray]:
        """y and dweight row by row."""
        weight, dy = to_float64(self.inputs()["weight"]), to_float64(self.cotangents()["y"])
        y, dweight = np.zeros_like(dy), np.zeros_like(weight)
        for place, number in np.ndenumerate(self.numbers()):
            if 0 <= int(number) < self.table[0]:
                y[place] = weight[int(number)]
                dweight[int(number)] += dy[place]
        return {"y": y, "dweight": dweight}


def _cases() -> list[EmbeddingCase]:
    cases = []
    for dtype in FLOATS:
        # Rows around a vector, a simdgroup's lanes and its parts of a row; tables and ids around their threadgroups.
        for columns in (1, 7, 8, 31, 32, 33, 257, 1025):
            cases.append(EmbeddingCase((11, columns), (9,), dtype))
        cases += [
            EmbeddingCase((1, 1), (), dtype),
            EmbeddingCase((5, 24), (), dtype, "none"),
            EmbeddingCase((3, 16), (1,), dtype),
            EmbeddingCase((1023, 24), (3, 31), dtype, "words"),
            EmbeddingCase((33, 40), (2, 3, 67), dtype, "outside"),
            EmbeddingCase((33, 40), (50,), dtype, "none"),
            EmbeddingCase((6, 24), (31,), dtype, "one"),
            EmbeddingCase((6, 24), (32,), dtype, "one"),
            EmbeddingCase((6, 24), (1025,), dtype, "one"),
            EmbeddingCase((7, 264), (400,), dtype, "runs"),
            EmbeddingCase((40, 20), (1500,), dtype, "runs"),
            *(EmbeddingCase((12, 16), (40,), dtype, values=values) for values in ("zeros", "ties", "spike", "ranges")),
            *(
                EmbeddingCase((12, 16), (5, 8), dtype, layout=layout)
                for layout in ("transposed", "sliced", "broadcast", "shifted")
            ),
            EmbeddingCase((5, 8), (0,), dtype),
            EmbeddingCase((5, 8), (2, 0, 3), dtype),
            EmbeddingCase((0, 8), (3,), dtype, "none"),
            EmbeddingCase((5, 0), (3,), dtype),
        ]
    cases += [EmbeddingCase((100, 12), (60,), ids="outside", ids_dtype=each) for each in INTEGERS if each != mx.int32]
    for dtype in (mx.float32, mx.bfloat16):
        cases += [EmbeddingCase((12, 16), (40,), dtype, values=values) for values in ("1e-30", "1e30")]
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    EmbeddingCase(table, ids, dtype, "words")
    for dtype in (mx.float32, mx.bfloat16)
    for table, ids in (((8192, 256), (16, 256)), ((50304, 512), (16, 512)))
)

TRAFFIC: Final = (
    EmbeddingCase((1000, 512), (4, 512)),
    EmbeddingCase((1000, 1024), (1024,), mx.bfloat16, "words"),
    EmbeddingCase((4096, 128), (4096,), ids="words"),
    EmbeddingCase((50, 256), (4096,), ids="one"),
    EmbeddingCase((64, 4096), (128,), mx.float16),
)
