"""A mixture-of-experts decoder in PyTorch, float64: the oracle of test_moe.py.

Written from the papers: the experts by a loop over tokens, each token's choice by sorting its own scores. `p` maps
names of parameters to tensors.
"""

from reference_gpt import attend, heads, merged, rms_norm, rotate
import torch
import torch.nn.functional as F


def act(name, gate, up):
    if name == "swiglu":
        return F.silu(gate) * up
    if name == "geglu":
        return F.gelu(gate) * up
    return {"relu2": lambda x: x.clamp(min=0).square(), "silu": F.silu}[name](up)


def mlp(p, name, x, kind):
    """down(act(gate x, up x)) for one MLP; of an expert the names' tensors are cut out of the stack before."""
    gate = p.get(f"{name}.gate_proj.weight")
    return (
        act(kind, None if gate is None else x @ gate.T, x @ p[f"{name}.up_proj.weight"].T)
        @ p[f"{name}.down_proj.weight"].T
    )


def choose(scores, bias, k, groups, groups_per_token):
    """The experts of one token `[k]`, best first, from its scores `[E]` and the bias; ties to the lowest index."""
    wish = (scores + bias).tolist()
    size = len(wish) // groups
    if groups > 1:
        best_two = [sum(sorted(wish[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-best_two[g], g))[:groups_per_token]
    else:
        kept = [0]
    allowed = [e for e in range(len(wish)) if e // size in kept]
    return sorted(allowed, key=lambda e: (-wish[e], e))[:k]


def moe(p, name, x, config):
    """`[N, C]` to `[N, C]`, token by token."""
    logits = x @ p[f"{name}.router.weight"].T
    scores = logits.softmax(-1) if config.router_scores == "softmax" else torch.sigmoid(logits)
    bias = p.get(f"{name}.router.selection_bias", torch.zeros(scores.shape[-1], dtype=x.dtype)).detach()
    rows = []
    for token, score in zip(x, scores, strict=True):
        chosen = choose(score.detach(), bias, config.experts_per_token, config.expert_groups, config.groups_per_token)
        gates = score[chosen]
        if config.normalize_gates:
            gates = gates / gates.sum()
        row = torch.zeros_like(token)
        for gate, expert in zip(gates * config.routed_scaling, chosen, strict=True):
            own = {key: value[expert] for key, value in p.items() if key.startswith(f"{name}.experts.")}
            row = row + gate * mlp(own, f"{name}.experts", token, config.mlp)
        rows.append(row)
    out = torch.stack(rows)
    if config.shared_experts:
        out = out + mlp(p, f"{name}.shared_experts", x, config.mlp)
    return out


def decoder(p, tokens, config):
    """Logits `[B, T, V]` of a pre-norm decoder with RMSNorm and rotary positions."""

    def norm(x, name):
        return rms_norm(x, p.get(f"{name}.weight"), config.norm_eps)

    x = p["embed_tokens.weight"][tokens]
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (h @ p[f"{layer}.self_attn.{n}_proj.weight"].T for n in "qkv")
        if config.qk_norm == "joint":
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        q, k, v = (heads(each, config.head_size) for each in (q, k, v))
        if config.qk_norm is True:
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        q, k = (rotate(each, config.rope_base, config.rope_scale) for each in (q, k))
        x = x + merged(attend(q, k, v)) @ p[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        if i < config.dense_layers:
            x = x + mlp(p, f"{layer}.mlp", h, config.mlp)
        else:
            x = x + moe(p, f"{layer}.mlp", h.flatten(0, 1), config).view_as(h)
    return norm(x, "norm") @ p.get("lm_head.weight", p["embed_tokens.weight"]).T
