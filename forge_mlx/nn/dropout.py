"""Dropout whose masks can be drawn a second time."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import mlx.core as mx
import mlx.nn as nn


class DropoutKeys:
    """The keys of masks that are drawn in a row, the same ones that MLX's generator would give from its state.

    Args:
        state: Key of two numbers, uint32 `[2]`, that they follow from.

    Attributes:
        drawn: How many keys have been taken.
    """

    def __init__(self, state: mx.array) -> None:
        self.drawn: int = 0
        self._state = state

    def take(self) -> mx.array:
        """The next key."""
        self._state, key = mx.random.split(self._state)
        self.drawn += 1
        return key


_KEYS: ContextVar[DropoutKeys | None] = ContextVar("dropout_keys", default=None)


@contextmanager
def dropout_keys(state: mx.array) -> Iterator[DropoutKeys]:
    """Let every `Dropout` inside draw from a state of its own instead of from MLX's generator, which does not move.

    Args:
        state: Key of two numbers, uint32 `[2]`. `generator_state()` gives the masks that would be drawn anyway.
    """
    keys = DropoutKeys(state)
    token = _KEYS.set(keys)
    try:
        yield keys
    finally:
        _KEYS.reset(token)


def generator_state() -> mx.array:
    """The state of MLX's generator, uint32 `[2]`; in a compiled function a placeholder if the state is its input."""
    return cast(list[mx.array], mx.random.state)[0]


def skip_draws(count: int) -> None:
    """Move MLX's generator on by so many draws.

    Args:
        count: How many.
    """
    for _ in range(count):
        mx.random.uniform(shape=(0,))


def next_key() -> mx.array:
    """The key that the next mask would be drawn with, uint32 `[2]`: of `dropout_keys`, else of MLX's generator."""
    keys = _KEYS.get()
    if keys is not None:
        return keys.take()
    key = DropoutKeys(generator_state()).take()
    skip_draws(1)
    return key


class Dropout(nn.Dropout):
    """x with each element set to 0 with probability p and else divided by 1 - p, in training.

    `mlx.nn.Dropout` with the same masks, which `dropout_keys` can have drawn again.

    Args:
        p: Probability of dropping an element, in [0, 1).
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[...]` to `[...]`."""
        keys = _KEYS.get()
        if keys is None or not self.drops:
            return super().__call__(x)
        kept = mx.random.bernoulli(self._p_1, x.shape, key=keys.take())
        return (kept * x) * (1 / self._p_1)

    @property
    def drops(self) -> bool:
        """Whether it is in training and drops anything."""
        return cast(bool, self.training and self._p_1 != 1)
