"""What the rooms' `cases.py` are made of: a case of an op, numbers of every kind, arrays laid out in every way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import mlx.core as mx
import numpy as np

LAYOUTS: Final = ("contiguous", "transposed", "sliced", "broadcast", "shifted")


class OpCase(ABC):
    """One call of an op with its gradients. A room's case is a frozen dataclass that derives from it.

    Attributes:
        op: The op's name in `forge_mlx.kernels`.
        dtype: The dtype whose tolerance holds for every result.
        max_ratio: How many times the ideal bytes its kernels may move.
        max_ratio_reason: Why that is more than the usual 1.05.
    """

    op: ClassVar[str]
    max_ratio: ClassVar[float] = 1.05
    max_ratio_reason: ClassVar[str] = ""

    dtype: mx.Dtype

    @property
    @abstractmethod
    def name(self) -> str:
        """A readable id, unique in the room."""

    @abstractmethod
    def inputs(self) -> dict[str, mx.array]:
        """The arrays that the op is differentiated by, by name and in the order that `function` takes them."""

    @abstractmethod
    def cotangents(self) -> dict[str, mx.array]:
        """An array for each result, by the result's name and in the order of the results."""

    @abstractmethod
    def function(self, impl: str) -> Callable[..., mx.array | tuple[mx.array, ...]]:
        """The op as a function of `inputs` on an engine; "mlx" as impl stands for what MLX has instead."""

    @abstractmethod
    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Results, and "d" + name of each input: by the forward and the written backward of the room's reference.py."""

    @abstractmethod
    def expected(self) -> Mapping[str, np.ndarray]:
        """The same in float64, of the inputs as the dtype has rounded them, not computed by MLX."""

    def run(self, impl: str) -> dict[str, mx.array]:
        """Results and gradients by name on an engine; "formula": by reference.py."""
        inputs, cotangents = self.inputs(), self.cotangents()
        if impl == "formula":
            return self.formula(inputs, cotangents)
        results, gradients = mx.vjp(self.function(impl), list(inputs.values()), list(cotangents.values()))
        named = dict(zip(cotangents, results, strict=True))
        return named | {f"d{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}

    def constants(self) -> dict[str, mx.array]:
        """The arrays without a gradient (ids, targets) that the op reads too, by name."""
        return {}

    def ideal_bytes(self) -> dict[str, int]:
        """The least that each pass moves: every array once.

        Forward: inputs, constants and results. Backward: inputs, constants, cotangents and gradients.
        """
        inputs, results = _bytes(self.inputs()), _bytes(self.cotangents())
        constants = _bytes(self.constants())
        return {"forward": inputs + constants + results, "backward": 2 * inputs + constants + results}


def _bytes(arrays: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def random_values(shape: tuple[int, ...], kind: str, random: np.random.Generator) -> np.ndarray:
    """Numbers for an array, in float32.

    Args:
        shape: Of the array.
        kind: "normal"; "zeros"; "ties", one number everywhere; "spike", one large element in each row; "ranges", rows
            of magnitudes from 1e-6 to 1e4; or a factor on normal numbers, as "1e-30".
        random: Where they come from.
    """
    x = random.normal(size=shape)
    if kind == "zeros":
        x *= 0
    elif kind == "ranges":
        x *= np.geomspace(1e-6, 1e4, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    elif kind == "spike":
        x[..., shape[-1] // 2] = 1e3
    elif kind == "ties":
        x[...] = 0.75
    elif kind != "normal":
        x *= float(kind)
    return x.astype(np.float32)


def laid_out(x: mx.array, layout: str) -> mx.array:
    """The same elements in another order in memory, except that "broadcast" repeats the first row.

    Args:
        x: An array of two axes or more; for "shifted" any.
        layout: "contiguous", "transposed", "sliced" (every other column of a larger array), "broadcast" (one row
            repeated) or "shifted" (begins one element into its buffer).

    Raises:
        ValueError: An unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"[laid_out] layout must be among {', '.join(LAYOUTS)} but got {layout!r}.")
    if layout == "transposed":
        return mx.contiguous(mx.swapaxes(x, -1, -2)).swapaxes(-1, -2)
    if layout == "sliced":
        return mx.repeat(x, 2, axis=-1)[..., ::2]
    if layout == "broadcast":
        return mx.broadcast_to(x[:1], x.shape)
    if layout == "shifted":
        return mx.concatenate([mx.zeros((1,), x.dtype), x.flatten()])[1:].reshape(x.shape)
    return x
