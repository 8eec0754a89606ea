"""Rotary position embedding."""

from forge_mlx.kernels.rope.op import rope

__all__ = ["rope"]
