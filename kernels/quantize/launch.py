"""How the kernels of this room are launched: over groups, over rows that a threadgroup holds, or in two passes."""

from collections.abc import Mapping
from functools import cache
import math
from pathlib import Path
from typing import Final

from forge_mlx.kernels._common.folding import Arrays
from forge_mlx.kernels._common.rows import FORWARD, Sharing, is_long, round_up, tiling, vector_size
from forge_mlx.kernels.quantize.options import Mode, Options
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.limits import SIMDGROUP
from forge_mlx.metal.signature import TemplateValue
import mlx.core as mx

_THREADS: Final = 256
PARTS: Final = Sharing(groups=1024, passes=4)
# As modes.h numbers them.
_NUMBERS: Final[dict[Mode, int]] = {
    "affine": 0,
    "mxfp4": 1,
    "mxfp8": 2,
    "nvfp4": 3,
    "int8": 4,
    "int4": 5,
    "ternary": 6,
    "fp8_e4m3": 7,
}
# Floats that found.h leaves of a part.
_FOUND: Final[dict[Mode, int]] = {"int8": 1, "int4": 1, "ternary": 4, "fp8_e4m3": 1}

# Their scales are rounded up, and so no code is clipped.
_UNCLIPPED: Final = ("mxfp4", "mxfp8")

Outputs = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]


def fake_quant(engine: EngineName, w: mx.array, options: Options) -> mx.array:
    """dequantize(quantize(w)) in the dtype of w, written once.

    Args:
        engine: An engine that runs kernels.
        w: `[..., K]`, as the options allow it.
        options: The mode.
    """
    return _launch("fake_quant", engine, options, {"w": w}, {"values": (w.shape, w.dtype)})[0]


def clip_backward(engine: EngineName, w: mx.array, dout: mx.array, options: Options) -> mx.array:
    """dw = dout, and 0 where the code of w was clipped.

    Args:
        engine: An engine that runs kernels.
        w: `[..., K]`, as the options allow it.
        dout: Cotangent of the fake-quantized w.
        options: The mode.
    """
    if options.mode in _UNCLIPPED:
        return dout
    return _launch("clip", engine, options, {"w": w, "dout": dout}, {"dw": (w.shape, w.dtype)})[0]


def quantize(engine: EngineName, w: mx.array, options: Options) -> tuple[mx.array, mx.array, mx.array | None]:
    """Codes, scales and, in the mode affine, biases.

    Args:
        engine: An engine that runs kernels.
        w: `[..., K]`, as the options allow it.
        options: The mode.
    """
    scales = (options.scales_shape(w.shape), options.scale_dtype(w.dtype))
    outputs = {"codes": (options.codes_shape(w.shape), mx.uint32), "scales": scales}
    if options.has_biases:
        outputs["biases"] = scales
    found = _launch("quantize", engine, options, {"w": w}, outputs)
    return found[0], found[1], found[2] if options.has_biases else None


@cache
def kernel(name: str) -> MetalKernel:
    """The kernel of a file.

    Args:
        name: The file's, without its ending.
    """
    return MetalKernel(Path(__file__).parent / f"{name}.metal")


def _launch(
    what: str, engine: EngineName, options: Options, arrays: Mapping[str, mx.array], outputs: Outputs
) -> Arrays:
    w = arrays["w"]
    if w.size == 0:
        return tuple(mx.zeros(shape, dtype) for shape, dtype in outputs.values())
    if options.group_size is not None:
        return _over_groups(what, engine, options, arrays, outputs)
    per_scale = math.prod(w.shape[-2:]) if options.granularity == "tensor" else w.shape[-1]
    rows = {name: array.reshape(-1, per_scale) for name, array in arrays.items()}
    if options.granularity == "row" and not is_long(per_scale, w.dtype):
        return _over_rows(what, engine, options.mode, rows, outputs)
    return _in_two_passes(what, engine, options.mode, rows, outputs)


