"""The formulas of this room and of their gradients in plain MLX operations, and what its ops ask of their arguments."""

from numbers import Integral

from forge_mlx.kernels._common.checks import check_axes, check_floating, check_integers, check_shape
from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels.dispatch.plan import DispatchPlan, make_plan
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx


def check_row_scale(op: str, x: mx.array, gates: mx.array, e: int) -> None:
    """Raise what `row_scale` and `row_scale_accumulate` raise for the arguments of both.

    Args:
        op: The op's name.
        x: `[..., C]`.
        gates: `[..., E]`.
        e: A column of gates.

    Raises:
        ValueError: Other dtypes or shapes, and an e that is no integer from 0 to E - 1.
    """
    check_floating(op, x=x, gates=gates)
    check_axes(op, 1, x=x, gates=gates)
    check_shape(op, "gates", gates, (*x.shape[:-1], gates.shape[-1]), "the leading axes of x and one gate per expert")
    if isinstance(e, mx.array):
        raise ValueError(f"[{op}] e must be a Python integer but got an mx.array. Convert it: e.item().")
    if not isinstance(e, Integral) or isinstance(e, bool):
        raise ValueError(f"[{op}] e must be a Python integer but got {e!r}.")
    if not 0 <= e < gates.shape[-1]:
        raise ValueError(f"[{op}] e must be from 0 to {gates.shape[-1] - 1}, a column of gates, but got {e}.")


def check_accumulate(dst: mx.array, x: mx.array, gates: mx.array, e: int) -> None:
    """Raise what `row_scale_accumulate` raises for its arguments.

    Args:
        dst: The shape of x.
        x: `[..., C]`.
        gates: `[..., E]`.
        e: A column of gates.

    Raises:
        ValueError: As `check_row_scale`, and for another dtype or shape of dst.
    """
    check_floating("row_scale_accumulate", dst=dst)
    check_row_scale("row_scale_accumulate", x, gates, e)
    check_shape("row_scale_accumulate", "dst", dst, x.shape, "that of x")


def check_dispatch(x: mx.array, indices: mx.array) -> None:
    """Raise what `moe_dispatch` raises for its arguments.

    Args:
        x: `[..., C]`.
        indices: `[..., k]`.

    Raises:
        ValueError: Other dtypes or shapes.
    """
    check_floating("moe_dispatch", x=x)
    check_integers("moe_dispatch", indices=indices)
    check_axes("moe_dispatch", 1, x=x, indices=indices)
    want = (*x.shape[:-1], indices.shape[-1])
    check_shape("moe_dispatch", "indices", indices, want, "the leading axes of x and the experts of each row")


def check_combine(y: mx.array, gates: mx.array, plan: DispatchPlan) -> None:
    """Raise what `moe_combine` raises for its arguments.

    Args:
        y: `[N k, C]`.
        gates: `[..., E]`.
        plan: As `moe_dispatch` returns it.

    Raises:
        ValueError: Other dtypes or shapes, or no plan.
    """
    check_floating("moe_combine", y=y, gates=gates)
    check_axes("moe_combine", 1, gates=gates)
    if not isinstance(plan, DispatchPlan):
        raise ValueError(
            f"[moe_combine] plan must be the DispatchPlan that moe_dispatch returns but got {type(plan).__name__}."
        )
    for name, field in plan._asdict().items():
        check_integers("moe_combine", **{f"plan.{name}": field})
        if field.dtype != mx.int32:
            raise ValueError(f"[moe_combine] plan.{name} must be int32 but got {dtype_name(field.dtype)}.")
    check_shape("moe_combine", "plan.positions", plan.positions, plan.indices.shape, "that of plan.indices")
    for name in ("experts", "tokens", "slots"):
        check_shape("moe_combine", f"plan.{name}", getattr(plan, name), (plan.indices.size,), "one for each slot")
    if y.ndim != 2 or y.shape[0] != plan.indices.size:
        raise ValueError(f"[moe_combine] y must have the shape ({plan.indices.size}, C), as plan, but got {y.shape}.")
    want = (*plan.indices.shape[:-1], gates.shape[-1])
    check_shape("moe_combine", "gates", gates, want, "the leading axes of plan.indices and one gate per expert")


