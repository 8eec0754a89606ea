"""GPT-2, Llama/Qwen3 and a modded-nanogpt decoder in PyTorch, float64: the oracle of test_gpt.py.

Written from the papers' formulas with explicit masks and rotations. `p` maps names of parameters to tensors.
"""

import math

import torch
import torch.nn.functional as F


def attend(q, k, v, window=None, cap=None, sinks=None):
    """Causal softmax attention over `[B, H, T, D]`, keys and values repeated for grouped heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    length = q.shape[2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    age = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    weights = scores.masked_fill((age < 0) | (age >= (window or length)), -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return weights / total @ v


def heads(x, size):
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def rms_norm(x, weight, eps):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def rotate(x, base, scale):
    """Element i of the first half turns against element i of the second by position * base^(-2i/D)."""
    half = x.shape[-1] // 2
    angle = scale * torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def gpt2(p, tokens, *, num_layers, head_dim, eps, gelu):
    x = p["embed_tokens.weight"][tokens] + p["embed_positions.weight"][: tokens.shape[1]]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    for i in range(num_layers):
        layer = f"layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(linear(h, f"{layer}.self_attn.{n}_proj"), head_dim) for n in "qkv")
        x = x + linear(merged(attend(q, k, v)), f"{layer}.self_attn.o_proj")
        h = linear(norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.up_proj")
        x = x + linear(F.gelu(h, approximate=gelu), f"{layer}.mlp.down_proj")
    return norm(x, "norm") @ p["embed_tokens.weight"].T


def llama(p, tokens, *, num_layers, head_dim, eps, base, mlp, scale=1.0, cap=None, window=None, attention_cap=None):
    """RMSNorm, rotary positions unless base is None, no biases; norms have a scale where p has one."""
    x = p["embed_tokens.weight"][tokens]
    if "token_shift.weight" in p:
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1]
        x = x + p["token_shift.weight"] * shifted

    def norm(x, name):
        return rms_norm(x, p.get(f"{name}.weight"), eps)

    def linear(x, name):
        return x @ p[f"{name}.weight"].T

    for i in range(num_layers):
        layer = f"layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(linear(h, f"{layer}.self_attn.{n}_proj"), head_dim) for n in "qkv")
        if f"{layer}.self_attn.q_norm.weight" in p or mlp == "relu2":
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        if base is not None:
            q, k = rotate(q, base, scale), rotate(k, base, scale)
        seen = attend(q, k, v, window, attention_cap, p.get(f"{layer}.self_attn.sinks"))
        x = x + linear(merged(seen), f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        up = linear(h, f"{layer}.mlp.up_proj")
        if mlp in ("swiglu", "geglu"):
            gate = linear(h, f"{layer}.mlp.gate_proj")
            up = (F.silu(gate) if mlp == "swiglu" else F.gelu(gate)) * up
        else:
            up = F.silu(up) if mlp == "silu" else up.clamp(min=0).square()
        x = x + linear(up, f"{layer}.mlp.down_proj")
    logits = norm(x, "norm") @ p.get("lm_head.weight", p["embed_tokens.weight"]).T
    return logits if cap is None else cap * torch.tanh(logits / cap)
