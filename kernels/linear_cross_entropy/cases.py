"""What linear_cross_entropy is proved and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
import math
from typing import Any, Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.cross_entropy import IGNORE_INDEX, Reduction, cross_entropy
from forge_mlx.kernels.cross_entropy.cases import token_losses
from forge_mlx.kernels.cross_entropy.options import Options
from forge_mlx.kernels.cross_entropy.reduction import reduce_losses
from forge_mlx.kernels.cross_entropy.reference import is_kept
from forge_mlx.kernels.linear_cross_entropy import reference
from forge_mlx.kernels.linear_cross_entropy.forward_gradients import gradients_in_forward
from forge_mlx.kernels.linear_cross_entropy.op import linear_cross_entropy
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

USUAL: Final = Options()
EVERY: Final = Options(IGNORE_INDEX, label_smoothing=0.1, softcap=3.0, z_loss=0.01)
"""All options at once."""


@dataclass(frozen=True)
class LinearCrossEntropyCase(OpCase):
    """linear_cross_entropy of one input with its gradients.

    Attributes:
        shape: Shape of hidden.
        vocabulary: V.
        dtype: Dtype of hidden.
        weight_dtype: Dtype of weight and bias; None: that of hidden.
        chunk: As linear_cross_entropy takes it.
        early: Whether gradients are computed in the forward: "none", "hidden" or "all".
        biased: Whether there is a bias.
        weighted: Whether there are weights.
        options: Options of a row's loss.
        reduction: As linear_cross_entropy takes it.
        ignored: How many targets are ignored: "none", "some" or "all".
        values: What hidden is, as `random_values` takes it.
        layout: How hidden lies in memory, as `laid_out` takes it.
        weight_layout: How weight does.
    """

    op = "linear_cross_entropy"

    shape: tuple[int, ...]
    vocabulary: int
    dtype: mx.Dtype = mx.float32
    weight_dtype: mx.Dtype | None = None
    chunk: int | None = 4
    early: str = "none"
    biased: bool = True
    weighted: bool = True
    options: Options = USUAL
    reduction: Reduction = "mean"
    ignored: str = "some"
    values: str = "normal"
    layout: str = "contiguous"
    weight_layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = ["x".join(map(str, self.shape)), str(self.vocabulary), dtype_name(self.dtype)]
        parts += [] if self.weight_dtype is None else [f"weight-{dtype_name(self.weight_dtype)}"]
        parts += [] if self.chunk == 4 else [f"chunk{self.chunk}"]
        parts += [] if self.early == "none" else [f"early-{self.early}"]
        for key in ("ignore_index", "label_smoothing", "softcap", "z_loss"):
            if (value := getattr(self.options, key)) != getattr(USUAL, key):
                parts.append(f"{key}{value:g}")
        parts += [text for text, there in (("bias", self.biased), ("weights", self.weighted)) if there]
        named = ((self.reduction, "mean"), (self.values, "normal"), (self.layout, "contiguous"))
        parts += [text for text, usual in named if text != usual]
        parts += [] if self.weight_layout == "contiguous" else [f"weight-{self.weight_layout}"]
        return "-".join(parts if self.ignored == "none" else [*parts, f"{self.ignored}-ignored"])

    def inputs(self) -> dict[str, mx.array]:
        """hidden, weight, and what there is of bias and weights."""
        random = np.random.default_rng(len(self.name))
        columns, weight_dtype = self.shape[-1], self.weight_dtype or self.dtype
        hidden = mx.array(random_values(self.shape, self.values, random)).astype(self.dtype)
        # Logits of a size that makes the softmax neither flat nor one token.
        weight = random.normal(size=(self.vocabulary, columns)).astype(np.float32) / np.float32(max(1, columns)) ** 0.5
        arrays = {
            "hidden": laid_out(hidden, self.layout),
            "weight": laid_out(mx.array(weight).astype(weight_dtype), self.weight_layout),
        }
        if self.biased:
            arrays["bias"] = mx.array(random.normal(size=self.vocabulary).astype(np.float32)).astype(weight_dtype)
        if self.weighted:
            arrays["weights"] = mx.array(random.uniform(0.1, 2, self.shape[:-1]).astype(np.float32))
        return arrays

    def constants(self) -> dict[str, mx.array]:
        """The targets."""
        random = np.random.default_rng(2000 + len(self.name))
        targets = random.integers(0, self.vocabulary, self.shape[:-1])
        if self.ignored == "all":
            targets[...] = self.options.ignore_index
        elif self.ignored == "some":
            targets[..., 1::3] = self.options.ignore_index
        return {"targets": mx.array(targets.astype(np.int32))}

    def cotangents(self) -> dict[str, mx.array]:
        """dloss."""
        shape = self.shape[:-1] if self.reduction == "none" else ()
        random = np.random.default_rng(1000 + len(self.name))
        return {"loss": mx.array(np.asarray(random.uniform(0.5, 2, shape), np.float32))}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """linear_cross_entropy of the inputs on an engine; "mlx": cross_entropy of whole logits."""
        targets, options, names = self.constants()["targets"], self.options, list(self.inputs())

        def call(*arrays: mx.array) -> mx.array:
            of = dict(zip(names, arrays, strict=True))
            hidden, weight, bias, weights = (of.get(name) for name in ("hidden", "weight", "bias", "weights"))
            assert hidden is not None
            assert weight is not None
            keywords: dict[str, Any] = {
                "ignore_index": options.ignore_index,
                "label_smoothing": options.label_smoothing,
                "softcap": options.softcap,
                "z_loss": options.z_loss,
            }
            if impl == "mlx":
                logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
                return cross_entropy(logits, targets, weights=weights, reduction=self.reduction, **keywords)
            keywords |= {"bias": bias, "weights": weights, "reduction": self.reduction, "chunk": self.chunk}
            if self.early == "none":
                return linear_cross_entropy(hidden, weight, targets, impl=impl, **keywords)
            with gradients_in_forward(weight=self.early == "all"):
                return linear_cross_entropy(hidden, weight, targets, impl=impl, **keywords)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The loss and the gradients by reference.py, the reduction's part of them by MLX."""
        hidden, weight, bias, weights = (inputs.get(name) for name in ("hidden", "weight", "bias", "weights"))
        assert hidden is not None
        assert weight is not None
        targets = self.constants()["targets"]
        rows, kept = hidden.reshape(-1, hidden.shape[-1]), is_kept(targets, self.options.ignore_index)
        losses = reference.losses(rows, weight, bias, targets.flatten(), self.options).reshape(targets.shape)

        def reduced(losses: mx.array, weights: mx.array | None = None) -> mx.array:
            return reduce_losses(losses, kept, weights, self.reduction)

        primals = [losses] if weights is None else [losses, weights]
        (loss,), (dlosses, *dweights) = mx.vjp(reduced, primals, [cotangents["loss"]])
        dhidden, *others = reference.backward(rows, weight, bias, targets.flatten(), dlosses.flatten(), self.options)
        gradients = [dhidden.reshape(hidden.shape), *others, *dweights]
        return {"loss": loss} | {f"d{name}": each for name, each in zip(inputs, gradients, strict=True)}

    def expected(self) -> Mapping[str, np.ndarray]:
        """The loss and the gradients in float64, of the inputs as the dtypes have rounded them."""
        arrays = {name: to_float64(array) for name, array in self.inputs().items()}
        targets = np.array(self.constants()["targets"])
        kept = (targets != self.options.ignore_index).astype(np.float64)
        logits = arrays["hidden"] @ arrays["weight"].T + arrays.get("bias", 0)
        losses, slopes = token_losses(logits, targets, self.options)
        cotangent = to_float64(self.cotangents()["loss"])
        factor = kept * arrays.get("weights", np.float64(1))
        count = factor.sum() if self.reduction == "mean" else np.float64(1)
        # Nothing kept: the mean is 0.
        share = np.divide(cotangent, count, out=np.zeros_like(cotangent), where=count != 0)
        total = losses * factor if self.reduction == "none" else np.sum(losses * factor)
        mean = np.divide(total, count, out=np.zeros_like(total), where=count != 0)
        dz = ((share * factor)[..., None] * slopes).reshape(-1, self.vocabulary)
        gradients = {
            "hidden": (dz @ arrays["weight"]).reshape(self.shape),
            "weight": dz.T @ arrays["hidden"].reshape(-1, self.shape[-1]),
            "bias": dz.sum(axis=0),
            "weights": share * kept * (losses - mean if self.reduction == "mean" else losses),
        }
        return {"loss": mean} | {f"d{name}": gradients[name] for name in arrays}

    def ideal_bytes(self) -> dict[str, int]:
        """What cross_entropy's kernels must move of all chunks' logits: its forward; then it again and its backward.

        The products are MLX's, and weights and reduction are no part of the kernels.
        """
        rows = math.prod(self.shape[:-1])
        logits = rows * self.vocabulary * mx.result_type(self.dtype, self.weight_dtype or self.dtype).size
        return {"forward": logits + 16 * rows, "backward": 3 * logits + 36 * rows}


