"""Normalisation over the last axis, with or without a learnable scale."""

from forge_mlx.kernels.norms import add_rms_norm, layer_norm, rms_norm
import mlx.core as mx
import mlx.nn as nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Args:
        dims: Size of the last axis.
        eps: Added to the mean square.
        weight: Whether there is a learnable scale `[dims]`, at first 1.
    """

    def __init__(self, dims: int, *, eps: float = 1e-5, weight: bool = True) -> None:
        super().__init__()
        self.eps = eps
        if weight:
            self.weight = mx.ones((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise `[..., dims]`."""
        return rms_norm(x, self.get("weight"), self.eps)

    def of_sum(self, x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        """Normalise x + residual, both `[..., dims]`. Returns the result and the sum, from one pass over them."""
        return add_rms_norm(x, residual, self.get("weight"), self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis.

    Args:
        dims: Size of the last axis.
        eps: Added to the variance (the biased one).
        weight: Whether there is a learnable scale `[dims]`, at first 1.
        bias: Whether there is a learnable shift `[dims]`, at first 0.
    """

    def __init__(self, dims: int, *, eps: float = 1e-5, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        if weight:
            self.weight = mx.ones((dims,))
        if bias:
            self.bias = mx.zeros((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise `[..., dims]`."""
        return layer_norm(x, self.get("weight"), self.get("bias"), self.eps)

    def of_sum(self, x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        """Normalise x + residual, both `[..., dims]`. Returns the result and the sum."""
        total = x + residual
        return self(total), total
