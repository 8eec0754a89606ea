"""The modes of `quantize` and `fake_quant`: what each takes, its defaults, and the shapes of what it gives."""

from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from forge_mlx.kernels._common.checks import check_axes, check_floating
import mlx.core as mx

Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4", "int8", "int4", "ternary", "fp8_e4m3"]
Granularity = Literal["row", "tensor"]
Ste = Literal["identity", "clip"]

Choice = TypeVar("Choice", int, Granularity)


@dataclass(frozen=True)
class _Choices:
    """What a mode takes; the first of each is the default, and without any the option is none of the mode's.

    Attributes:
        bits: Bits of a code.
        group_sizes: Neighbours in a row that share a scale.
        granularities: What shares a scale, in modes without groups.
        fixed_bits: Bits of a code in a mode that does not let them be chosen.
    """

    bits: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()
    granularities: tuple[Granularity, ...] = ()
    fixed_bits: int = 0


_MODES: Final[dict[Mode, _Choices]] = {
    "affine": _Choices(bits=(4, 2, 3, 5, 6, 8), group_sizes=(64, 32, 128)),
    "mxfp4": _Choices(bits=(4,), group_sizes=(32,)),
    "mxfp8": _Choices(bits=(8,), group_sizes=(32,)),
    "nvfp4": _Choices(bits=(4,), group_sizes=(16,)),
    "int8": _Choices(granularities=("row",), fixed_bits=8),
    "int4": _Choices(granularities=("row",), fixed_bits=4),
    "ternary": _Choices(granularities=("tensor", "row"), fixed_bits=2),
    "fp8_e4m3": _Choices(granularities=("row", "tensor"), fixed_bits=8),
}
MODES: Final[tuple[Mode, ...]] = tuple(_MODES)
_STES: Final[tuple[Ste, ...]] = ("identity", "clip")


@dataclass(frozen=True)
class Options:
    """A mode with all of its options decided, as `checked_options` gives them.

    Attributes:
        mode: The mode's name.
        bits: Bits of a code: 2, 3, 4, 5, 6 or 8.
        group_size: Neighbours in a row that share a scale; None in int8, int4, ternary and fp8_e4m3.
        granularity: "row" or "tensor" (the last two axes) in those four modes; None in the others.
    """

    mode: Mode
    bits: int
    group_size: int | None
    granularity: Granularity | None

    @property
    def columns_multiple(self) -> int:
        """What the last axis of w must be a multiple of: whole groups, and codes that fill 32-bit words."""
        return self.group_size or 32 // self.bits

    @property
    def has_biases(self) -> bool:
        """Whether a group has a bias."""
        return self.mode == "affine"

    def scale_dtype(self, dtype: mx.Dtype) -> mx.Dtype:
        """The dtype of the scales of a w of some dtype.

        Args:
            dtype: That of w.
        """
        if self.mode == "affine":
            return dtype
        return mx.float32 if self.group_size is None else mx.uint8

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`[..., K * bits / 32]`.

        Args:
            shape: `[..., K]`, that of w.
        """
        return (*shape[:-1], shape[-1] * self.bits // 32)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`[..., K / group_size]`, `[..., 1]` or, of one scale for the last two axes, `[..., 1, 1]`.

        Args:
            shape: `[..., K]`, that of w.
        """
        if self.group_size is not None:
            return (*shape[:-1], shape[-1] // self.group_size)
        return (*shape[:-2], 1, 1) if self.granularity == "tensor" else (*shape[:-1], 1)


def checked_options(op: str, mode: str, bits: int | None, group_size: int | None, granularity: str | None) -> Options:
    """The options of a mode, its defaults where None is given.

    Args:
        op: The op's name, for the message.
        mode: The mode's name.
        bits: Bits of a code: affine 4, 2, 3, 5, 6 or 8; mxfp4 and nvfp4 4; mxfp8 8.
        group_size: affine 64, 32 or 128; mxfp4 and mxfp8 32; nvfp4 16.
        granularity: int8 and int4 "row"; ternary "tensor" or "row"; fp8_e4m3 "row" or "tensor".

    Raises:
        ValueError: An unknown mode, a value that the mode does not have, an option that it does not take.
    """
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"[{op}] mode must be among {', '.join(MODES)} but got {mode!r}.")
    choices = _MODES[mode]
    return Options(
        mode,
        _chosen(op, mode, "bits", choices.bits, bits) or choices.fixed_bits,
        _chosen(op, mode, "group_size", choices.group_sizes, group_size),
        _chosen(op, mode, "granularity", choices.granularities, granularity),
    )


def _chosen(op: str, mode: str, name: str, allowed: tuple[Choice, ...], value: object) -> Choice | None:
    if value is None:
        return allowed[0] if allowed else None
    if not allowed:
        raise ValueError(f"[{op}] mode {mode!r} takes no {name} but got {value!r}. Leave it out.")
    # By type too: True is 1 to Python, and 4.0 is 4.
    found = next((each for each in allowed if type(value) is type(each) and value == each), None)
    if found is None:
        listed = " or ".join([*filter(None, [", ".join(map(repr, allowed[:-1]))]), repr(allowed[-1])])
        raise ValueError(f"[{op}] {name} must be {listed} in the mode {mode!r} but got {value!r}.")
    return found


def check_weights(op: str, w: mx.array, options: Options) -> None:
    """Raise unless w can be quantized.

    Args:
        op: The op's name, for the message.
        w: `[..., K]`.
        options: As `checked_options` gives them.

    Raises:
        ValueError: w of another dtype than the three, with fewer than two axes, or with a K that is no whole number of
            groups and of 32-bit words of codes.
    """
    check_floating(op, w=w)
    check_axes(op, 2, w=w)
    columns, group, word = w.shape[-1], options.group_size, 32 // options.bits
    if columns % options.columns_multiple:
        rule = f"{group} (group_size)" if group else f"{word} (codes of {options.bits} bits to a uint32)"
        raise ValueError(
            f"[{op}] the last axis of w must be a multiple of {rule} in the mode {options.mode!r} but got the shape "
            f"{w.shape}. Pad it with zeros."
        )


def check_ste(op: str, ste: str) -> Ste:
    """The gradient that `ste` names.

    Args:
        op: The op's name, for the message.
        ste: "identity" or "clip".

    Raises:
        ValueError: For anything else.
    """
    found = next((each for each in _STES if ste == each), None)
    if found is None:
        raise ValueError(f"[{op}] ste must be 'identity' or 'clip' but got {ste!r}.")
    return found
