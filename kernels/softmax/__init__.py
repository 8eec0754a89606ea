"""Softmax over the last axis."""

from forge_mlx.kernels.softmax.op import softmax

__all__ = ["softmax"]
