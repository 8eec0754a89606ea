"""What layers do whose matrix is made anew in every call: those of fake quantisation and those of codes."""

from forge_mlx.kernels.matmul import matmul
import mlx.core as mx
import mlx.nn as nn


class MadeWeightLinear(nn.Module):
    """x W^T + b of the matrix that `effective_weight` makes in every call, and of the input that `_input` makes of x.

    For layer classes that have both of them.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., in]` to `[..., out]`."""
        if x.ndim == 1:
            return self(x[None])[0]
        return matmul(self._input(x), self.effective_weight(), transpose_b=True, accumulate=self.get("bias"))


class MadeWeightTable(nn.Module):
    """A table that `effective_weight` makes in every call, as the output layer's matrix."""

    def as_linear(self, x: mx.array) -> mx.array:
        """x weight^T: `[..., dims]` to `[..., num_embeddings]`; the input is never quantised."""
        return matmul(x, self.effective_weight(), transpose_b=True)
