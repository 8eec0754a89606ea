"""The formulas of routing and of its gradient in plain MLX operations."""

from numbers import Integral

from forge_mlx.kernels._common.checks import (
    FLOATS,
    check_arrays,
    check_axes,
    check_eps,
    check_float32_range,
    check_floating,
    check_integers,
)
from forge_mlx.kernels.routing.tiles import MAX_EXPERTS
import mlx.core as mx

_INDEX_BITS = 10
"""Of a sort key: what an index below MAX_EXPERTS needs."""


def check_topk(p: mx.array, k: int, bias: mx.array | None, normalize: bool, eps: float) -> None:
    """Raise what `topk_renorm` raises for its arguments.

    Args:
        p: `[..., E]`.
        k: From 1 to E.
        bias: What broadcasts to p, or None.
        normalize: Whether gates are divided by their sum.
        eps: Added to the sum.

    Raises:
        ValueError: Anything else.
    """
    op = "topk_renorm"
    check_floating(op, p=p)
    check_axes(op, 1, p=p)
    experts = p.shape[-1]
    if experts > MAX_EXPERTS:
        raise ValueError(f"[{op}] p must have at most {MAX_EXPERTS} experts on its last axis but got {experts}.")
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k <= experts:
        raise ValueError(
            f"[{op}] k must be an integer from 1 to {experts}, the experts on the last axis of p, but got {k!r}."
        )
    if bias is not None:
        check_floating(op, bias=bias)
        fits = all(size in (1, wanted) for size, wanted in zip(reversed(bias.shape), reversed(p.shape), strict=False))
        if bias.ndim > p.ndim or not fits:
            raise ValueError(f"[{op}] bias must broadcast to the shape of p, {p.shape}, but got {bias.shape}.")
    if not isinstance(normalize, bool):
        raise ValueError(f"[{op}] normalize must be True or False but got {normalize!r}.")
    check_eps(op, eps)
    check_float32_range(op, "eps", eps)


def select(p: mx.array, bias: mx.array | None, k: int) -> mx.array:
    """The k elements of each row with the largest p + bias, the best one first and of equals the lowest index.

    A score and its index are one number, so that no two are equal, whatever the sort does with equals.

    Args:
        p: `[..., E]`, E at most MAX_EXPERTS.
        bias: What broadcasts to p, or None.
        k: From 1 to E.

    Returns:
        int32 `[..., k]`.
    """
    scores = mx.stop_gradient(p).astype(mx.float32)
    if bias is not None:
        scores = scores + mx.stop_gradient(bias).astype(mx.float32)
    bits = scores.view(mx.int32)
    # Integers in the order of the numbers: negative ones have theirs turned round, -0 is 0, NaN is above all.
    ordered = mx.where(bits < 0, -mx.bitwise_and(bits, 2**31 - 1), bits)
    ordered = mx.where(mx.isnan(scores), 2**31 - 1, ordered).astype(mx.int64)
    number = mx.arange(p.shape[-1], dtype=mx.int64)
    keys = mx.left_shift(-ordered, _INDEX_BITS) + number
    if k == 1:
        best = mx.min(keys, axis=-1, keepdims=True)
    elif k == p.shape[-1]:
        best = mx.sort(keys, axis=-1)
    else:
        best = mx.sort(mx.partition(keys, k - 1, axis=-1)[..., :k], axis=-1)
    return mx.bitwise_and(best, 2**_INDEX_BITS - 1).astype(mx.int32)


def forward(
    p: mx.array, bias: mx.array | None, k: int, normalize: bool = True, eps: float = 1e-20
) -> tuple[mx.array, mx.array]:
    """Gates and indices, in float32 and rounded once.

    Args:
        p: `[..., E]`, not empty.
        bias: What broadcasts to p, or None.
        k: From 1 to E.
        normalize: Whether gates are divided by their sum.
        eps: Added to the sum.

    Returns:
        Gates `[..., E]` in the dtype of p and int32 `[..., k]`.
    """
    indices = select(p, bias, k)
    chosen = mx.take_along_axis(p, indices, axis=-1).astype(mx.float32)
    if normalize:
        chosen = chosen / (mx.sum(chosen, axis=-1, keepdims=True) + eps)
    gates = mx.put_along_axis(mx.zeros(p.shape, p.dtype), indices, chosen.astype(p.dtype), axis=-1)
    return gates, indices


