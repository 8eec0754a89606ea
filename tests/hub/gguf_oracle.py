"""GGUF files of transformers' models and of tokenizers, written by the package gguf as llama.cpp's converter has it."""

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
import torch
import transformers
from ways_to_cut import PRE_TOKENIZERS

V = 320
# What config.json does not say and llama.cpp takes for granted: the scores' factor, which layers slide, caps.
_SHAPE = {
    **{"vocab_size": V, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 96, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    "pad_token_id": None,
}
_GEMMA = {**_SHAPE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
_OTHER_LIMITS = {**_LLAMA3, "low_freq_factor": 0.25, "high_freq_factor": 8.0, "original_max_position_embeddings": 32}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256},
    "attention_factor": 1.25,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}


def _config(name: str, **values):
    return getattr(transformers, f"{name}Config")(**values)


CONFIGS = {
    "llama": lambda: _config("Llama", **_SHAPE, rms_norm_eps=1e-4),
    "llama, stretched": lambda: _config("Llama", **_SHAPE, rope_parameters=_LLAMA3, attention_bias=True),
    "llama, other limits": lambda: _config("Llama", **_SHAPE, rope_parameters=_OTHER_LIMITS),
    "llama, linear": lambda: _config("Llama", **_SHAPE, rope_parameters=_LINEAR, tie_word_embeddings=True),
    "qwen2": lambda: _config("Qwen2", **_SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
    "qwen3": lambda: _config("Qwen3", **_SHAPE, head_dim=32, rope_parameters=_YARN),
    "gemma2": lambda: _config("Gemma2", **_GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=3.0),
    "gemma3": lambda: _config(
        "Gemma3Text",
        **{**_GEMMA, "num_hidden_layers": 7},
        rope_parameters={
            "full_attention": _LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt2": lambda: _config(
        # transformers takes the number of positions for granted when it opens a file.
        "GPT2",
        vocab_size=V,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=1024,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
"""By architecture, behind a comma what is special."""


def published(name: str):
    """transformers' model with matrices that matter, norms and biases that are not what they start as."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0, 0.2)
            if parameter.ndim == 1 and "norm" in key.replace("ln_", "norm") and not key.endswith("bias"):
                parameter += 0 if "gemma" in name else 1
    return model.eval()


def write_gguf_of(path: Path, model, name: str, *, kind: str = "F32", tokenizer: Tokenizer | None = None) -> Path:
    """The file that llama.cpp's converter would write: matrices in the type, everything else F32."""
    architecture, config = name.split(",")[0], model.config
    writer = gguf.GGUFWriter(path, architecture)
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 4 * config.hidden_size))
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        _add_rope(writer, config)
    if "gemma" in architecture:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_tokenizer(writer, tokenizer or byte_level())
    names = gguf.get_tensor_name_map(_enum(architecture), layers)
    for key, value in _tensors(model, architecture):
        short, _, part = key.rpartition(".")
        stored = gguf.GGMLQuantizationType[kind if value.ndim == 2 and "wpe" not in key else "F32"]
        found = f"{names.get_name(short)}.{part}"
        writer.add_tensor(found, gguf.quantize(value, stored), raw_dtype=stored)
    return _finish(writer, path)


def _finish(writer, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _enum(architecture: str):
    return next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _add_rope(writer, config) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        # llama.cpp multiplies this by what it computes itself.
        writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (0.1 * np.log(rope["factor"]) + 1))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))


def _llama3_factors(rope, head_dim: int):
    """As llama.cpp's converter computes them."""
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        length, original = 2 * np.pi / frequency, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _tensors(model, architecture: str):
    config = model.config
    for key, tensor in model.state_dict().items():
        value = tensor.numpy()
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "gpt2" and key.rpartition(".")[0].endswith(("c_attn", "c_proj", "c_fc")):
            value = value.T
        if "gemma" in architecture and key.endswith("norm.weight"):
            value = value + 1
        if architecture == "llama" and "q_proj" in key:
            value = _permuted(value, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in key:
            value = _permuted(value, config.num_key_value_heads)
        yield key, np.ascontiguousarray(value)


def _permuted(value, heads: int):
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


CORPUS = [
    "The quick brown fox jumps over 12345 lazy dogs, don't they? I'll say: it's 3.14159!\n\n",
    "def f(x):\n    return x ** 2 + 17  # naïve café\n\ttabs\r\nÜber straße 東京 Привет мир\n",
    "   three spaces and   more   \n\n\nlines, ½ ² ٣٤ the the the quick quick brown 2024 2025 2026",
]


def byte_level(pre: str = "gpt-2") -> Tokenizer:
    """A byte-level BPE tokenizer of V tokens that cuts as a published one does."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=V - 1,
        special_tokens=["<|unk|>", "<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def add_tokenizer(writer, tokenizer: Tokenizer, pre: str = "gpt-2", *, template: str | None = None) -> None:
    """The keys of a byte-level tokenizer."""
    content = json.loads(tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    added = {entry["content"]: entry["special"] for entry in content["added_tokens"]}
    kinds = [gguf.TokenType.NORMAL] * len(vocabulary)
    for number, token in enumerate(vocabulary):
        if token in added:
            kinds[number] = gguf.TokenType.CONTROL if added[token] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)


def write_tokenizer(path: Path, add) -> Path:
    """A file with a tokenizer and a tensor that is none of a model's."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.add_tensor("nothing", np.zeros(32, np.float32))
    return _finish(writer, path)
