"""expert_counts: how many tokens each expert gets, counted in integers."""

from functools import cache
from pathlib import Path

from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.folding import Arrays, Axes, Function
from forge_mlx.kernels._common.without_gradient import without_gradient
from forge_mlx.kernels.routing import reference
from forge_mlx.kernels.routing.tiles import CountTiling, count_tiling, indices_per_group, rows_per_group
from forge_mlx.metal.engine import EngineName, resolve
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx

_ROOM = Path(__file__).parent
_NO_GRADIENT = (
    "[expert_counts] counts must not be differentiated: they have no gradient. Count the indices, or cut the gates off "
    "with mx.stop_gradient."
)


def expert_counts(indices: mx.array, num_experts: int, *, impl: str | None = None) -> mx.array:
    """counts[e] = how many of the indices are e; of a matrix of gates, how many elements of column e are not 0.

    In plain operations::

        counts = (indices.reshape(-1, 1) == mx.arange(num_experts)).sum(axis=0)
        counts = (gates != 0).reshape(-1, num_experts).sum(axis=0)

    Indices outside of `[0, num_experts)` count nowhere, so padding tokens may have -1. Of gates, those that are NaN
    count and -0 does not; an expert that was chosen with a gate of 0 is missing there, and only the indices have it.
    Counts are sums of integers, the same every time.

    There is no gradient. Indices have none, and may be counted in whatever is differentiated; differentiating counts of
    gates raises.

    Args:
        indices: Experts of the tokens, integers of any dtype and shape, as `topk_renorm` returns them; or its gates
            `[..., E]`, float32, float16 or bfloat16.
        num_experts: E, 1 or more; of gates their last axis.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        int32 `[E]`.

    Raises:
        ValueError: Indices of another dtype, gates of another number of experts, num_experts that is no integer of 1
            or more, an unknown engine; when counts of gates are differentiated.
        RuntimeError: The engine that was asked for cannot run here.
    """
    reference.check_counts(indices, num_experts)
    engine = resolve("expert_counts", impl)
    experts = int(num_experts)
    if indices.size == 0:
        return mx.zeros((experts,), mx.int32)
    if indices.dtype in FLOATS:
        (counts,) = _gates_counter(engine.name)(indices.reshape(-1, experts))
    else:
        (counts,) = _indices_counter(engine.name, experts)(mx.stop_gradient(indices).reshape(-1))
    return counts


@cache
def _indices_counter(engine: EngineName, experts: int) -> Function:
    """The function integers `[N]` -> counts `[E]`."""

    def function(indices: mx.array) -> Arrays:
        return (_count_indices(engine, indices, experts),)

    def rule(_function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        indices = mx.moveaxis(inputs[0], axes[0] or 0, 0)
        size = indices.shape[0]
        # As many times the experts, each element of the axis with its own.
        number = reference.bins(indices, experts).astype(mx.int64)
        number = mx.where(number < experts, number + experts * mx.arange(size, dtype=mx.int64)[:, None], -1)
        (counts,) = _indices_counter(engine, size * experts)(number.reshape(-1))
        return (counts.reshape(size, experts),), (0,)

    return without_gradient(function, rule, _NO_GRADIENT)


@cache
def _gates_counter(engine: EngineName) -> Function:
    """The function gates `[N, E]` -> counts `[E]`."""

    def function(gates: mx.array) -> Arrays:
        return (_count_gates(engine, mx.stop_gradient(gates)),)

    def rule(function: Function, inputs: Arrays, axes: Axes) -> tuple[Arrays, Axes]:
        # Beside each other the matrices are one.
        gates = mx.moveaxis(inputs[0], axes[0] or 0, 1)
        rows, size, experts = gates.shape
        (counts,) = function(gates.reshape(rows, size * experts))
        return (counts.reshape(size, experts),), (0,)

    return without_gradient(function, rule, _NO_GRADIENT)


@cache
def _kernel(name: str) -> MetalKernel:
    return MetalKernel(_ROOM / f"{name}.metal")


def _count_indices(engine: EngineName, indices: mx.array, experts: int) -> mx.array:
    """Counts of integers `[N]`."""
    if engine == "reference":
        return reference.count_indices(indices, experts)
    tiles = count_tiling(indices.size, experts, indices_per_group(experts))
    inputs: dict[str, mx.array | int] = {
        "indices": indices,
        "experts": experts,
        "indices_per_group": tiles.per_group,
    }
    return _launch("expert_counts", engine, inputs, indices.dtype, tiles, experts)


def _count_gates(engine: EngineName, gates: mx.array) -> mx.array:
    """Counts of gates `[N, E]`."""
    if engine == "reference":
        return reference.count_gates(gates)
    rows, experts = gates.shape
    tiles = count_tiling(rows, experts, rows_per_group(experts, gates.dtype))
    inputs: dict[str, mx.array | int] = {"gates": gates, "rows_per_group": tiles.per_group}
    return _launch("expert_counts_gates", engine, inputs, gates.dtype, tiles, experts)


def _launch(
    name: str, engine: EngineName, inputs: dict[str, mx.array | int], dtype: mx.Dtype, tiles: CountTiling, experts: int
) -> mx.array:
    (counts,) = _kernel(name)(
        inputs,
        output_shapes=[(experts,)],
        output_dtypes=[mx.int32],
        grid=tiles.grid,
        threadgroup=tiles.threadgroup,
        template={"T": dtype},
        init_value=0,
        engine=engine,
    )
    return counts
