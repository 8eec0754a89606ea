"""One decoder for GPT-2, Llama, Qwen3 and modded-nanogpt: which of them it is, the config says."""

from collections.abc import Iterator
from contextlib import contextmanager
import math
from typing import Final, Literal, TypeAlias, cast

from forge_mlx._config import Section
from forge_mlx.kernels._common.checks import check_arrays, given
from forge_mlx.kernels.attention.options import LARGEST_HEAD
from forge_mlx.nn.activations import GATED_ACTIVATIONS, softcap
from forge_mlx.nn.attention import Attention
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.mlp import MLP, GatedMLP
from forge_mlx.nn.norms import LayerNorm, RMSNorm
from forge_mlx.nn.parameters import count_elements, named_arrays
from forge_mlx.nn.token_shift import LastToken, TokenShift
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from pydantic import Field, model_validator

_INTERMEDIATE_MULTIPLE: Final = 64
_RESIDUAL_MATRICES: Final = ("o_proj.weight", "down_proj.weight")

Cache: TypeAlias = KVCache | LastToken


class GPTConfig(Section):
    """The shape of a GPT. `models/README.md` gives the settings of the published families."""

    arch: Literal["gpt"] = Field("gpt", description="Architecture: the decoder of models/gpt.py.")
    vocab_size: int | None = Field(None, ge=1, description="Number of tokens V; null: the tokenizer's.")
    num_layers: int = Field(4, ge=1, description="Number of blocks.")
    hidden_size: int = Field(256, ge=1, description="Width C of the residual stream.")
    num_heads: int = Field(4, ge=1, description="Query heads of each attention.")
    num_kv_heads: int | None = Field(
        None, ge=1, description="Key and value heads, a divisor of num_heads (GQA); null: num_heads."
    )
    head_dim: int | None = Field(
        None,
        ge=1,
        description="Size of a head; null: hidden_size / num_heads. At most 256 with sliding_window, "
        "attention_softcap, attention_sinks or packed documents.",
    )
    intermediate_size: int | None = Field(
        None,
        ge=1,
        description="Width inside the MLP; null: 4 hidden_size, or for a gated MLP 8/3 hidden_size, rounded "
        "up to a multiple of 64, which has about as many parameters.",
    )
    max_seq_len: int = Field(
        256,
        ge=1,
        description="Longest sequence of training; for learned positions the limit of any sequence.",
    )
    norm: Literal["rms_norm", "layer_norm"] = Field("rms_norm", description="Normalisation before each half-block.")
    norm_eps: float = Field(1e-5, gt=0, description="Added to the variance or mean square in every norm.")
    norm_weight: bool = Field(
        True, description="Whether norms have a learnable scale (and, with bias, a LayerNorm's shift)."
    )
    position: Literal["rope", "learned", "none"] = Field(
        "rope", description="Positions: rotary in q and k, a learned table added to the embedding, or none."
    )
    rope_base: float = Field(10000.0, gt=1, description="Base of the rotary frequencies; for position: rope.")
    rope_scale: float = Field(
        1.0,
        gt=0,
        description="Factor on rotary positions; 0.5 stretches the context twofold; for position: rope.",
    )
    sliding_window: int | None = Field(
        None, ge=1, description="How many tokens attention sees, the one it is at included; null: all before it."
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="Bound c of the attention scores, c tanh(score / c), as in Gemma 2; null: none."
    )
    attention_sinks: bool = Field(
        False,
        description="Whether each head has a learnable logit that takes a share of its attention, as in gpt-oss.",
    )
    token_shift: bool = Field(
        False,
        description="Whether each embedding gets a learnable share of the one before it (modded-nanogpt's smear).",
    )
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "silu", "relu2"] = Field(
        "swiglu",
        description="MLP: gated (swiglu, geglu) or plain with this activation (gelu is the erf form).",
    )
    bias: bool = Field(False, description="Whether projections and LayerNorms have a bias; the head never has.")
    qk_norm: bool = Field(False, description="Whether each head of q and k passes an RMSNorm, as in Qwen3.")
    tie_embeddings: bool = Field(True, description="Whether the output head is the embedding table.")
    logit_softcap: float | None = Field(
        None, gt=0, description="Bound c of the logits, c tanh(logits / c); null: none."
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability of dropping an element of the embedding and of each half-block.",
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial matrices.")
    zero_init_residual: bool = Field(
        False,
        description="Whether o_proj and down_proj start at 0, so that each block starts as the identity.",
    )

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of a head, the default filled in."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def mlp_size(self) -> int:
        """Width inside the MLP, the default filled in."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.mlp in GATED_ACTIVATIONS:
            return math.ceil(8 * self.hidden_size / 3 / _INTERMEDIATE_MULTIPLE) * _INTERMEDIATE_MULTIPLE
        return 4 * self.hidden_size

    @model_validator(mode="after")
    def _check_heads(self) -> "GPTConfig":
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_heads, {self.num_heads}, but got {self.hidden_size}. "
                "Change one of them or set head_dim."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, {self.kv_heads}, but got {self.num_heads}. "
                "Change one of them; null takes as many key and value heads as query heads."
            )
        asked = {
            "sliding_window": self.sliding_window is not None,
            "attention_softcap": self.attention_softcap is not None,
            "attention_sinks": self.attention_sinks,
        }
        features = [name for name, is_asked in asked.items() if is_asked]
        if features and self.head_size > LARGEST_HEAD:
            raise ValueError(
                f"head_dim must be at most {LARGEST_HEAD} with {' and '.join(features)} but the head size is "
                f"{self.head_size}. Set it or raise num_heads."
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> "GPTConfig":
        if self.position == "rope":
            if self.head_size % 2:
                raise ValueError(
                    f"position: rope needs an even head size but got {self.head_size}. "
                    "Set head_dim to an even number or change num_heads."
                )
            return self
        # Values, not model_fields_set: a dumped config spells out every default and must load again.
        unused = [
            name for name in ("rope_base", "rope_scale") if getattr(self, name) != type(self).model_fields[name].default
        ]
        if unused:
            raise ValueError(
                f"{' and '.join(unused)} must not be set with position: {self.position}, which does not "
                "rotate. Remove it or set position: rope."
            )
        return self


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        config: The model's config.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_size,
            bias=config.bias,
            rope_base=config.rope_base if config.position == "rope" else None,
            rope_scale=config.rope_scale,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            qk_norm_weight=config.norm_weight,
            window=config.sliding_window,
            softcap=config.attention_softcap,
            sinks=config.attention_sinks,
        )
        self.post_attention_layernorm = _norm(config)
        mlp = GatedMLP if config.mlp in GATED_ACTIVATIONS else MLP
        self.mlp = mlp(config.hidden_size, config.mlp_size, activation=config.mlp, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(
        self,
        x: mx.array,
        cache: KVCache | None = None,
        *,
        segment_ids: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Map `[B, T, C]` to `[B, T, C]`; arguments as those of `Attention`."""
        normed = self.input_layernorm(x)
        attended = self.dropout(self.self_attn(normed, cache, segment_ids=segment_ids, positions=positions))
        normed, x = self.post_attention_layernorm.of_sum(attended, x)
        return x + self.dropout(self.mlp(normed))


class GPT(nn.Module):
    """A pre-norm decoder: embed -> [token shift] -> (attention, MLP) x num_layers -> norm -> head.

    Dropout follows the embedding, each attention and each MLP; attention probabilities are not dropped.

    Parameters have the names of Llama's in Hugging Face checkpoints, without `model.`. They start, from the
    seed alone (the global random state is neither read nor changed), as:

    | parameter | start |
    |---|---|
    | embed_tokens, embed_positions, lm_head | N(0, init_std^2) |
    | q_proj, k_proj, v_proj, gate_proj, up_proj | N(0, init_std^2) |
    | o_proj, down_proj | N(0, init_std^2 / (2 num_layers)), or 0 with zero_init_residual |
    | scales of norms | 1 |
    | token_shift | 0.3 |
    | sinks of attention | 0 |
    | biases | 0 |

    o_proj and down_proj write to the residual stream, 2 num_layers times in all: their factor keeps its
    variance independent of the depth.

    Args:
        config: The shape; vocab_size must be set.
        seed: Seed of the initial parameters.

    Raises:
        ValueError: When vocab_size is not set.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError(
                "[GPT] vocab_size must be set before the model is built but got None. Take the tokenizer's: "
                'config.model_copy(update={"vocab_size": ...}).'
            )
        self.config = config
        with _unchanged_random_state():
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            if config.position == "learned":
                self.embed_positions = Embedding(config.max_seq_len, config.hidden_size)
            if config.token_shift:
                self.token_shift = TokenShift(config.hidden_size)
            self.dropout = nn.Dropout(config.dropout)
            self.layers = [Block(config) for _ in range(config.num_layers)]
            self.norm = _norm(config)
            if not config.tie_embeddings:
                self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        _initialise(self, config, seed)

    def __call__(
        self,
        tokens: mx.array,
        cache: list[Cache] | None = None,
        *,
        segment_ids: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Logits of the next token after each position: `head(hidden(tokens))`.

        Args:
            tokens: `[B, T]`, integers in [0, V).
            cache: As `hidden` takes it.
            segment_ids: As `hidden` takes them.
            positions: As `hidden` takes them.

        Returns:
            `[B, T, V]`.

        Raises:
            ValueError: As `hidden`.
        """
        return self.head(self.hidden(tokens, cache, segment_ids=segment_ids, positions=positions))

    def hidden(
        self,
        tokens: mx.array,
        cache: list[Cache] | None = None,
        *,
        segment_ids: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Hidden states after the last norm.

        Several documents may stand in a row. With a segment id and a position for each token, that of its document and
        its place in it, each gives to the bit what it would give at that place among any other documents.

        Args:
            tokens: `[B, T]`, integers in [0, V).
            cache: From `make_cache`: the tokens continue what it holds, and it is extended.
            segment_ids: Integers `[B, T]`: no token sees one of another id, and none sees one with a negative id, which
                is padding. None: a row is one text. Ids above 2^31 - 1 wrap around: they become padding, or meet
                another document's.
            positions: Integers `[B, T]`, without effect for position: none. Learned ones must lie in [0, max_seq_len),
                in a row of any length; another position counts as zeros, as nothing can raise inside a compiled step.
                None: as they follow each other in the row, behind what the cache holds.

        Returns:
            `[B, T, C]`.

        Raises:
            ValueError: When tokens, segment ids or positions are no matrices of integers of one shape, segment ids or
                positions come with a cache, the cache has another number of layers, learned positions end before the
                tokens do and none are given, or segment ids meet heads of more than 256 elements.
        """
        self._check_tokens(tokens, cache, {"segment_ids": segment_ids, "positions": positions})
        layer_caches, last = self._split(cache)
        x = self.embed_tokens(tokens)
        if self.config.position == "learned":
            offset = layer_caches[0].offset if layer_caches[0] is not None else 0
            x = x + self._positions(offset, tokens.shape[1], positions)
        if self.config.token_shift:
            x = self.token_shift(x, last, segment_ids=segment_ids)
        x = self.dropout(x)
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            x = layer(x, layer_cache, segment_ids=segment_ids, positions=positions)
        return self.norm(x)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits `[..., V]` of hidden states `[..., C]`, soft-capped if the config says so."""
        logits = self.embed_tokens.as_linear(hidden) if self.config.tie_embeddings else self.lm_head(hidden)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)

    @property
    def head_weight(self) -> mx.array:
        """The output head's matrix `[V, C]`: the embedding table when tied.

        Raises:
            ValueError: When the head has been replaced by one that is not a matrix, as a quantised one.
        """
        owner = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        if not isinstance(owner, (Embedding, Linear)):
            raise ValueError(
                f"[GPT] head_weight must be the matrix of an Embedding or a Linear but the head is a "
                f"{type(owner).__name__}. Call head(hidden), or leave the head out when layers are replaced."
            )
        return owner.weight

    def make_cache(self) -> list[Cache]:
        """An empty cache: one KVCache a layer, and behind them a LastToken if the model has a token shift."""
        shift: list[Cache] = [LastToken()] if self.config.token_shift else []
        return [*(KVCache() for _ in self.layers), *shift]

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Number of parameters, a tied head counted once.

        Args:
            embeddings: Whether the embedding tables and an untied head count; without them it is the number
                that scaling laws call non-embedding.
        """
        total = count_elements(self.parameters())
        return total if embeddings else total - sum(count_elements(m.parameters()) for m in self._tables())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of training on one token, forward and backward.

        6 (N + C V) + 12 num_layers H D K, where N counts the elements of the blocks' matrices and K the keys that a
        token sees on average: (T + 1) / 2, or with a sliding window of W < T tokens W - W (W - 1) / (2 T). Each
        element of a matrix takes a multiplication and an addition forward, and twice that backward; the head
        counts whether tied or not, and looking up an embedding counts nothing. In attention a token takes 4 H D
        operations with each key, forward; the scores that the mask hides are not counted. Nor are norms, activations,
        softmax and a recomputed forward.

        Args:
            seq_len: Length T of the training sequences: with documents packed into rows, of a document.
        """
        config = self.config
        leaves = named_arrays([layer.parameters() for layer in self.layers])
        matrices = sum(p.size for _, p in leaves if p.ndim == 2) + self.head_weight.size
        window = min(config.sliding_window or seq_len, seq_len)
        # Twice the keys that all tokens of a sequence see.
        keys = window * (2 * seq_len - window + 1)
        return 6 * matrices + 6 * config.num_layers * config.num_heads * config.head_size * keys // seq_len

    def _check_tokens(self, tokens: mx.array, cache: list[Cache] | None, documents: dict[str, mx.array | None]) -> None:
        """Raise unless tokens, and what says which documents they are of, fit together."""
        check_arrays("GPT", tokens=tokens, **given(**documents))
        if tokens.ndim != 2 or not mx.issubdtype(tokens.dtype, mx.integer):
            raise ValueError(f"[GPT] tokens must be integers of shape [B, T] but got {tokens.dtype} of {tokens.shape}.")
        for name, array in documents.items():
            if array is None:
                continue
            if cache is not None:
                raise ValueError(
                    f"[GPT] {name} must be left out with a cache, which holds one text a row, but got both. Give the "
                    "rows without a cache, or each document a row of its own."
                )
            if array.shape != tokens.shape or not mx.issubdtype(array.dtype, mx.integer):
                raise ValueError(
                    f"[GPT] {name} must be integers of the shape of tokens, {tokens.shape}, but got {array.dtype} of "
                    f"{array.shape}."
                )

    def _split(self, cache: list[Cache] | None) -> tuple[list[KVCache | None], LastToken | None]:
        """The layers' parts of a cache, and the token shift's."""
        if cache is None:
            return [None] * len(self.layers), None
        wanted = [type(part) for part in self.make_cache()]
        if [type(part) for part in cache] != wanted:
            raise ValueError(
                f"[GPT] cache must have the parts {[part.__name__ for part in wanted]} but got "
                f"{[type(part).__name__ for part in cache]}. Use make_cache()."
            )
        last = cast(LastToken, cache[-1]) if self.config.token_shift else None
        return cast(list[KVCache | None], cache[: len(self.layers)]), last

    def _tables(self) -> list[nn.Module]:
        return [self[name] for name in ("embed_tokens", "embed_positions", "lm_head") if name in self]

    def _positions(self, offset: int, length: int, positions: mx.array | None) -> mx.array:
        """Rows of the table of learned positions: those asked for, or offset to offset + length."""
        if positions is not None:
            return self.embed_positions(positions)
        limit = self.config.max_seq_len
        if offset + length > limit:
            raise ValueError(
                f"[GPT] learned positions end at max_seq_len, {limit}, but got {offset + length} tokens. "
                "Shorten the sequence, or train with a larger max_seq_len or with position: rope."
            )
        return self.embed_positions(mx.arange(offset, offset + length))


def _norm(config: GPTConfig) -> RMSNorm | LayerNorm:
    if config.norm == "rms_norm":
        return RMSNorm(config.hidden_size, eps=config.norm_eps, weight=config.norm_weight)
    shift = config.bias and config.norm_weight
    return LayerNorm(config.hidden_size, eps=config.norm_eps, weight=config.norm_weight, bias=shift)


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Take back what is drawn inside: MLX's modules draw initial values, which `_initialise` replaces."""
    high, low = cast(list[int], cast(list[mx.array], mx.random.state)[0].tolist())
    yield
    # A key is the two halves of the seed that it was made from, so this restores it exactly.
    mx.random.seed(high << 32 | low)


def _initialise(model: GPT, config: GPTConfig, seed: int) -> None:
    """Set every matrix and bias of the model to its start in GPT's table."""
    named = sorted(named_arrays(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(named))
    residual_std = 0.0 if config.zero_init_residual else config.init_std / math.sqrt(2 * config.num_layers)
    start = []
    for (name, parameter), key in zip(named, keys, strict=True):
        if parameter.ndim < 2:
            # Sinks and the scales of norms and of the token shift start as their modules make them.
            value = mx.zeros(parameter.shape) if name.endswith("bias") else parameter
        else:
            std = residual_std if name.endswith(_RESIDUAL_MATRICES) else config.init_std
            value = mx.random.normal(parameter.shape, key=key) * std
        start.append((name, value))
    model.update(tree_unflatten(start))
