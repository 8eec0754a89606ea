"""Small models of mlx-lm with random weights, one for each family that `patch` knows, and what two of them share."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

VOCAB = 97
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}
HEADS_OF_16 = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}

# Name of the case -> family, and what its shape has beside SHAPE.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied, biases, llama3 rope": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3},
    ),
    "llama with windows, traditional rope": (
        "llama",
        {"layer_types": MIXED, "sliding_window": 7, "rope_traditional": True},
    ),
    "llama with heads of 12": ("llama", {"head_dim": 12}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3, yarn rope": (
        "qwen3",
        HEADS_OF_16
        | {"rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": True, "rope_scaling": YARN},
    ),
    "gemma": ("gemma", HEADS_OF_16),
    "gemma2": ("gemma2", HEADS_OF_16 | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("gemma3_text", HEADS_OF_16 | {"sliding_window": 7, "sliding_window_pattern": 2}),
    "phi3, long rope": (
        "phi3",
        {"rope_scaling": LONGROPE, "max_position_embeddings": 64, "original_max_position_embeddings": 16},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS
        | HEADS_OF_16
        | {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "rope_theta": 1e4,
            "tie_word_embeddings": False,
            "max_position_embeddings": 64,
            "norm_topk_prob": True,
        },
    ),
}  # fmt: skip


def make(case: str, **changes: Any) -> Any:
    """A model of mlx-lm, its norms' weights other than 1 and its biases other than 0."""
    family, more = FAMILIES[case]
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs(model_type=family, **(SHAPE | more | changes)))

    def varied(array: mx.array) -> mx.array:
        return array + 0.2 * mx.random.normal(array.shape) if array.ndim == 1 else array

    model.update(tree_map(varied, model.parameters()))
    mx.eval(model.parameters())
    return model


def tokens(rows: int, length: int) -> mx.array:
    """Tokens `[rows, length]`."""
    return mx.random.randint(0, VOCAB, (rows, length), key=mx.random.key(5))


def gradients(model: nn.Module, loss: Callable[..., Any], *batch: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    """A loss, and the gradient of each trained parameter by its name."""
    value, found = nn.value_and_grad(model, loss)(model, *batch)
    value = value[0] if isinstance(value, tuple) else value
    named = dict(tree_flatten(found))
    mx.eval(value, named)
    return value, named


def check_close(found: mx.array, expected: mx.array, rtol: float = 1e-5) -> None:
    """Equal to rtol of the largest value."""
    assert found.shape == expected.shape
    assert mx.all(mx.isfinite(found)).item()
    largest = mx.abs(expected).max().item()
    assert mx.abs(found - expected).max().item() <= rtol * largest


def check_gradients(found: dict[str, mx.array], expected: dict[str, mx.array], rtol: float = 1e-5) -> None:
    """Each gradient equal to rtol of its largest value, or of the largest of all where its own is rounding."""
    assert found.keys() == expected.keys()
    largest = max(mx.abs(each).max().item() for each in expected.values())
    assert largest > 0
    for name, array in expected.items():
        off = mx.abs(found[name] - array).max().item()
        assert off <= rtol * max(mx.abs(array).max().item(), 1e-3 * largest), name
