"""Which family a config.json is of, and which can say a config."""

from collections.abc import Mapping
import difflib
from typing import Any, Final, NamedTuple

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.deepseek_v3 import DEEPSEEK_V3
from forge_mlx.hub.families.dots1 import DOTS1
from forge_mlx.hub.families.family import Family
from forge_mlx.hub.families.gemma2 import GEMMA2
from forge_mlx.hub.families.gemma3 import GEMMA3
from forge_mlx.hub.families.gpt2 import GPT2
from forge_mlx.hub.families.llama import LLAMA
from forge_mlx.hub.families.mistral import MISTRAL
from forge_mlx.hub.families.mixtral import MIXTRAL
from forge_mlx.hub.families.olmoe import OLMOE
from forge_mlx.hub.families.qwen2 import QWEN2
from forge_mlx.hub.families.qwen3 import QWEN3
from forge_mlx.hub.families.qwen3_moe import QWEN3_MOE
from forge_mlx.models.decoder_config import DecoderConfig

FAMILIES: Final[dict[str, Family]] = {
    family.model_type: family
    for family in (
        *(LLAMA, QWEN3, QWEN2, MISTRAL, GEMMA3, GEMMA2, GPT2),
        *(MIXTRAL, QWEN3_MOE, OLMOE, DOTS1, DEEPSEEK_V3),
    )
}
"""By model_type; of several that can say a model, the first is written."""

_OF_TEXT_AND_IMAGES: Final = {"gemma3": "gemma3_text"}


class Described(NamedTuple):
    """What a config.json says.

    Attributes:
        family: The family.
        config: The shape.
        values: The keys of the text model.
        unknown: Keys that nothing is known of.
    """

    family: Family
    config: DecoderConfig
    values: dict[str, Any]
    unknown: list[str]


def describe(values: Mapping[str, Any], where: str) -> Described:
    """The family and the shape that a config.json says.

    Args:
        values: Its keys.
        where: What errors call it: the file.

    Raises:
        HubError: It is of no family that is known, or says something that a model cannot compute.
    """
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in _OF_TEXT_AND_IMAGES:
        text = values.get("text_config")
        if not isinstance(text, dict):
            raise HubError(f"{where}: text_config must be an object in a {model_type} but got {text!r}.")
        shared = {key: values[key] for key in ("tie_word_embeddings", "vocab_size") if key in values}
        values = {**shared, **text, "model_type": _OF_TEXT_AND_IMAGES[model_type]}
        where = f"{where}: text_config"
    family = _family(values.get("model_type"), where)
    config, unknown = family.read_config(values, where)
    return Described(family, config, dict(values), unknown)


def family_for(config: DecoderConfig) -> Family:
    """The first family that can say a config.

    Args:
        config: Of a model.

    Raises:
        HubError: None can; what the nearest one cannot is named.
    """
    found = {}
    for family in FAMILIES.values():
        if family.config_type.model_fields["arch"].default == config.arch:
            problems = family.differences(config)
            if not problems:
                return family
            found[family.model_type] = problems
    if not found:
        raise HubError(f"[save_pretrained] arch must be that of a family but got {config.arch}.")
    nearest = min(found, key=lambda name: (FAMILIES[name].refuses(config), len(found[name])))
    raise HubError(
        f"[save_pretrained] the model must be one of a published family but from the nearest, {nearest}, it differs in "
        f"{'; '.join(found[nearest])}. Train with other settings, or keep forge_mlx's own folder."
    )


def _family(model_type: Any, where: str) -> Family:
    if model_type is None:
        raise HubError(f"{where}: model_type must name a family but is missing. Is it a Hugging Face folder?")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = [*FAMILIES, *_OF_TEXT_AND_IMAGES]
        near = difflib.get_close_matches(str(model_type), known, n=1, cutoff=0.5)
        nearest = f" The nearest is {near[0]}." if near else ""
        raise HubError(f"{where}: model_type must be among {', '.join(known)} but got {model_type!r}.{nearest}")
    return FAMILIES[model_type]
