"""What matmul is proved, timed and counted on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
import math
from typing import Final

from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.matmul import reference
from forge_mlx.kernels.matmul.op import matmul
from forge_mlx.kernels.matmul.tiles import TILES, choose
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class MatmulCase(OpCase):
    """One product with its gradients.

    Attributes:
        a: Batch axes, M and K, before a transpose.
        b: Batch axes, K and N, before a transpose.
        dtype: Dtype of a, and of b and c if they have no other.
        c: Shape of what is added; None for nothing.
        transpose: Which operands lie transposed: "", "a", "b" or "ab".
        variant: As matmul takes it.
        values: What a and b hold, as `random_values` takes it.
        layout: How a and b lie in memory, as `laid_out` takes it.
        b_dtype: Dtype of b; None: that of a.
        c_dtype: Dtype of c; None: that of a.
    """

    op = "matmul"

    a: tuple[int, ...]
    b: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    c: tuple[int, ...] | None = None
    transpose: str = ""
    variant: str = "auto"
    values: str = "normal"
    layout: str = "contiguous"
    b_dtype: mx.Dtype | None = None
    c_dtype: mx.Dtype | None = None

    @property
    def name(self) -> str:
        """A readable id."""
        shapes = [("x".join(map(str, shape)) or "scalar") for shape in (self.a, self.b, self.c) if shape is not None]
        parts = ["-".join(shapes), dtype_name(self.dtype), self.variant]
        parts += [f"t{self.transpose}"] if self.transpose else []
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        parts += [f"{name}-{dtype_name(each)}" for name, each in (("b", self.b_dtype), ("c", self.c_dtype)) if each]
        return "-".join(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return (*np.broadcast_shapes(self.a[:-2], self.b[:-2]), self.a[-2], self.b[-1])

    def inputs(self) -> dict[str, mx.array]:
        """a, b and perhaps c."""
        random = np.random.default_rng(len(self.name))
        arrays = {"a": self._operand(self.a, self.dtype, "a" in self.transpose, random)}
        arrays["b"] = self._operand(self.b, self.b_dtype or self.dtype, "b" in self.transpose, random)
        if self.c is not None:
            c = random.normal(size=self.c).astype(np.float32)
            arrays["c"] = mx.array(c).astype(self.c_dtype or self.dtype)
        return arrays

    def _operand(self, shape: tuple[int, ...], dtype: mx.Dtype, swap: bool, random: np.random.Generator) -> mx.array:
        shape = (*shape[:-2], shape[-1], shape[-2]) if swap else shape
        return laid_out(mx.array(random_values(shape, self.values, random)).astype(dtype), self.layout)

    def cotangents(self) -> dict[str, mx.array]:
        """dy."""
        dy = np.random.default_rng(1000 + len(self.name)).normal(size=self.shape).astype(np.float32)
        return {"y": mx.array(dy).astype(self._result_dtype)}

    @property
    def _result_dtype(self) -> mx.Dtype:
        dtype = mx.result_type(self.dtype, self.b_dtype or self.dtype)
        return dtype if self.c is None else mx.result_type(dtype, self.c_dtype or self.dtype)

    @property
    def _swaps(self) -> tuple[bool, bool]:
        return "a" in self.transpose, "b" in self.transpose

    def function(self, impl: str) -> Callable[..., mx.array]:
        """matmul of a, b and perhaps c on an engine; "mlx": mx.matmul or mx.addmm."""
        a_swap, b_swap = self._swaps
        # The variants are kernels, which the reference has not.
        variant = "auto" if impl == "reference" else self.variant

        def call(a: mx.array, b: mx.array, c: mx.array | None = None) -> mx.array:
            if impl == "mlx":
                a = a.swapaxes(-1, -2) if a_swap else a
                b = b.swapaxes(-1, -2) if b_swap else b
                return mx.matmul(a, b) if c is None else mx.addmm(c, a, b)
            return matmul(a, b, transpose_a=a_swap, transpose_b=b_swap, accumulate=c, variant=variant, impl=impl)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """y, da, db and dc by reference.py."""
        a, b, c = inputs["a"], inputs["b"], inputs.get("c")
        y = reference.forward(a, b, c, *self._swaps, self._result_dtype)
        da, db, dc = reference.backward(a, b, c, cotangents["y"], *self._swaps)
        results = {"y": y, "da": da, "db": db}
        return results if dc is None else results | {"dc": dc}

    def expected(self) -> Mapping[str, np.ndarray]:
        """y, da, db and dc in float64, of the inputs as the dtype has rounded them."""
        arrays = {name: to_float64(array) for name, array in self.inputs().items()}
        a, b = (_swapped(arrays[name], swap) for name, swap in zip("ab", self._swaps, strict=True))
        dy = to_float64(self.cotangents()["y"])
        gradients = {"da": dy @ _swapped(b, True), "db": _swapped(a, True) @ dy}
        results = {"y": a @ b + arrays.get("c", 0.0)}
        for name, swap in zip(("da", "db"), self._swaps, strict=True):
            results[name] = _summed_to(_swapped(gradients[name], swap), arrays[name[1]].shape)
        return results | ({"dc": _summed_to(dy, self.c)} if self.c is not None else {})

    def ideal_bytes(self) -> dict[str, int]:
        """What the blocks imply: a once for each column of blocks, b once for each row of blocks, y and c once.

        A block of one product reads its rows of a and its columns of b once. Batches must be those of a alone, which
        become rows, or the same for both.
        """
        inputs, (dy,) = self.inputs(), self.cotangents().values()
        a, b, c = inputs["a"], inputs["b"], inputs.get("c")
        rows, depth, columns = self.a[-2], self.a[-1], self.b[-1]
        batches = math.prod(self.b[:-2])
        rows *= math.prod(self.a[:-2]) // batches
        a_swap, b_swap = self._swaps
        y, sa, sb = dy.itemsize, a.itemsize, b.itemsize
        forward = _blocked(rows, columns, depth, (sa, sb, y), (a_swap, b_swap), c)
        if a_swap:
            da = _blocked(depth, rows, columns, (sb, y, sa), (b_swap, True))
        else:
            da = _blocked(rows, depth, columns, (y, sb, sa), (False, not b_swap))
        if b_swap:
            db = _blocked(columns, depth, rows, (y, sa, sb), (True, a_swap))
        else:
            db = _blocked(depth, columns, rows, (sa, y, sb), (not a_swap, False))
        dc = 0
        if c is not None and c.size != dy.size:
            dc = _blocked(1, columns, rows, (y, y, c.itemsize), (True, False))
        return {"forward": batches * forward, "backward": batches * (da + db + dc)}


def _blocked(
    rows: int,
    columns: int,
    depth: int,
    sizes: tuple[int, int, int],
    transposes: tuple[bool, bool],
    c: mx.array | None = None,
) -> int:
    """Bytes of one product, given the sizes of an element of both operands and of the result."""
    variant = choose(rows, columns, depth, *transposes)
    tiles = TILES[variant]
    # naive: a thread reads its row and its column itself.
    reads_a, reads_b = (columns, rows) if variant == "naive" else (-(-columns // tiles.columns), -(-rows // tiles.rows))
    moved = reads_a * rows * depth * sizes[0] + reads_b * depth * columns * sizes[1] + rows * columns * sizes[2]
    if c is None:
        return moved
    # A row that is added to all is read by every thread that needs it: in simdgroup by one in four rows.
    is_shared = c.size != rows * columns and variant == "simdgroup"
    return moved + rows * columns * c.itemsize // (4 if is_shared else 1)


def _swapped(x: np.ndarray, swap: bool) -> np.ndarray:
    return np.swapaxes(x, -1, -2) if swap else x


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over the axes that broadcasting gave to an array of this shape."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    repeated = tuple(axis for axis, (has, wants) in enumerate(zip(x.shape, shape, strict=True)) if has != wants)
    summed: np.ndarray = x.sum(axis=repeated, keepdims=True)
    return summed


# M, K, N: around a fragment, a tile, a simdgroup's and a threadgroup's block, and where the depth is split.
SIZES: Final = {
    "naive": [(1, 97, 300), (1, 1, 1), (3, 2, 5), (1, 333, 31), (16, 16, 17)],
    "tiled": [(15, 33, 17), (33, 1025, 8), (1, 1, 1), (16, 16, 16), (31, 97, 32)],
    "simdgroup": [(65, 33, 97), (24, 2056, 24), (1, 1, 1), (64, 48, 128), (31, 7, 33), (32, 16, 64)],
}
# Batches of a and of b, shape of c: rows that fold, operands repeated on either side, more axes than strides.
BATCHES: Final = [((2, 3), (), "full"), ((), (3,), "row"), ((2, 1), (3,), "column"), ((2, 1, 2), (3, 1), "outer")]
# Each is another kernel where the operands are staged in its order, so not every dtype has all.
TRANSPOSES: Final = {mx.float32: ("b", "", "a", "ab"), mx.bfloat16: ("ab", "b"), mx.float16: ("b",)}


def _cases() -> list[MatmulCase]:
    cases = []
    for variant in SIZES:
        for dtype in FLOATS:
            cases += _sizes(variant, dtype) + _batches(variant, dtype)
            # Sums of the large products leave float16.
            for values in ("zeros", "30") if dtype == mx.float16 else ("zeros", "ranges", "spike"):
                cases.append(MatmulCase((20, 24), (24, 36), dtype, (20, 36), "b", variant, values))
            for layout in ("transposed", "sliced", "shifted"):
                cases.append(MatmulCase((66, 32), (32, 72), dtype, None, "b", variant, layout=layout))
        for dtype in (mx.float32, mx.bfloat16):
            cases += [MatmulCase((33, 20), (20, 24), dtype, None, "b", variant, values) for values in ("1e-18", "1e18")]
        mixed = MatmulCase((33, 20), (20, 24), mx.bfloat16, (24,), "b", variant, b_dtype=mx.float32)
        cases += [mixed, replace(mixed, dtype=mx.float16, b_dtype=mx.bfloat16)][: 1 if variant == "simdgroup" else 2]
    for dtype in FLOATS:
        cases += [
            MatmulCase((0, 5), (5, 4), dtype, (4,)),
            MatmulCase((3, 0), (0, 4), dtype, (3, 1)),
            MatmulCase((3, 0), (0, 4), dtype),
            MatmulCase((0, 3, 5), (5, 4), dtype),
            MatmulCase((64, 16), (16, 64), dtype, (64,), "b"),
            MatmulCase((1, 1023), (1023, 9), dtype, ()),
        ]
    return cases


def _sizes(variant: str, dtype: mx.Dtype) -> list[MatmulCase]:
    transposes = TRANSPOSES[dtype]
    return [
        MatmulCase((m, k), (k, n), dtype, None, transposes[turn % len(transposes)], variant)
        for turn, (m, k, n) in enumerate(SIZES[variant][: None if dtype == mx.float32 else 2])
    ]


def _batches(variant: str, dtype: mx.Dtype) -> list[MatmulCase]:
    cases = []
    m, k, n = (34, 18, 40) if variant == "simdgroup" else (18, 10, 5)
    for a, b, kind in BATCHES if dtype == mx.float32 else BATCHES[:2]:
        batch = tuple(np.broadcast_shapes(a, b))
        c = {"full": (*batch, m, n), "row": (n,), "column": (m, 1), "outer": (*batch[-2:], 1, n)}[kind]
        cases.append(MatmulCase((*a, m, k), (*b, k, n), dtype, c, "b", variant))
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    MatmulCase(a, b, dtype, c, transpose)
    for dtype in (mx.float32, mx.bfloat16)
    for a, b, c, transpose in (
        ((512, 512), (512, 512), None, ""),
        ((8, 128, 768), (768, 768), (768,), "b"),
        ((48, 128, 64), (48, 64, 128), None, "b"),
        ((1, 768), (768, 32000), None, ""),
    )
)

TRAFFIC: Final = (
    MatmulCase((256, 512), (512, 256)),
    MatmulCase((192, 1024), (1024, 256), mx.bfloat16, (192, 256)),
    MatmulCase((2, 128, 512), (512, 320), mx.float16, (320,), "b"),
    MatmulCase((4, 128, 512), (4, 512, 128), mx.float32, None, "b"),
    MatmulCase((200, 520), (520, 136)),
    MatmulCase((24, 512), (512, 512), mx.bfloat16, None, "b"),
    MatmulCase((1, 1024), (1024, 512)),
)
