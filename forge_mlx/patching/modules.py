"""What the modules of mlx-lm's models become: classes whose instances keep their parameters, and unpatch to the bit.

Each is put before the class that it replaces, as `class Patched(replacement, original)`, so that `super().__call__` is
the original's way.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, cast

from forge_mlx.kernels.activations import geglu, swiglu
from forge_mlx.kernels.norms import rms_norm
from forge_mlx.kernels.rope import rope
from forge_mlx.patching.parameters import without_keeping
from forge_mlx.patching.rows import Rows, current_rows
import mlx.core as mx
import mlx.nn as nn


class Patched(nn.Module):
    """What is common to all replacements.

    Attributes:
        original: The class that the instance had.
        by: What runs instead, for the report.
    """

    original: ClassVar[type[nn.Module]]
    by: ClassVar[str]


@cache
def patched_class(replacement: type[Patched], original: type[nn.Module]) -> type[Patched]:
    """A class that does what the replacement does and is still the original.

    Args:
        replacement: One of the classes here.
        original: The class of the instances that it is for.
    """
    return type(f"Patched{original.__name__}", (replacement, original), {"original": original})


class PatchedDecoder(Patched):
    """A stack of blocks without a cache: its attention learns of documents and windows from `Rows`."""

    by = "masks stay unmade; documents from packed_rows"

    def __call__(self, inputs: mx.array, cache: Any = None, *args: Any, **kwargs: Any) -> mx.array:
        """Tokens `[B, T]` to `[B, T, C]`.

        Raises:
            ValueError: A cache in a `packed_rows` block, or a block of ids of another shape.
        """
        rows = current_rows(inputs)
        if cache is None:
            cache = [rows] * len(self.layers)
        elif rows.segment_ids is not None:
            raise ValueError(
                "[packed_rows] a cache must be left out, as it holds one text a row, but got one. Give each document a "
                "row of its own."
            )
        return cast(mx.array, super().__call__(inputs, cache, *args, **kwargs))


class PatchedRMSNorm(Patched):
    """x / sqrt(mean(x^2) + eps) * weight."""

    by = "kernels.rms_norm"

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise `[..., C]`."""
        return rms_norm(x, self.weight, self.eps)


class PatchedOffsetRMSNorm(Patched):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), Gemma's."""

    by = "kernels.rms_norm"

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise `[..., C]`."""
        return rms_norm(x, 1.0 + self.weight, self.eps)


def same_dtype(*arrays: mx.array) -> tuple[mx.array, ...]:
    """The arrays in the dtype that MLX promotes all of them to: adapters may return another one than their bases.

    Args:
        *arrays: Of any shapes.
    """
    dtype = arrays[0].dtype
    for array in arrays[1:]:
        dtype = mx.result_type(mx.array(0, dtype), mx.array(0, array.dtype))
    return tuple(array.astype(dtype) for array in arrays)


class PatchedSwiGLU(Patched):
    """down(silu(gate(x)) * up(x))."""

    by = "kernels.swiglu"
    _gated: ClassVar[Callable[..., mx.array]] = staticmethod(swiglu)

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., C]` to `[..., C]`."""
        gate, up = same_dtype(self.gate_proj(x), self.up_proj(x))
        return without_keeping(self.down_proj, self._gated, gate, up)


class PatchedGEGLU(PatchedSwiGLU):
    """down(gelu(gate(x)) * up(x)), with the erf form."""

    by = "kernels.geglu"
    _gated = staticmethod(geglu)


class PatchedGEGLUTanh(PatchedSwiGLU):
    """down(gelu(gate(x)) * up(x)), with the tanh form."""

    by = "kernels.geglu"
    _gated = staticmethod(partial(geglu, approximate="tanh"))


class PatchedJoinedSwiGLU(Patched):
    """down(silu(gate) * up) with gate and up from one product, as in Phi-3."""

    by = "kernels.swiglu"

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., C]` to `[..., C]`."""
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        return without_keeping(self.down_proj, swiglu, gate, up)


class PatchedSwitchGLU(Patched):
    """The experts of an MoE layer: their products are mlx-lm's, the activation between them is ours."""

    by = "kernels.swiglu between its products"

    # Found before the instance's own: all models share that object, so that its class must stay.
    @staticmethod
    def activation(up: mx.array, gate: mx.array) -> mx.array:
        """silu(gate) * up.

        Args:
            up: Any shape.
            gate: The same shape.
        """
        gate, up = same_dtype(gate, up)
        return swiglu(gate, up)


class PatchedRotary(Patched):
    """Rotary positions with frequencies of a base."""

    by = "kernels.rope"

    def __call__(self, x: mx.array, offset: int | mx.array = 0, *, positions: mx.array | None = None) -> mx.array:
        """Rotate heads `[B, H, T, D]`.

        Args:
            x: `[B, H, T, D]`.
            offset: Position of the first token, for all rows or for each.
            positions: Integers `[B, T]` in the place of an offset, for packed rows.
        """
        return rope(
            x,
            dims=self.dims,
            base=float(self.base),
            scale=float(self.scale),
            offset=offset,
            positions=positions,
            traditional=self.traditional,
        )


class PatchedScaledRotary(Patched):
    """Rotary positions with frequencies of their own, and for YaRN a factor on what is rotated."""

    by = "kernels.rope"

    def __call__(self, x: mx.array, offset: int | mx.array = 0, *, positions: mx.array | None = None) -> mx.array:
        """Rotate heads `[B, H, T, D]`; the arguments are `PatchedRotary`'s."""
        dims = 2 * self._freqs.size
        factor = getattr(self, "mscale", getattr(self, "_scale", 1.0))
        if factor != 1.0:
            x = x.at[..., :dims].multiply(factor)
        traditional = getattr(self, "traditional", False)
        return rope(x, self._freqs, dims=dims, offset=offset, positions=positions, traditional=traditional)


def rotated(rotary: nn.Module, x: mx.array, rows: Rows) -> mx.array:
    """Heads with their positions rotated in.

    Args:
        rotary: The rotary module of an attention.
        x: `[B, H, T, D]`.
        rows: Where there may be positions.

    Raises:
        ValueError: There are positions, and the module is none that takes them.
    """
    if rows.positions is None:
        return cast(mx.array, rotary(x))
    if isinstance(rotary, (PatchedRotary, PatchedScaledRotary)):
        return rotary(x, positions=rows.positions)
    if type(rotary).__name__ == "NoPE":
        return x
    raise ValueError(
        f"[packed_rows] the rotary module must be one that patch replaces but got {type(rotary).__name__}, which knows "
        "no position but that in the row. Give each document a row of its own."
    )
