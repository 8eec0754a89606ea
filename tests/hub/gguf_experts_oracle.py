"""GGUF files of transformers' models with experts, written by the package gguf as llama.cpp's converter has it."""

from pathlib import Path

import gguf
from gguf_oracle import V, add_tokenizer, byte_level
import numpy as np
import torch
import transformers

_SHAPE = {
    **{"vocab_size": V, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    "pad_token_id": None,
}
CONFIGS = {
    "llama": lambda: transformers.MixtralConfig(**_SHAPE, num_local_experts=5, sliding_window=None),
    "olmoe": lambda: transformers.OlmoeConfig(
        **{**_SHAPE, "num_key_value_heads": 4}, num_experts=6, num_experts_per_tok=3, rope_parameters=_rope(5e4)
    ),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPE,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        rope_parameters=_rope(1e6),
    ),
    "dots1": lambda: transformers.Dots1Config(
        **{**_SHAPE, "num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 32, "moe_intermediate_size": 32},
        **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1},
        **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
}
"""By architecture."""


def _rope(base: float):
    return {"rope_type": "default", "rope_theta": base}


def published(name: str, **changes):
    """transformers' model with matrices that matter, norms and biases that are not what they start as.

    `changes` are keys of its config.
    """
    torch.manual_seed(11)
    config = CONFIGS[name]()
    config = type(config).from_dict({**config.to_dict(), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0, 0.2)
            if parameter.ndim == 1 and "norm" in key:
                parameter += 1
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                # transformers gives experts of groups that are out a score of 0, which llama.cpp does not.
                buffer.uniform_(0, 0.5)
    return model.eval()


def write_gguf_of(
    path: Path, model, name: str, *, kind: str = "F32", changes=None, tensors=None, numbers=None, split_max_tensors=0
) -> Path:
    """The file that llama.cpp's converter would write: matrices in the type, routers and everything else F32.

    `changes` are keys without the architecture, where None leaves one out; `tensors` are arrays or None for one that is
    left out; `numbers` are keys in full of 16 bits. With `split_max_tensors` the file is split into parts of so many.
    """
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    for key, value in (numbers or {}).items():
        writer.add_uint16(key, value)
    for key, value in (_keys(model.config, name) | (changes or {})).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if value is not None:
            add[type(value)](f"{name}.{key}", value)
    add_tokenizer(writer, byte_level())
    for key, value in (dict(tensors_of(model, name)) | (tensors or {})).items():
        if value is not None:
            stored = gguf.GGMLQuantizationType[kind if is_in_blocks(key, value) else "F32"]
            writer.add_tensor(key, gguf.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def is_in_blocks(name: str, value) -> bool:
    """Whether a tensor is of the file's type."""
    return value.ndim > 1 and not name.endswith("ffn_gate_inp.weight")


def _keys(config, name: str):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
        "expert_count": getattr(config, "n_routed_experts", None) or config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
    }
    if name in ("qwen3moe", "dots1"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if name == "dots1":
        keys |= {
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    return keys


def tensors_of(model, name: str):
    """Names in the file and arrays."""
    config = model.config
    architecture = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        value = tensor.numpy()
        if name == "llama" and "q_proj" in key:
            value = _permuted(value, config.num_attention_heads)
        if name == "llama" and "k_proj" in key:
            value = _permuted(value, config.num_key_value_heads)
        if key.endswith("experts.gate_up_proj"):
            gate, up = np.split(value, 2, axis=1)
            place = key.removesuffix("gate_up_proj")
            yield f"{names.get_name(place + 'gate_proj')}.weight", np.ascontiguousarray(gate)
            yield f"{names.get_name(place + 'up_proj')}.weight", np.ascontiguousarray(up)
        elif key.endswith("experts.down_proj"):
            yield f"{names.get_name(key)}.weight", value
        else:
            short, _, part = key.replace("e_score_correction_bias", "e_score_correction.bias").rpartition(".")
            yield f"{names.get_name(short)}.{part}", np.ascontiguousarray(value)


def _permuted(value, heads: int):
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)
