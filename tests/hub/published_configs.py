"""config.json of published models: their own keys, but small sizes, and names of tokens where these have ids."""

from typing import Any

V = 448
_SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "vocab_size": V},
}
_COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True, **_SIZES}
_ALL_HEADS = {"num_key_value_heads": _SIZES["num_attention_heads"]}
_ENDS = {"bos_token_id": "<s>", "eos_token_id": "</s>"}
_IM_END = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"}

LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
    **{"max_position_embeddings": 2048, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-05},
    **{"rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "transformers_version": "4.35.0"},
    **{**_COMMON, **_ENDS},
}
SMOLLM2 = {
    **{**LLAMA, "max_position_embeddings": 8192, "rope_theta": 100000, "tie_word_embeddings": True},
    **{"initializer_range": 0.041666666666666664, "is_llama_config": True, "rope_interleaved": False},
    **{"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|im_end|>"},
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
}
LLAMA_OF_2023: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "max_sequence_length": 2048},
    **{"model_type": "llama", "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False},
    **{**_COMMON, **_ENDS, "num_key_value_heads": 4, "torch_dtype": "float16", "transformers_version": "4.28.1"},
}
del LLAMA_OF_2023["num_key_value_heads"]
LLAMA_32_ENDS = {"bos_token_id": "<|begin_of_text|>", "eos_token_id": ["<|end_header_id|>", "<|eot_id|>"]}
LLAMA_32 = {
    **{**LLAMA, **LLAMA_32_ENDS, "head_dim": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0},
    **{"tie_word_embeddings": True, "transformers_version": "4.45.0.dev0"},
    "rope_scaling": {
        **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
        "original_max_position_embeddings": 8192,
    },
}
MISTRAL: dict[str, Any] = {
    **{"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768, "model_type": "mistral"},
    **{"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False},
    **{**_COMMON, **_ENDS, "transformers_version": "4.34.0.dev0"},
}
MISTRAL_03 = {**MISTRAL, "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None}
NEMO = {**MISTRAL_03, "head_dim": 12, "max_position_embeddings": 1024000}
QWEN2: dict[str, Any] = {
    **{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "max_position_embeddings": 32768},
    **{"max_window_layers": 21, "model_type": "qwen2", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
    **{"sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False},
    **{**_COMMON, **_IM_END, "transformers_version": "4.43.1"},
}
QWEN2_YARN = {
    **{**QWEN2, "max_window_layers": 28, "sliding_window": 131072, "tie_word_embeddings": False},
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}
QWEN2_1M = {
    **{**QWEN2, "max_position_embeddings": 1010000, "rope_theta": 10000000.0, "tie_word_embeddings": False},
    "dual_chunk_attention_config": {
        **{"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    },
}
QWEN3: dict[str, Any] = {
    **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16},
    **{"max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True},
    **{**_COMMON, **_IM_END, "transformers_version": "4.51.0", "use_sliding_window": False},
}
GEMMA_ENDS = {"bos_token_id": "<bos>", "eos_token_id": ["<eos>", "<end_of_turn>"], "pad_token_id": "<pad>"}
_GEMMA: dict[str, Any] = {
    **{"attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid", "head_dim": 16},
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-06},
    **{key: value for key, value in _COMMON.items() if key != "hidden_act"},
    **{**GEMMA_ENDS, "hidden_size": 64},
}
GEMMA2 = {
    **{"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    **{"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "model_type": "gemma2"},
    **{"rope_theta": 10000.0, "sliding_window": 4096, "transformers_version": "4.42.4", **_GEMMA},
}
_GEMMA3 = {
    **{"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None},
    **{"max_position_embeddings": 32768, "model_type": "gemma3_text", "rope_local_base_freq": 10000},
    **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, **_GEMMA, "num_hidden_layers": 6},
}
GEMMA3 = {**_GEMMA3, "sliding_window_pattern": 6, "transformers_version": "4.50.0.dev0"}
GEMMA3_270M = {
    **{key: value for key, value in _GEMMA3.items() if key != "cache_implementation"},
    **{"_sliding_window_pattern": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    **{"use_bidirectional_attention": False, "transformers_version": "4.55.0.dev0"},
}
GEMMA3_4B: dict[str, Any] = {
    **{"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000},
    **{"eos_token_id": ["<eos>", "<end_of_turn>"], "image_token_index": 262144, "initializer_range": 0.02},
    **{"mm_tokens_per_image": 256, "model_type": "gemma3", "torch_dtype": "bfloat16"},
    "text_config": {
        **{"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        **{"sliding_window": 1024, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 6},
        # Those of the real one are what their absence means.
        **{
            "head_dim": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 16,
            "vocab_size": V,
        },
    },
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model"},
        **{"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
    },
}
GPT2_ENDS = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"}
GPT2: dict[str, Any] = {
    **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    **{"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 64, "n_embd": 32},
    **{"n_head": 4, "n_layer": 2, "n_positions": 64, "resid_pdrop": 0.1, "summary_activation": None},
    **{"summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index"},
    **{"summary_use_proj": True, "vocab_size": V, **GPT2_ENDS},
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
GPT2_MEDIUM = {**GPT2, "n_special": 0, "predict_special_tokens": True}
DISTILGPT2 = {**GPT2, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
MIXTRAL: dict[str, Any] = {
    **{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "max_position_embeddings": 32768},
    **{"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": False},
    **{"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None},
    **{**_COMMON, **_ENDS, "tie_word_embeddings": False, "transformers_version": "4.36.0.dev0"},
}
OLMOE: dict[str, Any] = {
    **{"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None},
    **{"max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False, "num_experts": 4},
    **{"num_experts_per_tok": 2, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": None},
    **{"rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, **_COMMON, **_ALL_HEADS},
    **{"eos_token_id": "<|endoftext|>", "pad_token_id": "<|padding|>", "transformers_version": "4.43.0.dev0"},
}
QWEN3_MOE = {
    **{**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"max_window_layers": 48, "model_type": "qwen3_moe", "moe_intermediate_size": 12, "norm_topk_prob": True},
    **{"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False, "rope_theta": 1000000.0},
    **{"router_aux_loss_coef": 0.001, "tie_word_embeddings": False},
}
DOTS1: dict[str, Any] = {
    **{"architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"first_k_dense_replace": 1, "max_position_embeddings": 32768, "max_window_layers": 62, "model_type": "dots1"},
    **{"moe_intermediate_size": 12, "moe_layer_freq": 1, "n_routed_experts": 4, "n_shared_experts": 2},
    **{"norm_topk_prob": True, "num_experts_per_tok": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
    **{"rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc"},
    **{"sliding_window": None, "tie_word_embeddings": False, **_COMMON, **_ALL_HEADS},
    "eos_token_id": "<|im_end|>",
    "transformers_version": "4.46.3",
}
