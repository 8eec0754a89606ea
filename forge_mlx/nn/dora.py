"""DoRA: a low-rank adapter of the weight's directions, and a magnitude to train for each row of the weight.

After Liu et al. 2024 (arXiv:2402.09353). Names and shapes of the parameters are mlx-lm's.
"""

from forge_mlx.kernels.embedding import embedding
from forge_mlx.kernels.matmul import matmul
from forge_mlx.nn.adapted_base import float_weight, product
from forge_mlx.nn.lora import Adapter, AdapterOptions, LoRAEmbedding, LoRALinear
import mlx.core as mx
import mlx.nn as nn


class Magnitudes(Adapter):
    """What the layers of DoRA have in common: m / ||W + s (A B)|| for each row of the weight, the norm as a constant.

    That the norm has no gradient is the paper's section 4.3. m `[out]` starts as the rows' norms. These come from the
    base's weight when the adapter is made: that weight must not change later.

    Takes what `Adapter` takes.
    """

    def __init__(self, base: nn.Module, adapter: AdapterOptions, *, key: mx.array) -> None:
        super().__init__(base, adapter, key=key)
        self._squares = mx.square(float_weight(base).astype(mx.float32)).sum(axis=-1)
        self.m = mx.sqrt(self._squares)
        mx.eval(self._squares, self.m)

    def adapted_weight(self, a: mx.array, b: mx.array, after: mx.array | None = None) -> mx.array:
        """m / ||V|| V of the rows of V = W + s (A B), computed in float32 and rounded once to the dtype of W.

        Args:
            a: A.
            b: B.
            after: What has to be there first; see `float_weight`.
        """
        weight = float_weight(self.base, after)
        moved = self._moved_weight(weight, a, b)
        norms = mx.stop_gradient(mx.linalg.norm(moved, axis=-1))
        return (_ratio(self.m.astype(mx.float32), norms)[:, None] * moved).astype(weight.dtype)

    def _row_factors(self, a: mx.array, b: mx.array) -> mx.array:
        """m / ||W + s (A B)|| in float32, `[out]`, without the adapted weight.

        ||W + s D||^2 = ||W||^2 + 2 s <W, D> + s^2 ||D||^2 row by row: with D = L R, L `[out, r]`, that takes W R^T,
        `[out, r]`, and R R^T, `[r, r]`.
        """
        left, right = self._product_order(a, b)
        met = product(self.base, right).T.astype(mx.float32)
        left, right = (each.astype(mx.float32) for each in (left * self.adapter.scale, right))
        squares = self._squares + (left * (2 * met + left @ (right @ right.T))).sum(axis=-1)
        return _ratio(self.m.astype(mx.float32), mx.stop_gradient(mx.sqrt(mx.maximum(squares, 0))))


class DoRALinear(Magnitudes, LoRALinear):
    """m / ||W + s (A B)^T|| (x W^T + s (dropout(x) A) B) + b over a linear layer, float or of codes; m `[out]`.

    The bias is added behind the magnitudes: in 16 bits that rounds once more than the layer under it does.

    Takes what `Adapter` takes.
    """

    def _adapted(self, x: mx.array) -> mx.array:
        a, b = self._factors(x.dtype)
        out = matmul(self._inner(x, a), b, accumulate=product(self.base, x))
        out = self._row_factors(a, b).astype(x.dtype) * out
        bias = self.base.get("bias")
        return out if bias is None else out + bias


class DoRAEmbedding(Magnitudes, LoRAEmbedding):
    """Rows of m / ||W + s A B|| (W + s A B), each with its own norm; m `[V]`.

    Takes what `Adapter` takes; the layer under it is an embedding.
    """

    def _adapted(self, ids: mx.array, rows: mx.array) -> mx.array:
        added = self._added(ids, rows.dtype)
        moved = mx.stop_gradient(rows.astype(mx.float32) + added.astype(mx.float32))
        wanted = embedding(self.m.astype(mx.float32)[:, None], ids)
        factors = _ratio(wanted, mx.linalg.norm(moved, axis=-1, keepdims=True))
        return factors.astype(rows.dtype) * (rows + self.dropout(added))

    def _adapted_head(self, x: mx.array) -> mx.array:
        return self._row_factors(*self._factors(x.dtype)).astype(x.dtype) * super()._adapted_head(x)


def _ratio(m: mx.array, norms: mx.array) -> mx.array:
    """m / norms, m where a norm is 0: that row has no direction."""
    return m / mx.where(norms == 0, 1, norms)
