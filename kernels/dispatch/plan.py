"""Which row of the sorted order is which token's: what `moe_dispatch` hands to `moe_combine`."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from forge_mlx.kernels._common.differentiable import VmapRule
from forge_mlx.kernels._common.folding import Arrays, Axes, Function, map_batches
import mlx.core as mx

_MAX_ROWS: Final = 2**31


class DispatchPlan(NamedTuple):
    """Where the rows of `moe_dispatch` come from. Slot j of token n is its j-th expert; n counts over all leading axes.

    All arrays are int32, have no gradient and pass through `mx.compile`, `mx.vmap` and `mx.checkpoint` as one.

    Attributes:
        experts: `[N k]`, the expert of each row, ascending, for ``mx.gather_mm(rows.reshape(-1, 1, C), w,
            rhs_indices=plan.experts, sorted_indices=True)``. 0 where `indices` has -1, so that such a row reads no
            memory in front of w.
        tokens: `[N k]`, the token of each row.
        slots: `[N k]`, the slot n k + j of each row.
        positions: `[..., k]`, the row of each slot.
        indices: `[..., k]`, the expert of each slot; -1 for one that names none.
    """

    experts: mx.array
    tokens: mx.array
    slots: mx.array
    positions: mx.array
    indices: mx.array


def make_plan(indices: mx.array) -> DispatchPlan:
    """Sort slots by their experts; those of one expert stay in the order of tokens, then of slots.

    Args:
        indices: `[..., k]`, integers of any dtype. Those that are no int32 of 0 or more name no expert and come first.

    Raises:
        ValueError: More slots than int32 can count.
    """
    indices = mx.stop_gradient(indices)
    count = indices.size
    check_row_count("moe_dispatch", "indices", count)
    if indices.dtype.size < 4:
        indices = indices.astype(mx.int32)
    # Chosen in its own dtype: what int32 does not hold would wrap around to an expert that exists.
    is_expert = (indices >= 0) & (indices < _MAX_ROWS - 1)
    indices = mx.where(is_expert, mx.where(is_expert, indices, mx.zeros_like(indices)).astype(mx.int32), -1)
    if count == 0:
        nothing = mx.zeros((0,), mx.int32)
        return DispatchPlan(nothing, nothing, nothing, indices, indices)
    # An expert and its slot are one number: the order does not depend on what the sort does with equal ones.
    slots = mx.arange(count, dtype=mx.int32)
    keys = mx.sort(mx.left_shift(indices.reshape(-1).astype(mx.int64), 32) + slots.astype(mx.int64))
    order = mx.bitwise_and(keys, 2**31 - 1).astype(mx.int32)
    return DispatchPlan(
        experts=mx.maximum(mx.right_shift(keys, 32), 0).astype(mx.int32),
        tokens=order // indices.shape[-1],
        slots=order,
        positions=mx.put_along_axis(mx.zeros_like(slots), order, slots, axis=0).reshape(indices.shape),
        indices=indices,
    )


def check_row_count(op: str, name: str, count: int) -> None:
    """Raise unless int32 can count rows.

    Args:
        op: The op's name, for the message.
        name: Of what has them.
        count: How many.

    Raises:
        ValueError: For 2^31 or more.
    """
    if count >= _MAX_ROWS:
        raise ValueError(f"[{op}] {name} must have fewer than 2^31 rows together but got {count}. Split the batch.")


def map_plans(op: str, *, rows: Sequence[int], tokens: Sequence[int] = ()) -> VmapRule:
    """The vmap rule of functions of a plan's arrays: the plans of all elements of the axis are one longer plan.

    Args:
        op: The op's name, for the message.
        rows: Indices of the inputs that hold rows or slots, counted from 0 in each plan. The first of them is
            `positions`, `[N, k]`.
        tokens: Indices of the inputs that hold tokens.
    """

    def rule(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        size = next(array.shape[axis] for array, axis in zip(inputs, axes, strict=True) if axis is not None)
        places = {index: _with_axis(inputs[index], axes[index]) for index in (*rows, *tokens)}
        count, slots = places[rows[0]].shape[1:]
        check_row_count(op, "all elements of vmap", size * count * slots)
        steps = dict.fromkeys(rows, count * slots) | dict.fromkeys(tokens, count)
        element = mx.arange(size, dtype=mx.int32)
        moved, moved_axes = list(inputs), list(axes)
        for index, place in places.items():
            moved[index] = place + steps[index] * element.reshape(-1, *[1] * (place.ndim - 1))
            moved_axes[index] = 0
        return map_batches(function, tuple(moved), tuple(moved_axes))

    return rule


def _with_axis(array: mx.array, axis: int | None) -> mx.array:
    """The mapped axis first; of length 1 where there is none."""
    return array[None] if axis is None else mx.moveaxis(array, axis, 0)
