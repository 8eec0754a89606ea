"""The formulas of attention and of its gradient in plain MLX operations, with scores and probabilities whole."""

import math

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels.attention.options import LONGEST, Options
import mlx.core as mx


def forward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    sinks: mx.array | None,
    options: Options,
) -> tuple[mx.array, mx.array]:
    """out = sum of e^(s - lse) v, lse = ln(sum of e^s + e^sink), over the keys that a query sees, in float32.

    A query that sees nothing has the result 0, and the sink as lse, or -inf.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, Dv]`.
        q_segments: int32 `[B, T]`, or None.
        k_segments: int32 `[B, S]`, or None.
        sinks: float32 `[B, H]`, or None.
        options: What is seen, and how scores are made.

    Returns:
        out `[B, H, T, Dv]`, rounded once to the dtype of q, and lse `[B, H, T]` in float32.
    """
    seen = visible(q.shape[2], k.shape[2], q_segments, k_segments, options)
    out, lse = attend(scores(q, k, options), v, seen, sinks)
    return out.astype(q.dtype), lse


def backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    sinks: mx.array | None,
    out: mx.array,
    lse: mx.array,
    dout: mx.array,
    dlse: mx.array,
    options: Options,
) -> Arrays:
    """dv = P^T dout, and with dS = P (dout v^T - rowsum(dout out) + dlse): dq = scale dS k, dk = scale dS^T q.

    Under a softcap dS has the factor 1 - (s / c)^2 too. dsink = sum of e^(sink - lse) (dlse - rowsum(dout out)).

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, Dv]`.
        q_segments: int32 `[B, T]`, or None.
        k_segments: int32 `[B, S]`, or None.
        sinks: float32 `[B, H]`, or None.
        out: As `forward` returned it.
        lse: As `forward` returned it.
        dout: Cotangent of out.
        dlse: Cotangent of lse; where lse is -inf it counts as 0.
        options: What is seen, and how scores are made.

    Returns:
        dq, dk and dv, rounded once to the dtype of q, and with sinks dsinks `[B, H]` in float32.
    """
    seen = visible(q.shape[2], k.shape[2], q_segments, k_segments, options)
    delta = row_delta(out, lse, dout, dlse)
    found = gradients(q, k, v, seen, lse, delta, dout, options)
    rounded = tuple(gradient.astype(q.dtype) for gradient in found)
    return rounded if sinks is None else (*rounded, sink_gradient(sinks, lse, delta))


def visible(
    queries: int,
    keys: int,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    options: Options,
    *,
    first_query: int = 0,
    first_key: int = 0,
    offset: int | None = None,
    zero: mx.array | None = None,
) -> mx.array:
    """Whether query i sees key j: j <= i + S - T, j > i + S - T - window, and the same id, which is not negative.

    Args:
        queries: How many queries.
        keys: How many keys.
        q_segments: int32 `[B, queries]`, or None.
        k_segments: int32 `[B, keys]`, or None.
        options: Which of this counts.
        first_query: Index of the first query, where these are a part of all.
        first_key: Index of the first key, where these are a part of all.
        offset: S - T of all; None: of these.
        zero: An int32 0 that the result waits for; None: nothing.

    Returns:
        Truth values `[B or 1, 1, queries, keys]`.
    """
    seen = mx.broadcast_to(mx.array(True), (1, 1, queries, keys))
    if options.causal:
        # Starts of mx.arange, as a compiled function would have another kernel for each number that is added.
        start = first_query + (keys - queries if offset is None else offset)
        last = mx.arange(start, start + queries, dtype=mx.int32)[:, None]
        last = last if zero is None else last + zero
        key = mx.arange(first_key, first_key + keys, dtype=mx.int32)
        seen = (key <= last)[None, None]
        # A window that is wider than everything might not fit the dtype.
        if options.window is not None:
            seen = seen & (key > last - min(options.window, LONGEST))
    if q_segments is not None and k_segments is not None:
        ids = (q_segments if zero is None else q_segments + zero)[:, None, :, None]
        same = (ids == k_segments[:, None, None]) & (ids >= 0)
        seen = seen & same if options.causal else same
    return seen


