"""Where a model's parameters lie in a GGUF file: names of tensors, and rows in llama.cpp's order."""

from collections.abc import Iterable
import re
from typing import Final, NamedTuple

from forge_mlx.models.decoder_config import DecoderConfig
import numpy as np
from numpy.typing import NDArray

_TOP: Final = {
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention_output_layernorm": "post_attention_norm",
    "mlp_output_layernorm": "post_ffw_norm",
}
_FUSED: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_SELECTION_BIAS: Final = re.compile(r"layers\.(\d+)\.mlp\.router\.selection_bias")
ROUTER: Final = "ffn_gate_inp.weight"
"""How the names of routers end, which are F32 whatever the other matrices are."""


class Source(NamedTuple):
    """Where a parameter lies.

    Attributes:
        tensor: Name of the tensor.
        rows: Its rows that are the parameter's, in the parameter's order; None: all of them as they are.
    """

    tensor: str
    rows: NDArray[np.intp] | None = None


def sources(architecture: str, config: DecoderConfig, names: Iterable[str]) -> dict[str, Source | None]:
    """For each parameter where it lies; None for one that the format has no tensor for.

    llama.cpp rotates neighbours in architecture llama, where the halves of a head rotate against each other here: its
    rows of q and k lie in the other order.

    Args:
        architecture: One of `FIXED`.
        config: The model's.
        names: The model's parameters, such as `layers.0.self_attn.q_proj.weight`.
    """
    return {name: _source(architecture, config, name) for name in names}


def _source(architecture: str, config: DecoderConfig, name: str) -> Source | None:
    if bias := _SELECTION_BIAS.fullmatch(name):
        return Source(f"blk.{bias[1]}.exp_probs_b.bias")
    found = _LAYER.fullmatch(name)
    if found is None:
        module, _, part = name.rpartition(".")
        return Source(f"{_TOP[module]}.{part}") if module in _TOP else None
    layer, module, part = found.groups()
    if architecture == "gpt2" and module in _FUSED:
        width = config.hidden_size
        start = _FUSED.index(module) * width
        return Source(f"blk.{layer}.attn_qkv.{part}", np.arange(start, start + width))
    if module not in _IN_LAYER:
        return None
    rows = None
    if architecture == "llama" and module in _FUSED[:2]:
        heads = config.num_heads if module == _FUSED[0] else config.kv_heads
        pairs = np.arange(heads * config.head_size).reshape(heads, config.head_size // 2, 2)
        rows = pairs.swapaxes(1, 2).reshape(-1)
    return Source(f"blk.{layer}.{_IN_LAYER[module]}.{part}", rows)
