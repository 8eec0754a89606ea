"""Which layers hold codes and scales, what those of forge-mlx have in common, and the shapes that codes stand for."""

from dataclasses import replace
from typing import Final

from forge_mlx.nn.parameters import StaysFrozen, cast_floats, named_arrays
from forge_mlx.nn.weight_format import Packed, WeightFormat, describe_options, quantized_input
import mlx.core as mx
import mlx.nn as nn


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
        return f"{coded_shape(self)}, {describe_options(self.format.options, self.format.activations)}"


_CODES: Final = (Coded, nn.QuantizedLinear, nn.QuantizedEmbedding)


def holds_codes(layer: nn.Module) -> bool:
    """Whether a module is a layer of codes, of forge-mlx or of `mlx.nn.quantize`.

    Args:
        layer: Any module.
    """
    return isinstance(layer, _CODES)


def compute_in_float32(model: nn.Module) -> None:
    """Cast all floats of a module to float32, and let its codes stand for weights of float32.

    Args:
        model: A model, or a layer of codes; changed in place.
    """
    model.update(cast_floats(model.parameters(), mx.float32))
    for module in model.modules():
        if isinstance(module, Coded):
            module.format = replace(module.format, dtype=mx.float32)


def coded_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape of the weight that the codes of a layer stand for, `[..., out, in]`.

    Args:
        layer: A layer of codes.
    """
    shape: tuple[int, ...] = layer.weight.shape
    return (*shape[:-1], shape[-1] * 32 // layer.bits)


def coded_layers(model: nn.Module) -> list[str]:
    """The names of the layers that hold codes, in order.

    Args:
        model: Any module; layers of `mlx.nn.quantize` count too.
    """
    return sorted(name for name, module in model.named_modules() if holds_codes(module))


def named_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """The parameters' names and shapes as they are without codes: of layers of codes, the weight they stand for.

    Args:
        model: Any module; layers of `mlx.nn.quantize` count too.
    """
    coded = {name: module for name, module in model.named_modules() if holds_codes(module)}
    found = []
    for name, array in named_arrays(model.parameters()):
        layer, _, part = name.rpartition(".")
        if layer not in coded or part not in ("weight", "scales", "biases"):
            found.append((name, array.shape))
        elif part == "weight":
            found.append((name, coded_shape(coded[layer])))
    return found
