"""moe_dispatch and moe_combine: rows sorted by expert for `mx.gather_mm`, and back to their tokens."""

from functools import cache
import math

from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function
from forge_mlx.kernels.dispatch import launch, reference
from forge_mlx.kernels.dispatch.plan import DispatchPlan, make_plan, map_plans
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def moe_dispatch(x: mx.array, indices: mx.array, *, impl: str | None = None) -> tuple[mx.array, DispatchPlan]:
    """rows[r] = x[plan.tokens[r]]: each token once for each of its k experts, sorted by expert. Nothing is dropped.

    Rows of one expert are in the order of their tokens, then of their slots. A layer of experts::

        gates, indices = topk_renorm(p, k)
        rows, plan = moe_dispatch(x, indices)
        blocks = rows.reshape(-1, 1, rows.shape[-1])  # not rows[:, None]: MLX issue 4253
        y = mx.gather_mm(blocks, w, rhs_indices=plan.experts, sorted_indices=True).reshape(len(rows), -1)
        out = moe_combine(y, gates, plan)

    Differentiable in x: dx[n] is the sum of its k rows' gradients, in float32, in the order of the slots and rounded
    once, without atomics: the same bits every time. Derivatives of any order are these two again. indices and the plan
    are integers without a gradient, cut off from what they were made of. Forward mode (`mx.jvp`): impl "reference".

    A negative index (a token of padding), and one that int32 does not hold, names no expert: nothing can raise inside
    a compiled step. Its row comes first all the same, among those of expert 0, and `moe_combine` counts it nowhere. How
    many experts there are is not known here: an index of that number or more reaches `mx.gather_mm`, which reads behind
    its weights; `moe_combine` alone would count it nowhere too. A token that names an expert twice has two rows.

    Args:
        x: `[..., C]`, float32, float16 or bfloat16.
        indices: `[..., k]`, the experts of each token, integers of any dtype; the leading axes of x, together N.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        rows `[N k, C]` in the dtype of x, and the plan.

    Raises:
        ValueError: Arrays without axes, of another dtype or with other leading axes, 2^31 rows or more, an unknown
            engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_dispatch(x, indices)
    engine = resolve("moe_dispatch", impl)
    plan = make_plan(indices)
    shape = (indices.size, x.shape[-1])
    if math.prod(shape) == 0:
        return mx.zeros(shape, x.dtype), plan
    (rows,) = _gather(engine.name)(_flat(x), _flat(plan.positions), plan.tokens)
    return rows, plan


def moe_combine(y: mx.array, gates: mx.array, plan: DispatchPlan, *, impl: str | None = None) -> mx.array:
    """out[n] = the sum of gates[n, e] y[r] over the k rows r of token n, of which e is the expert.

    Each with n counted over all leading axes. In float32, in the order of the slots, rounded once. Gradients, in one
    pass over y and dout without atomics, the same bits every time::

        dy[r] = gates[n, e] * dout[n]
        dgates[n, e] = (dout[n] * y[r]).sum(), 0 for the experts that the token does not name

    For an expert that a token names twice the gate counts for both rows, and its gradient is the sum of both. An index
    that is not in `[0, E)` has the gate 0: its row is not added, even if it is not finite, and gets the gradient 0.
    Second derivatives are those of the gradient's formula in plain MLX operations. Engine "reference", the one with
    forward mode (`mx.jvp`): plain MLX operations; on a GPU the gates' gradients of an expert that a token names three
    times or more may differ in their last bits from run to run.

    Args:
        y: `[N k, C]`, a row for each row of `moe_dispatch`, float32, float16 or bfloat16.
        gates: `[..., E]`, as `topk_renorm` returns them, of any of these dtypes.
        plan: As `moe_dispatch` returned it.
        impl: As `moe_dispatch` takes it.

    Returns:
        `[..., C]`, the leading axes of what was dispatched, in the dtype of y.

    Raises:
        ValueError: Arrays of another dtype, a y without one row for each of the plan, other leading axes of gates, no
            DispatchPlan, an unknown engine.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_combine(y, gates, plan)
    engine = resolve("moe_combine", impl)
    shape = (*plan.indices.shape[:-1], y.shape[1])
    if y.size == 0 or gates.size == 0:
        return mx.zeros(shape, y.dtype)
    (out,) = _combine(engine.name)(y, _flat(gates), _flat(plan.positions), _flat(plan.indices), plan.slots)
    return out.reshape(shape)


def _flat(x: mx.array) -> mx.array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# Each of the first two is the gradient of the other. Neither reads what the other was given, so that x is not held.


@cache
def _gather(engine: EngineName) -> Function:
    """The differentiable function x `[N, C]`, positions `[N, k]`, tokens `[N k]` -> rows `[N k, C]`."""

    def forward(x: mx.array, positions: mx.array, tokens: mx.array) -> Arrays:
        if engine == "reference":
            return (reference.dispatch_forward(x, tokens),)
        return (launch.dispatch_forward(engine, x, positions),)

    def backward(_x: mx.array, positions: mx.array, tokens: mx.array, drows: mx.array) -> Arrays:
        return _add_rows(engine)(drows, positions, tokens)

    rule = map_plans("moe_dispatch", rows=(1,), tokens=(2,))
    return differentiable(forward, backward, backward, constants=(1, 2), vmap=rule)


@cache
def _add_rows(engine: EngineName) -> Function:
    """The differentiable function rows `[N k, C]`, positions `[N, k]`, tokens `[N k]` -> their sums `[N, C]`."""

    def forward(rows: mx.array, positions: mx.array, _tokens: mx.array) -> Arrays:
        if engine == "reference":
            return (reference.dispatch_backward(rows, positions),)
        return (launch.dispatch_backward(engine, rows, positions),)

    def backward(_rows: mx.array, positions: mx.array, tokens: mx.array, dsums: mx.array) -> Arrays:
        return _gather(engine)(dsums, positions, tokens)

    rule = map_plans("moe_dispatch", rows=(1,), tokens=(2,))
    return differentiable(forward, backward, backward, constants=(1, 2), vmap=rule)


@cache
def _combine(engine: EngineName) -> Function:
    """The differentiable function y `[N k, C]`, gates `[N, E]`, positions, indices, slots -> out `[N, C]`."""
    rule = map_plans("moe_combine", rows=(2, 4))

    def forward(y: mx.array, gates: mx.array, positions: mx.array, indices: mx.array, _slots: mx.array) -> Arrays:
        if engine == "reference":
            return (reference.combine_forward(y, gates, positions, indices),)
        return (launch.combine_forward(engine, y, gates, positions, indices),)

    def backward(
        y: mx.array, gates: mx.array, positions: mx.array, indices: mx.array, _slots: mx.array, dout: mx.array
    ) -> Arrays:
        return launch.combine_backward(engine, y, gates, positions, indices, dout)

    gradient = reference.combine_backward if engine == "reference" else backward
    return differentiable(forward, gradient, reference.combine_backward, constants=(2, 3, 4), vmap=rule)
