"""The size of a head in families whose config.json seldom says it: transformers reads the key where it is."""

from typing import Any

from forge_mlx.hub.families.keys import Keys
from forge_mlx.models.decoder_config import DecoderConfig


def read_head_dim(keys: Keys) -> dict[str, Any]:
    """Fields of a config: head_dim, unless it is the heads' share of the width.

    Args:
        keys: Those of a config.json.

    Raises:
        HubError: A size is no integer of 0 or more.
    """
    size = keys.count("head_dim", 0)
    is_share = size * keys.count("num_attention_heads") == keys.count("hidden_size")
    return {} if is_share or not size else {"head_dim": size}


def write_head_dim(config: DecoderConfig) -> dict[str, Any]:
    """What `read_head_dim` reads.

    Args:
        config: A model's config.
    """
    is_share = config.head_size * config.num_heads == config.hidden_size
    return {} if is_share else {"head_dim": config.head_size}