def _over_groups(
    what: str, engine: EngineName, options: Options, arrays: Mapping[str, mx.array], outputs: Outputs
) -> Arrays:
    """One thread for each 16 bytes; whole simdgroups, as the lanes of a group exchange what they find."""
    w = arrays["w"]
    template: dict[str, TemplateValue] = {"T": w.dtype}
    if what == "quantize":
        name = "quantize_affine" if options.mode == "affine" else "quantize_blocks"
    else:
        name = f"{what}_groups"
    if name != "quantize_affine":
        template["MODE"] = _NUMBERS[options.mode]
    assert options.group_size is not None
    template |= {"BITS": options.bits, "GROUP": options.group_size}
    threads = round_up(w.size // vector_size(w.dtype), SIMDGROUP)
    return _run(name, engine, {**arrays, "size": w.size}, outputs, (threads, 1, 1), min(_THREADS, threads), template)


def _over_rows(what: str, engine: EngineName, mode: Mode, rows: Mapping[str, mx.array], outputs: Outputs) -> Arrays:
    """Of `[M, K]`, each row in the registers of the threads that share it."""
    w = rows["w"]
    tiles = tiling(1, w.shape[0], w.shape[1], w.dtype, FORWARD)
    return _run(
        f"{what}_rows",
        engine,
        {**rows, "width": tiles.lanes or tiles.threads, "rows_per_group": tiles.rows_per_group},
        outputs,
        (tiles.groups * tiles.threads, 1, 1),
        tiles.threads,
        {"T": w.dtype, "MODE": _NUMBERS[mode]},
    )


def _in_two_passes(what: str, engine: EngineName, mode: Mode, rows: Mapping[str, mx.array], outputs: Outputs) -> Arrays:
    """Of `[B, n]`, n elements that share a scale: first the scales, then all else."""
    w = rows["w"]
    scales = _scales(engine, w, mode)
    batches, columns = w.shape
    vectors = -(-columns // vector_size(w.dtype))
    threads = min(_THREADS, round_up(vectors, SIMDGROUP))
    groups = -(-vectors // threads)
    found = _run(
        f"{what}_scaled",
        engine,
        {**rows, "scales": scales, "groups_per_row": groups},
        {name: output for name, output in outputs.items() if name != "scales"},
        (batches * groups * threads, 1, 1),
        threads,
        {"T": w.dtype, "MODE": _NUMBERS[mode]},
    )
    return found if "scales" not in outputs else (*found, scales.reshape(outputs["scales"][0]))


def _scales(engine: EngineName, w: mx.array, mode: Mode) -> mx.array:
    """The scale `[B]` of each row of `[B, n]`: what threadgroups find of parts, joined in a second launch."""
    batches, columns = w.shape
    vectors = -(-columns // vector_size(w.dtype))
    threads = min(_THREADS, round_up(vectors, SIMDGROUP))
    passes = -(-vectors // threads)
    passes = max(-(-passes // max(1, PARTS.groups // batches)), min(passes, PARTS.passes))
    per_group = passes * threads * vector_size(w.dtype)
    groups = -(-columns // per_group)
    (parts,) = _run(
        "find_parts",
        engine,
        {"w": w, "elements_per_group": min(per_group, columns), "groups_per_row": groups},
        {"parts": ((batches, groups, _FOUND[mode]), mx.float32)},
        (batches * groups * threads, 1, 1),
        threads,
        {"T": w.dtype, "MODE": _NUMBERS[mode]},
    )
    threads = min(_THREADS, round_up(groups, SIMDGROUP))
    (scales,) = _run(
        "join_parts",
        engine,
        {"parts": parts, "columns": columns},
        {"scales": ((batches,), mx.float32)},
        (batches * threads, 1, 1),
        threads,
        {"MODE": _NUMBERS[mode]},
    )
    return scales


def _run(
    name: str,
    engine: EngineName,
    inputs: Mapping[str, mx.array | int],
    outputs: Outputs,
    grid: tuple[int, int, int],
    threads: int,
    template: Mapping[str, TemplateValue],
) -> Arrays:
    found = kernel(name)(
        inputs,
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=grid,
        threadgroup=(threads, 1, 1),
        template=template,
        engine=engine,
    )
    return tuple(found)
