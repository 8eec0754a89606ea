"""Rows of a table by their ids."""

from forge_mlx.kernels.embedding.op import embedding

__all__ = ["embedding"]
