"""What the config.json of published models says, in our words, and back."""

import importlib
import json
import math
import re

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.registry import FAMILIES, describe, family_for
from forge_mlx.hub.families.rope import write_rope
from forge_mlx.models.gpt import GPTConfig
from forge_mlx.models.moe import MoEConfig
from forge_mlx.models.rope_scaling import RopeScaling
import pytest

# As the files on the hub have it, but for tokens and what nothing is computed with.
PUBLISHED = {
    "SmolLM2-135M": {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664},
        **{"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False},
        **{"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3},
        **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None},
        **{"rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True},
        **{"transformers_version": "4.40.1", "vocab_size": 49152},
    },
    "Llama-3.2-1B": {
        **{"attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048},
        **{"initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False},
        **{"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256},
        "rope_scaling": {
            **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "original_max_position_embeddings": 8192,
        },
    },
    "Mistral-7B-v0.1": {
        **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336},
        **{"max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32},
        **{"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
        **{"sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
    },
    "Qwen2.5-0.5B": {
        **{"attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02},
        **{"intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24},
        **{"model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2},
        **{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True},
        **{"use_mrope": False, "use_sliding_window": False, "vocab_size": 151936},
    },
    "Qwen3-0.6B": {
        **{"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024},
        **{"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960},
        **{"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28},
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
    },
    "gemma-2-2b": {
        **{"attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid"},
        **{
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "num_hidden_layers": 26,
        },
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02},
        **{"intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "rope_theta": 10000.0},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06},
        **{"sliding_window": 4096, "vocab_size": 256000},
    },
    "gemma-3-1b": {
        **{"attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid"},
        **{"final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
        **{"hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "num_hidden_layers": 26},
        **{"max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4},
        **{"num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_scaling": None},
        **{"rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 512, "vocab_size": 262144},
        "sliding_window_pattern": 6,
    },
    "gemma-3-4b": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        },
    },
    "gpt2": {
        **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
        **{"embd_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2"},
        **{"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1},
        **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
        **{"summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257},
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "Mixtral-8x7B": {
        **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336},
        **{"max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32},
        **{"num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8},
        **{"output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None},
        **{"router_aux_loss_coef": 0.02, "tie_word_embeddings": False, "vocab_size": 32000},
    },
    "OLMoE-1B-7B": {
        **{"attention_bias": False, "clip_qkv": None, "hidden_act": "silu", "hidden_size": 2048},
        **{"initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096},
        **{"model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64},
        **{"num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rope_theta": 10000.0},
        **{"rope_scaling": None, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304},
    },
    "Qwen3-30B-A3B": {
        **{"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu"},
        **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "mlp_only_layers": []},
        **{"max_position_embeddings": 40960, "max_window_layers": 48, "model_type": "qwen3_moe"},
        **{"moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128},
        **{"num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06},
        **{"rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False},
        **{"tie_word_embeddings": False, "vocab_size": 151936, "router_aux_loss_coef": 0.001},
    },
    "dots.llm1": {
        **{"attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096},
        **{"initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 32768},
        **{"max_window_layers": 62, "model_type": "dots1", "moe_intermediate_size": 1408, "moe_layer_freq": 1},
        **{"n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "topk_group": 1},
        **{"num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32},
        **{"rms_norm_eps": 1e-05, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc"},
        **{"scoring_func": "noaux_tc", "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 152064},
    },
    "DeepSeek-V3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1},
        **{"aux_loss_alpha": 0.001, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168},
        **{"initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048},
        **{"max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_layer_freq": 1, "n_group": 8},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128},
        **{"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "pretraining_tp": 1},
        **{"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
        **{"seq_aux": True, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc"},
        **{"v_head_dim": 128, "vocab_size": 129280},
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
            "original_max_position_embeddings": 4096,
        },
    },
    "Moonlight-16B-A3B": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1},
        **{"aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048},
        **{"initializer_range": 0.02, "intermediate_size": 11264, "kv_lora_rank": 512, "moe_intermediate_size": 1408},
        **{"max_position_embeddings": 8192, "model_type": "deepseek_v3", "moe_layer_freq": 1, "n_group": 1},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16},
        **{"num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1},
        **{"num_nextn_predict_layers": 0, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid"},
        **{"seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc"},
        **{"v_head_dim": 128, "vocab_size": 163840},
    },
}
SAID = {
    "SmolLM2-135M": {"rope_base": 1e5, "num_kv_heads": 3, "tie_embeddings": True, "head_dim": None, "norm_eps": 1e-5},
    "Llama-3.2-1B": {
        "rope_scaling": RopeScaling(kind="llama3", factor=32.0, original_max_seq_len=8192),
        "rope_base": 5e5,
        "sliding_window": None,
    },
    "Mistral-7B-v0.1": {"sliding_window": 4096, "sliding_layers": None, "num_kv_heads": 8},
    "Qwen2.5-0.5B": {"sliding_window": None, "attention_bias": "qkv", "feed_forward_bias": False, "rope_base": 1e6},
    "Qwen3-0.6B": {"qk_norm": True, "head_size": 128, "attention_bias": False, "sliding_window": None},
    "gemma-2-2b": {
        **{
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "post_norms": True,
            "norm_offset": True,
            "mlp": "geglu_tanh",
        },
        **{
            "sliding_layers": list(range(0, 26, 2)),
            "embedding_scale": 48.0,
            "attention_scale": 1 / 16,
            "qk_norm": False,
        },
    },
    "gemma-3-1b": {
        **{"sliding_layers": [layer for layer in range(26) if layer % 6 != 5], "sliding_window": 512, "qk_norm": True},
        **{"rope_base": 1e6, "rope_local_base": 1e4, "rope_scale": 1.0, "attention_softcap": None},
    },
    "gemma-3-4b": {
        **{"rope_scale": 1 / 8, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "vocab_size": 262208},
        **{"sliding_window": 1024, "rope_local_base": 1e4, "max_seq_len": 131072},
    },
    "gpt2": {
        **{"norm": "layer_norm", "position": "learned", "mlp": "gelu_tanh", "bias": True, "mlp_size": 3072},
        **{"max_seq_len": 1024, "tie_embeddings": True, "dropout": 0.0},
    },
    "Mixtral-8x7B": {"expert_size": 14336, "normalize_gates": True, "aux_loss_weight": 0.0, "rope_base": 1e6},
    "OLMoE-1B-7B": {"qk_norm": "joint", "normalize_gates": False, "expert_size": 1024, "norm_eps": 1e-5},
    "Qwen3-30B-A3B": {"expert_size": 768, "dense_layers": 0, "qk_norm": True, "normalize_gates": True},
    "dots.llm1": {
        **{"shared_experts": 2, "dense_layers": 1, "mlp_size": 10944, "routed_scaling": 2.5, "selection_bias": True},
        **{"router_scores": "sigmoid", "sliding_window": None, "qk_norm": True},
    },
    "DeepSeek-V3": {
        **{"attention_scale": (0.1 * math.log(40) + 1) ** 2 * 192**-0.5, "latent_eps": 1e-6, "norm_eps": 1e-6},
        "rope_scaling": RopeScaling(kind="yarn", factor=40.0, original_max_seq_len=4096, attention_factor=1.0),
        **{"head_size": 192, "rotary_size": 64, "attention_sizes": (192, 128), "expert_groups": 8},
    },
    "Moonlight-16B-A3B": {
        **{"attention_scale": None, "rope_scaling": None, "latent_eps": 1e-6, "norm_eps": 1e-5, "q_lora_rank": None},
        **{"rope_base": 5e4, "shared_experts": 2, "routed_scaling": 2.446},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model(name):
    described = describe(PUBLISHED[name], "config.json")
    assert described.unknown == []
    assert {field: getattr(described.config, field) for field in SAID[name]} == SAID[name]
    family = described.family
    assert family.differences(described.config) == []
    written = json.loads(json.dumps(family.write_config(described.config)))
    again, unknown = family.read_config(written, "written")
    assert unknown == []
    assert family.write_config(again) == written
    not_of_the_shape = {"router_aux_loss_coef", "max_window_layers", "scoring_func", "num_nextn_predict_layers"}
    if described.config.sliding_window is None:
        not_of_the_shape.add("sliding_window")
    if name == "Qwen3-30B-A3B":
        # The width of dense layers, of which there are none.
        not_of_the_shape.add("intermediate_size")
    for key, value in described.values.items():
        if key == "rope_scaling" and value is not None:
            # attention_factor, which follows from the others, is said too.
            assert written[key].items() >= {k: v for k, v in value.items() if k != "type"}.items()
        elif key in written.keys() - not_of_the_shape:
            assert written[key] == value or (key.endswith("_pdrop") and written[key] == 0), key


def test_every_family_is_there():
    published = {describe(values, "").family.model_type for values in PUBLISHED.values()}
    assert FAMILIES.keys() == published


LATENT = {
    **{"model_type": "deepseek_v3", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "kv_lora_rank": 20},
    **{"num_attention_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 24, "n_routed_experts": 8},
    **{"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": None, "rope_theta": 10000.0},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1},
}


def test_deepseek_v3():
    config = describe(LATENT, "").config
    assert (config.kv_lora_rank, config.head_size, config.rotary_size) == (20, 20, 8)
    assert family_for(config).model_type == "deepseek_v3"
    # An eps of latents that is left out is norm_eps.
    assert family_for(config.model_copy(update={"latent_norm_eps": None})).model_type == "deepseek_v3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_norm_eps": None, "norm_eps": 1e-5}, r"latent_norm_eps: 1e-05 \(must be 1e-06\)"),
        ({"attention_scale": 0.3}, r"attention_scale: 0\.3 \(must be 0\.2236"),
        (
            {"attention_scale": 0.3, "rope_scaling": RopeScaling(kind="yarn", factor=1.0, original_max_seq_len=64)},
            r"attention_scale: 0\.3 \(must be 0\.2236",
        ),
    ],
    ids=["eps", "scale", "scale and a factor of 1"],
)
def test_what_a_deepseek_v3_cannot_say(change, message):
    described = describe(LATENT, "")
    (problem,) = described.family.differences(described.config.model_copy(update=change))
    assert re.match(message, problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 40, "mscale_all_dim": 1.0}},
            "mscale_all_dim must be left out with rope_type 'linear' but is there.",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 40}},
            "rope_type must be among default, linear, llama3, yarn but got 'dynamic'",
        ),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1 but got 2"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc' but got 'greedy'"),
        ({"topk_group": 5}, "groups_per_token must be 1 to expert_groups, 4, but got 5. Change one of them."),
    ],
    ids=["factor of scores", "dynamic", "every other layer", "other choice", "groups"],
)
def test_what_deepseek_v3_has_and_we_have_not(change, message):
    with pytest.raises(HubError) as caught:
        describe({**LATENT, **change}, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("more", "factor"),
    [
        ({}, 0.1 * 1.3862943611198906 + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707}, 0.1 * 1.3862943611198906 + 1),
        ({"finetuned": True}, 0.1 * 1.3862943611198906 + 1),
    ],
    ids=["alone", "said", "both mscales", "one mscale", "finetuned"],
)
def test_yarn_s_factor_on_attention(more, factor):
    config = describe({**PUBLISHED["Qwen3-0.6B"], "rope_scaling": {**YARN, **more}}, "").config
    assert config.rope_scaling.rotation_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    "more",
    [{}, {"attention_factor": 1.0}, {"attention_factor": 0.4}, {"mscale": 0.707}, {"mscale": 0.7, "mscale_all_dim": 2}],
    ids=["alone", "1", "small", "one mscale", "both mscales"],
)
def test_mlx_lm_computes_the_written_factor_of_yarn(more):
    config = describe({**PUBLISHED["Qwen3-0.6B"], "rope_scaling": {**YARN, **more}}, "").config
    written = json.loads(json.dumps(write_rope(config)["rope_scaling"]))
    theirs = importlib.import_module("mlx_lm.models.rope_utils").initialize_rope(64, 1e4, False, written, 131072)
    assert theirs.mscale == pytest.approx(config.rope_scaling.rotation_factor, rel=1e-12)
    again = describe({**PUBLISHED["Qwen3-0.6B"], "rope_scaling": written}, "").config
    assert again.rope_scaling == config.rope_scaling


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"truncate": False}, "rope_scaling: truncate must be True but got False"),
        ({"short_factor": [1.0]}, "rope_scaling: short_factor must be left out with rope_type 'yarn' but is there."),
        ({"factor": "four"}, "rope_scaling: factor must be a number but got 'four'."),
        ({"beta_fast": 0.5}, "beta_fast must be greater than beta_slow, 1.0, but got 0.5. Change one of them"),
    ],
)
def test_what_yarn_cannot_be_here(more, message):
    with pytest.raises(HubError) as caught:
        describe({**PUBLISHED["Qwen3-0.6B"], "rope_scaling": {**YARN, **more}}, "config.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "OLMoE-1B-7B"])
def test_a_size_of_heads_that_config_json_seldom_says(name):
    values = PUBLISHED[name]
    share = values["hidden_size"] // values["num_attention_heads"]
    assert describe({**values, "head_dim": share}, "").config == describe(values, "").config
    described = describe({**values, "head_dim": 96}, "")
    assert (described.config.head_size, described.unknown) == (96, [])
    written = described.family.write_config(described.config)
    assert written["head_dim"] == 96
    assert "head_dim" not in described.family.write_config(describe(values, "").config)


def test_a_gemma_3_caps_no_scores():
    described = describe({**PUBLISHED["gemma-3-1b"], "attn_logit_softcapping": 50.0}, "")
    assert described.config == describe(PUBLISHED["gemma-3-1b"], "").config
    assert described.unknown == ["attn_logit_softcapping"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Mixtral-8x7B", {"sliding_window": 1 << 31}, "sliding_window must be at most 2147483647 but has 10 digits"),
        ("gemma-2-2b", {"hidden_size": 10**400}, "hidden_size must be at most 2147483647 but has 401 digits"),
        ("gemma-3-1b", {"num_hidden_layers": 10**9}, "the number of layers must be at most 10000 but got 1000000000"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0, "a"]}, "mlp_only_layers must be the first layers but got [0, 'a']"),
    ],
    ids=["window", "width", "layers", "layers in words"],
)
def test_numbers_that_no_model_has(name, change, message):
    with pytest.raises(HubError) as caught:
        describe({**PUBLISHED[name], **change}, "config.json")
    assert message in str(caught.value)


def test_the_first_family_that_can_say_a_model():
    shape = {"vocab_size": 99, "hidden_size": 64, "num_heads": 4, "num_layers": 3}
    experts = {**shape, "num_experts": 4}
    for config, family in (
        (GPTConfig(**shape), "llama"),
        (GPTConfig(**shape, bias=True), "llama"),
        (GPTConfig(**shape, attention_bias="qkv"), "qwen2"),
        (GPTConfig(**shape, attention_bias="qkv", sliding_window=8, sliding_layers=[1, 2]), "qwen2"),
        (GPTConfig(**shape, qk_norm=True), "qwen3"),
        (GPTConfig(**shape, sliding_window=8), "mistral"),
        (GPTConfig(**shape, norm="layer_norm", bias=True, position="learned", mlp="gelu_tanh"), "gpt2"),
        (MoEConfig(**experts), "mixtral"),
        (MoEConfig(**experts, qk_norm=True, dense_layers=1), "qwen3_moe"),
        (MoEConfig(**experts, qk_norm="joint", normalize_gates=False), "olmoe"),
        (MoEConfig(**experts, qk_norm=True, router_scores="sigmoid", selection_bias=True), "dots1"),
    ):
        assert family_for(config).model_type == family, family


def test_biases_of_three_projections_are_no_llama_s():
    with pytest.raises(HubError, match="attention_bias must be False or True but got 'qkv'"):
        describe({**PUBLISHED["SmolLM2-135M"], "attention_bias": "qkv"}, "config.json")


def test_windows_in_layers_that_no_family_has():
    shape = {"vocab_size": 99, "hidden_size": 64, "num_heads": 4, "num_layers": 3}
    with pytest.raises(HubError, match=r"from the nearest, .*, it differs in "):
        family_for(GPTConfig(**shape, sliding_window=8, sliding_layers=[0, 2]))


def test_a_family_that_refuses_is_not_the_nearest():
    config = describe(LATENT, "").config.model_copy(update={"attention_scale": 0.3, "token_shift": True})
    assert len(FAMILIES["mixtral"].differences(config)) == 1
    problems = r"attention_scale: 0\.3 \(must be 0\.2236\d*\); token_shift: True \(must be False\)\. Train"
    with pytest.raises(HubError, match=f"from the nearest, deepseek_v3, it differs in {problems}"):
        family_for(config)


def test_all_layers_of_a_gemma_3_slide():
    values = {**PUBLISHED["gemma-3-1b"], "layer_types": ["sliding_attention"] * 26}
    config = describe(values, "").config
    assert (config.sliding_layers, config.rope_base, config.rope_local_base) == (None, 1e4, None)
    assert family_for(config).model_type == "gemma3_text"
