"""Sums, products and multiples, element by element, and a bias for each column."""

from forge_mlx.kernels.elementwise.op import accumulate, add, add_bias, axpy, mul, scale

__all__ = ["accumulate", "add", "add_bias", "axpy", "mul", "scale"]