def _cases() -> list[LinearCrossEntropyCase]:
    cases = []
    for dtype in FLOATS:
        usual = LinearCrossEntropyCase((9, 24), 40, dtype)
        # Vocabularies around a lane's vector and a simdgroup; rows that fill their chunks, and do not.
        cases += [replace(usual, vocabulary=vocabulary) for vocabulary in (1, 7, 31, 32, 33, 257, 1025)]
        cases += [replace(usual, shape=(rows, 24)) for rows in (1, 4, 5, 8)]
        cases += [replace(usual, shape=(33, columns), chunk=32) for columns in (1, 31, 33)]
        cases += [
            replace(usual, shape=(2, 3, 5, 24)),
            replace(usual, shape=(24,), ignored="none"),
            replace(usual, chunk=None),
            replace(usual, chunk=1),
            replace(usual, biased=False, weighted=False),
            *(replace(usual, early=early) for early in ("all", "hidden")),
            *(replace(usual, early=early, options=EVERY, biased=False) for early in ("none", "all", "hidden")),
            *(replace(usual, values=values) for values in ("zeros", "ties", "1e-30", "20")),
            *(replace(usual, layout=layout) for layout in LAYOUTS[1:]),
            replace(usual, weight_layout="transposed"),
            replace(usual, weight_layout="shifted", early="all"),
        ]
    usual = LinearCrossEntropyCase((9, 24), 40)
    for ignored in ("none", "some", "all"):
        cases += [replace(usual, reduction=reduction, ignored=ignored) for reduction in ("sum", "none")]
        cases += [replace(usual, reduction="sum", ignored=ignored, early=early) for early in ("all", "hidden")]
    cases += [replace(usual, ignored="all", early=early) for early in ("none", "all", "hidden")]
    cases += [replace(usual, options=Options(ignore_index=3)), replace(usual, reduction="none", options=EVERY)]
    for weight_dtype in (mx.float16, mx.bfloat16):
        cases += [replace(usual, weight_dtype=weight_dtype), replace(usual, weight_dtype=weight_dtype, early="all")]
        cases += [replace(usual, dtype=weight_dtype, weight_dtype=mx.float32, early=early) for early in ("none", "all")]
    cases.append(replace(usual, shape=(1030, 8), vocabulary=12, chunk=None))
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    LinearCrossEntropyCase((rows, 256), vocabulary, dtype, chunk=None, early=early, biased=False, weighted=False)
    for dtype in (mx.float32, mx.bfloat16)
    for rows, vocabulary in ((2048, 2048), (512, 32000))
    for early in ("none", "all")
)

TRAFFIC: Final = (
    LinearCrossEntropyCase((512, 8), 1000, chunk=128, biased=False, weighted=False, ignored="none"),
    LinearCrossEntropyCase((96, 8), 4096, chunk=32, biased=False, weighted=False, ignored="none"),
    LinearCrossEntropyCase((16, 8), 32000, mx.bfloat16, chunk=8, biased=False, weighted=False, ignored="none"),
)
