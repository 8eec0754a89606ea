"""Adapters merged into a model that is to be written."""

from collections.abc import Callable

from forge_mlx._text import count
from forge_mlx.models.adapters import adapted_layers, merge_adapters
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.coded import holds_codes


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
    if anew and not dequantize:
        log(
            f"{count(anew, 'layer')} of codes with adapters: codes are made anew of the sum, which rounds away part of "
            "what was learned; --dequantize writes floats instead"
        )
    merge_adapters(model, dequantize=dequantize)
