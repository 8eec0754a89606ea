"""Choosing the next token: temperature, top-k, top-p, min-p; and the generation loop over a KV cache."""

from collections.abc import Iterator
from dataclasses import dataclass
import math
from typing import Any, Protocol

import mlx.core as mx

# Long prompts are read in pieces of this many tokens, so that memory does not grow with their square.
PREFILL_TOKENS = 512


class CausalModel(Protocol):
    """What generation needs of a model."""

    def make_cache(self) -> list[Any]:
        """An empty KV cache."""
        ...

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Tokens ``[B, T]`` to logits ``[B, T, V]``."""
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
    stop: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield up to ``max_tokens`` tokens that continue the prompt.

    Args:
        model: the decoder, in evaluation mode.
        prompt: at least one token.
        sampler: how a token is chosen.
        max_tokens: the most tokens to yield.
        stop: a token that ends the text; it is not yielded.
        seed: the same seed gives the same tokens; MLX's global random state is not touched.
        use_cache: False reads the whole text again for every token: slow, the check on the cache.

    Raises:
        ValueError: the prompt is empty, or the seed is not in [0, 2^63).
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"[generate_tokens] seed must lie in [0, 2^63) but got {seed}.")
    if not prompt:
        raise ValueError("[generate_tokens] prompt must hold at least one token but got none.")
    key = mx.random.key(seed)
    cache = model.make_cache() if use_cache else None
    text, unread = list(prompt), list(prompt)
    for _ in range(max_tokens):
        if cache is None:
            logits = model(mx.array([text]))
        else:
            for start in range(0, len(unread), PREFILL_TOKENS):
                logits = model(mx.array([unread[start : start + PREFILL_TOKENS]]), cache=cache)
                mx.eval(logits)
        key, draw = mx.random.split(key)
        token = sampler(logits[0, -1], draw)
        if token == stop:
            return
        yield token
        text.append(token)
        unread = [token]
