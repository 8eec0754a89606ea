"""Low-rank adapters: a frozen layer, and two thin matrices to train whose product is added to its weight.

After Hu et al. 2021 (arXiv:2106.09685). Names and shapes of the parameters are mlx-lm's.
"""

from dataclasses import dataclass
import math
from typing import ClassVar, cast

from forge_mlx.kernels.embedding import embedding
from forge_mlx.kernels.matmul import matmul
from forge_mlx.nn.adapted_base import Kind, float_layer, float_weight, kind_of, weight_shape, with_weight
from forge_mlx.nn.dropout import Dropout, next_key
from forge_mlx.nn.expert_linear import expert_product
import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class AdapterOptions:
    """What all adapters of a model have in common.

    Attributes:
        rank: Columns r of A and rows of B.
        scale: Factor s of their product.
        dropout: Probability of dropping an element of the adapter's input in training.
    """

    rank: int
    scale: float
    dropout: float = 0.0


def adapter_shapes(kind: Kind, weight: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and B.

    Args:
        kind: Of the layer under the adapter.
        weight: The shape of its weight: `[out, in]`, `[E, out, in]` of experts, `[V, C]` of an embedding.
        rank: Columns r of A and rows of B.

    Returns:
        `[in, r]` and `[r, out]`; `[E, r, in]` and `[E, out, r]`; `[V, r]` and `[r, C]`.
    """
    *experts, out, columns = weight
    if kind == "experts":
        return (*experts, rank, columns), (*experts, out, rank)
    return ((out, rank), (rank, columns)) if kind == "embedding" else ((columns, rank), (rank, out))


class Adapter(nn.Module):
    """What the adapted layers have in common: a frozen layer, A and B, and the weight that all three stand for.

    A starts uniform in ±1/sqrt(inputs) and B at 0, in float32: the layer first computes what the one under it does. A
    and B are used in the dtype of the layer's input.

    Args:
        base: The layer whose place this one takes, frozen here.
        adapter: Rank, scale and dropout.
        key: Of the initial A.

    Attributes:
        adapter: Rank, scale and dropout.
        active: Whether the adapter counts; without it the layer computes what the one under it does. A compiled
            function keeps what it was compiled with.

    Raises:
        ValueError: When the layer is of another kind than the class is for, or an option is out of its range.
    """

    kind: ClassVar[Kind]
    base_name: ClassVar[str] = "linear"

    def __init__(self, base: nn.Module, adapter: AdapterOptions, *, key: mx.array) -> None:
        # Not the next class's: it would take the base's parameters over.
        nn.Module.__init__(self)
        name = type(self).__name__
        if kind_of(base) != self.kind:
            raise ValueError(f"[{name}] base must be a layer of the kind {self.kind} but got a {type(base).__name__}.")
        if adapter.rank < 1:
            raise ValueError(f"[{name}] rank must be 1 or more but got {adapter.rank}.")
        if not 0 <= adapter.dropout < 1:
            raise ValueError(f"[{name}] dropout must be in [0, 1) but got {adapter.dropout}.")
        base.freeze()
        self[self.base_name] = base
        self.adapter = adapter
        self.active = True
        self.dropout = Dropout(adapter.dropout)
        weight = weight_shape(base)
        a_shape, b_shape = adapter_shapes(self.kind, weight, adapter.rank)
        bound = 1 / math.sqrt(weight[-2 if self.kind == "embedding" else -1])
        self.lora_a = mx.random.uniform(-bound, bound, a_shape, key=key)
        self.lora_b = mx.zeros(b_shape)
        self.train(base.training)

    @property
    def base(self) -> nn.Module:
        """The frozen layer."""
        layer: nn.Module = self[self.base_name]
        return layer

    def adapted_weight(self, a: mx.array, b: mx.array, after: mx.array | None = None) -> mx.array:
        """W + s (A B) laid out as W, summed in float32 and rounded once to the dtype of W, `[..., out, in]`.

        Args:
            a: A.
            b: B.
            after: What has to be there first; see `float_weight`.
        """
        weight = float_weight(self.base, after)
        return self._moved_weight(weight, a, b).astype(weight.dtype)

    def effective_weight(self) -> mx.array:
        """The weight that the layer computes with, `[..., out, in]` in the dtype of the base's."""
        return self.adapted_weight(self.lora_a, self.lora_b) if self.active else float_weight(self.base)

    def merged(self, *, dequantize: bool = False) -> nn.Module:
        """A layer of the base's class with the adapted weight; A and B are no part of it.

        Args:
            dequantize: Whether a base of codes becomes a float layer; else the weight is quantised as the base's is.
        """
        weight = self.adapted_weight(self.lora_a, self.lora_b)
        return float_layer(self.base, weight) if dequantize else with_weight(self.base, weight)

    def _moved_weight(self, weight: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """W + s (A B) in float32; one product adds and sums, so that compiling cannot change how it is rounded."""
        left, right, weight = (each.astype(mx.float32) for each in (*self._product_order(a, b), weight))
        return mx.addmm(weight, left * self.adapter.scale, right)

    def _product_order(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """Two factors whose product is laid out as the weight."""
        return b.T, a.T

    def _factors(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return self.lora_a.astype(dtype), self.lora_b.astype(dtype)

    def _inner(self, x: mx.array, a: mx.array) -> mx.array:
        """s dropout(x) A, `[..., r]`."""
        inner = dropped_product(x, a, self.adapter.dropout) if self.dropout.drops else matmul(x, a)
        return inner * self.adapter.scale

    def _extra_repr(self) -> str:
        each = self.adapter
        return f"rank={each.rank}, scale={each.scale:g}, dropout={each.dropout:g}, active={self.active}"


class LoRALinear(Adapter):
    """x W^T + b + s (dropout(x) A) B, A `[in, r]`, B `[r, out]`, over a linear layer, float or of codes.

    Takes what `Adapter` takes.
    """

    kind = "linear"

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., in]` to `[..., out]`."""
        if x.ndim == 1:
            return self(x[None])[0]
        if not self.active:
            out: mx.array = self.base(x)
            return out
        return self._adapted(x)

    def _adapted(self, x: mx.array) -> mx.array:
        a, b = self._factors(x.dtype)
        return matmul(self._inner(x, a), b, accumulate=self.base(x))


class LoRAExpertLinear(Adapter):
    """x W_e^T + s (dropout(x) A_e^T) B_e^T for the rows of each expert e, A `[E, r, in]`, B `[E, out, r]`.

    Takes what `Adapter` takes; the layer under it is an `ExpertLinear` or its counterpart of codes.
    """

    kind = "experts"

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map x `[M, R, in]`, whose blocks belong to experts `[M]`, sorted, to `[M, R, out]`."""
        out: mx.array = self.base(x, experts)
        return self._adapted(x, experts, out) if self.active else out

    def _adapted(self, x: mx.array, experts: mx.array, out: mx.array) -> mx.array:
        a, b = self._factors(x.dtype)
        inner = expert_product(self.dropout(x), a, experts) * self.adapter.scale
        return out + expert_product(inner, b, experts)

    def _product_order(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        return b, a


class LoRAEmbedding(Adapter):
    """Rows of W + s A B, A `[V, r]`, B `[r, C]`, dropout on what is added; zeros for an id out of range.

    As the output layer's matrix it is x W^T + s (dropout(x) B^T) A^T.

    Takes what `Adapter` takes; the layer under it is an embedding.
    """

    kind = "embedding"
    base_name = "embedding"

    def __call__(self, ids: mx.array) -> mx.array:
        """Map ids `[...]` to vectors `[..., C]`."""
        rows: mx.array = self.base(ids)
        return self._adapted(ids, rows) if self.active else rows

    def as_linear(self, x: mx.array) -> mx.array:
        """The adapted table as the output layer's matrix: `[..., C]` to `[..., V]`."""
        return self._adapted_head(x) if self.active else self._base_head(x)

    def _adapted(self, ids: mx.array, rows: mx.array) -> mx.array:
        return rows + self.dropout(self._added(ids, rows.dtype))

    def _added(self, ids: mx.array, dtype: mx.Dtype) -> mx.array:
        """s A[ids] B, `[..., C]`."""
        a, b = self._factors(dtype)
        return matmul(embedding(a, ids) * self.adapter.scale, b)

    def _adapted_head(self, x: mx.array) -> mx.array:
        a, b = self._factors(x.dtype)
        return matmul(self._inner(x, b.T), a, transpose_b=True, accumulate=self._base_head(x))

    def _base_head(self, x: mx.array) -> mx.array:
        out: mx.array = self.base.as_linear(x)
        return out

    def _product_order(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        return a, b


def dropped_product(x: mx.array, a: mx.array, p: float) -> mx.array:
    """dropout(x) a, of which the mask is kept for the backward pass, a byte an element, but not the masked x.

    Args:
        x: `[..., in]`.
        a: `[in, r]`.
        p: Probability of dropping an element.

    Returns:
        `[..., r]`.
    """
    kept = mx.random.bernoulli(1 - p, x.shape, key=next_key())

    def masked(x: mx.array) -> mx.array:
        return (kept * x) * (1 / (1 - p))

    @mx.custom_function
    def function(x: mx.array, a: mx.array) -> mx.array:
        return matmul(masked(x), a)

    @function.vjp
    def vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
        x, a = primals
        # Behind the cotangent, or a compiled function would keep the masked x of the forward pass.
        (late,) = mx.depends([x], [cotangent])
        rows = cotangent.reshape(-1, cotangent.shape[-1])
        of_a = matmul(masked(late).reshape(-1, x.shape[-1]), rows, transpose_a=True)
        return masked(matmul(cotangent, a, transpose_b=True)), of_a

    return cast(mx.array, function(x, a))
