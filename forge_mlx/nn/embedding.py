"""A table of vectors, one for each token id."""

from forge_mlx.kernels.embedding import embedding
from forge_mlx.kernels.matmul import matmul
import mlx.core as mx
import mlx.nn as nn


class Embedding(nn.Embedding):
    """weight[ids], the rows' gradients summed in float32; an id out of range gives zeros and has no gradient.

    `mlx.nn.Embedding(num_embeddings, dims)` with the same table, the same initial values and the same `as_linear`,
    which uses the table as the output layer's matrix.
    """

    def __call__(self, ids: mx.array) -> mx.array:
        """Map ids `[...]` to vectors `[..., dims]`."""
        return embedding(self.weight, ids)

    def as_linear(self, x: mx.array) -> mx.array:
        """x weight^T: the table as the output layer's matrix, `[..., dims]` to `[..., num_embeddings]`."""
        return matmul(x, self.weight, transpose_b=True)
