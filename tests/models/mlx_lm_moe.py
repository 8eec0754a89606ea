"""Mixture-of-experts models of mlx-lm with the weights of ours: the peers of test_moe_parity.py.

`FAMILIES` says each family twice, in our config's words and in those of its `config.json`; weights go over under the
names of its checkpoints, through mlx-lm's own `sanitize`.
"""

import importlib

from forge_mlx.models.moe import MoE, MoEConfig
from forge_mlx.nn.router import Router
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
import numpy as np

V, C, H, LAYERS = 61, 32, 4, 3

# What is said in the same words by all of them.
_OURS = {"vocab_size": V, "hidden_size": C, "num_heads": H, "num_layers": LAYERS, "tie_embeddings": False}
_THEIRS = {
    "vocab_size": V,
    "hidden_size": C,
    "num_attention_heads": H,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_DEEPSEEK_ROUTING = {
    "num_experts": 16,
    "experts_per_token": 3,
    "intermediate_size": 40,
    "expert_intermediate_size": 12,
    "router_scores": "sigmoid",
    "routed_scaling": 2.5,
    "shared_experts": 2,
    "dense_layers": 1,
    "expert_groups": 4,
    "groups_per_token": 2,
    "selection_bias": True,
}
_THEIR_DEEPSEEK_ROUTING = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}

FAMILIES = {
    "mixtral": (
        {
            "num_kv_heads": 2,
            "num_experts": 8,
            "experts_per_token": 2,
            "intermediate_size": 24,
            "rope_base": 1e6,
            "norm_eps": 1e-5,
        },
        {
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
    ),
    "olmoe": (
        {
            "num_kv_heads": 2,
            "num_experts": 16,
            "experts_per_token": 4,
            "intermediate_size": 12,
            "normalize_gates": False,
            "qk_norm": "joint",
            "norm_eps": 1e-5,
        },
        {
            "num_key_value_heads": 2,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 12,
            "norm_topk_prob": False,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3_moe": (
        {
            "num_kv_heads": 2,
            "head_dim": 16,
            "num_experts": 16,
            "experts_per_token": 4,
            "intermediate_size": 40,
            "expert_intermediate_size": 12,
            "dense_layers": 1,
            "qk_norm": True,
            "rope_base": 1e6,
            "norm_eps": 1e-6,
        },
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 40,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
        },
    ),
    # Its norms over the latents have an eps of 1e-6, whatever rms_norm_eps is.
    "deepseek_v3": (
        {**_DEEPSEEK_ROUTING, **_LATENT, "q_lora_rank": 14, "rope_base": 1e4, "norm_eps": 1e-6},
        {**_THEIR_DEEPSEEK_ROUTING, **_LATENT, "q_lora_rank": 14, "rope_theta": 1e4, "rms_norm_eps": 1e-6},
    ),
    "deepseek_v3, queries of x": (
        {**_DEEPSEEK_ROUTING, **_LATENT, "rope_base": 1e4, "norm_eps": 1e-6},
        {**_THEIR_DEEPSEEK_ROUTING, **_LATENT, "q_lora_rank": None, "rope_theta": 1e4, "rms_norm_eps": 1e-6},
    ),
    "dots1": (
        {**_DEEPSEEK_ROUTING, "num_kv_heads": 2, "qk_norm": True, "rope_base": 1e7, "norm_eps": 1e-5},
        {**_THEIR_DEEPSEEK_ROUTING, "num_key_value_heads": 2, "rope_theta": 1e7, "rms_norm_eps": 1e-5},
    ),
}


def our_model(family, seed=8, **changes):
    """Our model of a family, every parameter random.

    Router weights are large, so that scores are far apart and the choice differs from token to token. Selection biases
    are as large as the scores' spread and not negative: mlx-lm gives experts of groups that are out a score of 0, which
    must not be more than that of one that is in.
    """
    model = MoE(MoEConfig(**{**_OURS, **FAMILIES[family][0], **changes}))
    rng = np.random.default_rng(seed)
    start = []
    for name, p in tree_flatten(model.parameters()):
        value = rng.standard_normal(p.shape) * (0.25 if p.ndim > 1 else 0.2)
        if "router.weight" in name:
            value *= 2
        elif "selection_bias" in name:
            value = np.abs(value) * 2
        elif p.ndim == 1:
            value += 1
        start.append((name, mx.array(value.astype(np.float32))))
    model.update(tree_unflatten(start))
    return model.eval()


def their_model(family, weights):
    """mlx-lm's model of a family with these weights, each of which it must know.

    Args:
        family: A key of FAMILIES.
        weights: A tree of the names of our parameters.
    """
    model_type = family.split(",")[0]
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    args = module.ModelArgs.from_dict({"model_type": model_type, **_THEIRS, **FAMILIES[family][1]})
    model = module.Model(args)
    model.load_weights(list(as_theirs(model, model_type, weights).items()), strict=True)
    return model.eval()


def as_theirs(model, model_type, tree):
    """A tree by our parameters' names as one flat dict by mlx-lm's: weights, or gradients, as all of it is linear."""
    checkpoint = {}
    for name, value in tree_flatten(tree):
        checkpoint |= _in_checkpoint(model_type, f"{'' if name.startswith('lm_head') else 'model.'}{name}", value)
    return model.sanitize(checkpoint)


def _in_checkpoint(model_type, name, value):
    """One of our parameters as a published checkpoint has it: each expert's matrix by itself."""
    layer = "block_sparse_moe" if model_type == "mixtral" else "mlp"
    name = name.replace(".mlp.router.weight", f".{layer}.gate.weight")
    name = name.replace(".mlp.router.selection_bias", ".mlp.gate.e_score_correction_bias")
    if ".mlp.experts." not in name:
        return {name: value}
    prefix, matrix = name.split(".mlp.experts.")
    if model_type == "mixtral":
        for ours, theirs in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
            matrix = matrix.replace(ours, theirs)
    return {f"{prefix}.{layer}.experts.{e}.{matrix}": value[e] for e in range(value.shape[0])}


def routings(model, tokens, monkeypatch):
    """What each router of our model decides for these tokens, in the order of the layers, with its bias `[E]` or 0."""
    found, call = [], Router.__call__

    def recorded(self, x):
        routing = call(self, x)
        found.append((routing, self.get("selection_bias", mx.array(0.0))))
        return routing

    with monkeypatch.context() as patch:
        patch.setattr(Router, "__call__", recorded)
        model(tokens)
    return found
