"""What a patched model hands to its attention in the place of a cache: which tokens of a row see each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from forge_mlx.kernels._common.checks import check_integers, given
import mlx.core as mx


@dataclass(frozen=True, eq=False)
class Sight:
    """Stands for a mask: causal order, within a window if there is one.

    Attributes:
        window: How many tokens a query sees, its own included; None: all before it.
    """

    window: int | None


@dataclass(frozen=True, eq=False)
class Rows:
    """Stands for the cache of a layer that has none.

    mlx-lm's models ask a cache for the mask and hand both from layer to layer. So what is here comes to attention as an
    argument, also where `mx.checkpoint` runs a layer for the second time, after a `with` block has ended.

    Attributes:
        segment_ids: Integers `[B, T]`; None: each row is one text.
        positions: Integers `[B, T]`; None: from 0 on.
    """

    segment_ids: mx.array | None = None
    positions: mx.array | None = None

    def make_mask(self, _length: int, *, window_size: int | None = None, **_: bool) -> Sight:
        """What mlx-lm's `create_attention_mask` asks a cache for.

        Args:
            window_size: The sliding window; None or 0: none.
            **_: Whether a mask must be an array, which it never is here.
        """
        return Sight(window_size or None)


@dataclass(eq=False)
class _Packed:
    rows: Rows
    is_read: bool = False


_packed: ContextVar[_Packed | None] = ContextVar("forge_mlx_packed_rows", default=None)


@contextmanager
def packed_rows(segment_ids: mx.array, positions: mx.array | None = None) -> Iterator[None]:
    """Tell the patched models that are called in a `with` block that their rows hold several documents each.

    A token then sees those of its own document alone, and rotary positions begin anew with each::

        with packed_rows(segment_ids):
            logits = model(tokens)

    The choice belongs to the thread or task that makes it. A function that `mx.compile` has traced does not look here
    again: open the block inside of it, with ids that are its arguments, as `forge_mlx.patching.loss` does.

    Args:
        segment_ids: Integers `[B, T]`, such as the number of the document that each token belongs to; a negative id is
            padding, which sees nothing.
        positions: Integers `[B, T]`, the place of each token in its document; None: counted from each token whose id is
            not that of the one before it.

    Raises:
        ValueError: No integers, or other shapes than `[B, T]`.
        RuntimeError: No patched model was called in the block.
    """
    check_integers("packed_rows", segment_ids=segment_ids, **given(positions=positions))
    if segment_ids.ndim != 2:
        raise ValueError(f"[packed_rows] segment_ids must have the axes [B, T] but got the shape {segment_ids.shape}.")
    if positions is not None and positions.shape != segment_ids.shape:
        raise ValueError(
            f"[packed_rows] positions must have the shape of segment_ids, {segment_ids.shape}, but got "
            f"{positions.shape}."
        )
    packed = _Packed(Rows(segment_ids, positions_in_documents(segment_ids) if positions is None else positions))
    token = _packed.set(packed)
    try:
        yield
    finally:
        _packed.reset(token)
    if not packed.is_read:
        raise RuntimeError(
            "[packed_rows] a patched model must be called in the block but none was, so that the segment ids had no "
            "effect. Call forge_mlx.patch(model) first; with mx.compile open the block inside the compiled function."
        )


def positions_in_documents(segment_ids: mx.array) -> mx.array:
    """The place of each token in its document, int32 `[B, T]`: 0 wherever an id is not that of the token before.

    Args:
        segment_ids: Integers `[B, T]`.
    """
    places = mx.arange(segment_ids.shape[1], dtype=mx.int32)[None]
    is_first = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_first = mx.pad(is_first, [(0, 0), (1, 0)])
    return places - mx.cummax(mx.where(is_first, places, 0), axis=1)


def current_rows(tokens: mx.array) -> Rows:
    """What the enclosing `packed_rows` block says; without one, that each row is one text.

    Args:
        tokens: `[B, T]`.

    Raises:
        ValueError: The block's ids have another shape.
    """
    packed = _packed.get()
    if packed is None:
        return Rows()
    ids = packed.rows.segment_ids
    if ids is not None and ids.shape != tokens.shape[:2]:
        raise ValueError(
            f"[packed_rows] segment_ids must have the shape of the tokens, {tokens.shape[:2]}, but got {ids.shape}."
        )
    packed.is_read = True
    return packed.rows
