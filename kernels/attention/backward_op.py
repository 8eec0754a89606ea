"""flash_attention_backward: the gradients of attention from what a forward pass, of whatever kind, has left."""

from functools import cache
from typing import Final

from forge_mlx.kernels._common.checks import check_floating, check_shape, given
from forge_mlx.kernels._common.folding import Arrays, Function, map_batches
from forge_mlx.kernels._common.without_gradient import without_gradient
from forge_mlx.kernels.attention.op import check_engine_has_variant, gradients, placed
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
from forge_mlx.kernels.attention.reference import sink_gradient
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx

_OP: Final = "flash_attention_backward"
_NO_GRADIENT: Final = (
    f"[{_OP}] has no gradient: it is one itself. Differentiate flash_attention, whose second derivatives work, or wrap "
    "its arguments in mx.stop_gradient."
)


def flash_attention_backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    out: mx.array,
    dout: mx.array,
    *,
    lse: mx.array | None = None,
    row_max: mx.array | None = None,
    row_sum: mx.array | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: SegmentIds | None = None,
    sinks: mx.array | None = None,
    dlse: mx.array | None = None,
    variant: str = "auto",
    impl: str | None = None,
) -> tuple[mx.array, ...]:
    """dq, dk, dv (and dsinks) of `flash_attention`, from its result and the statistics of its rows.

    With s the scaled, capped scores, P = e^(s - lse) and D = rowsum(dout * out) - dlse::

        dv = P^T dout
        dS = P * (dout v^T - D) * (1 - (s / softcap)^2)
        dq = scale * dS k
        dk = scale * dS^T q
        dsinks = -sum(e^(sinks - lse) * D)

    The statistics are lse, or the largest score of each row and the sum of e^(s - largest), the interface of
    flashback.metal: lse = row_max + ln(row_sum). A sink counts in them. A row that sees nothing has the lse -inf, or
    the sum 0. dq and dk, dv are two kernels without atomics: a block of queries goes through the keys that it sees, a
    block of keys through the queries that see it, for all heads of its group.

    It has no gradient: differentiating through it raises.

    Args:
        q: `[B, H, T, D]`, as `flash_attention` takes it.
        k: `[B, Hkv, S, D]`.
        v: `[B, Hkv, S, Dv]`.
        out: Its result, `[B, H, T, Dv]`.
        dout: The cotangent of out.
        lse: `[B, H, T]`, float32.
        row_max: `[B, H, T]`, float32: the largest score of each row, natural units; with row_sum, instead of lse.
        row_sum: `[B, H, T]`, float32.
        scale: As `flash_attention` takes it.
        causal: As `flash_attention` takes it.
        window: As `flash_attention` takes it.
        softcap: As `flash_attention` takes it.
        segment_ids: As `flash_attention` takes them.
        sinks: As `flash_attention` takes them.
        dlse: The cotangent of lse, `[B, H, T]`; None for none.
        variant: As `flash_attention` takes it.
        impl: As `flash_attention` takes it; automatic is a GPU's kernels, else "reference".

    Returns:
        dq, dk and dv in the dtype of q, and with sinks dsinks `[H]` in the dtype of sinks.

    Raises:
        ValueError: As `flash_attention`; both or neither of lse and the pair row_max, row_sum; differentiating.
        RuntimeError: The engine that was asked for cannot run here.
    """
    check_qkv(_OP, q, k, v)
    options = check_options(_OP, q.shape[3], scale, causal, window, softcap)
    q_segments, k_segments = check_segments(_OP, q, k, segment_ids)
    all_sinks = check_sinks(_OP, q, sinks)
    chosen = check_variant(_OP, variant)
    _check_results(q, v, out, dout)
    lse = _log_sum(q, lse, row_max, row_sum)
    for array in given(dlse=dlse).values():
        _check_statistics(q, dlse=array)
    engine = resolve(_OP, impl)
    check_engine_has_variant(_OP, variant, engine)
    dlse = mx.zeros_like(lse) if dlse is None else dlse.astype(mx.float32)
    if 0 in q.shape or 0 in k.shape:
        found: Arrays = tuple(mx.zeros_like(each) for each in (q, k, v))
        if all_sinks is not None:
            # Without keys the sinks are all of lse.
            found += (mx.zeros_like(all_sinks) if 0 in q.shape else sink_gradient(all_sinks, lse, -dlse),)
    else:
        function = _gradients(engine.name, chosen, q_segments is not None, all_sinks is not None, options)
        more = given(q_segments=q_segments, k_segments=k_segments, sinks=all_sinks).values()
        found = function(q, k, v, *more, out, lse, dout, dlse)
    if sinks is None:
        return found
    return (*found[:3], found[3].sum(0).astype(sinks.dtype))


def _check_results(q: mx.array, v: mx.array, out: mx.array, dout: mx.array) -> None:
    check_floating(_OP, out=out, dout=dout)
    for name, array in {"out": out, "dout": dout}.items():
        check_shape(_OP, name, array, (*q.shape[:3], v.shape[3]), "the batch, heads and length of q and the size of v")
        if array.dtype != q.dtype:
            raise ValueError(
                f"[{_OP}] {name} must have the dtype of q, {dtype_name(q.dtype)}, but got {dtype_name(array.dtype)}."
            )


def _check_statistics(q: mx.array, **arrays: mx.array) -> None:
    check_floating(_OP, **arrays)
    for name, array in arrays.items():
        check_shape(_OP, name, array, q.shape[:3], "the batch, heads and length of q")


def _log_sum(q: mx.array, lse: mx.array | None, row_max: mx.array | None, row_sum: mx.array | None) -> mx.array:
    """lse as it is, or of the pair."""
    got = given(lse=lse, row_max=row_max, row_sum=row_sum)
    _check_statistics(q, **got)
    if lse is not None and len(got) == 1:
        return lse.astype(mx.float32)
    if lse is None and row_max is not None and row_sum is not None:
        # A row that sees nothing: whatever its largest score is said to be, nothing was added up.
        total = row_sum.astype(mx.float32)
        return mx.where(total > 0, row_max.astype(mx.float32) + mx.log(mx.where(total > 0, total, 1)), -mx.inf)
    raise ValueError(
        f"[{_OP}] statistics must be either lse, or row_max and row_sum, but got {' and '.join(got) or 'none of them'}."
    )


@cache
def _gradients(
    engine: EngineName, variant: Variant | None, with_segments: bool, with_sinks: bool, options: Options
) -> Function:
    """The function of q, k, v, ids and sinks if there are any, out, lse, dout and dlse."""
    inputs = 3 + 2 * with_segments + with_sinks

    def function(*arrays: mx.array) -> Arrays:
        first = placed(arrays[:inputs], with_segments, with_sinks)
        return gradients(engine, variant, first, arrays[inputs:], options)

    return without_gradient(function, map_batches, _NO_GRADIENT)
