"""Every architecture by the name that `arch` gives it in a config."""

from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.models.moe import MoE, MoEConfig
from pydantic import Discriminator, Tag


class Architecture(NamedTuple):
    """What builds a model.

    Attributes:
        config: Its config.
        model: The model.
    """

    config: type[DecoderConfig]
    model: type[GPT]


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "gpt": Architecture(GPTConfig, GPT),
    "moe": Architecture(MoEConfig, MoE),
}


def _architecture_of(value: Any) -> Any:
    """The `arch` of a config or of its keys and values; "gpt" where it is left out."""
    return value.get("arch", "gpt") if isinstance(value, dict) else getattr(value, "arch", None)


ModelConfig: TypeAlias = Annotated[
    Annotated[GPTConfig, Tag("gpt")] | Annotated[MoEConfig, Tag("moe")],
    Discriminator(_architecture_of),
]
"""The config of any architecture, which `arch` names; without it, of a GPT."""


def build_model(config: DecoderConfig, *, seed: int = 0) -> GPT:
    """The model of a config.

    Args:
        config: Of any architecture, with vocab_size set.
        seed: Seed of the initial parameters.

    Raises:
        ValueError: When vocab_size is not set, or no architecture has such a config.
    """
    found = ARCHITECTURES.get(config.arch)
    if found is None:
        raise ValueError(f"[build_model] config.arch must be one of {sorted(ARCHITECTURES)} but got {config.arch!r}.")
    return found.model(config, seed=seed)
