"""Normalisation over the last axis, with or without a learnable scale."""

from forge_mlx.kernels.norms import add_rms_norm, layer_norm, rms_norm
import mlx.core as mx
import mlx.nn as nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, or with an offset * (1 + weight), as in Gemma.

    Args:
        dims: Size of the last axis.
        eps: Added to the mean square.
        weight: Whether there is a learnable scale `[dims]`, at first 1.
        offset: Whether the scale is 1 + weight, a float32 sum whatever the dtype of weight, which is at first 0.

    Raises:
        ValueError: When there is an offset without a weight.
    """

    def __init__(self, dims: int, *, eps: float = 1e-5, weight: bool = True, offset: bool = False) -> None:
        super().__init__()
        if offset and not weight:
            raise ValueError("[RMSNorm] offset must be false without a weight but got true. Leave it out.")
        self.eps = eps
        self.offset = offset
        if weight:
            self.weight = mx.zeros((dims,)) if offset else mx.ones((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise `[..., dims]`."""
        return self._rounded(rms_norm(x, self._scale(), self.eps), x)

    def of_sum(self, x: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        """Normalise x + residual, both `[..., dims]`. Returns the result and the sum, from one pass over them."""
        normed, total = add_rms_norm(x, residual, self._scale(), self.eps)
        return self._rounded(normed, total), total

    def _scale(self) -> mx.array | None:
        # In 16 bits 1 + weight would lose most of a small weight.
        return 1 + self.weight.astype(mx.float32) if self.offset else self.get("weight")

    def _rounded(self, normed: mx.array, x: mx.array) -> mx.array:
        """The result in the dtype that it has without an offset."""
        return normed.astype(mx.result_type(x, self.weight)) if self.offset else normed


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
