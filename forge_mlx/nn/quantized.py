"""Layers that hold codes and scales: those of MLX's own formats, and those of the formats that MLX has not."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple

from forge_mlx.kernels.matmul import matmul
from forge_mlx.kernels.quantize import dequantize, fake_quant
from forge_mlx.kernels.quantize.options import Options
from forge_mlx.nn.expert_linear import ExpertLinear, plain_blocks
from forge_mlx.nn.made_weight import MadeWeightLinear, MadeWeightTable
from forge_mlx.nn.parameters import StaysFrozen, named_arrays
import mlx.core as mx
import mlx.nn as nn

Activations = Literal["int8"]

# From so many rows on, making floats of the codes of a layer takes a CPU less time than MLX's quantised product.
_FLOAT_ROWS: Final = 8

MLX_MODES: Final = ("affine", "mxfp4", "mxfp8", "nvfp4")
"""Formats that MLX's quantised products read."""


def option_arguments(options: Options) -> dict[str, Any]:
    """Options as `quantize`, `dequantize` and `fake_quant` take them.

    Args:
        options: The mode with all of its options.
    """
    return {
        "mode": options.mode,
        # A mode without groups has its bits in its name and takes none.
        "bits": options.bits if options.group_size else None,
        "group_size": options.group_size,
        "granularity": options.granularity,
    }


def quantized_input(x: mx.array, activations: Activations | None) -> mx.array:
    """q s for each token: s = max|x| / 127 in float32, q = clip(rint(x / s), -127, 127); its gradient is that of x.

    Args:
        x: `[..., K]`.
        activations: "int8"; None: x as it is.
    """
    if activations is None or x.size == 0:
        return x
    return fake_quant(x.reshape(-1, x.shape[-1]), "int8").reshape(x.shape)


def describe_options(options: Options, activations: Activations | None) -> str:
    """Options as the text of a layer shows them: `mode=affine, bits=4, group_size=64`.

    Args:
        options: The mode with all of its options.
        activations: What becomes of the layer's input.
    """
    shown = asdict(options) | {"activations": activations}
    return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


def named_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """The parameters' names and shapes as they are without codes: of layers of codes, the weight they stand for.

    Args:
        model: Any module; layers of `mlx.nn.quantize` count too.
    """
    quantized = (Coded, nn.QuantizedLinear, nn.QuantizedEmbedding)
    bits = {name: module.bits for name, module in model.named_modules() if isinstance(module, quantized)}
    found = []
    for name, array in named_arrays(model.parameters()):
        layer, _, part = name.rpartition(".")
        if layer not in bits or part not in ("weight", "scales", "biases"):
            found.append((name, array.shape))
        elif part == "weight":
            found.append((name, (*array.shape[:-1], array.shape[-1] * 32 // bits[layer])))
    return found


class Packed(NamedTuple):
    """What `quantize` gives of one weight.

    Attributes:
        codes: uint32 `[..., K bits / 32]`.
        scales: As `quantize` gives them.
        biases: `[..., K / group_size]` in the mode affine, else None.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None


@dataclass(frozen=True)
class WeightFormat:
    """How the weight of a layer is held, and what becomes of the layer's input.

    Attributes:
        options: The mode with all of its options.
        dtype: Of the weight that the codes stand for.
        activations: "int8": the layer's input is quantised, symmetric per token.
    """

    options: Options
    dtype: mx.Dtype
    activations: Activations | None = None

    def empty(self, shape: tuple[int, ...]) -> Packed:
        """Arrays of zeros for a weight of some shape.

        Args:
            shape: `[..., K]`.
        """
        options = self.options
        scales = mx.zeros(options.scales_shape(shape), options.scale_dtype(self.dtype))
        biases = mx.zeros_like(scales) if options.has_biases else None
        return Packed(mx.zeros(options.codes_shape(shape), mx.uint32), scales, biases)

    def values(self, packed: Packed) -> mx.array:
        """The weight that codes stand for, `[..., K]`.

        Args:
            packed: Codes and scales of this format.
        """
        return dequantize(*packed, dtype=self.dtype, **option_arguments(self.options))


class Coded(nn.Module):
    """What all layers of codes have in common: codes and scales, and the weight that they stand for.

    All parameters are frozen. Codes, scales and biases of groups stay so even after `unfreeze()`: codes have no
    gradient, and the others belong to them.

    Args:
        packed: Codes and scales.
        format: Their format.
        bias: `[out]`, or None.

    Attributes:
        format: Their format.
    """

    def __init__(self, packed: Packed, format: WeightFormat, bias: mx.array | None = None) -> None:
        # Not the next class's: MLX's quantised layers would draw a weight and quantise it themselves.
        nn.Module.__init__(self)
        self.format = format
        self.mode: str = format.options.mode
        self.bits, self.group_size = format.options.bits, format.options.group_size
        self.weight, self.scales = packed.codes, packed.scales
        self.biases: mx.array | None = packed.biases
        if bias is not None:
            self.bias = bias
        self._no_grad = StaysFrozen({"weight", "scales", "biases"})
        self.freeze()

    def packed(self) -> Packed:
        """Codes and scales."""
        return Packed(self.weight, self.scales, self.get("biases"))

    def effective_weight(self) -> mx.array:
        """The weight `[..., out, in]` that the codes stand for, which is the one that was trained."""
        return self.format.values(self.packed())

    def _input(self, x: mx.array) -> mx.array:
        return quantized_input(x, self.format.activations)

    def _extra_repr(self) -> str:
        shape = (*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.bits)
        return f"{shape}, {describe_options(self.format.options, self.format.activations)}"


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

    Takes what `Coded` takes; the mode is one of MLX's.
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map x `[M, R, in]`, whose blocks belong to experts `[M]`, sorted, to `[M, R, out]`."""
        if x.size == 0:
            return mx.zeros((*x.shape[:-1], self.weight.shape[1]), x.dtype)
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


def prefers_floats(x: mx.array) -> bool:
    """Whether the default device is a CPU and x has so many rows that floats made of codes are the faster factor.

    Args:
        x: `[..., in]`.
    """
    return bool(mx.default_device().type == mx.cpu and x.size >= _FLOAT_ROWS * x.shape[-1])


def float_product(x: mx.array, packed: Packed, values: Callable[[Packed], mx.array]) -> mx.array:
    """x W^T of the weight that codes stand for, `[..., out]`; the backward pass makes its floats anew.

    No layer's floats are kept from the forward to the backward pass. Codes and scales get no gradient.

    Args:
        x: `[..., in]`.
        packed: Codes and scales.
        values: Makes the weight `[out, in]` of them.
    """

    def multiplied(x: mx.array, *arrays: mx.array) -> mx.array:
        codes, scales, *biases = (mx.stop_gradient(array) for array in arrays)
        return matmul(x, values(Packed(codes, scales, biases[0] if biases else None)), transpose_b=True)

    arrays = [array for array in packed if array is not None]
    product: mx.array = mx.checkpoint(multiplied)(x, *arrays)
    return product


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
