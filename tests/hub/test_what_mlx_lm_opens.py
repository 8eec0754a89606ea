"""The line of what mlx-lm does not open of a written folder is there where it is true, and nowhere else."""

import importlib

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.pretrained import save_pretrained
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.registry import build_model
import pytest
from tiny_tokenizer import write_tokenizer

V = 61
SHAPE = {"vocab_size": V, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_seq_len": 32}
EXPERTS = {**SHAPE, "num_experts": 4, "experts_per_token": 2}
LATENT = {
    **{**EXPERTS, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "dense_layers": 1},
    **{"router_scores": "sigmoid", "selection_bias": True, "latent_norm_eps": 1e-6, "q_lora_rank": 16},
    "shared_experts": 1,
}
GPT2 = {**SHAPE, "norm": "layer_norm", "position": "learned", "mlp": "gelu_tanh", "bias": True}
GEMMA = {
    **{**SHAPE, "norm_offset": True, "post_norms": True, "mlp": "geglu_tanh", "embedding_scale": 32**0.5},
    **{"head_dim": 8, "intermediate_size": 48},
}
CASES = {
    "deepseek_v3": (MoEConfig(**LATENT, tie_embeddings=False), None),
    "deepseek_v3, tied": (MoEConfig(**LATENT), "no tie_embeddings but False"),
    "gpt2": (GPTConfig(**GPT2), None),
    "gpt2, width said": (GPTConfig(**GPT2, intermediate_size=128), None),
    "gpt2, width": (GPTConfig(**GPT2, intermediate_size=96), "no intermediate_size but 128"),
    "gpt2, both": (
        GPTConfig(**GPT2, intermediate_size=96, tie_embeddings=False),
        "no tie_embeddings but True, no intermediate_size but 128",
    ),
    "qwen3": (GPTConfig(**SHAPE, qk_norm=True), None),
    "qwen3, biases": (GPTConfig(**SHAPE, qk_norm=True, attention_bias=True), "no attention_bias but False"),
    "qwen2, heads": (GPTConfig(**SHAPE, attention_bias="qkv", head_dim=16), "no head_dim but 8"),
    "mixtral, heads said": (MoEConfig(**EXPERTS, head_dim=8), None),
    "mixtral, heads": (MoEConfig(**EXPERTS, head_dim=16), "no head_dim but 8"),
    "gemma3_text": (GPTConfig(**GEMMA, qk_norm=True), None),
    "gemma3_text, biases": (GPTConfig(**GEMMA, qk_norm=True, attention_bias=True), "no attention_bias but False"),
    "gemma2, untied": (
        GPTConfig(**GEMMA, attention_softcap=50, logit_softcap=30, tie_embeddings=False),
        "no tie_embeddings but True",
    ),
}


def written(folder, name):
    """The folder of a model, and what was said when it was saved."""
    config, _ = CASES[name]
    write_tokenizer(folder, V)
    lines = []
    model = build_model(config, seed=1)
    said = save_pretrained(folder / "model", model, HubTokenizer.load(folder), log=lines.append)
    assert said["model_type"] == name.partition(",")[0]
    return folder / "model", lines


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(tmp_path, name):
    _, lines = written(tmp_path, name)
    known = CASES[name][1]
    said = f"mlx-lm 0.32 does not open this folder: of a {name.partition(',')[0]} it knows {known}"
    assert lines == ([] if known is None else [said])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_mlx_lm_itself(tmp_path, name):
    folder, _ = written(tmp_path, name)
    load = importlib.import_module("mlx_lm.utils").load_model
    if CASES[name][1] is None:
        load(folder)
    else:
        with pytest.raises(ValueError, match=r"Missing \d|Expected shape|Received \d"):
            load(folder)
