"""What an adapter asks of the layer under it, float or of codes: its kind, its weight, its product, its successor."""

from typing import Final, Literal

from forge_mlx.kernels.matmul import matmul
from forge_mlx.kernels.quantize import quantize
from forge_mlx.kernels.quantize.options import Mode, Options, checked_options
from forge_mlx.nn.code_products import float_product, prefers_floats
from forge_mlx.nn.coded import Coded, coded_shape, holds_codes
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.module_copy import copied_modules
from forge_mlx.nn.quantized import CodesEmbedding, CodesLinear, QuantizedExpertLinear
from forge_mlx.nn.weight_format import Packed, option_arguments
import mlx.core as mx
import mlx.nn as nn

Kind = Literal["linear", "experts", "embedding"]

_KINDS: Final[dict[Kind, tuple[type[nn.Module], ...]]] = {
    "linear": (nn.Linear, nn.QuantizedLinear, CodesLinear),
    "experts": (ExpertLinear, QuantizedExpertLinear),
    "embedding": (nn.Embedding, nn.QuantizedEmbedding, CodesEmbedding),
}
_FLOAT: Final[dict[Kind, type[nn.Module]]] = {"linear": Linear, "experts": ExpertLinear, "embedding": Embedding}


def kind_of(layer: nn.Module) -> Kind | None:
    """Which kind of layer with a matrix a module is; None: none that an adapter fits.

    Args:
        layer: Any module.
    """
    return next((kind for kind, classes in _KINDS.items() if isinstance(layer, classes)), None)


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape of the weight, `[..., out, in]`; of layers of codes, of the one that they stand for.

    Args:
        layer: A layer of a kind that `kind_of` knows.
    """
    shape: tuple[int, ...] = coded_shape(layer) if holds_codes(layer) else layer.weight.shape
    return shape


def codes_options(layer: nn.Module) -> Options:
    """The mode of a layer of codes with all of its options.

    Args:
        layer: A layer of codes.
    """
    if isinstance(layer, Coded):
        return layer.format.options
    mode: Mode = layer.mode
    # The other modes have one number of bits and one size of groups.
    bits, group_size = (layer.bits, layer.group_size) if mode == "affine" else (None, None)
    return checked_options(type(layer).__name__, mode, bits, group_size, None)


def float_weight(layer: nn.Module, after: mx.array | None = None) -> mx.array:
    """The weight as floats, `[..., out, in]`, that of codes made anew.

    Args:
        layer: A layer of a kind that `kind_of` knows.
        after: What has to be there before the weight of codes is made; a compiled function then does not keep an
            equal one of the forward pass instead.
    """
    if not holds_codes(layer):
        weight: mx.array = layer.weight
        return weight
    arrays = [array for array in (layer.weight, layer.scales, layer.get("biases")) if array is not None]
    codes, scales, *biases = arrays if after is None else mx.depends(arrays, [after])
    return _values(layer, Packed(codes, scales, biases[0] if biases else None))


def _values(layer: nn.Module, packed: Packed) -> mx.array:
    """The weight that codes and scales of a layer of codes stand for."""
    if isinstance(layer, Coded):
        return layer.format.values(packed)
    return mx.dequantize(*packed, group_size=layer.group_size, bits=layer.bits, mode=layer.mode)


def product(layer: nn.Module, x: mx.array) -> mx.array:
    """x W^T without the layer's bias, `[..., in]` to `[..., out]`; of a layer of codes on MLX's quantised product.

    On a CPU, where that product takes as long again for every row, many rows are multiplied by floats made of the
    codes, in the forward and anew in the backward pass: no layer's floats are kept.

    Args:
        layer: A linear layer or, whose table is then the matrix, an embedding.
        x: `[..., in]`.
    """
    if x.size == 0:
        return mx.zeros((*x.shape[:-1], layer.weight.shape[0]), x.dtype)
    if holds_codes(layer) and prefers_floats(x):
        packed = Packed(layer.weight, layer.scales, layer.get("biases"))
        return float_product(x, packed, lambda packed: _values(layer, packed))
    if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        return mx.quantized_matmul(
            x,
            layer.weight,
            layer.scales,
            layer.get("biases"),
            transpose=True,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
    return matmul(x, float_weight(layer), transpose_b=True)


def float_layer(layer: nn.Module, weight: mx.array) -> nn.Module:
    """A float layer of the same kind with another weight, its bias and its mode of training taken over.

    Args:
        layer: A layer of a kind that `kind_of` knows.
        weight: `[..., out, in]`.

    Raises:
        ValueError: When the layer is of no such kind.
    """
    kind = kind_of(layer)
    if kind is None:
        raise ValueError(
            f"[float_layer] layer must be a linear layer, an embedding or experts but got a {type(layer).__name__}."
        )
    made: nn.Module = _FLOAT[kind].__new__(_FLOAT[kind])
    # Not the class's own, which would draw a weight.
    nn.Module.__init__(made)
    made.weight = weight
    if (bias := layer.get("bias")) is not None:
        made.bias = bias
    made.train(layer.training)
    return made


def with_weight(layer: nn.Module, weight: mx.array) -> nn.Module:
    """The same layer with another weight: of a float layer in its dtype, of a layer of codes quantised as it is.

    Args:
        layer: A layer of a kind that `kind_of` knows; it stays as it is.
        weight: `[..., out, in]`.
    """
    made = copied_modules(layer)
    if not holds_codes(layer):
        made.weight = weight.astype(layer.weight.dtype)
        return made
    options = codes_options(layer)
    dtype = layer.format.dtype if isinstance(layer, Coded) else float_weight(layer).dtype
    packed = Packed(*quantize(weight.astype(dtype), **option_arguments(options)))
    made.weight, made.scales = packed.codes, packed.scales
    if packed.biases is not None:
        made.biases = packed.biases
    return made
