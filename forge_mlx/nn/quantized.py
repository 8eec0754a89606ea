"""Layers that hold codes and scales: those of MLX's own formats, and those of the formats that MLX has not."""

from typing import Final

from forge_mlx.nn.code_products import float_expert_product, float_product, prefers_floats
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.expert_linear import ExpertLinear, plain_blocks
from forge_mlx.nn.made_weight import MadeWeightLinear, MadeWeightTable
from forge_mlx.nn.weight_format import MLX_MODES, Packed, WeightFormat
import mlx.core as mx
import mlx.nn as nn


class QuantizedLinear(Coded, nn.QuantizedLinear):
    """x W^T + b on MLX's quantised product: an `mlx.nn.QuantizedLinear` that may quantise its input first.

    On a CPU, where that product takes as long again for every row, many rows are multiplied by floats made of the
    codes.

    Takes what `Coded` takes; the mode is one of MLX's.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., in]` to `[..., out]`."""
        if x.ndim == 1:
            return self(x[None])[0]
        if x.size == 0:
            # MLX's product of no rows ends the process.
            return mx.zeros((*x.shape[:-1], self.weight.shape[0]), x.dtype)
        if prefers_floats(x):
            y = float_product(self._input(x), self.packed(), self.format.values)
            return y + self.bias if "bias" in self else y
        product: mx.array = nn.QuantizedLinear.__call__(self, self._input(x))
        return product


class QuantizedEmbedding(Coded, nn.QuantizedEmbedding):
    """weight[ids] of codes, zeros for an id out of range; as the output layer on MLX's quantised product.

    Takes what `Coded` takes; the mode is one of MLX's. Vectors have the dtype of the trained weight, where
    `mlx.nn.QuantizedEmbedding` makes bfloat16 of the modes mxfp4, mxfp8 and nvfp4.
    """

    def __call__(self, ids: mx.array) -> mx.array:
        """Map ids `[...]` to vectors `[..., dims]`."""
        return _rows(self, ids)

    def as_linear(self, x: mx.array) -> mx.array:
        """x weight^T: `[..., dims]` to `[..., num_embeddings]`."""
        if x.size == 0:
            return mx.zeros((*x.shape[:-1], self.weight.shape[0]), x.dtype)
        if prefers_floats(x):
            return float_product(x, self.packed(), self.format.values)
        y: mx.array = nn.QuantizedEmbedding.as_linear(self, x)
        return y


class QuantizedExpertLinear(Coded):
    """x W_e^T for rows of one expert each, on MLX's quantised product: `ExpertLinear` of codes.

    On a CPU many rows are multiplied by floats made of the codes, as in `QuantizedLinear`; those of all experts exist
    during a call then.

    Takes what `Coded` takes; the mode is one of MLX's.
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map x `[M, R, in]`, whose blocks belong to experts `[M]`, sorted, to `[M, R, out]`."""
        if x.size == 0:
            return mx.zeros((*x.shape[:-1], self.weight.shape[1]), x.dtype)
        if prefers_floats(x, num_experts=self.weight.shape[0]):
            return float_expert_product(self._input(x), self.packed(), self.format.values, experts)
        out = mx.gather_qmm(
            plain_blocks(self._input(x)),
            *self.packed(),
            rhs_indices=experts,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=True,
        )
        return plain_blocks(out)


class CodesLinear(Coded, MadeWeightLinear):
    """x W^T + b, W made of its codes in every call: for the modes int8, int4 and fp8_e4m3, which MLX cannot multiply.

    Takes what `Coded` takes. The product is that of `Linear` with the trained weight, to the bit.
    """


class CodesEmbedding(Coded, MadeWeightTable):
    """weight[ids] of codes of the modes int8, int4 and fp8_e4m3, zeros for an id out of range.

    Takes what `Coded` takes.
    """

    def __call__(self, ids: mx.array) -> mx.array:
        """Map ids `[...]` to vectors `[..., dims]`."""
        return _rows(self, ids)


class CodesExpertLinear(Coded, ExpertLinear):
    """`ExpertLinear` of codes of the modes int8, int4 and fp8_e4m3: all experts' weights exist during a call.

    Takes what `Coded` takes.
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map x `[M, R, in]`, whose blocks belong to experts `[M]`, sorted, to `[M, R, out]`."""
        return ExpertLinear.__call__(self, self._input(x), experts)


def _rows(layer: Coded, ids: mx.array) -> mx.array:
    """Rows of a table of codes: only those that are asked for are made."""
    wanted = ids.reshape(-1)
    known = (wanted >= 0) & (wanted < layer.weight.shape[0])
    wanted = mx.where(known, wanted, 0)
    codes, scales, biases = layer.packed()
    if layer.format.options.granularity != "tensor":
        scales = scales[wanted]
    rows = layer.format.values(Packed(codes[wanted], scales, None if biases is None else biases[wanted]))
    return mx.where(known[:, None], rows, mx.zeros_like(rows)).reshape(*ids.shape, rows.shape[-1])


_LAYERS: Final[tuple[tuple[type[nn.Module], type[Coded], type[Coded]], ...]] = (
    (nn.Linear, QuantizedLinear, CodesLinear),
    (nn.Embedding, QuantizedEmbedding, CodesEmbedding),
    (ExpertLinear, QuantizedExpertLinear, CodesExpertLinear),
)

QUANTIZABLE: Final = tuple(kind for kind, _, _ in _LAYERS)
"""Classes of layers whose weight can be in codes."""


def coded_layer(layer: nn.Module, packed: Packed | None, format: WeightFormat) -> Coded:
    """The layer of codes that takes the place of a layer with a weight.

    Args:
        layer: A Linear, an Embedding or an ExpertLinear; its bias is taken over.
        packed: Codes and scales of its weight; None: zeros.
        format: Their format.

    Raises:
        ValueError: When the layer is of another class.
    """
    for kind, of_mlx, of_codes in _LAYERS:
        if isinstance(layer, kind):
            chosen = of_mlx if format.options.mode in MLX_MODES else of_codes
            made = chosen(packed or format.empty(layer.weight.shape), format, layer.get("bias"))
            made.train(layer.training)
            return made
    raise ValueError(
        f"[coded_layer] layer must be a Linear, an Embedding or an ExpertLinear but got {type(layer).__name__}."
    )
