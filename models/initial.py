"""The parameters that a model starts with."""

from collections.abc import Iterator
from contextlib import contextmanager
import math
from typing import Final, cast

from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

_RESIDUAL_MATRICES: Final = ("o_proj.weight", "down_proj.weight")


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Take back what is drawn inside: MLX's modules draw initial values, which `initialise` replaces."""
    high, low = cast(list[int], cast(list[mx.array], mx.random.state)[0].tolist())
    yield
    # A key is the two halves of the seed that it was made from, so this restores it exactly.
    mx.random.seed(high << 32 | low)


def initialise(model: nn.Module, config: DecoderConfig, seed: int) -> None:
    """Set every matrix and bias of a model to its start in GPT's table.

    Args:
        model: The model.
        config: Its config.
        seed: The seed, which alone decides the numbers.
    """
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
