"""flash_attention: softmax(q k^T) v without the scores, for packed documents, windows, soft-capping and sinks."""

from collections.abc import Sequence
from functools import cache

from forge_mlx.kernels._common.checks import given
from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_batches
from forge_mlx.kernels.attention import blocked, launch, reference
from forge_mlx.kernels.attention.options import (
    Options,
    SegmentIds,
    Variant,
    check_options,
    check_qkv,
    check_segments,
    check_sinks,
    check_variant,
)
from forge_mlx.kernels.attention.plain import is_better, plain_attention, reason_for_mlx
from forge_mlx.metal.engine import Engine, EngineName, resolve
import mlx.core as mx


def flash_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: SegmentIds | None = None,
    sinks: mx.array | None = None,
    return_lse: bool = False,
    variant: str = "auto",
    impl: str | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """softmax(scale q k^T over the keys that are seen) v, without the scores ever being there as a whole.

    Replaces, with H a multiple of Hkv and each k and v head used by H / Hkv heads of q::

        s = scale * q @ k.swapaxes(-1, -2)
        s = softcap * mx.tanh(s / softcap)
        s = mx.where(seen, s, -mx.inf)
        lse = mx.logsumexp(mx.concatenate([s, sink], axis=-1), axis=-1, keepdims=True)
        out = mx.exp(s - lse) @ v

    Query i of T sees key j of S where all of these hold:

    - causal: j <= i + S - T; the last query sees the last key (T = 2, S = 4)::

        1 1 1 .
        1 1 1 1

    - window: j > i + S - T - window;
    - segment_ids: both ids are equal and not negative.

    Forward and backward keep O(T) memory. The kernels do not visit blocks of keys that no query of a block sees, by
    causal order, by the window, and by the least and largest segment id of each block (of unsorted ids fewer are left
    out, and the result is the same).

    What is hidden must still be finite: it is multiplied by 0, so that an infinity or a NaN in a row of k, v, q or dout
    can reach rows that do not see it, as in `mx.fast.scaled_dot_product_attention`.

    Saved for the gradient: q, k, v, out and lse; scores are computed again. Scores and probabilities are float32 in
    registers, sums float32, results rounded once. After Dao, FlashAttention-2 (arXiv:2307.08691); sinks as in gpt-oss,
    soft-capping as in Gemma 2.

    Differentiable in q, k, v, sinks, through out and lse. A query that sees nothing gives 0, its lse is the sink or
    -inf, and it has no gradient. Sums have an order that follows from shapes, dtypes, options and ids alone. Second
    derivatives are those of the gradient's formula in plain MLX operations, with all scores at once.

    Which engine runs: automatic takes `mx.fast.scaled_dot_product_attention` ("reference") for plain causal or full
    attention (no window, softcap, segments, sinks or lse asked for) with no more queries than keys and heads of 64, 72,
    80, 96 or 128 for both k and v, for which MLX has Metal kernels; and our kernels for everything else where there is
    a GPU that they run on. The engine "reference" is MLX's op where that can do it, on a CPU for fewer than 128 queries
    in float32 alone, else blocks of queries in plain MLX operations, which keep O(T) memory too; there causal order and
    windows save work, segment ids do not.

    Args:
        q: Queries `[B, H, T, D]`, float32, float16 or bfloat16; D a multiple of 8 up to 256. Any strides: what an
            attention gets by `transpose(0, 2, 1, 3)` is read as it lies.
        k: Keys `[B, Hkv, S, D]`, of the dtype of q.
        v: Values `[B, Hkv, S, Dv]`, of the dtype of q; Dv too a multiple of 8 up to 256.
        scale: Factor on the scores; None for 1 / sqrt(D).
        causal: Whether a query sees no later keys.
        window: How many keys a query sees, its own included; needs causal. None for all.
        softcap: Bound of the scores, after the scale; None for none.
        segment_ids: Integers `[B, T]` for queries and keys, or a pair `[B, T]`, `[B, S]`, such as the number of the
            document that each token belongs to; a negative id is padding, which sees nothing. Ids above 2^31 - 1 wrap
            around: they become padding, or meet another document's.
        sinks: A logit for each head, `[H]`, in the denominator; neither scaled nor capped. None for none.
        return_lse: Whether to return lse too.
        variant: "mma" (matrix units), "scalar" (a simdgroup a row, to check the other) or "auto", which is "mma".
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        out `[B, H, T, Dv]` in the dtype of q; with return_lse also lse `[B, H, T]` in float32, the natural logarithm of
        the sum of e^s over the seen keys and the sink.

    Raises:
        ValueError: Arrays that do not fit together, another dtype, a head size that is not supported, an option out of
            its range, a window without causal, an unknown variant or engine, a variant on an engine without kernels.
        RuntimeError: The engine that was asked for cannot run here.
    """
    op = "flash_attention"
    check_qkv(op, q, k, v)
    options = check_options(op, q.shape[3], scale, causal, window, softcap)
    q_segments, k_segments = check_segments(op, q, k, segment_ids)
    sinks = check_sinks(op, q, sinks)
    chosen = check_variant(op, variant)
    is_plain = options.is_plain and q_segments is None and sinks is None and not return_lse
    is_plain = is_plain and q.shape[2] <= k.shape[2] and is_better(q.shape[2], q.dtype, mx.default_device().type)
    prefer_mlx = reason_for_mlx(q.shape[3], v.shape[3]) if is_plain and chosen is None else None
    engine = resolve(op, impl, prefer_mlx=prefer_mlx)
    check_engine_has_variant(op, variant, engine)
    if 0 in q.shape or 0 in k.shape:
        out, lse = _nothing_to_see(q, v, sinks)
    elif engine.name == "reference" and is_plain:
        return plain_attention(q, k, v, scale=options.scale, causal=causal)
    else:
        function = _attention(engine.name, chosen, q_segments is not None, sinks is not None, options)
        more = given(q_segments=q_segments, k_segments=k_segments, sinks=sinks).values()
        out, lse = function(q, k, v, *more)
    return (out, lse) if return_lse else out


