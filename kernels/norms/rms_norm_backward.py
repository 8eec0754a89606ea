"""The gradient of normalisation by the root mean square on the kernels: for rms_norm and for add_rms_norm."""

from forge_mlx.kernels._common.partial_sums import sum_parts
from forge_mlx.kernels.norms.launch import Rows, launch_backward, launch_backward_columns, launch_backward_rows
from forge_mlx.metal.engine import EngineName
from forge_mlx.metal.signature import TemplateValue
import mlx.core as mx


def rms_norm_backward(
    engine: EngineName,
    x: mx.array,
    w: mx.array,
    r: mx.array,
    dy: mx.array,
    dr: mx.array,
    weighted: bool,
    others: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Launch what `reference.rms_norm_backward` has the formula of.

    Args:
        engine: One that runs kernels.
        x: `[B, M, C]`.
        w: `[B, C]`; anything of 2 axes if not weighted.
        r: `[B, M]` in float32, 1 / the root mean square.
        dy: Cotangent of y.
        dr: Cotangent of r.
        weighted: Whether w counts.
        others: A gradient `[B, M, C]` that is added to dx, in x's dtype.

    Returns:
        dx and dw (None if not weighted).
    """
    rows = Rows.of(x)
    types: dict[str, TemplateValue] = {"T": x.dtype, "W": w.dtype, "Y": dy.dtype, "WEIGHT": weighted}
    inputs = {"x": x, "w": w, "inverse_rms": r, "dy": dy}
    # What is not read needs a buffer all the same.
    added = {"others": x if others is None else others}
    flags = types | {"ADD": others is not None}
    if rows.is_long:
        c = launch_backward_rows(engine, "rms_norm", rows, inputs | {"dr": dr}, types, 1)
        inputs |= {"c": c} | added
        dx, parts = launch_backward_columns(engine, "rms_norm", rows, inputs, flags, int(weighted))
    else:
        dx, parts = launch_backward(engine, "rms_norm", rows, inputs | {"dr": dr} | added, flags, int(weighted))
    return dx, sum_parts(engine, parts, w.dtype) if weighted else None
