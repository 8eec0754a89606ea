"""Attention on an engine that runs kernels: what each kernel is given, and in what order they run."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Final

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels.attention.delta import delta
from forge_mlx.kernels.attention.options import Options, Variant
from forge_mlx.kernels.attention.reference import sink_gradient
from forge_mlx.kernels.attention.tiles import Kernel, tiles
from forge_mlx.metal.checked_launch import Scalar
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx

_ROOM: Final = Path(__file__).parent
_NO_IDS: Final = (1, 2)
_SCALAR_ROWS: Final = 4


@cache
def _kernel(name: str) -> MetalKernel:
    # Only q, k, v and dout have strides: they are the large ones, and often lie head by head in a longer row.
    return MetalKernel(_ROOM / f"flash_attention_{name}.metal", ensure_row_contiguous=False)


def forward(
    engine: EngineName,
    variant: Variant | None,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    q_segments: mx.array | None,
    k_segments: mx.array | None,
    sinks: mx.array | None,
    options: Options,
) -> Arrays:
    """out `[B, H, T, Dv]` and lse `[B, H, T]`, by one launch.

    Args:
        engine: "metal", "cuda" or "emulator".
        variant: Which kernels; None for "mma".
        q: `[B, H, T, D]`, any strides; not empty.
        k: `[B, Hkv, S, D]`, any strides; not empty.
        v: `[B, Hkv, S, Dv]`, any strides.
        q_segments: `[B, T]` int32, or None.
        k_segments: `[B, S]` int32, or None.
        sinks: `[B, H]` float32, or None.
        options: What is seen, and how scores are made.
    """
    batch, heads, length, _ = q.shape
    inputs = _inputs(q, k, v, q_segments, k_segments)
    inputs["sinks"] = mx.zeros((1, 1)) if sinks is None else mx.contiguous(sinks)
    out, lse = _launch(
        engine,
        variant,
        "forward",
        inputs,
        options,
        outputs=[((batch, heads, length, v.shape[3]), q.dtype), ((batch, heads, length), mx.float32)],
        own=(length, heads, batch),
        SEGMENTS=q_segments is not None,
        SINKS=sinks is not None,
    )
    return out, lse


def backward(
    engine: EngineName,
    variant: Variant | None,
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
    """dq, dk, dv, and dsinks `[B, H]` if there are sinks, by three launches.

    Args:
        engine: "metal", "cuda" or "emulator".
        variant: Which kernels; None for "mma".
        q: `[B, H, T, D]`, any strides; not empty.
        k: `[B, Hkv, S, D]`, any strides; not empty.
        v: `[B, Hkv, S, Dv]`, any strides.
        q_segments: `[B, T]` int32, or None.
        k_segments: `[B, S]` int32, or None.
        sinks: `[B, H]` float32, or None.
        out: `[B, H, T, Dv]`, as forward gave it.
        lse: `[B, H, T]` float32, as forward gave it.
        dout: Cotangent of out, any strides.
        dlse: Cotangent of lse.
        options: What is seen, and how scores are made.
    """
    batch, heads, length, _ = q.shape
    lse = mx.contiguous(lse)
    of_rows = delta(engine, out, dout, dlse)
    inputs = _inputs(q, k, v, q_segments, k_segments) | {"dout": dout, "lse": lse, "delta": of_rows}
    launched = partial(_launch, engine, variant, inputs=inputs, options=options, SEGMENTS=q_segments is not None)
    (dq,) = launched("dq", outputs=[(q.shape, q.dtype)], own=(length, heads, batch))
    of_keys = [(k.shape, k.dtype), (v.shape, v.dtype)]
    dk, dv = launched("dkv", outputs=of_keys, own=(k.shape[2], k.shape[1], batch))
    if sinks is None:
        return dq, dk, dv
    return dq, dk, dv, sink_gradient(sinks, lse, of_rows)


def _inputs(
    q: mx.array, k: mx.array, v: mx.array, q_segments: mx.array | None, k_segments: mx.array | None
) -> dict[str, mx.array]:
    """The arrays that all kernels take. What is not there has a stand-in that no kernel reads."""
    none = mx.zeros(_NO_IDS, mx.int32)
    return {
        **{"q": q, "k": k, "v": v},
        "q_segments": none if q_segments is None else mx.contiguous(q_segments),
        "k_segments": none if k_segments is None else mx.contiguous(k_segments),
    }


def _numbers(inputs: Mapping[str, mx.array], options: Options) -> dict[str, float | int]:
    """The numbers that all kernels take."""
    everything = inputs["q"].shape[2] + inputs["k"].shape[2]
    return {
        "scale": options.scale,
        "softcap": 1.0 if options.softcap is None else options.softcap,
        "window": everything if options.window is None else min(options.window, everything),
    }


def _launch(
    engine: EngineName,
    variant: Variant | None,
    kernel: Kernel,
    inputs: Mapping[str, mx.array],
    options: Options,
    *,
    outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    own: tuple[int, int, int],
    **flags: bool,
) -> list[mx.array]:
    """One kernel, of which `own` are the rows, heads and batches that its threadgroups share out."""
    rows, heads, batch = own
    head_dim, v_head_dim, dtype = inputs["q"].shape[3], inputs["v"].shape[3], inputs["q"].dtype
    template: dict[str, mx.Dtype | int | bool] = {
        **{"T": dtype, "D": head_dim, "DV": v_head_dim},
        **{"CAUSAL": options.causal, "WINDOW": options.window is not None, "SOFTCAP": options.softcap is not None},
        **flags,
    }
    if variant == "scalar":
        metal, threads, rows_of_group = _kernel(f"{kernel}_scalar"), 32 * _SCALAR_ROWS, _SCALAR_ROWS
    else:
        tile = tiles(kernel, head_dim, v_head_dim, dtype)
        metal, threads, rows_of_group = _kernel(kernel), tile.threads, tile.own
        template |= {"ROWS": tile.rows, "STEP": tile.step, "SPLIT": tile.split, "GROUPS": tile.groups}
        ranges, ids = ("q_ranges", "q_segments") if kernel == "dkv" else ("k_ranges", "k_segments")
        inputs = {**inputs, ranges: segment_ranges(inputs[ids], tile.step) if flags["SEGMENTS"] else inputs[ids]}
    given: dict[str, mx.array | Scalar] = {**inputs, **_numbers(inputs, options)}
    return metal(
        {array.name: given[array.name] for array in metal.source.inputs},
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[output for _, output in outputs],
        grid=(-(-rows // rows_of_group) * threads, heads, batch),
        threadgroup=(threads, 1, 1),
        template=template,
        engine=engine,
    )


def segment_ranges(ids: mx.array, step: int) -> mx.array:
    """The least and the largest id of each block of positions, those of padding left out: `[B, blocks, 2]` int32.

    Of a block that is all padding the least is over the largest.

    Args:
        ids: `[B, T]` int32.
        step: Positions of a block.
    """
    batch, length = ids.shape
    blocks = -(-length // step)
    ids = mx.pad(ids, [(0, 0), (0, blocks * step - length)], constant_values=-1).reshape(batch, blocks, step)
    highest = 2**31 - 1
    return mx.stack([mx.where(ids < 0, highest, ids).min(-1), ids.max(-1)], axis=-1)
