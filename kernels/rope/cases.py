"""What rope is proved and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from forge_mlx.kernels._common.cases import OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.rope import op, reference
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

_USUAL: Final = {"at": "0", "values": "normal", "layout": "contiguous", "base": 10000.0, "scale": 1.0, "dims": None}


@dataclass(frozen=True)
class RopeCase(OpCase):
    """rope of one input with its gradients.

    Attributes:
        shape: Shape of x.
        dtype: Dtype of x.
        dims: Elements to rotate.
        traditional: Whether pairs are neighbours.
        at: Where the tokens are: an offset as text, "rows", an offset for each row of the batch, or "packed", positions
            that begin anew twice in each row.
        freqs: Whether frequencies of its own are given and differentiated by.
        values: As `random_values` takes them.
        layout: As `laid_out` takes it, or "heads": `[B, T, H, D]` in memory.
        base: As rope takes it.
        scale: As rope takes it.
    """

    op: ClassVar[str] = "rope"

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype = mx.float32
    dims: int | None = None
    traditional: bool = False
    at: str = "0"
    freqs: bool = False
    values: str = "normal"
    layout: str = "contiguous"
    base: float = 10000.0
    scale: float = 1.0

    @property
    def name(self) -> str:
        """A readable id."""
        parts = ["x".join(map(str, self.shape)), dtype_name(self.dtype)]
        parts += [name for name in ("traditional", "freqs") if getattr(self, name)]
        for name, usual in _USUAL.items():
            if (value := getattr(self, name)) != usual:
                parts.append(value if name in ("values", "layout") else f"{name}-{value}")
        return "-".join(parts)

    def inputs(self) -> dict[str, mx.array]:
        """x, and freqs where the case has its own."""
        random = np.random.default_rng(len(self.name))
        x = mx.array(random_values(self.shape, self.values, random)).astype(self.dtype)
        if self.layout == "heads":
            x = mx.contiguous(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        else:
            x = laid_out(x, self.layout)
        if not self.freqs:
            return {"x": x}
        return {"x": x, "freqs": mx.array(random.uniform(0.5, 100, self._dims // 2).astype(np.float32))}

    def cotangents(self) -> dict[str, mx.array]:
        """That of y."""
        random = np.random.default_rng(len(self.name) + 1)
        return {"y": mx.array(random.normal(size=self.shape).astype(np.float32)).astype(self.dtype)}

    def constants(self) -> dict[str, mx.array]:
        """The positions or offsets."""
        named = zip(("offset", "positions"), self._where(), strict=True)
        return {name: each for name, each in named if isinstance(each, mx.array)}

    def ideal_bytes(self) -> dict[str, int]:
        """x is no part of the backward pass: dy is read and dx written. The frequencies count once."""
        least = 2 * mx.zeros(self.shape, self.dtype).nbytes + 2 * self._dims
        least += sum(each.nbytes for each in self.constants().values())
        return {"forward": least, "backward": least}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """rope of x and freqs on an engine; "mlx": mx.fast.rope, which takes no positions."""
        offset, positions = self._where()

        def call(x: mx.array, freqs: mx.array | None = None) -> mx.array:
            if impl == "mlx":
                return mx.fast.rope(
                    x,
                    self._dims,
                    traditional=self.traditional,
                    base=None if self.freqs else self.base,
                    scale=self.scale,
                    offset=offset,
                    freqs=freqs,
                )
            return op.rope(
                x,
                freqs,
                dims=self.dims,
                base=self.base,
                scale=self.scale,
                offset=offset,
                positions=positions,
                traditional=self.traditional,
                impl=impl,
            )

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """By reference.py."""
        x, freqs = inputs["x"], inputs.get("freqs")
        if x.size == 0:
            return {"y": x, "dx": x} | ({} if freqs is None else {"dfreqs": mx.zeros_like(freqs)})
        inverse = reference.inverse_frequencies(freqs, self._dims, self.base)
        first = reference.starting_positions(*self._where())
        y = reference.forward(x, first, inverse, self.scale, self.traditional)
        dx, dinverse = reference.backward(x, first, inverse, cotangents["y"], self.scale, self.traditional)
        results = {"y": y, "dx": dx}
        return results if freqs is None else results | {"dfreqs": -dinverse.sum(0) * inverse[0] ** 2}

    def expected(self) -> Mapping[str, np.ndarray]:
        """y, dx and dfreqs by complex numbers, whose frequencies are those that float32 holds."""
        inputs, dy = self.inputs(), to_float64(self.cotangents()["y"])
        x, dims = to_float64(inputs["x"]), self._dims
        freqs = to_float64(inputs["freqs"]) if self.freqs else None
        inverse = np.float64(np.float32(self.base ** (-np.arange(0, dims, 2) / dims))) if freqs is None else 1 / freqs
        turn = np.exp(1j * self.scale * self.token_positions()[..., None] * inverse)[:, None]
        pairs, dpairs = self._complex(x), self._complex(dy)
        results = {"y": self._real(pairs * turn, x), "dx": self._real(dpairs / turn, dy)}
        if freqs is None:
            return results
        dangle = (dpairs * (1j * pairs * turn).conj()).real.sum(1)
        dinverse = (dangle * self.scale * self.token_positions()[..., None]).sum((0, 1))
        return results | {"dfreqs": -dinverse / freqs**2}

    def token_positions(self) -> np.ndarray:
        """`[B, T]`: where each token is."""
        offset, positions = self._where()
        if positions is not None:
            return np.array(positions).astype(np.int64)
        first = np.broadcast_to(np.array(offset).astype(np.int64), self.shape[0])
        return first[:, None] + np.arange(self.shape[2])

    @property
    def _dims(self) -> int:
        return self.shape[-1] if self.dims is None else self.dims

    def _where(self) -> tuple[int | mx.array, mx.array | None]:
        """The offset and the positions."""
        batch, _, length, _ = self.shape
        if self.at == "rows":
            return mx.arange(batch) * 1000 + 3, None
        if self.at == "packed":
            return 0, mx.arange(batch * length).reshape(batch, length) % max(2, length // 2)
        return int(self.at), None

    def _complex(self, x: np.ndarray) -> np.ndarray:
        dims = self._dims
        if self.traditional:
            return x[..., :dims:2] + 1j * x[..., 1:dims:2]
        return x[..., : dims // 2] + 1j * x[..., dims // 2 : dims]

    def _real(self, pairs: np.ndarray, x: np.ndarray) -> np.ndarray:
        parts = np.stack([pairs.real, pairs.imag], -1 if self.traditional else -2).reshape(*x.shape[:-1], self._dims)
        return np.concatenate([parts, x[..., self._dims :]], axis=-1)


def _cases() -> list[RopeCase]:
    cases = []
    # Heads of one pair, of fewer pairs than a vector, around it, of odd numbers of pairs, and past a threadgroup's
    # columns; heads and tokens of 1, around a thread's and a threadgroup's, and a prime.
    shapes = ((1, 1, 1, 2), (2, 3, 1, 6), (1, 7, 3, 8), (1, 8, 33, 16), (3, 9, 5, 62), (1, 2, 31, 128), (1, 17, 2, 34))
    for dtype in FLOATS:
        for index, shape in enumerate(shapes):
            cases.append(RopeCase(shape, dtype, traditional=index % 2 == 1))
            cases.append(RopeCase(shape, dtype, traditional=index % 2 == 0, at=("7", "rows", "packed")[index % 3]))
        cases += [
            RopeCase((1, 2, 2, 1040), dtype),
            RopeCase((1, 2, 2, 1040), dtype, dims=1026, traditional=True),
            RopeCase((2, 3, 5, 48), dtype, dims=32, at="rows"),
            RopeCase((2, 3, 5, 47), dtype, dims=10, traditional=True),
            RopeCase((2, 3, 5, 16), dtype, dims=2),
            RopeCase((2, 3, 7, 16), dtype, freqs=True, at="5"),
            RopeCase((2, 3, 7, 19), dtype, dims=12, freqs=True, traditional=True, at="packed", scale=0.5),
            *(
                RopeCase((2, 3, 6, 16), dtype, layout=layout, at="packed", traditional=layout in ("sliced", "heads"))
                for layout in ("heads", "transposed", "sliced", "broadcast", "shifted")
            ),
            RopeCase((2, 3, 6, 32), dtype, dims=24, layout="heads"),
            *(RopeCase((2, 3, 5, 16), dtype, values=values) for values in ("zeros", "ties", "spike")),
            RopeCase((0, 2, 3, 8), dtype),
            RopeCase((2, 2, 0, 8), dtype, freqs=True),
            RopeCase((1, 2, 5, 16), dtype, at="4000"),
        ]
    for dtype in (mx.float32, mx.bfloat16):
        cases += [RopeCase((2, 3, 5, 16), dtype, values=values) for values in ("1e-30", "1e30")]
    cases += [
        RopeCase((1, 2, 5, 64), at="1000000"),
        RopeCase((1, 2, 5, 64), at="-3"),
        RopeCase((1, 2, 5, 64), at="100", base=500000.0, scale=0.125),
        RopeCase((1, 2, 1025, 8)),
    ]
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    RopeCase(shape, dtype, layout="heads")
    for dtype in (mx.float32, mx.bfloat16)
    for shape in ((4, 8, 512, 64), (1, 32, 2048, 128), (8, 32, 1, 128))
)

TRAFFIC: Final = (
    RopeCase((2, 8, 512, 64), layout="heads"),
    RopeCase((2, 8, 512, 64), mx.bfloat16, layout="heads", traditional=True),
    RopeCase((1, 16, 256, 128), mx.bfloat16, at="packed"),
    RopeCase((2, 8, 256, 128), mx.float16, dims=64),
)