def scale_forward(x: mx.array, gates: mx.array, e: int) -> mx.array:
    """x gates[..., e], rounded once.

    Args:
        x: `[..., C]`.
        gates: `[..., E]`.
        e: A column of gates.

    Returns:
        `[..., C]` in the dtype of x.
    """
    return (x * gates[..., e : e + 1]).astype(x.dtype)


def accumulate_forward(dst: mx.array, x: mx.array, gates: mx.array, e: int) -> mx.array:
    """dst + x gates[..., e], rounded once.

    Args:
        dst: `[..., C]`.
        x: `[..., C]`.
        gates: `[..., E]`.
        e: A column of gates.

    Returns:
        `[..., C]` in the dtype of dst.
    """
    product = x.astype(mx.float32) * gates[..., e : e + 1].astype(mx.float32)
    return (dst.astype(mx.float32) + product).astype(dst.dtype)


def scale_backward(x: mx.array, gates: mx.array, e: int, dout: mx.array) -> Arrays:
    """dx = dout gates[:, e]; dgates[:, e] = the sum of dout x over a row, 0 in the other columns.

    Args:
        x: `[N, C]`.
        gates: `[N, E]`.
        e: A column of gates.
        dout: `[N, C]`, the cotangent of the result.

    Returns:
        dx `[N, C]` and dgates `[N, E]`, each in the dtype of what it is the gradient of.
    """
    dout = dout.astype(mx.float32)
    dx = dout * gates[:, e : e + 1].astype(mx.float32)
    dgate = (dout * x.astype(mx.float32)).sum(axis=1, keepdims=True)
    dgates = mx.where(mx.arange(gates.shape[1]) == e, dgate, 0)
    return dx.astype(x.dtype), dgates.astype(gates.dtype)


def dispatch_forward(x: mx.array, tokens: mx.array) -> mx.array:
    """rows[r] = x[tokens[r]].

    Args:
        x: `[N, C]`.
        tokens: `[N k]`, of the plan.

    Returns:
        `[N k, C]`.
    """
    return mx.take(x, tokens, axis=0)


def dispatch_backward(drows: mx.array, positions: mx.array) -> mx.array:
    """dx[n] = the sum of drows[positions[n, j]] over j, in float32 and rounded once.

    Args:
        drows: `[N k, C]`, the cotangent of the rows.
        positions: `[N, k]`, of the plan.

    Returns:
        `[N, C]` in the dtype of drows.
    """
    # Slot by slot: a float32 copy of all rows is never there.
    total = mx.zeros((positions.shape[0], drows.shape[1]))
    for slot in range(positions.shape[1]):
        total = total + mx.take(drows, positions[:, slot], axis=0).astype(mx.float32)
    return total.astype(drows.dtype)


def combine_forward(y: mx.array, gates: mx.array, positions: mx.array, indices: mx.array) -> mx.array:
    """out[n] = the sum of gates[n, indices[n, j]] y[positions[n, j]] over j, in float32 and rounded once.

    Args:
        y: `[N k, C]`.
        gates: `[N, E]`.
        positions: `[N, k]`, of the plan.
        indices: `[N, k]`, of the plan. A slot whose expert is not in `[0, E)` counts nothing.

    Returns:
        `[N, C]` in the dtype of y.
    """
    weights, is_expert = _slot_gates(gates, indices)
    total = mx.zeros((positions.shape[0], y.shape[1]))
    for slot in range(positions.shape[1]):
        row = mx.take(y, positions[:, slot], axis=0).astype(mx.float32)
        here = slice(slot, slot + 1)
        total = total + mx.where(is_expert[:, here], weights[:, here] * row, 0)
    return total.astype(y.dtype)


