"""Choosing the next token: temperature, top-k, top-p, min-p; and the generation loop over a KV cache."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
import math
from typing import Any, Protocol

import mlx.core as mx

# Long prompts are read in pieces of this many tokens, so that memory does not grow with their square.
PREFILL_TOKENS = 512


class CausalModel(Protocol):
    """What generation needs of a model: its logits are ``head(hidden(tokens))``."""

    def make_cache(self) -> list[Any]:
        """An empty KV cache."""
        ...

    def hidden(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Tokens ``[B, T]``, which continue what the cache holds, to hidden states ``[B, T, C]``."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Hidden states ``[..., C]`` to logits ``[..., V]``."""
        ...


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn from the logits.

    The filters act on the probabilities at temperature 1, each on what the one before left: ``top_k`` keeps the k
    largest, ``top_p`` the smallest set whose probabilities reach p (nucleus, Holtzman et al. 2020), ``min_p``
    those of at least p times the largest (Nguyen et al. 2024). The temperature then divides the logits of what is
    left; temperature 0 takes the largest logit.

    Raises:
        ValueError: a setting outside its range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"[Sampler] temperature must be at least 0 and finite but got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"[Sampler] top_k must be at least 0 (0: off) but got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"[Sampler] top_p must lie in (0, 1] (1: off) but got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"[Sampler] min_p must lie in [0, 1] (0: off) but got {self.min_p}.")

    def filtered(self, logits: mx.array) -> mx.array:
        """Logits ``[V]`` in float32 with what the filters remove at -inf."""
        logits = logits.astype(mx.float32)
        vocab_size = logits.shape[-1]
        order = mx.argsort(-logits)
        probabilities = mx.softmax(logits[order], axis=-1, precise=True)
        rank = mx.arange(vocab_size)
        keep = mx.ones((vocab_size,), dtype=mx.bool_)
        if 0 < self.top_k < vocab_size:
            keep = rank < self.top_k
        if self.top_p < 1:
            kept = mx.where(keep, probabilities, 0)
            kept = kept / kept.sum()
            # A token stays while the sum before it has not reached p, so the first always does.
            keep = keep & (mx.cumsum(kept) - kept < self.top_p)
        if self.min_p > 0:
            keep = keep & (probabilities >= self.min_p * probabilities[0])
        ordered = mx.where(keep, logits[order], -mx.inf)
        return mx.put_along_axis(mx.zeros_like(logits), order, ordered, axis=-1)

    def __call__(self, logits: mx.array, key: mx.array) -> int:
        """Draw a token from logits ``[V]``."""
        if self.temperature == 0:
            return int(mx.argmax(logits))
        kept = self.filtered(logits)
        # The largest becomes 0, so that a small temperature cannot overflow.
        return int(mx.random.categorical((kept - kept.max()) / self.temperature, key=key))


def generate_tokens(
    model: CausalModel,
    prompt: list[int],
    sampler: Sampler,
    max_tokens: int,
    *,
    stop: Set[int] = frozenset(),
    vocab_size: int | None = None,
    seed: int = 0,
    cache: list[Any] | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield up to ``max_tokens`` tokens that continue the prompt.

    Logits are computed at the last position alone.

    Args:
        model: the decoder, in evaluation mode.
        prompt: at least one token.
        sampler: how a token is chosen.
        max_tokens: the most tokens to yield.
        stop: tokens that end the text; they are not yielded.
        vocab_size: the tokenizer's, whose ids alone are drawn: a model's table may end in rows that stand for nothing.
            None: as many as the model has.
        seed: the same seed gives the same tokens; MLX's global random state is not touched.
        cache: holds the text before the prompt, and is extended by the prompt and what is yielded, the last token
            perhaps excepted; None: the prompt is the start.
        use_cache: False reads the whole text again for every token: slow, the check on the cache.

    Raises:
        ValueError: the prompt is empty, the seed is not in [0, 2^63), or a cache is given and not to be used.
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"[generate_tokens] seed must lie in [0, 2^63) but got {seed}.")
    if not prompt:
        raise ValueError("[generate_tokens] prompt must hold at least one token but got none.")
    if cache is not None and not use_cache:
        raise ValueError("[generate_tokens] cache must be None with use_cache=False but got one. Leave one out.")
    key = mx.random.key(seed)
    if use_cache and cache is None:
        cache = model.make_cache()
    text, unread = list(prompt), list(prompt)
    for _ in range(max_tokens):
        logits = _last_logits(model, unread, cache) if use_cache else _last_logits(model, text, None)
        key, draw = mx.random.split(key)
        token = sampler(logits[:vocab_size], draw)
        if token in stop:
            return
        yield token
        text.append(token)
        unread = [token]


def _last_logits(model: CausalModel, tokens: list[int], cache: list[Any] | None) -> mx.array:
    """Logits ``[V]`` behind the last token; with a cache the tokens are read in pieces."""
    size = len(tokens) if cache is None else PREFILL_TOKENS
    hidden = model.hidden(mx.array([tokens[:size]]), cache=cache)
    for start in range(size, len(tokens), size):
        # One piece at a time, or the activations of all would be alive together.
        mx.eval(hidden)
        hidden = model.hidden(mx.array([tokens[start : start + size]]), cache=cache)
    return model.head(hidden[:, -1])[0]
