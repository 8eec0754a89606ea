"""What the loss of a row depends on beside its logits and its target, with the checks of it."""

from dataclasses import dataclass
import math
from numbers import Integral, Real
from typing import Final, Literal, get_args

from forge_mlx.kernels._common.checks import check_arrays, check_axes, check_floating, check_integers, check_shape
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

IGNORE_INDEX: Final = -100
"""A target with this value has no loss and no gradient."""
_SMALLEST: Final = float(np.finfo(np.float32).tiny)
_LARGEST: Final = float(np.finfo(np.float32).max)

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Options:
    """The options of a row's loss. Numbers of NumPy become Python's.

    Attributes:
        ignore_index: Targets of this value have no loss and no gradient.
        label_smoothing: The share of the loss that all tokens have alike, 0 to 1.
        softcap: A logit x becomes softcap * tanh(x / softcap) first; None: stays what it is.
        z_loss: Factor of the squared logsumexp that is added to the loss, 0 or more.
    """

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        """Convert NumPy's scalars, which times an array of MLX would make an array of NumPy."""
        for name, value in vars(self).items():
            if isinstance(value, np.generic) and isinstance(value, Real):
                object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))


def check_options(op: str, options: Options) -> None:
    """Raise for options that make no loss.

    Args:
        op: The op's name, for the message.
        options: The options.

    Raises:
        ValueError: ignore_index not an integer of 32 bits, another option no Python number, label_smoothing outside
            [0, 1], softcap not positive or it or its reciprocal no normal number of float32, z_loss negative or not
            finite in float32.
    """
    index = options.ignore_index
    if not isinstance(index, int) or isinstance(index, bool) or not -(2**31) <= index < 2**31:
        raise ValueError(f"[{op}] ignore_index must be an integer of 32 bits but got {index!r}.")
    _check_number(op, "label_smoothing", options.label_smoothing)
    _check_number(op, "z_loss", options.z_loss)
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"[{op}] label_smoothing must be between 0 and 1 but got {options.label_smoothing}.")
    if options.softcap is not None:
        _check_number(op, "softcap", options.softcap, " or None")
        if not (math.isfinite(options.softcap) and options.softcap > 0):
            raise ValueError(f"[{op}] softcap must be a finite number above 0 or None but got {options.softcap}.")
        if not _SMALLEST <= options.softcap <= 1 / _SMALLEST:
            raise ValueError(
                f"[{op}] softcap must be between {_SMALLEST:.3g} and {1 / _SMALLEST:.3g}, so that float32 holds it and "
                f"its reciprocal, but got {options.softcap}."
            )
    if not 0 <= options.z_loss <= _LARGEST:
        raise ValueError(f"[{op}] z_loss must be a finite number of 0 or more but got {options.z_loss}.")


def _check_number(op: str, name: str, value: object, otherwise: str = "") -> None:
    """Raise for what is no number: an array too, which has no gradient here and which kernels take as a constant."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = "an array" if isinstance(value, mx.array) else repr(value)
        raise ValueError(f"[{op}] {name} must be a Python number{otherwise} but got {kind}.")


def check_reduction(op: str, reduction: str) -> None:
    """Raise unless a reduction is one of the three.

    Args:
        op: The op's name, for the message.
        reduction: Its name.

    Raises:
        ValueError: For any other.
    """
    if reduction not in get_args(Reduction):
        names = ", ".join(repr(name) for name in get_args(Reduction))
        raise ValueError(f"[{op}] reduction must be one of {names} but got {reduction!r}.")


def check_targets(op: str, rows: str, shape: tuple[int, ...], targets: mx.array, weights: mx.array | None) -> None:
    """Raise unless there is one target, and one weight, for each row.

    Args:
        op: The op's name, for the message.
        rows: The argument whose rows have the targets, for the message.
        shape: Its shape, with the last axis.
        targets: `[...]`.
        weights: `[...]` or None.

    Raises:
        ValueError: Targets that are not integers, targets or weights of another shape, weights that are complex or of
            64 bits.
    """
    check_integers(op, targets=targets)
    if targets.shape != shape[:-1]:
        raise ValueError(
            f"[{op}] targets must have the shape of {rows} without its last axis but got {targets.shape} for {rows} "
            f"{shape}."
        )
    if weights is None:
        return
    check_arrays(op, weights=weights)
    # A mask of bool or integers will do.
    if weights.dtype in (mx.complex64, mx.float64):
        raise ValueError(f"[{op}] weights must be real numbers of at most 32 bits but got {dtype_name(weights.dtype)}.")
    check_shape(op, "weights", weights, targets.shape, "that of targets")


def check_arguments(
    op: str, logits: mx.array, targets: mx.array, weights: mx.array | None, options: Options, reduction: str
) -> None:
    """Raise what `cross_entropy` raises for its arguments.

    Args:
        op: The op's name, for the message.
        logits: `[..., V]`.
        targets: `[...]`.
        weights: `[...]` or None.
        options: The options of a row's loss.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: As `check_options`, `check_reduction` and `check_targets`; logits without axes, without
            tokens or of another dtype than the three.
    """
    check_floating(op, logits=logits)
    check_axes(op, 1, logits=logits)
    if logits.shape[-1] == 0:
        raise ValueError(f"[{op}] logits must be of one token or more but got the shape {logits.shape}.")
    check_targets(op, "logits", logits.shape, targets, weights)
    check_options(op, options)
    check_reduction(op, reduction)
