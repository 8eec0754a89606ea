"""What may be asked of attention: options, the arrays that may be left out, and the checks of all arguments."""

from dataclasses import dataclass
from numbers import Integral
from typing import Final, Literal, TypeVar, get_args

from forge_mlx.kernels._common.checks import (
    FLOATS,
    check_arrays,
    check_constant,
    check_float32_range,
    check_floating,
    check_integers,
    check_shape,
    given,
)
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx

Variant = Literal["scalar", "mma"]
VARIANTS: Final[tuple[str, ...]] = ("auto", *get_args(Variant))

LARGEST_HEAD: Final = 256
_SMALLEST_CAP: Final = 1e-10
_LARGEST_CAP: Final = 1e30
LONGEST: Final = 2**28
"""Queries or keys: sums of them, and of a window, have to fit 32 bits."""

SegmentIds = mx.array | tuple[mx.array, mx.array]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Options:
    """What decides which keys a query sees, and how its scores are made.

    Attributes:
        scale: Factor on the scores.
        causal: Whether query i of T sees no key after i + S - T of S.
        window: How many keys up to that one it sees; None: all.
        softcap: Bound c of the scores, c tanh(s / c), after the scale; None: none.
    """

    scale: float
    causal: bool
    window: int | None
    softcap: float | None

    @property
    def is_plain(self) -> bool:
        """Whether only causal order hides anything."""
        return self.window is None and self.softcap is None


def flash_supported(head_dim: int, v_head_dim: int | None = None, dtype: mx.Dtype = mx.float32) -> bool:
    """Whether `flash_attention` takes heads of this size.

    It takes every multiple of 8 from 8 to 256, also where v has another size than q and k, in float32, float16 and
    bfloat16.

    Args:
        head_dim: Size D of the heads of q and k.
        v_head_dim: Size of the heads of v; None: D too.
        dtype: Of q, k and v.
    """
    sizes = (head_dim, head_dim if v_head_dim is None else v_head_dim)
    return dtype in FLOATS and all(8 <= size <= LARGEST_HEAD and size % 8 == 0 for size in sizes)


