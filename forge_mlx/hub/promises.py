"""What a config.json promises against the tensors that are there, before a model of that size is made."""

from collections.abc import Iterator, Mapping
import re
from typing import Final

from forge_mlx.hub.errors import HubError
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.moe import MoEConfig
import mlx.core as mx

_LAYER: Final = re.compile(r"(?:layers|h)\.(\d+)\.")
# Elements in a word of codes of 2 bits, the smallest.
_MOST_IN_A_WORD: Final = 16


def require_promised(config: DecoderConfig, tensors: Mapping[str, mx.array], where: str) -> None:
    """Raise where a model would be larger than the tensors of a checkpoint can fill.

    Args:
        config: What config.json says.
        tensors: Those of the checkpoint by their names without a prefix.
        where: What errors call it: the folder.

    Raises:
        HubError: There are tensors of fewer layers, or none of them has so long an axis.
    """
    layers = {match[1] for match in map(_LAYER.match, tensors) if match}
    if config.num_layers > len(layers):
        raise HubError(
            f"{where}: the number of layers must be that of the tensors, {len(layers)}, but config.json says "
            f"{config.num_layers}. Download it again."
        )
    longest = max((size for array in tensors.values() for size in array.shape), default=0)
    if any(array.dtype == mx.uint32 for array in tensors.values()):
        longest *= _MOST_IN_A_WORD
    for name, size in _sizes(config):
        if size > longest:
            raise HubError(
                f"{where}: {name} must be that of the tensors, whose longest axis has {longest}, but config.json says "
                f"{size}. Are the files of one model?"
            )


def _sizes(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Each size that is an axis of some tensor, or a share of one."""
    yield "vocab_size", config.vocab_size or 0
    yield "hidden_size", config.hidden_size
    yield "num_heads times head_dim", config.num_heads * config.head_size
    if config.position == "learned":
        yield "max_seq_len", config.max_seq_len
    if not isinstance(config, MoEConfig) or config.dense_layers:
        yield "intermediate_size", config.mlp_size
    if isinstance(config, MoEConfig):
        yield "expert_intermediate_size", config.expert_size * max(config.shared_experts, 1)
        for name in ("kv_lora_rank", "q_lora_rank", "v_head_dim"):
            yield name, getattr(config, name) or 0
