"""One decoder for GPT-2, Llama, Mistral, Qwen, Gemma and modded-nanogpt: which of them it is, the config says."""

import math
from typing import ClassVar, Literal, TypeAlias, cast

from forge_mlx.kernels._common.checks import check_arrays, given
from forge_mlx.models.block import Block, attention_of, mlp_of, norm_of
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.initial import initialise, unchanged_random_state
from forge_mlx.nn.activations import softcap
from forge_mlx.nn.coded import Coded, named_shapes
from forge_mlx.nn.dropout import Dropout
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.kv_cache import KVCache
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.lora import Adapter
from forge_mlx.nn.recompute import recomputed
from forge_mlx.nn.token_shift import LastToken, TokenShift
import mlx.core as mx
import mlx.nn as nn
from pydantic import Field

Cache: TypeAlias = KVCache | LastToken


class GPTConfig(DecoderConfig):
    """The shape of a GPT. `models/README.md` gives the settings of the published families."""

    arch: Literal["gpt"] = Field("gpt", description="Architecture: the decoder of models/gpt.py.")


class GPT(nn.Module):
    """A decoder of residual blocks: embed -> [token shift] -> (attention, MLP) x num_layers -> norm -> head.

    Dropout follows the embedding, each attention and each MLP; attention probabilities are not dropped.

    Parameters have the names of Llama's in Hugging Face checkpoints, without `model.`. They start, from the
    seed alone (the global random state is neither read nor changed), as:

    | parameter | start |
    |---|---|
    | embed_tokens, embed_positions, lm_head | N(0, init_std^2) |
    | q_proj, k_proj, v_proj, gate_proj, up_proj | N(0, init_std^2) |
    | o_proj, down_proj | N(0, init_std^2 / (2 num_layers)), or 0 with zero_init_residual |
    | scales of norms | 1; with norm_offset, which adds the 1, 0 |
    | token_shift | 0.3 |
    | sinks of attention | 0 |
    | biases | 0 |

    o_proj and down_proj write to the residual stream, 2 num_layers times in all: their factor keeps its
    variance independent of the depth.

    Args:
        config: The shape; vocab_size must be set.
        seed: Seed of the initial parameters.

    Attributes:
        checkpoint_blocks: Whether the backward pass computes each block again, from its input alone, instead of keeping
            what the block made (gradient checkpointing): less memory, a third more work. At first false. Nothing else
            changes: the gradients are the same, those through dropout too. Without effect with a cache.

    Raises:
        ValueError: When vocab_size is not set, or the config is one of another architecture.
    """

    config_type: ClassVar[type[DecoderConfig]] = GPTConfig

    def __init__(self, config: DecoderConfig, *, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(config, self.config_type):
            raise ValueError(
                f"[{type(self).__name__}] config must be a {self.config_type.__name__} but got a "
                f"{type(config).__name__}. build_model(config) builds the model of any config."
            )
        if config.vocab_size is None:
            raise ValueError(
                f"[{type(self).__name__}] vocab_size must be set before the model is built but got None. Take the "
                "tokenizer's: "
                'config.model_copy(update={"vocab_size": ...}).'
            )
        self.config = config
        self.checkpoint_blocks = False
        with unchanged_random_state():
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            if config.position == "learned":
                self.embed_positions = Embedding(config.max_seq_len, config.hidden_size)
            if config.token_shift:
                self.token_shift = TokenShift(config.hidden_size)
            self.dropout = Dropout(config.dropout)
            self.layers = [self._block(index) for index in range(config.num_layers)]
            self.norm = norm_of(config)
            if not config.tie_embeddings:
                self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        initialise(self, config, seed)

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
        if self.config.embedding_scale is not None:
            # MLX takes a Python number in x's dtype.
            x = x * self.config.embedding_scale
        if self.config.position == "learned":
            offset = layer_caches[0].offset if layer_caches[0] is not None else 0
            x = x + self._positions(offset, tokens.shape[1], positions)
        if self.config.token_shift:
            x = self.token_shift(x, last, segment_ids=segment_ids)
        x = self.dropout(x)
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            run = recomputed(layer) if self.checkpoint_blocks and cache is None else layer
            x = run(x, layer_cache, segment_ids=segment_ids, positions=positions)
        return self.norm(x)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits `[..., V]` of hidden states `[..., C]`, soft-capped if the config says so."""
        logits = self.embed_tokens.as_linear(hidden) if self.config.tie_embeddings else self.lm_head(hidden)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)

    @property
    def head_name(self) -> str:
        """Name of the module whose matrix is the output head's: "embed_tokens" when tied, else "lm_head"."""
        return "embed_tokens" if self.config.tie_embeddings else "lm_head"

    @property
    def head_weight(self) -> mx.array:
        """The output head's matrix `[V, C]`: the table when tied; of a prepared or adapted head, what it stands for.

        Raises:
            ValueError: When the head has been replaced by one that is not a matrix, as one of `mlx.nn.quantize`.
        """
        owner = self[self.head_name]
        if isinstance(owner, (Adapter, FakeQuantized, Coded)):
            return owner.effective_weight()
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
        """Number of parameters, a tied head counted once; of layers of codes, of the weight that they stand for.

        Args:
            embeddings: Whether the embedding tables and an untied head count; without them it is the number
                that scaling laws call non-embedding.
        """
        total = _count(self)
        return total if embeddings else total - sum(map(_count, self._tables()))

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of training on one token, forward and backward.

        6 (N + C V) + 6 H (D + D_v) K, where N counts the elements of the blocks' matrices, of experts those that a
        token goes to, and K the keys that it sees on average, summed over the layers: (T + 1) / 2 in each, or with a
        sliding window of W < T tokens W - W (W - 1) / (2 T). Each element of a matrix takes a multiplication and an
        addition forward, and twice that backward; the head counts whether tied or not, and looking up an embedding
        counts nothing. In attention, with heads of D for queries and keys and D_v for values, a token takes
        2 H (D + D_v) operations with each key, forward; the scores that the mask hides are not counted. Nor are norms,
        activations, softmax and a recomputed forward.

        Args:
            seq_len: Length T of the training sequences: with documents packed into rows, of a document.
        """
        config = self.config
        matrices = sum(self._used_elements(name, shape) for name, shape in self._block_parameters() if len(shape) >= 2)
        matrices += config.hidden_size * cast(int, config.vocab_size)
        windows = [min(config.window_of(layer) or seq_len, seq_len) for layer in range(config.num_layers)]
        # Twice the keys that all tokens of a sequence see, in all layers.
        keys = sum(window * (2 * seq_len - window + 1) for window in windows)
        width = config.num_heads * sum(config.attention_sizes)
        return 6 * matrices + 3 * width * keys // seq_len

    def _block(self, index: int) -> Block:
        """The block of one place, 0 to num_layers - 1."""
        return Block(self.config, attention_of(self.config, index), mlp_of(self.config, self.config.mlp_size))

    def _block_parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """The shapes of all blocks' parameters with their names in the model."""
        return [(name, shape) for name, shape in named_shapes(self) if name.startswith("layers.")]

    def _used_elements(self, _name: str, shape: tuple[int, ...]) -> int:
        """How many elements of a block's parameter one token meets."""
        return math.prod(shape)

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


def _count(model: nn.Module) -> int:
    return sum(math.prod(shape) for _, shape in named_shapes(model))
