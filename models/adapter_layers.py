"""The layer with an adapter that takes the place of another, and how its adapted weight is quantised."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final, cast

from forge_mlx.models.qat_config import LayerQuantization, QATConfig
from forge_mlx.nn.adapted_base import Kind, codes_options, float_layer, holds_codes, kind_of
from forge_mlx.nn.dora import DoRAEmbedding, DoRALinear
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.lora import Adapter, AdapterOptions, LoRAEmbedding, LoRAExpertLinear, LoRALinear
from forge_mlx.nn.qat_lora import (
    FakeQuantAdapter,
    FakeQuantDoRAEmbedding,
    FakeQuantDoRALinear,
    FakeQuantLoRAEmbedding,
    FakeQuantLoRAExpertLinear,
    FakeQuantLoRALinear,
)
from forge_mlx.nn.quantized import describe_options
import mlx.core as mx
import mlx.nn as nn

_PLAIN: Final[dict[tuple[Kind, bool], type[Adapter]]] = {
    ("linear", False): LoRALinear,
    ("experts", False): LoRAExpertLinear,
    ("embedding", False): LoRAEmbedding,
    ("linear", True): DoRALinear,
    ("embedding", True): DoRAEmbedding,
}
_FAKE_QUANTIZED: Final[dict[tuple[Kind, bool], type[FakeQuantAdapter]]] = {
    ("linear", False): FakeQuantLoRALinear,
    ("experts", False): FakeQuantLoRAExpertLinear,
    ("embedding", False): FakeQuantLoRAEmbedding,
    ("linear", True): FakeQuantDoRALinear,
    ("embedding", True): FakeQuantDoRAEmbedding,
}


def adapted_layer(
    layer: nn.Module, options: AdapterOptions, use_dora: bool, format: LayerQuantization | None, key: mx.array
) -> Adapter:
    """The layer with an adapter that takes the place of another.

    Args:
        layer: A layer of a kind that `kind_of` knows; of a fake-quantised one, its format is used.
        options: Rank, scale and dropout.
        use_dora: Whether it has magnitudes.
        format: How the adapted weight is quantised; None: not at all.
        key: Of the initial A.
    """
    kind = cast(Kind, kind_of(layer))
    if isinstance(layer, FakeQuantized):
        format = LayerQuantization(layer.options, layer.ste, layer.activations)
        layer = float_layer(layer, layer.weight)
    if format is None:
        return _PLAIN[kind, use_dora](layer, options, key=key)
    return _FAKE_QUANTIZED[kind, use_dora](
        layer, options, key=key, options=format.options, ste=format.ste, activations=format.activations
    )


def formats_of_codes(model: nn.Module, chosen: dict[str, nn.Module], qat: QATConfig) -> dict[str, LayerQuantization]:
    """How the adapted layers of a model of codes are quantised: as their codes are, which the config must say too.

    Args:
        model: The model.
        chosen: The layers that get adapters, by their names.
        qat: What is asked for.

    Raises:
        ValueError: When the config names another format for one of them, or one that is float.
    """
    formats = {}
    for name, layer in chosen.items():
        how = _asked_format(name, qat)
        if how is None:
            continue
        if not holds_codes(layer):
            raise ValueError(
                f"[add_adapters] qat: in a model of codes all that it names must be codes but {name} is float. Leave "
                f"it float by qat.overrides: {{{name}: null}}, or take the float model."
            )
        own = codes_options(layer)
        if own != how.options:
            raise ValueError(
                f"[add_adapters] qat must name the format that the codes of the model have, for {name} "
                f"{describe_options(own, None)}, but got {describe_options(how.options, None)}. Change it, or take the "
                "float model."
            )
        keeps_input = kind_of(layer) == "embedding" or name == getattr(model, "head_name", None)
        formats[name] = replace(how, activations=None) if keeps_input else how
    return formats


def _asked_format(name: str, qat: QATConfig) -> LayerQuantization | None:
    """How a config wants a layer quantised; None: not at all."""
    if not any(fnmatchcase(name, pattern) for pattern in qat.modules):
        return None
    fitting = [override for pattern, override in qat.overrides.items() if fnmatchcase(name, pattern)]
    if fitting and fitting[-1] is None:
        return None
    return qat.merged(fitting[-1] if fitting else None)
