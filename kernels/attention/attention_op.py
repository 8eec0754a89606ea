"""attention: softmax(q k^T) v step by step in plain MLX operations, which can also return the probabilities."""

from functools import cache
from typing import Final

from forge_mlx.kernels._common.checks import given
from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_batches
from forge_mlx.kernels.attention import reference
from forge_mlx.kernels.attention.op import placed
from forge_mlx.kernels.attention.options import (
    Options,
    SegmentIds,
    check_options,
    check_qkv,
    check_segments,
    check_sinks,
)
from forge_mlx.metal.engine import Engine, checked, resolve
import mlx.core as mx

_OP: Final = "attention"


def attention(
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
    return_probs: bool = False,
    impl: str | None = None,
) -> mx.array | tuple[mx.array, ...]:
    """out = P v with P = e^(s - lse), which `flash_attention` computes without P: for small sizes, to look at P.

    Scores s, lse and what a query sees are those of `flash_attention`, and so is the result but for rounding. All
    scores are there at once, in float32; a pass holds a few arrays of T x S. There is no kernel: the operations are
    MLX's on every device.

    Differentiable in q, k, v and sinks, through out, lse and P. With dP = dout v^T + dprobs::

        dv = P^T dout
        dS = P * (dP - rowsum(P * dP) + dlse) * (1 - (s / softcap)^2)
        dq = scale * dS k
        dk = scale * dS^T q
        dsinks = sum(e^(sinks - lse) * (dlse - rowsum(P * dP)))

    Without a cotangent on P, rowsum(P * dP) would be rowsum(dout * out), which `flash_attention` uses. Second
    derivatives are those of these formulas.

    Args:
        q: Queries `[B, H, T, D]`, float32, float16 or bfloat16; D a multiple of 8 up to 256.
        k: Keys `[B, Hkv, S, D]`, of the dtype of q, H a multiple of Hkv.
        v: Values `[B, Hkv, S, Dv]`, of the dtype of q; Dv too a multiple of 8 up to 256.
        scale: Factor on the scores; None for 1 / sqrt(D).
        causal: Whether query i sees no key after i + S - T.
        window: How many keys a query sees, its own included; needs causal. None for all.
        softcap: Bound of the scores, after the scale; None for none.
        segment_ids: Integers `[B, T]` for queries and keys, or a pair `[B, T]`, `[B, S]`; only equal ids see each
            other, and a negative one sees nothing.
        sinks: A logit for each head, `[H]`, in the denominator; neither scaled nor capped. None for none.
        return_lse: Whether to return lse.
        return_probs: Whether to return P.
        impl: "reference" or None: there is no other engine.

    Returns:
        out `[B, H, T, Dv]` in the dtype of q. If asked for, then lse `[B, H, T]` in float32; and P `[B, H, T, S]` in
        the dtype of q, whose rows sum to 1 less the share of the sink, and to 0 where nothing is seen.

    Raises:
        ValueError: Arrays that do not fit together, another dtype, a head size that is not supported, an option out of
            its range, a window without causal, an unknown engine, an engine for kernels.
    """
    check_qkv(_OP, q, k, v)
    options = check_options(_OP, q.shape[3], scale, causal, window, softcap)
    q_segments, k_segments = check_segments(_OP, q, k, segment_ids)
    sinks = check_sinks(_OP, q, sinks)
    _check_engine(impl)
    function = _attention(q_segments is not None, sinks is not None, bool(return_probs), options)
    more = given(q_segments=q_segments, k_segments=k_segments, sinks=sinks).values()
    out, lse, *probs = function(q, k, v, *more)
    return (out, *([lse] if return_lse else []), *probs) if return_lse or return_probs else out


def _check_engine(impl: str | None) -> None:
    """Raise unless plain operations may run."""
    # What the call names first: that it cannot run on this machine would be the wrong reason.
    asked = resolve(_OP, prefer_mlx="there is no kernel") if impl is None else Engine(checked(impl, "impl"), "impl=")
    if asked.name != "reference":
        raise ValueError(
            f'[{_OP}] engine must be reference, as there is no kernel, but got {asked}. Give impl="reference", or call '
            "flash_attention, which has kernels."
        )


def _probabilities(s: mx.array, seen: mx.array, lse: mx.array, sinks: mx.array | None) -> mx.array:
    """P, divided by its sum, which is off from 1 by what rounding does to a large lse."""
    p = reference.probabilities(s, seen, lse)
    total = reference.row_sum(p)
    if sinks is not None:
        total = total + reference.sink_share(sinks, lse)
    return p / mx.where(total == 0, 1.0, total)[..., None]


@cache
def _attention(with_segments: bool, with_sinks: bool, with_probs: bool, options: Options) -> Function:
    """The differentiable function of q, k, v, and ids and sinks `[B, H]` if there are any."""
    inputs = 3 + 2 * with_segments + with_sinks

    def forward(*arrays: mx.array) -> Arrays:
        q, k, v, q_segments, k_segments, sinks = placed(arrays, with_segments, with_sinks)
        seen = reference.visible(q.shape[2], k.shape[2], q_segments, k_segments, options)
        s = reference.scores(q, k, options)
        out, lse = reference.attend(s, v, seen, sinks)
        found = (out.astype(q.dtype), lse)
        return (*found, _probabilities(s, seen, lse, sinks).astype(q.dtype)) if with_probs else found

    def backward(*arrays: mx.array) -> Arrays:
        q, k, v, q_segments, k_segments, sinks = placed(arrays[:inputs], with_segments, with_sinks)
        lse, dout, dlse, *dprobs = arrays[inputs:]
        seen = reference.visible(q.shape[2], k.shape[2], q_segments, k_segments, options)
        s = reference.scores(q, k, options)
        p = _probabilities(s, seen, lse, sinks)
        dp = reference.probability_gradient(dout, v)
        for cotangent in dprobs:
            dp = dp + cotangent.astype(mx.float32)
        delta = reference.row_sum(p * dp) - reference.lse_cotangent(lse, dlse)
        dq, dk = reference.score_gradients(q, k, s, p * (dp - delta[..., None]), options)
        dv = reference.value_gradient(p, dout, k.shape[1])
        found = tuple(gradient.astype(q.dtype) for gradient in (dq, dk, dv))
        return found if sinks is None else (*found, reference.sink_gradient(sinks, lse, delta))

    return differentiable(
        forward, backward, backward, saved=(1,), constants={3, 4} if with_segments else (), vmap=map_batches
    )