def check_engine_has_variant(op: str, variant: str, engine: Engine) -> None:
    """Raise if a variant is asked for where no kernel runs.

    Args:
        op: The op's name, for the message.
        variant: As the op takes it.
        engine: What runs.

    Raises:
        ValueError: It is.
    """
    if variant != "auto" and engine.name == "reference":
        raise ValueError(
            f"[{op}] variant must be auto on the engine {engine}, which runs no kernels, but got {variant!r}. "
            "Name another engine by impl=."
        )


def _nothing_to_see(q: mx.array, v: mx.array, sinks: mx.array | None) -> tuple[mx.array, mx.array]:
    """out and lse where there is no query, or no key."""
    shape = q.shape[:3]
    # The gradient of what is repeated no times would be a sum of nothing, which MLX may never finish on a CPU.
    lse = mx.full(shape, -mx.inf) if sinks is None or 0 in shape else mx.broadcast_to(sinks[..., None], shape)
    return mx.zeros((*shape, v.shape[3]), q.dtype), lse


Placed = tuple[mx.array, mx.array, mx.array, mx.array | None, mx.array | None, mx.array | None]


def placed(arrays: Sequence[mx.array], with_segments: bool, with_sinks: bool) -> Placed:
    """q, k, v, ids of the queries and of the keys, and sinks, with None for what there is not.

    Args:
        arrays: Those that there are, in this order.
        with_segments: Whether there are ids.
        with_sinks: Whether there are sinks.
    """
    q, k, v, *rest = arrays
    q_segments, k_segments = (rest[0], rest[1]) if with_segments else (None, None)
    return q, k, v, q_segments, k_segments, rest[-1] if with_sinks else None


def gradients(engine: EngineName, variant: Variant | None, inputs: Placed, rest: Arrays, options: Options) -> Arrays:
    """dq, dk, dv, and dsinks `[B, H]` if there are sinks.

    Args:
        engine: What runs.
        variant: Which kernels.
        inputs: As `placed` gives them.
        rest: out, lse and their cotangents.
        options: What is seen, and how scores are made.
    """
    out, lse, dout, dlse = rest
    if engine == "reference":
        return blocked.backward(*inputs, out, lse, dout, dlse, options)
    return launch.backward(engine, variant, *inputs, out, lse, dout, dlse, options)


@cache
def _attention(
    engine: EngineName, variant: Variant | None, with_segments: bool, with_sinks: bool, options: Options
) -> Function:
    """The differentiable function of q, k, v, and ids and sinks `[B, H]` if there are any."""
    inputs = 3 + 2 * with_segments + with_sinks

    def first(arrays: Sequence[mx.array]) -> Placed:
        return placed(arrays[:inputs], with_segments, with_sinks)

    def forward(*arrays: mx.array) -> Arrays:
        if engine == "reference":
            return blocked.forward(*first(arrays), options)
        return launch.forward(engine, variant, *first(arrays), options)

    def backward(*arrays: mx.array) -> Arrays:
        return gradients(engine, variant, first(arrays), arrays[inputs:], options)

    def formula(*arrays: mx.array) -> Arrays:
        out, lse, dout, dlse = arrays[inputs:]
        return reference.backward(*first(arrays), out, lse, dout, dlse, options)

    return differentiable(
        forward,
        backward,
        formula,
        saved=(0, 1),
        constants={3, 4} if with_segments else (),
        vmap=map_batches,
    )
