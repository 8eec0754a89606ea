"""The activations of a feed-forward layer by the names that a config gives them."""

from collections.abc import Callable
from functools import partial
from typing import Final

from forge_mlx.kernels.activations import geglu, gelu, relu2, silu, softcap, swiglu
import mlx.core as mx

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "relu2", "softcap"]

ACTIVATIONS: Final[dict[str, Callable[[mx.array], mx.array]]] = {
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "silu": silu,
    "relu2": relu2,
}
"""Activation of a plain MLP by its name in a config. `gelu` is the erf form."""

GATED_ACTIVATIONS: Final[dict[str, Callable[[mx.array, mx.array], mx.array]]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": partial(geglu, approximate="tanh"),
}
"""What a gated MLP makes of its gate and its other projection, by the name of the MLP in a config."""
