"""Activations, and the gated forms of feed-forward layers."""

from forge_mlx.kernels.activations.gated_op import geglu, swiglu
from forge_mlx.kernels.activations.unary_op import gelu, relu2, sigmoid, silu, softcap

__all__ = ["geglu", "gelu", "relu2", "sigmoid", "silu", "softcap", "swiglu"]