def backward(p: mx.array, indices: mx.array, dgates: mx.array, normalize: bool = True, eps: float = 1e-20) -> mx.array:
    """dp = (dgates - sum(g dgates)) / (sum(p) + eps) on the selection and 0 elsewhere, in float32 and rounded once.

    Without `normalize` dgates on the selection.

    Args:
        p: `[..., E]`, not empty.
        indices: `[..., k]`, as `forward` returns them.
        dgates: The cotangent of the gates.
        normalize: As the forward had it.
        eps: As the forward had it.
    """
    indices = mx.stop_gradient(indices)
    g = mx.take_along_axis(dgates, indices, axis=-1).astype(mx.float32)
    if normalize:
        chosen = mx.take_along_axis(p, indices, axis=-1).astype(mx.float32)
        total = mx.sum(chosen, axis=-1, keepdims=True) + eps
        g = (g - mx.sum(chosen / total * g, axis=-1, keepdims=True)) / total
    return mx.put_along_axis(mx.zeros(p.shape, p.dtype), indices, g.astype(p.dtype), axis=-1)


def topk_renorm(
    p: mx.array, k: int, bias: mx.array | None = None, normalize: bool = True, eps: float = 1e-20
) -> tuple[mx.array, mx.array]:
    """Gates on the k best experts and their indices, as `forge_mlx.kernels.topk_renorm` but for `impl`.

    Args:
        p: `[..., E]`.
        k: From 1 to E.
        bias: What broadcasts to p, or None.
        normalize: Whether gates are divided by their sum.
        eps: Added to the sum.

    Returns:
        Gates `[..., E]` and int32 `[..., k]`.

    Raises:
        ValueError: As `check_topk`.
    """
    check_topk(p, k, bias, normalize, eps)
    if p.size == 0:
        return mx.zeros(p.shape, p.dtype), mx.zeros((*p.shape[:-1], k), mx.int32)
    return forward(p, bias, k, normalize, eps)


def check_counts(indices: mx.array, num_experts: int) -> None:
    """Raise what `expert_counts` raises for its arguments.

    Args:
        indices: Integers of any shape, or gates `[..., E]`.
        num_experts: E.

    Raises:
        ValueError: Another dtype, gates of another number of experts, no positive number.
    """
    op = "expert_counts"
    check_arrays(op, indices=indices)
    if isinstance(num_experts, bool) or not isinstance(num_experts, Integral) or num_experts < 1:
        raise ValueError(f"[{op}] num_experts must be an integer of 1 or more but got {num_experts!r}.")
    if indices.dtype not in FLOATS:
        check_integers(op, indices=indices)
        return
    check_axes(op, 1, indices=indices)
    if indices.shape[-1] != num_experts:
        raise ValueError(
            f"[{op}] num_experts must be the last axis of gates, {indices.shape[-1]}, but got {num_experts}."
        )


def bins(indices: mx.array, num_experts: int) -> mx.array:
    """Integers of any dtype as int32, and num_experts for those outside of `[0, num_experts)`."""
    if indices.dtype.size < 4:
        # 8 and 16 bits may not hold the number that they are compared with.
        indices = indices.astype(mx.int32)
    known = (indices >= 0) & (indices < num_experts)
    # Chosen in its own dtype: what int32 does not hold would wrap around to an expert that exists.
    return mx.where(known, mx.where(known, indices, mx.zeros_like(indices)).astype(mx.int32), num_experts)


def count_indices(indices: mx.array, num_experts: int) -> mx.array:
    """counts[e] = how many of the indices are e.

    Args:
        indices: Integers `[N]`, N at least 1.
        num_experts: E.

    Returns:
        int32 `[E]`.
    """
    # One more, which takes what is out of range and is cut off.
    counts = mx.zeros((num_experts + 1,), mx.int32).at[bins(indices, num_experts)].add(1)
    return counts[:num_experts]


def count_gates(gates: mx.array) -> mx.array:
    """counts[e] = how many elements of column e are not 0.

    Args:
        gates: `[N, E]`, N at least 1.

    Returns:
        int32 `[E]`.
    """
    # By their bits, because a comparison on a GPU may take the smallest numbers for 0.
    bits = gates.view(mx.uint32 if gates.dtype == mx.float32 else mx.uint16)
    return mx.sum(mx.left_shift(bits, 1) != 0, axis=0).astype(mx.int32)


def expert_counts(indices: mx.array, num_experts: int) -> mx.array:
    """How many tokens each expert gets, as `forge_mlx.kernels.expert_counts` but for `impl`.

    Args:
        indices: Integers of any shape, or gates `[..., E]`.
        num_experts: E.

    Returns:
        int32 `[E]`.

    Raises:
        ValueError: As `check_counts`.
    """
    check_counts(indices, num_experts)
    if indices.size == 0:
        return mx.zeros((num_experts,), mx.int32)
    if indices.dtype in FLOATS:
        return count_gates(indices.reshape(-1, num_experts))
    return count_indices(indices.reshape(-1), num_experts)