def scores(q: mx.array, k: mx.array, options: Options) -> mx.array:
    """s = scale q k^T, or c tanh(s / c), `[B, H, T, S]` in float32; what is hidden is there too.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        options: How they are made.
    """
    s = _times(q.astype(mx.float32) * options.scale, mx.swapaxes(k.astype(mx.float32), 2, 3))
    return s if options.softcap is None else options.softcap * mx.tanh(s / options.softcap)


def attend(s: mx.array, v: mx.array, seen: mx.array, sinks: mx.array | None) -> tuple[mx.array, mx.array]:
    """out and lse as `forward` has them, both in float32.

    Args:
        s: Scores `[B, H, T, S]`.
        v: `[B, Hkv, S, Dv]`.
        seen: As from `visible`.
        sinks: float32 `[B, H]`, or None.
    """
    s = mx.minimum(s, _most(seen))
    # Nothing depends on what is subtracted, so that it has no gradient.
    top = mx.max(s, axis=-1, keepdims=True) if s.size else mx.full((*s.shape[:-1], 1), -math.inf)
    sink = None if sinks is None else sinks[:, :, None, None]
    top = mx.stop_gradient(top if sink is None else mx.maximum(top, sink))
    top = mx.where(top == -math.inf, 0.0, top)
    e = _exp(s - top)
    total = row_sum(e)[..., None]
    if sink is not None:
        total = total + _exp(sink - top)
    # A denominator of 1 where there is none: a gradient of 0 / 0 would be NaN even where the result is not taken.
    is_empty = total == 0
    total = mx.where(is_empty, 1.0, total)
    lse = mx.where(is_empty, -math.inf, top + mx.log(total))
    return _times(e, v.astype(mx.float32)) / total, lse[..., 0]


def probabilities(s: mx.array, seen: mx.array, lse: mx.array) -> mx.array:
    """P = e^(s - lse), 0 where nothing is seen.

    Args:
        s: Scores `[B, H, T, S]`.
        seen: As from `visible`.
        lse: float32 `[B, H, T]`.
    """
    return _exp(mx.minimum(s - lse[..., None], _most(seen)))


def row_delta(out: mx.array, lse: mx.array, dout: mx.array, dlse: mx.array) -> mx.array:
    """rowsum(dout out) - dlse, `[B, H, T]` in float32: what is subtracted from dP.

    Args:
        out: `[B, H, T, Dv]`.
        lse: float32 `[B, H, T]`; where it is -inf, dlse does not count.
        dout: Cotangent of out.
        dlse: Cotangent of lse.
    """
    return row_sum(dout.astype(mx.float32) * out.astype(mx.float32)) - lse_cotangent(lse, dlse)


def row_sum(x: mx.array) -> mx.array:
    """The sum over the last axis.

    Args:
        x: `[..., N]`.
    """
    # MLX's sum over an axis of no elements can run for minutes on a CPU.
    return mx.sum(x, axis=-1) if x.size else mx.zeros(x.shape[:-1], x.dtype)


def lse_cotangent(lse: mx.array, dlse: mx.array) -> mx.array:
    """dlse in float32, 0 where nothing is seen: a loss that uses lse may well give NaN there.

    Args:
        lse: float32 `[B, H, T]`.
        dlse: Cotangent of lse.
    """
    return mx.where(lse == -math.inf, 0.0, dlse.astype(mx.float32))


def gradients(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    seen: mx.array,
    lse: mx.array,
    delta: mx.array,
    dout: mx.array,
    options: Options,
) -> tuple[mx.array, mx.array, mx.array]:
    """dq, dk and dv as `backward` has them, in float32.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, Dv]`.
        seen: As from `visible`.
        lse: float32 `[B, H, T]`.
        delta: As from `row_delta`.
        dout: Cotangent of out.
        options: How scores are made.
    """
    s = scores(q, k, options)
    p = probabilities(s, seen, lse)
    ds = p * (probability_gradient(dout, v) - delta[..., None])
    return (*score_gradients(q, k, s, ds, options), value_gradient(p, dout, k.shape[1]))


