"""Sums over everything: `sum` and `sum_squares`, of one array or of a list of them."""

from forge_mlx.kernels.reductions.op import sum, sum_squares

__all__ = ["sum", "sum_squares"]
