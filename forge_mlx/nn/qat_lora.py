"""Adapters of a weight that is quantised behind them: what is trained is the merged weight of its codes."""

from typing import Final, cast

from forge_mlx.kernels.embedding import embedding
from forge_mlx.kernels.matmul import matmul
from forge_mlx.kernels.quantize import fake_quant
from forge_mlx.kernels.quantize.options import Options, Ste
from forge_mlx.nn.adapted_base import Kind, float_layer, float_weight
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.dora import DoRAEmbedding, DoRALinear, Magnitudes
from forge_mlx.nn.expert_linear import expert_product
from forge_mlx.nn.fake_quant import FakeQuantEmbedding, FakeQuantExpertLinear, FakeQuantized, FakeQuantLinear
from forge_mlx.nn.lora import Adapter, AdapterOptions, LoRAEmbedding, LoRAExpertLinear, LoRALinear
from forge_mlx.nn.weight_format import Activations, describe_options, option_arguments
import mlx.core as mx
import mlx.nn as nn

_FAKE_QUANTIZED: Final[dict[Kind, type[FakeQuantized]]] = {
    "linear": FakeQuantLinear,
    "experts": FakeQuantExpertLinear,
    "embedding": FakeQuantEmbedding,
}


class FakeQuantAdapter(Adapter, FakeQuantized):
    """What adapted layers of quantisation-aware training have in common: W' = dequantize(quantize(W + s (A B))).

    The base is a float layer or one of codes, and frozen; the gradient of W' passes to A and B. As any fake-quantised
    layer it can be switched to floats by `enabled`, and `to_coded` gives the codes that training saw.

    Args:
        base: The layer whose place this one takes, frozen here.
        adapter: Rank and scale; there can be no dropout, as A and B have no input of their own.
        key: Of the initial A.
        options: The mode that the adapted weight is quantised in, with all of its options.
        ste: As `FakeQuantized` takes it.
        activations: As `FakeQuantized` takes them.

    Raises:
        ValueError: As `Adapter`, and with dropout.
    """

    def __init__(
        self,
        base: nn.Module,
        adapter: AdapterOptions,
        *,
        key: mx.array,
        options: Options,
        ste: Ste = "identity",
        activations: Activations | None = None,
    ) -> None:
        if adapter.dropout:
            raise ValueError(
                f"[{type(self).__name__}] dropout must be 0 where the adapted weight is quantised as one but got "
                f"{adapter.dropout}. Set it to 0."
            )
        super().__init__(base, adapter, key=key)
        self.options, self.ste, self.activations = options, ste, activations
        self.enabled = True

    def quantized_weight(self, a: mx.array, b: mx.array, after: mx.array | None = None) -> mx.array:
        """The weight that the layer computes with, `[..., out, in]` in the dtype of the base's.

        Args:
            a: A.
            b: B.
            after: What has to be there first; see `float_weight`.
        """
        weight = self.adapted_weight(a, b, after) if self.active else float_weight(self.base, after)
        return fake_quant(weight, ste=self.ste, **option_arguments(self.options)) if self.enabled else weight

    def effective_weight(self) -> mx.array:
        """dequantize(quantize(W + s (A B))) in the dtype of W; not quantised while the layer is not enabled."""
        return self.quantized_weight(self.lora_a, self.lora_b)

    def fake_quantized(self) -> FakeQuantized:
        """The layer that trains the adapted weight itself, and starts with it."""
        weight = self.adapted_weight(self.lora_a, self.lora_b)
        made = _FAKE_QUANTIZED[self.kind]
        layer: FakeQuantized = made(
            float_layer(self.base, weight), self.options, ste=self.ste, activations=self.activations
        )
        layer.enabled = self.enabled
        return layer

    def to_coded(self) -> Coded:
        """The layer of the codes that `effective_weight` is made of when enabled."""
        return self.fake_quantized().to_coded()

    def merged(self, *, dequantize: bool = False) -> nn.Module:
        """The layer of the codes that training saw.

        Args:
            dequantize: Whether it becomes a float layer with the weight that they stand for.
        """
        coded = self.to_coded()
        return float_layer(self.base, float_weight(coded)) if dequantize else coded

    def _extra_repr(self) -> str:
        quantized = describe_options(self.options, self.activations)
        return f"{Adapter._extra_repr(self)}, {quantized}, ste={self.ste}"


