"""The loss and its gradients through chunks of rows, one after the other, so that only one chunk's logits exist."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from forge_mlx.kernels.cross_entropy import cross_entropy
from forge_mlx.kernels.cross_entropy.options import Options
from forge_mlx.kernels.cross_entropy.reference import IGNORED
from forge_mlx.kernels.linear_cross_entropy.forward_gradients import Variable
from forge_mlx.metal.engine import EngineName
import mlx.core as mx

CHUNK_BYTES: Final = {mx.cpu: 4 * 2**20, mx.gpu: 256 * 2**20}
"""By device, the bytes that the logits of a chunk take at most when nobody says how many rows it has."""
CHUNK_ROWS: Final = 256
"""So many rows a chunk has then even if they take more: products of fewer rows spend their time on reading weight."""
SMALL_CHUNK_BYTES: Final = {mx.cpu: 4 * 2**20, mx.gpu: 32 * 2**20}
"""CHUNK_BYTES where no chunk adds to a gradient of weight, which is the most that a small chunk costs."""
SMALL_CHUNK_ROWS: Final = {mx.cpu: 64, mx.gpu: 256}
"""CHUNK_ROWS there, by device."""


@dataclass(frozen=True)
class Setup:
    """How the chunks are computed.

    Attributes:
        engine: What computes losses and their gradients from logits; products are MLX's.
        options: The options of a row's loss; what is ignored has the code IGNORED.
        biased: Whether there is a bias.
        chunk: Rows at once, or None.
    """

    engine: EngineName
    options: Options
    biased: bool
    chunk: int | None


def chunk_rows(rows: int, row_bytes: int, device: mx.DeviceType, *, adds_weight: bool = True) -> int:
    """How many rows a chunk has when nobody says: all rows shared out evenly.

    Args:
        rows: All rows, at least 1.
        row_bytes: Bytes of a row's logits.
        device: Where the products run.
        adds_weight: Whether each chunk adds to a gradient of weight.
    """
    fewest, most = CHUNK_ROWS, CHUNK_BYTES[device]
    if not adds_weight:
        fewest, most = SMALL_CHUNK_ROWS[device], SMALL_CHUNK_BYTES[device]
    chunks = -(-rows // max(fewest, most // row_bytes))
    return -(-rows // chunks)


def losses(setup: Setup, hidden: mx.array, weight: mx.array, bias: mx.array, codes: mx.array) -> mx.array:
    """The loss of each row.

    Args:
        setup: How.
        hidden: `[N, C]`, N at least 1.
        weight: `[V, C]`.
        bias: `[V]`; anything where there is none.
        codes: int32 `[N]`, as `target_codes` makes them.

    Returns:
        float32 `[N]`.
    """
    w = weight.astype(_dtype(setup, hidden, weight))
    found: list[mx.array] = []
    for rows in _slices(setup, hidden, weight, adds_weight=False):
        x = _after(found[-1:], hidden[rows]).astype(w.dtype)
        found.append(_row_losses(setup, _logits(setup, x, w, bias), codes[rows]))
    return mx.concatenate(found)


def gradients(
    setup: Setup,
    wanted: Collection[Variable],
    hidden: mx.array,
    weight: mx.array,
    bias: mx.array,
    codes: mx.array,
    dloss: mx.array,
) -> tuple[mx.array, dict[Variable, mx.array]]:
    """The loss of each row, and gradients.

    Args:
        setup: How.
        wanted: Whose gradients.
        hidden: `[N, C]`, N at least 1.
        weight: `[V, C]`.
        bias: `[V]`; anything where there is none.
        codes: int32 `[N]`, as `target_codes` makes them.
        dloss: float32 `[N]`, cotangent of the losses.

    Returns:
        The losses, and the gradients by name: those of weight and bias in float32, summed over the chunks in order.
    """
    w = weight.astype(_dtype(setup, hidden, weight))
    row_values: list[mx.array] = []
    dhidden: list[mx.array] = []
    sums: dict[Variable, mx.array] = {}
    before: list[mx.array] = [dloss]
    for rows in _slices(setup, hidden, weight, adds_weight="weight" in wanted):
        x = _after(before, hidden[rows]).astype(w.dtype)
        (value,), (dz,) = mx.vjp(
            lambda z, rows=rows: _row_losses(setup, z, codes[rows]), [_logits(setup, x, w, bias)], [dloss[rows]]
        )
        row_values.append(value)
        if "hidden" in wanted:
            dhidden.append(_product(dz, w))
        if "weight" in wanted:
            sums["weight"] = _add_product(sums.get("weight"), dz.T, x)
        if "bias" in wanted:
            sums["bias"] = _add_sum(sums.get("bias"), dz)
        # The loss too: what still needs the logits keeps them.
        before = [value, *dhidden[-1:], *sums.values()]
    if "hidden" in wanted:
        sums["hidden"] = mx.concatenate(dhidden)
    return mx.concatenate(row_values), {name: sums[name] for name in wanted}


def _dtype(setup: Setup, hidden: mx.array, weight: mx.array) -> mx.Dtype:
    """What products are computed in: on a CPU 16-bit ones are many times slower than those of float32."""
    if setup.engine == "reference" and mx.default_device().type == mx.cpu:
        return mx.float32
    return mx.result_type(hidden, weight)


def _slices(setup: Setup, hidden: mx.array, weight: mx.array, *, adds_weight: bool) -> Iterator[slice]:
    rows, chunk = hidden.shape[0], setup.chunk
    if chunk is None:
        row_bytes = weight.shape[0] * _dtype(setup, hidden, weight).size
        chunk = chunk_rows(rows, row_bytes, mx.default_device().type, adds_weight=adds_weight)
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


def _after(before: list[mx.array], x: mx.array) -> mx.array:
    """x, once some arrays are there: MLX would compute the logits of all chunks before it uses the first.

    A choice that is never made, because mx.depends has no vmap.
    """
    never = mx.array(False)
    for array in before:
        if array.size:
            x = mx.where(never, array.flatten()[0].astype(x.dtype), x)
    return x


def _logits(setup: Setup, hidden: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
    z = _product(hidden, weight.T)
    return z + bias if setup.biased else z


def _row_losses(setup: Setup, logits: mx.array, codes: mx.array) -> mx.array:
    options = setup.options
    return cross_entropy(
        logits,
        codes,
        ignore_index=IGNORED,
        label_smoothing=options.label_smoothing,
        softcap=options.softcap,
        z_loss=options.z_loss,
        reduction="none",
        impl=setup.engine,
    )


def _product(a: mx.array, b: mx.array) -> mx.array:
    return mx.matmul(a, b)


def _add_product(total: mx.array | None, a: mx.array, b: mx.array) -> mx.array:
    """total + a @ b in float32."""
    if total is None:
        return _product(a, b).astype(mx.float32)
    if a.dtype == b.dtype == mx.float32:
        return mx.addmm(total, a, b)
    return total + _product(a, b)


def _add_sum(total: mx.array | None, dz: mx.array) -> mx.array:
    """total + the sum of all rows in float32."""
    rows = mx.sum(dz.astype(mx.float32), axis=0)
    return rows if total is None else total + rows