def combine_backward(
    y: mx.array, gates: mx.array, positions: mx.array, indices: mx.array, slots: mx.array, dout: mx.array
) -> Arrays:
    """dy[r] = gates[n, e] dout[n] for the token n and the expert e of row r; dgates[n, e] = dout[n] . y[r].

    Args:
        y: `[N k, C]`.
        gates: `[N, E]`.
        positions: `[N, k]`, of the plan.
        indices: `[N, k]`, of the plan.
        slots: `[N k]`, of the plan.
        dout: `[N, C]`, the cotangent of out.

    Returns:
        dy `[N k, C]` and dgates `[N, E]`, each in the dtype of what it is the gradient of. Rows of an expert that is
        not in `[0, E)` and gates that no slot names get 0; an expert that a token names twice has the sum of both.
    """
    count, experts = gates.shape
    weights, is_expert = _slot_gates(gates, indices)
    token = slots // indices.shape[1]
    of_rows = mx.take(dout, token, axis=0).astype(mx.float32) * mx.take(weights.reshape(-1), slots)[:, None]
    dy = mx.where(mx.take(is_expert.reshape(-1), slots)[:, None], of_rows, 0)
    wide = dout.astype(mx.float32)
    products = [
        (mx.take(y, positions[:, slot], axis=0).astype(mx.float32) * wide).sum(axis=1)
        for slot in range(positions.shape[1])
    ]
    # One column more, which takes what no expert gets and is cut off.
    target = mx.where(is_expert, indices, experts)
    token = mx.arange(count, dtype=mx.int32)[:, None]
    dgates = mx.zeros((count, experts + 1)).at[token, target].add(mx.stack(products, axis=1))[:, :experts]
    return dy.astype(y.dtype), dgates.astype(gates.dtype)


def _slot_gates(gates: mx.array, indices: mx.array) -> tuple[mx.array, mx.array]:
    """The gate of each slot in float32, and whether its expert exists."""
    is_expert = (indices >= 0) & (indices < gates.shape[1])
    chosen = mx.take_along_axis(gates, mx.where(is_expert, indices, 0), axis=1)
    return chosen.astype(mx.float32), is_expert


def row_scale(x: mx.array, gates: mx.array, e: int) -> mx.array:
    """x gates[..., e], as `forge_mlx.kernels.row_scale` but for `impl`.

    Args:
        x: `[..., C]`.
        gates: `[..., E]`.
        e: A column of gates.

    Returns:
        `[..., C]` in the dtype of x.

    Raises:
        ValueError: As `check_row_scale`.
    """
    check_row_scale("row_scale", x, gates, e)
    return scale_forward(x, gates, e)


def row_scale_accumulate(dst: mx.array, x: mx.array, gates: mx.array, e: int) -> mx.array:
    """dst + x gates[..., e], as `forge_mlx.kernels.row_scale_accumulate` but for `impl`.

    Args:
        dst: `[..., C]`.
        x: `[..., C]`.
        gates: `[..., E]`.
        e: A column of gates.

    Returns:
        `[..., C]` in the dtype of dst.

    Raises:
        ValueError: As `check_accumulate`.
    """
    check_accumulate(dst, x, gates, e)
    return accumulate_forward(dst, x, gates, e)


def moe_dispatch(x: mx.array, indices: mx.array) -> tuple[mx.array, DispatchPlan]:
    """x's rows by expert, as `forge_mlx.kernels.moe_dispatch` but for `impl`.

    Args:
        x: `[..., C]`.
        indices: `[..., k]`.

    Returns:
        `[N k, C]` and the plan.

    Raises:
        ValueError: As `check_dispatch`.
    """
    check_dispatch(x, indices)
    plan = make_plan(indices)
    return dispatch_forward(x.reshape(-1, x.shape[-1]), plan.tokens), plan


def moe_combine(y: mx.array, gates: mx.array, plan: DispatchPlan) -> mx.array:
    """The rows of each token, weighed and added, as `forge_mlx.kernels.moe_combine` but for `impl`.

    Args:
        y: `[N k, C]`.
        gates: `[..., E]`.
        plan: As `moe_dispatch` returned it.

    Returns:
        `[..., C]` in the dtype of y.

    Raises:
        ValueError: As `check_combine`.
    """
    check_combine(y, gates, plan)
    flat = (each.reshape(-1, each.shape[-1]) for each in (gates, plan.positions, plan.indices))
    return combine_forward(y, *flat).reshape(*plan.indices.shape[:-1], y.shape[1])
