"""Adapters merged into a model that is to be written."""

from collections.abc import Callable

from forge_mlx._text import count
from forge_mlx.hub.gguf_write import Kind, keeps_codes
from forge_mlx.models.adapters import adapted_layers, merge_adapters
from forge_mlx.models.gpt import GPT
from forge_mlx.models.qat import is_prepared
from forge_mlx.models.replace import replace_each
from forge_mlx.nn.coded import compute_in_float32, holds_codes
from forge_mlx.nn.lora import Adapter
import mlx.nn as nn


def merge_for_saving(model: GPT, *, dequantize: bool, log: Callable[[str], None]) -> None:
    """Merge the adapters of a model, and say where that rounds what they learned.

    Args:
        model: With adapters; changed in place.
        dequantize: Whether all layers of codes become float layers.
        log: Told in one line how many layers get new codes.

    Raises:
        ValueError: The model has no adapters.
    """
    anew = sum(holds_codes(layer.base) for _, layer in adapted_layers(model))
    # In quantisation-aware training the codes are what was learned.
    if anew and not dequantize and not is_prepared(model):
        log(
            f"{count(anew, 'layer')} of codes with adapters: codes are made anew of the sum, which rounds away part of "
            "what was learned; --dequantize writes floats instead"
        )
    merge_adapters(model, dequantize=dequantize)


def merge_for_gguf(model: GPT, kind: Kind, *, dequantize: bool, log: Callable[[str], None]) -> None:
    """Merge the adapters of a model that becomes a GGUF file, so that sums with codes are rounded once, to its type.

    Sums become float32 layers. Layers without adapters keep their codes. In q4_0, codes that the file has as they are,
    Q4_1, are made anew of the sum: that too rounds once, and stays nearer to it than Q4_0.

    Args:
        model: With adapters; changed in place.
        kind: Of the file.
        dequantize: Whether sums with such codes become floats too.
        log: Told in a line each how many layers of codes become floats, and how many get new codes.

    Raises:
        ValueError: The model has no adapters.
    """

    def stays_coded(base: nn.Module) -> bool:
        return kind == "q4_0" and not dequantize and keeps_codes(base)

    def becomes_float(layer: nn.Module) -> bool:
        return isinstance(layer, Adapter) and holds_codes(layer.base) and not stays_coded(layer.base)

    layers = [layer for _, layer in adapted_layers(model)]
    # In quantisation-aware training the codes are what was learned.
    floats, anew = (
        (0, 0)
        if is_prepared(model)
        else (
            sum(becomes_float(layer) for layer in layers),
            sum(stays_coded(layer.base) for layer in layers),
        )
    )
    # Each is to be free as soon as it is replaced.
    del layers
    if anew:
        log(
            f"{count(anew, 'layer')} of codes with adapters: codes are made anew of the sum, which rounds away part of "
            "what was learned; q8_0 keeps more"
        )
    if floats:
        log(f"{count(floats, 'layer')} of codes with adapters: merged as floats, as by --dequantize")
        replace_each(model, lambda layer: _summed(layer) if becomes_float(layer) else None)
    if adapted_layers(model) or not floats:
        merge_adapters(model)


def _summed(layer: nn.Module) -> nn.Module:
    """The float32 layer of codes and adapters."""
    assert isinstance(layer, Adapter)
    # Else the codes' values, and the sum, are rounded to the dtype that the model computes in.
    compute_in_float32(layer.base)
    return layer.merged(dequantize=True)