def check_qkv(op: str, q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raise unless q, k and v fit together.

    Args:
        op: The op's name, for the message.
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, Dv]`.

    Raises:
        ValueError: Another dtype, number of axes or shape, or a head size that is not supported.
    """
    check_floating(op, q=q, k=k, v=v)
    for name, array in {"q": q, "k": k, "v": v}.items():
        if array.ndim != 4:
            raise ValueError(f"[{op}] {name} must be [batch, heads, length, head_dim] but got the shape {array.shape}.")
        if array.dtype != q.dtype:
            raise ValueError(
                f"[{op}] {name} must have the dtype of q, {dtype_name(q.dtype)}, but got {dtype_name(array.dtype)}. "
                "Convert one of them."
            )
        if not flash_supported(array.shape[3]):
            whose = " of v" if name == "v" else ""
            hint = " Pad the heads with zeros, and give the scale of the size that they had."
            raise ValueError(
                f"[{op}] head_dim{whose} must be a multiple of 8 from 8 to {LARGEST_HEAD} but got {array.shape[3]}."
                f"{hint if 0 < array.shape[3] < LARGEST_HEAD else ''}"
            )
        if array.shape[2] > LONGEST:
            raise ValueError(f"[{op}] {name} must have a length of at most 2^28 but got {array.shape[2]}.")
    batch, heads, _, size = q.shape
    check_shape(op, "k", k, (batch, k.shape[1], k.shape[2], size), "with the batch and head size of q")
    check_shape(op, "v", v, (*k.shape[:3], v.shape[3]), "with the batch, heads and length of k")
    kv_heads = k.shape[1]
    if heads != 0 and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"[{op}] the heads of q must be a multiple of those of k, {kv_heads}, but got {heads}.")
    if heads == 0 != kv_heads:
        raise ValueError(f"[{op}] the heads of k must be 0, as those of q, but got {kv_heads}.")


def check_options(
    op: str, head_dim: int, scale: float | None, causal: bool, window: int | None, softcap: float | None
) -> Options:
    """Raise unless the options make sense.

    Args:
        op: The op's name, for the message.
        head_dim: Size D of the heads of q and k.
        scale: As the op takes it; None: 1 / sqrt(D).
        causal: As the op takes it.
        window: As the op takes it.
        softcap: As the op takes it.

    Raises:
        ValueError: What is no number, out of its range, or a window without causal.
    """
    if not isinstance(causal, bool):
        raise ValueError(f"[{op}] causal must be True or False but got {causal!r}.")
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, Integral) or window < 1:
            raise ValueError(f"[{op}] window must be a whole number of keys, 1 or more, or None but got {window!r}.")
        if not causal:
            raise ValueError(f"[{op}] window needs causal=True but got causal=False: it counts back from the query.")
    for name, value in {"scale": scale, "softcap": softcap}.items():
        if value is not None:
            check_constant(op, name, value)
            check_float32_range(op, name, value)
    if softcap is not None and not _SMALLEST_CAP <= softcap <= _LARGEST_CAP:
        raise ValueError(
            f"[{op}] softcap must lie in {_SMALLEST_CAP:g} to {_LARGEST_CAP:g} or be None but got {softcap}."
        )
    return Options(
        head_dim**-0.5 if scale is None else float(scale),
        causal,
        None if window is None else int(window),
        None if softcap is None else float(softcap),
    )


def check_segments(
    op: str, q: mx.array, k: mx.array, segment_ids: SegmentIds | None
) -> tuple[mx.array | None, mx.array | None]:
    """Raise unless segment ids fit q and k.

    Args:
        op: The op's name, for the message.
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        segment_ids: As the op takes them.

    Returns:
        The ids of the queries `[B, T]` and of the keys `[B, S]`, both int32, or None twice.

    Raises:
        ValueError: No integers, another shape, or one array for queries and keys of different lengths.
    """
    if segment_ids is None:
        return None, None
    is_pair = isinstance(segment_ids, tuple)
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(
                f"[{op}] segment_ids must be an array, or a pair for queries and keys, but got {len(segment_ids)}."
            )
        queries, keys = segment_ids
        check_arrays(op, **{"segment_ids[0]": queries, "segment_ids[1]": keys})
    else:
        if isinstance(segment_ids, list) and any(isinstance(each, mx.array) for each in segment_ids):
            raise ValueError(f"[{op}] segment_ids must be an mx.array or a tuple of two but got a list of arrays.")
        check_arrays(op, segment_ids=segment_ids)
        queries, keys = segment_ids, segment_ids
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"[{op}] segment_ids must be a pair, for queries and keys, where their lengths differ but got one "
                f"array for {q.shape[2]} queries and {k.shape[2]} keys."
            )
    found = []
    for index, (ids, array, whose) in enumerate(((queries, q, "queries"), (keys, k, "keys"))):
        name = f"segment_ids[{index}]" if is_pair else "segment_ids"
        check_integers(op, **{name: ids})
        check_shape(op, name, ids, (array.shape[0], array.shape[2]), f"an id for each of the {whose}")
        # Ids wrap around at 32 bits in no application; unsigned ones would become negative.
        found.append(ids.astype(mx.int32))
    return found[0], found[1]


def check_sinks(op: str, q: mx.array, sinks: mx.array | None) -> mx.array | None:
    """Raise unless there is a sink for each head.

    Args:
        op: The op's name, for the message.
        q: `[B, H, T, D]`.
        sinks: `[H]` of any floating dtype, or None.

    Returns:
        `[B, H]` float32, the same for each batch: what the gradient of `[H]` is summed from. None for None.

    Raises:
        ValueError: No floating numbers, or another shape.
    """
    for array in given(sinks=sinks).values():
        check_floating(op, sinks=array)
        check_shape(op, "sinks", array, (q.shape[1],), "one logit for each head of q")
        return mx.broadcast_to(array.astype(mx.float32)[None], q.shape[:2])
    return None


def check_variant(op: str, variant: str) -> Variant | None:
    """Raise unless a variant is known.

    Args:
        op: The op's name, for the message.
        variant: As the op takes it.

    Returns:
        The variant, None for "auto".

    Raises:
        ValueError: An unknown one.
    """
    if variant not in VARIANTS:
        raise ValueError(f"[{op}] variant must be among {', '.join(VARIANTS)} but got {variant!r}.")
    if variant == "auto":
        return None
    return "scalar" if variant == "scalar" else "mma"
