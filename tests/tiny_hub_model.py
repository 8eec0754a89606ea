"""A Llama of a few thousand parameters in Hugging Face's layout, with a tokenizer and a chat template, for tests."""

import json
from pathlib import Path
from typing import Any

from forge_mlx.data.chat_template import BUILT_IN_TEMPLATES
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.models.gpt import GPT, GPTConfig
import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = BUILT_IN_TEMPLATES["chatml"].source
TEXT = "".join(f"user says hello number {i}, and the model says: good day, größe {i * i}!\n" for i in range(60))
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 256}


def tokenizer_files(template: str | None = CHATML) -> dict[str, bytes]:
    """A byte-level BPE of 300 tokens, ChatML's special tokens among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>"}).encode(),
    }
    return files if template is None else {**files, "chat_template.jinja": template.encode()}


def tiny_tokenizer(template: str | None = CHATML) -> HubTokenizer:
    """The same, opened."""
    return HubTokenizer(tokenizer_files(template), "tiny")


def tiny_model(seed: int = 0, **changes: Any) -> GPT:
    """A random model whose choices are far from even, so that greedy text is the same in any rounding."""
    config = GPTConfig.model_validate({**SHAPE, "vocab_size": 300, "init_std": 0.4, "tie_embeddings": False, **changes})
    model = GPT(config, seed=seed)
    model.eval()
    return model


def write_hub_model(folder: Path, template: str | None = CHATML, seed: int = 0) -> Path:
    """The model and the tokenizer as a folder, written by hand."""
    folder.mkdir(parents=True)
    model = tiny_model(seed)
    arrays = dict(tree_flatten(model.parameters()))
    named = {name if name.startswith("lm_head") else f"model.{name}": array for name, array in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named, {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 300,
        "hidden_size": SHAPE["hidden_size"],
        "intermediate_size": model.config.mlp_size,
        "num_hidden_layers": SHAPE["num_layers"],
        "num_attention_heads": SHAPE["num_heads"],
        "num_key_value_heads": SHAPE["num_kv_heads"],
        "max_position_embeddings": SHAPE["max_seq_len"],
        "rms_norm_eps": model.config.norm_eps,
        "rope_theta": model.config.rope_base,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, content in tokenizer_files(template).items():
        (folder / name).write_bytes(content)
    return folder