def probability_gradient(dout: mx.array, v: mx.array) -> mx.array:
    """dP = dout v^T, `[B, H, T, S]` in float32.

    Args:
        dout: `[B, H, T, Dv]`.
        v: `[B, Hkv, S, Dv]`.
    """
    return _times(dout.astype(mx.float32), mx.swapaxes(v.astype(mx.float32), 2, 3))


def score_gradients(q: mx.array, k: mx.array, s: mx.array, ds: mx.array, options: Options) -> tuple[mx.array, mx.array]:
    """dq = scale dS k and dk = scale dS^T q in float32, dS with the factor 1 - (s / c)^2 under a softcap.

    Args:
        q: `[B, H, T, D]`.
        k: `[B, Hkv, S, D]`.
        s: As from `scores`.
        ds: Gradient of s, 0 where nothing is seen.
        options: How scores are made.
    """
    if options.softcap is not None:
        ds = ds * (1 - mx.square(s / options.softcap))
    dq = _times(ds, k.astype(mx.float32)) * options.scale
    return dq, _transposed_times(ds, q.astype(mx.float32) * options.scale, k.shape[1])


def value_gradient(p: mx.array, dout: mx.array, kv_heads: int) -> mx.array:
    """dv = P^T dout, summed over the heads that share it, in float32.

    Args:
        p: `[B, H, T, S]`.
        dout: `[B, H, T, Dv]`.
        kv_heads: Hkv.
    """
    return _transposed_times(p, dout.astype(mx.float32), kv_heads)


def sink_gradient(sinks: mx.array, lse: mx.array, delta: mx.array) -> mx.array:
    """The sum over queries of -e^(sink - lse) delta, `[B, H]` in float32.

    Args:
        sinks: float32 `[B, H]`.
        lse: float32 `[B, H, T]`.
        delta: As from `row_delta`.
    """
    return -row_sum(sink_share(sinks, lse) * delta)


def sink_share(sinks: mx.array, lse: mx.array) -> mx.array:
    """e^(sink - lse), what a row's probabilities lack to 1, `[B, H, T]` in float32.

    Args:
        sinks: float32 `[B, H]`.
        lse: float32 `[B, H, T]`.
    """
    # A sink of -inf, alone, has the share 0: -inf - -inf would be NaN.
    return _exp(sinks[..., None] - mx.where(lse == -math.inf, 0.0, lse))


def _exp(x: mx.array) -> mx.array:
    """e^x. On an x86 CPU MLX's power takes less than half the time of its exp, most of a pass, and is closer."""
    return mx.power(math.e, x) if mx.default_device().type == mx.cpu else mx.exp(x)


def _most(seen: mx.array) -> mx.array:
    """What bounds scores so that they are -inf where nothing is seen: on a CPU far faster than a choice."""
    return mx.where(seen, math.inf, -math.inf)


def _times(x: mx.array, y: mx.array) -> mx.array:
    """`[B, H, T, M] [B, Hkv, M, N]` -> `[B, H, T, N]`: the heads of a group are more rows, and y is not repeated."""
    return (_joined(x, y.shape[1]) @ y).reshape(*x.shape[:3], y.shape[3])


def _transposed_times(x: mx.array, y: mx.array, kv_heads: int) -> mx.array:
    """x^T y, `[B, H, T, M] [B, H, T, N]` -> `[B, Hkv, M, N]`: the sum over the rows is one over the group as well."""
    return mx.swapaxes(_joined(x, kv_heads), 2, 3) @ _joined(y, kv_heads)


def _joined(x: mx.array, kv_heads: int) -> mx.array:
    """`[B, H, T, M]` as `[B, Hkv, H / Hkv T, M]`."""
    batch, heads, rows, columns = x.shape
    return x.reshape(batch, kv_heads, heads // max(kv_heads, 1) * rows, columns)
