"""The GPT of forge_mlx.models.gpt in idiomatic PyTorch: the peer that bench_training.py measures against."""

from forge_mlx.models.gpt import GPTConfig
import torch
from torch import nn
import torch.nn.functional as F


def _norm(config: GPTConfig) -> nn.Module:
    weight = config.norm_weight
    if config.norm == "rms_norm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps, elementwise_affine=weight)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, elementwise_affine=weight, bias=config.bias)


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions of `[B, H, T, D]`, element i against i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with PyTorch's fused op where that can do it; submodules are named as in forge_mlx."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        width, heads, kv = config.hidden_size, config.num_heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(width, heads, bias=config.bias)
        self.k_proj = nn.Linear(width, kv, bias=config.bias)
        self.v_proj = nn.Linear(width, kv, bias=config.bias)
        self.o_proj = nn.Linear(heads, width, bias=config.bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                nn.RMSNorm(config.head_size, eps=config.norm_eps, elementwise_affine=config.norm_weight)
                for _ in range(2)
            )
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(config.num_heads))

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Map `[B, T, C]` to `[B, T, C]`."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        y = self._attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        window, cap = self.config.sliding_window, self.config.attention_softcap
        if window is None and cap is None and not self.config.attention_sinks:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.transpose(-1, -2) * self.config.head_size**-0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        length = q.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.config.attention_sinks:
            sinks = self.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v
        return scores.softmax(-1) @ v


class MLP(nn.Module):
    """Plain or gated MLP, by the config."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        if self.kind in ("swiglu", "geglu"):
            self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=config.bias)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, C]` to `[B, T, C]`."""
        up = self.up_proj(x)
        match self.kind:
            case "swiglu":
                y = F.silu(self.gate_proj(x)) * up
            case "geglu":
                y = F.gelu(self.gate_proj(x)) * up
            case "relu2":
                y = F.relu(up).square()
            case "silu":
                y = F.silu(up)
            case _:
                y = F.gelu(up, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        return self.down_proj(y)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = _norm(config), Attention(config)
        self.post_attention_layernorm, self.mlp = _norm(config), MLP(config)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """Map `[B, T, C]` to `[B, T, C]`."""
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class TokenShift(nn.Module):
    """x_t + w * x_(t-1)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, C]` to `[B, T, C]`."""
        return x + self.weight * F.pad(x[:, :-1], (0, 0, 1, 0))


class TorchGPT(nn.Module):
    """The decoder; its state dict has forge_mlx's names. No dropout.

    Args:
        config: The shape; vocab_size must be set.

    Raises:
        ValueError: When the config is of another architecture or has a joint norm of q and k.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise ValueError(
                f"[TorchGPT] config must be a GPTConfig but got a {type(config).__name__}. Measure a config with "
                "arch: gpt."
            )
        if config.qk_norm == "joint":
            raise ValueError("[TorchGPT] qk_norm must be true or false but got joint. Measure a config without it.")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size or 0, config.hidden_size)
        if config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_seq_len, config.hidden_size)
        if config.token_shift:
            self.token_shift = TokenShift(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size or 0, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[B, T]` to logits `[B, T, V]`."""
        length, rotation = tokens.shape[1], None
        x = self.embed_tokens(tokens)
        if self.config.position == "learned":
            x = x + self.embed_positions.weight[:length]
        elif self.config.position == "rope":
            size = self.config.head_size
            periods = self.config.rope_base ** (torch.arange(0, size, 2) / size)
            angles = torch.arange(length)[:, None] * self.config.rope_scale / periods
            rotation = (angles.cos(), angles.sin())
        if self.config.token_shift:
            x = self.token_shift(x)
        for layer in self.layers:
            x = layer(x, rotation)
        x = self.norm(x)
        head = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        logits = F.linear(x, head.weight)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
