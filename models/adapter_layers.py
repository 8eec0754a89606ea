"""The layer with an adapter that takes the place of another, and how its adapted weight is quantised."""

from typing import Final, cast

from forge_mlx.models.qat import preparable_layers
from forge_mlx.models.qat_config import LayerQuantization, QATConfig
from forge_mlx.models.qat_patterns import chosen_formats
from forge_mlx.nn.adapted_base import Kind, codes_options, float_layer, kind_of
from forge_mlx.nn.coded import holds_codes
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
from forge_mlx.nn.weight_format import describe_options
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
        qat: What is asked for. Its patterns are those of `prepare_qat`, and choose among layers of codes too.

    Raises:
        ValueError: When a pattern fits no layer or has no effect, the config chooses no layer that gets an adapter,
            or it names another format for one of them, or one that is float.
    """
    coded = {name: layer for name, layer in model.named_modules() if name and holds_codes(layer)}
    asked = chosen_formats("[add_adapters] qat:", model, preparable_layers(model) | coded, qat)
    formats = {name: asked[name] for name in chosen if name in asked}
    if not formats:
        raise ValueError(
            "[add_adapters] qat must choose a layer that gets an adapter, as the others of a model of codes stay as "
            f"they are, but chooses {len(asked)} that get none, such as {next(iter(asked))}. Change modules or targets."
        )
    for name, how in formats.items():
        if name not in coded:
            raise ValueError(
                f"[add_adapters] qat: in a model of codes all that it names must be codes but {name} is float. Leave "
                f"it float by qat.overrides: {{{name}: null}}, or take the float model."
            )
        own = codes_options(chosen[name])
        if own != how.options:
            raise ValueError(
                f"[add_adapters] qat must name the format that the codes of the model have, for {name} "
                f"{describe_options(own, None)}, but got {describe_options(how.options, None)}. Change it, or take the "
                "float model."
            )
    return formats
