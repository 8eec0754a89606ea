"""Names and shapes of the tensors of published checkpoints, by their config.json."""

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def llama(config: Config, prefix: str = "model.", *, qkv_bias: bool = False, norms: str = "") -> Shapes:
    """Llama's, and what has its layout; `norms` names those that a family has beside it."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    queries, keys = heads * size, config.get("num_key_value_heads", heads) * size
    found: Shapes = {f"{prefix}embed_tokens.weight": (config["vocab_size"], width), f"{prefix}norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        block, rows = f"{prefix}layers.{layer}", {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        for matrix, count in rows.items():
            found[f"{block}.self_attn.{matrix}.weight"] = (count, width)
            if qkv_bias:
                found[f"{block}.self_attn.{matrix}.bias"] = (count,)
        found[f"{block}.self_attn.o_proj.weight"] = (width, queries)
        if "heads" in norms:
            found |= {f"{block}.self_attn.{norm}.weight": (size,) for norm in ("q_norm", "k_norm")}
        if "joint" in norms:
            found |= {f"{block}.self_attn.q_norm.weight": (queries,), f"{block}.self_attn.k_norm.weight": (keys,)}
        places = ["input_layernorm", "post_attention_layernorm"]
        if "behind" in norms:
            places += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        found |= {f"{block}.{place}.weight": (width,) for place in places}
        found |= {f"{block}.mlp.{matrix}.weight": (inner, width) for matrix in _PROJECTIONS[:2]}
        found[f"{block}.mlp.down_proj.weight"] = (width, inner)
    if not config.get("tie_word_embeddings", "behind" in norms):
        found["lm_head.weight"] = (config["vocab_size"], width)
    return found


def old_llama(config: Config) -> Shapes:
    """With the buffers that transformers saved in its day."""
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    layers = range(config["num_hidden_layers"])
    return llama(config) | {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (half,) for layer in layers}


def qwen2(config: Config) -> Shapes:
    """Biases of three projections."""
    return llama(config, qkv_bias=True)


def qwen3(config: Config) -> Shapes:
    """Norms over heads."""
    return llama(config, norms="heads")


def gemma2(config: Config) -> Shapes:
    """Norms behind each half of a block."""
    return llama(config, norms="behind")


def gemma3(config: Config) -> Shapes:
    """Both."""
    return llama(config, norms="behind, heads")


def gemma3_with_images(config: Config) -> Shapes:
    """The text model behind another prefix, and a vision tower."""
    seen = {"vision_tower.vision_model.embeddings.patch_embedding.weight": (16, 3, 4, 4)}
    seen["multi_modal_projector.mm_input_projection_weight"] = (16, config["hidden_size"])
    return llama(config, "language_model.model.", norms="behind, heads") | seen


def _experts(
    config: Config, width: int, *, block: str = "mlp", names: tuple[str, ...] = _PROJECTIONS, norms: str = ""
) -> Shapes:
    """Each expert by itself, behind dense layers where there are any."""
    hidden, dense = config["hidden_size"], config.get("first_k_dense_replace", 0)
    count = next(config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config)
    sparse = range(dense, config["num_hidden_layers"])
    moved = tuple(f"model.layers.{layer}.mlp." for layer in sparse)
    found = {name: shape for name, shape in llama(config, norms=norms).items() if not name.startswith(moved)}
    for layer in sparse:
        place = f"model.layers.{layer}.{block}"
        found[f"{place}.gate.weight"] = (count, hidden)
        for expert in range(count):
            gate, up, down = (f"{place}.experts.{expert}.{name}.weight" for name in names)
            found |= {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
    return found


def mixtral(config: Config) -> Shapes:
    """Other names for the block and its matrices."""
    return _experts(config, config["intermediate_size"], block="block_sparse_moe", names=("w1", "w3", "w2"))


def olmoe(config: Config) -> Shapes:
    """Norms over all heads at once."""
    return _experts(config, config["intermediate_size"], norms="joint")


def qwen3_moe(config: Config) -> Shapes:
    """Norms over heads."""
    return _experts(config, config["moe_intermediate_size"], norms="heads")


def dots1(config: Config) -> Shapes:
    """A first dense layer, experts that always take part, and biases that steer the router."""
    width, hidden = config["moe_intermediate_size"], config["hidden_size"]
    found, shared = _experts(config, width, norms="heads"), width * config["n_shared_experts"]
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        place = f"model.layers.{layer}.mlp"
        found[f"{place}.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        found |= {f"{place}.shared_experts.{matrix}.weight": (shared, hidden) for matrix in _PROJECTIONS[:2]}
        found[f"{place}.shared_experts.down_proj.weight"] = (hidden, shared)
    return found


def gpt2(config: Config, prefix: str = "") -> Shapes:
    """As it was first uploaded: without a prefix, with the masks."""
    width, positions = config["n_embd"], config["n_positions"]
    found: Shapes = {f"{prefix}wte.weight": (config["vocab_size"], width), f"{prefix}wpe.weight": (positions, width)}
    norms = [f"{prefix}ln_f"]
    for layer in range(config["n_layer"]):
        block = f"{prefix}h.{layer}"
        places = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        places |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
        for place, shape in places.items():
            found |= {f"{block}.{place}.weight": shape, f"{block}.{place}.bias": shape[1:]}
        found[f"{block}.attn.bias"] = (1, 1, positions, positions)
        norms += [f"{block}.ln_1", f"{block}.ln_2"]
    for norm in norms:
        found |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    return found


def distilgpt2(config: Config) -> Shapes:
    """With a prefix, and the masks' value."""
    masked = {f"transformer.h.{layer}.attn.masked_bias": () for layer in range(config["n_layer"])}
    return gpt2(config, "transformer.") | masked
