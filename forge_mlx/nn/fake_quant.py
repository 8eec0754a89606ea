"""Layers that train what will be deployed: the forward uses the weight as its codes will give it back."""

from typing import Final

from forge_mlx.kernels.embedding import embedding
from forge_mlx.kernels.quantize import fake_quant, quantize
from forge_mlx.kernels.quantize.options import Options, Ste
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.made_weight import MadeWeightLinear, MadeWeightTable
from forge_mlx.nn.quantized import coded_layer
from forge_mlx.nn.weight_format import (
    Activations,
    Packed,
    WeightFormat,
    describe_options,
    option_arguments,
    quantized_input,
)
import mlx.core as mx
import mlx.nn as nn

_TERNARY_GROUPS: Final = (64, 32)


def columns_multiple(options: Options) -> int:
    """What the last axis of a weight must be a multiple of, so that it can be trained and deployed in a mode.

    Args:
        options: The mode with all of its options.
    """
    # Ternary weights are deployed as MLX's affine format of 2 bits, whose smallest group this is.
    return _TERNARY_GROUPS[-1] if options.mode == "ternary" else options.columns_multiple


class FakeQuantized(nn.Module):
    """What the three layers have in common: a float weight to train, and the quantised one that the forward uses.

    Takes over the parameters of a layer, the same arrays under the same names, so that optimizer states and checkpoints
    are those of the model without quantisation.

    Args:
        layer: The layer whose place this one takes.
        options: The weight's mode with all of its options.
        ste: "identity": the gradient of the quantised weight is that of the weight; "clip": and 0 where the code was
            clipped.
        activations: "int8": the input is fake-quantised too, symmetric per token.

    Attributes:
        enabled: Whether the forward is quantised; without it the layer is the one whose place it took.
    """

    def __init__(
        self, layer: nn.Module, options: Options, *, ste: Ste = "identity", activations: Activations | None = None
    ) -> None:
        # Not the next class's: it would draw a weight.
        nn.Module.__init__(self)
        self.options, self.ste, self.activations = options, ste, activations
        self.enabled = True
        for name, array in layer.parameters().items():
            self[name] = array
        self.train(layer.training)
        self.freeze(keys=[name for name in self if name not in layer.trainable_parameters()])

    def effective_weight(self) -> mx.array:
        """dequantize(quantize(weight)) in the dtype of weight; weight itself while the layer is not enabled."""
        weight: mx.array = self.weight
        return fake_quant(weight, ste=self.ste, **option_arguments(self.options)) if self.enabled else weight

    def to_coded(self) -> Coded:
        """The layer of the codes that `effective_weight` is made of when enabled.

        A mode of MLX's gives one of MLX's quantised layers. So does ternary: with 2 bits, scale s and bias -s the codes
        0, 1, 2 stand for -s, 0, s, the trained weight itself.
        """
        weight: mx.array = self.weight
        packed = Packed(*quantize(weight, **option_arguments(self.options)))
        options = self.options
        if options.mode == "ternary":
            group = next(size for size in _TERNARY_GROUPS if weight.shape[-1] % size == 0)
            options = Options("affine", 2, group, None)
            scales = mx.broadcast_to(packed.scales.astype(weight.dtype), options.scales_shape(weight.shape))
            # Whole arrays: products and files take no repeated rows.
            packed = Packed(packed.codes, mx.contiguous(scales), -scales)
        return coded_layer(self, packed, WeightFormat(options, weight.dtype, self.activations))

    def to_quantized(self, *_args: object, **_options: object) -> nn.Module:
        """What `mlx.nn.quantize` calls; it would make codes that were not trained.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"[{type(self).__name__}] the layer must not go through mlx.nn.quantize, whose codes are not those that "
            "were trained. Use forge_mlx.models.qat.convert_qat(model)."
        )

    def _extra_repr(self) -> str:
        return f"{self.weight.shape}, {describe_options(self.options, self.activations)}, ste={self.ste}"

    def _input(self, x: mx.array) -> mx.array:
        return quantized_input(x, self.activations) if self.enabled else x


class FakeQuantLinear(FakeQuantized, MadeWeightLinear, Linear):
    """x W'^T + b with W' = dequantize(quantize(W)), and the gradient of W' for W.

    Takes what `FakeQuantized` takes, of an `mlx.nn.Linear`.
    """


class FakeQuantEmbedding(FakeQuantized, MadeWeightTable, Embedding):
    """Rows of W' = dequantize(quantize(W)), zeros for an id out of range; W' is the output layer's matrix too.

    Takes what `FakeQuantized` takes, of an `mlx.nn.Embedding`; ids and the output layer's input are never quantised.
    """

    def __call__(self, ids: mx.array) -> mx.array:
        """Map ids `[...]` to vectors `[..., dims]`."""
        return embedding(self.effective_weight(), ids)


class FakeQuantExpertLinear(FakeQuantized, ExpertLinear):
    """`ExpertLinear` with W' = dequantize(quantize(W)) of W `[E, out, in]`: no group has parts of two experts.

    Takes what `FakeQuantized` takes, of an `ExpertLinear`.
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map x `[M, R, in]`, whose blocks belong to experts `[M]`, sorted, to `[M, R, out]`."""
        return ExpertLinear.__call__(self, self._input(x), experts)
