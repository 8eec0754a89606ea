"""Tiny models of every family with random weights, as transformers saves them: what the parity tests load."""

import importlib
import json
from pathlib import Path

from tiny_tokenizer import write_tokenizer
import torch

V, WINDOW = 61, 8
_SHAPE = {
    **{"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    "pad_token_id": None,
}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_DEEPSEEK = {
    **{"moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
}
# mlx-lm rounds the factor sqrt(hidden_size) of the embedding to bfloat16 whatever the dtype: 8 stays 8.
_GEMMA = {**_SHAPE, "hidden_size": 64, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}


def hugging_face():
    """The module transformers, which takes seconds to import."""
    return importlib.import_module("transformers")


def _config(name: str, **values):
    return getattr(hugging_face(), f"{name}Config")(**values)


CONFIGS = {
    "llama": lambda: _config("Llama", **_SHAPE, rope_parameters=_LLAMA3),
    "llama, biases": lambda: _config(
        "Llama", **_SHAPE, attention_bias=True, mlp_bias=True, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-4
    ),
    "mistral": lambda: _config("Mistral", **_SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: _config(
        "Qwen2",
        **_SHAPE,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
    ),
    "qwen3": lambda: _config("Qwen3", **_SHAPE, head_dim=16, rope_parameters=_YARN),
    "gemma2": lambda: _config("Gemma2", **_GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=3.0),
    "gemma3_text": lambda: _config(
        "Gemma3Text",
        **_GEMMA,
        sliding_window_pattern=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "gpt2": lambda: _config(
        "GPT2", vocab_size=V, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: _config("Mixtral", **_SHAPE, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "olmoe": lambda: _config("Olmoe", **_SHAPE, num_experts=6, num_experts_per_tok=2),
    "qwen3_moe": lambda: _config(
        "Qwen3Moe",
        # mlx-lm quantises its routers in groups of 64.
        **{**_SHAPE, "hidden_size": 64},
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "deepseek_v3": lambda: _config(
        "DeepseekV3",
        **{**_SHAPE, "num_key_value_heads": 4},
        **_DEEPSEEK,
        **{"kv_lora_rank": 20, "q_lora_rank": 14, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    ),
    "dots1": lambda: _config("Dots1", **_SHAPE, **_DEEPSEEK, head_dim=8),
}
"""By model_type, behind a comma what is special."""
IGNORES_WINDOWS = {"mistral", "qwen2", "qwen3", "gemma2", "dots1"}
"""Families whose sliding windows mlx-lm does not read."""


def published(name: str, **changes):
    """transformers' model of a family: matrices that matter, norms and biases that are not what they start as.

    `changes` are keys of its config.

    Biases that steer a router are not negative: mlx-lm gives experts of groups that are out a score of 0.
    """
    torch.manual_seed(7)
    config = CONFIGS[name]()
    if changes:
        config = type(config).from_dict({**config.to_dict(), **changes})
    model = hugging_face().AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if hasattr(config, "num_experts_per_tok"):
        model.config._experts_implementation = "eager"
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0, 0.25)
            if parameter.ndim == 1 and "norm" in key.replace("ln_", "norm") and not key.endswith("bias"):
                parameter += 0 if "gemma" in name else 1
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.uniform_(0, 0.5)
    return model.eval()


def save(model, folder: Path, *, shard_bytes: int | None = None) -> Path:
    """A Hugging Face folder of transformers' own writing, with a tokenizer."""
    sharding = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(folder, **sharding)
    write_tokenizer(folder, V)
    return folder


def as_transformers_4(folder: Path) -> None:
    """Rewrite config.json with the keys of transformers 4, which mlx-lm reads: rope_theta, rope_scaling and so on."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters", None)
    if rope is not None and "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope is not None:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] != "mistral":
        config.pop("layer_types", None)
    if "num_local_experts" in config and config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"] == "gpt2":
        config["n_ctx"] = config["n_positions"]
    file.write_text(json.dumps(config))