class FakeQuantLoRALinear(FakeQuantAdapter, LoRALinear):
    """x W'^T + b with W' = dequantize(quantize(W + s (A B)^T)).

    Takes what `FakeQuantAdapter` takes. With ste "identity" the gradients of A and B are s x^T (dy B^T) and
    s (x A)^T dy, without one of the whole weight; W' is made again for the backward pass.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Map `[..., in]` to `[..., out]`."""
        if x.ndim == 1:
            return self(x[None])[0]
        x = self._input(x)
        if self.active and self.ste == "identity" and not isinstance(self, Magnitudes):
            return self._straight_through(x)
        return matmul(x, self.effective_weight(), transpose_b=True, accumulate=self.base.get("bias"))

    def _straight_through(self, x: mx.array) -> mx.array:
        scale = self.adapter.scale

        @mx.custom_function
        def function(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
            return matmul(x, self.quantized_weight(a, b), transpose_b=True, accumulate=self.base.get("bias"))

        @function.vjp
        def vjp(
            primals: tuple[mx.array, mx.array, mx.array], cotangent: mx.array, _output: mx.array
        ) -> tuple[mx.array, mx.array, mx.array]:
            x, a, b = primals
            # Behind the cotangent, or a compiled function would keep the weight of the forward pass.
            late_a, late_b = mx.depends([a, b], [cotangent])
            of_x = matmul(cotangent, self.quantized_weight(late_a, late_b, cotangent))
            rows, dy = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
            a, b = (each.astype(dy.dtype) for each in (a, b))
            of_a = matmul(rows, matmul(dy, b, transpose_b=True) * scale, transpose_a=True)
            of_b = matmul(matmul(rows, a) * scale, dy, transpose_a=True)
            return of_x, of_a.astype(primals[1].dtype), of_b.astype(primals[2].dtype)

        return cast(mx.array, function(x, self.lora_a, self.lora_b))


class FakeQuantDoRALinear(FakeQuantLoRALinear, DoRALinear):
    """x W'^T + b with W' = dequantize(quantize(m / ||W + s (A B)^T|| (W + s (A B)^T))).

    Takes what `FakeQuantAdapter` takes.
    """


class FakeQuantLoRAExpertLinear(FakeQuantAdapter, LoRAExpertLinear):
    """x W_e'^T with W' = dequantize(quantize(W + s B A)), for the rows of each expert e.

    Takes what `FakeQuantAdapter` takes.
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Map x `[M, R, in]`, whose blocks belong to experts `[M]`, sorted, to `[M, R, out]`."""
        return expert_product(self._input(x), self.effective_weight(), experts)


class FakeQuantLoRAEmbedding(FakeQuantAdapter, LoRAEmbedding):
    """Rows of W' = dequantize(quantize(W + s A B)), zeros for an id out of range; W' is the output layer's matrix too.

    Takes what `FakeQuantAdapter` takes.
    """

    def __call__(self, ids: mx.array) -> mx.array:
        """Map ids `[...]` to vectors `[..., C]`."""
        return embedding(self.effective_weight(), ids)

    def as_linear(self, x: mx.array) -> mx.array:
        """x W'^T: `[..., C]` to `[..., V]`."""
        return matmul(x, self.effective_weight(), transpose_b=True)


class FakeQuantDoRAEmbedding(FakeQuantLoRAEmbedding, DoRAEmbedding):
    """`FakeQuantLoRAEmbedding` with W' of DoRA's adapted weight.

    Takes what `FakeQuantAdapter` takes.
    """
