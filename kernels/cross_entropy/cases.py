"""What cross_entropy is proved and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
import math
from typing import Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.cross_entropy import reference
from forge_mlx.kernels.cross_entropy.op import cross_entropy
from forge_mlx.kernels.cross_entropy.options import IGNORE_INDEX, Options, Reduction
from forge_mlx.kernels.cross_entropy.reduction import reduce_losses
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

USUAL: Final = Options()
EVERY: Final = Options(IGNORE_INDEX, label_smoothing=0.1, softcap=3.0, z_loss=0.01)
"""All options at once."""


@dataclass(frozen=True)
class CrossEntropyCase(OpCase):
    """cross_entropy of one input with its gradients.

    Attributes:
        shape: Shape of the logits.
        dtype: Dtype of the logits.
        options: Options of a row's loss.
        reduction: As cross_entropy takes it.
        weighted: Whether there are weights.
        ignored: How many targets are ignored: "none", "some" or "all".
        values: What the logits are, as `random_values` takes it, or "masked": normal numbers, every third that is not
            the target's -inf; or "low": around -1000.
        layout: How the logits lie in memory, as `laid_out` takes it.
    """

    op = "cross_entropy"

    shape: tuple[int, ...]
    dtype: mx.Dtype = mx.float32
    options: Options = USUAL
    reduction: Reduction = "mean"
    weighted: bool = True
    ignored: str = "some"
    values: str = "normal"
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = ["x".join(map(str, self.shape)), dtype_name(self.dtype)]
        for key in ("ignore_index", "label_smoothing", "softcap", "z_loss"):
            if (value := getattr(self.options, key)) != getattr(USUAL, key):
                parts.append(f"{key}{value:g}")
        parts += ["weights"] if self.weighted else []
        named = ((self.reduction, "mean"), (self.values, "normal"), (self.layout, "contiguous"))
        parts += [text for text, usual in named if text != usual]
        return "-".join(parts if self.ignored == "none" else [*parts, f"{self.ignored}-ignored"])

    def inputs(self) -> dict[str, mx.array]:
        """The logits and, if weighted, the weights."""
        random = np.random.default_rng(len(self.name))
        kind = "normal" if self.values in ("masked", "low") else self.values
        logits = random_values(self.shape, kind, random)
        if self.values == "low":
            logits -= 1000
        elif self.values == "masked":
            third = np.arange(self.shape[-1]) % 3 == 0
            is_target = np.arange(self.shape[-1]) == np.array(self.constants()["targets"])[..., None]
            logits[third & ~is_target] = -np.inf
        arrays = {"logits": laid_out(mx.array(logits).astype(self.dtype), self.layout)}
        if self.weighted:
            arrays["weights"] = mx.array(random.uniform(0.1, 2, self.shape[:-1]).astype(np.float32))
        return arrays

    def constants(self) -> dict[str, mx.array]:
        """The targets."""
        random = np.random.default_rng(2000 + len(self.name))
        targets = random.integers(0, self.shape[-1], self.shape[:-1])
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
        """cross_entropy of logits and weights on an engine; "mlx": mx.fast.cross_entropy, or plain operations."""
        targets, options = self.constants()["targets"], self.options

        def call(logits: mx.array, weights: mx.array | None = None) -> mx.array:
            if impl == "mlx":
                return _plain(logits, targets, weights, options, self.reduction)
            return cross_entropy(
                logits,
                targets,
                ignore_index=options.ignore_index,
                label_smoothing=options.label_smoothing,
                softcap=options.softcap,
                z_loss=options.z_loss,
                weights=weights,
                reduction=self.reduction,
                impl=impl,
            )

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The loss and the gradients by reference.py, the reduction's part of them by MLX."""
        logits, weights = inputs["logits"].astype(mx.float32), inputs.get("weights")
        targets = self.constants()["targets"]
        kept = reference.is_kept(targets, self.options.ignore_index)
        losses, parts = mx.zeros(targets.shape), mx.zeros((*targets.shape, 2))
        if targets.size:
            losses, parts = reference.row_losses(logits, targets, self.options)

        def reduced(losses: mx.array, weights: mx.array | None = None) -> mx.array:
            return reduce_losses(losses, kept, weights, self.reduction)

        primals = [losses] if weights is None else [losses, weights]
        (loss,), (dlosses, *dweights) = mx.vjp(reduced, primals, [cotangents["loss"]])
        dlogits = reference.row_gradients(logits, targets, parts, dlosses, mx.zeros_like(parts), self.options)
        results = {"loss": loss, "dlogits": dlogits.astype(self.dtype)}
        return results | {"dweights": dweights[0]} if dweights else results

    def expected(self) -> Mapping[str, np.ndarray]:
        """The loss and the gradients in float64, of the logits as the dtype has rounded them."""
        arrays = {name: to_float64(array) for name, array in self.inputs().items()}
        targets = np.array(self.constants()["targets"])
        kept = (targets != self.options.ignore_index).astype(np.float64)
        losses, gradients = token_losses(arrays["logits"], targets, self.options)
        cotangent = to_float64(self.cotangents()["loss"])
        factor = kept * arrays.get("weights", np.float64(1))
        count = factor.sum() if self.reduction == "mean" else np.float64(1)
        # Nothing kept: the mean is 0.
        share = np.divide(cotangent, count, out=np.zeros_like(cotangent), where=count != 0)
        total = losses * factor if self.reduction == "none" else np.sum(losses * factor)
        mean = np.divide(total, count, out=np.zeros_like(total), where=count != 0)
        results = {"loss": mean, "dlogits": (share * factor)[..., None] * gradients}
        dweights = share * kept * (losses - mean if self.reduction == "mean" else losses)
        return results | {"dweights": dweights} if self.weighted else results

    def ideal_bytes(self) -> dict[str, int]:
        """The logits, and their gradient, once; targets, loss, the two parts of L and cotangents are numbers of a row.

        The weights are no part of the kernels.
        """
        rows = math.prod(self.shape[:-1])
        logits = rows * self.shape[-1] * self.dtype.size
        return {"forward": logits + 16 * rows, "backward": 2 * logits + 20 * rows}


def token_losses(logits: np.ndarray, targets: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row and its gradient, written out in float64.

    Args:
        logits: `[..., V]`.
        targets: `[...]`.
        options: The options.

    Returns:
        `[...]` and `[..., V]`, both 0 where the target is ignored.
    """
    cap, smoothing, z_loss = options.softcap, options.label_smoothing, options.z_loss
    z = logits if cap is None else cap * np.tanh(logits / cap)
    slope = np.ones_like(z) if cap is None else 1 - np.tanh(logits / cap) ** 2
    kept = targets != options.ignore_index
    is_target = np.arange(z.shape[-1]) == np.where(kept, targets, 0)[..., None]
    largest = z.max(axis=-1, keepdims=True)
    lse = largest + np.log(np.exp(z - largest).sum(axis=-1, keepdims=True))
    loss = lse[..., 0] - (1 - smoothing) * z[is_target].reshape(kept.shape) + z_loss * lse[..., 0] ** 2
    if smoothing:
        loss -= smoothing * z.mean(axis=-1)
    gradient = np.exp(z - lse) * (1 + 2 * z_loss * lse) - (1 - smoothing) * is_target - smoothing / z.shape[-1]
    return np.where(kept, loss, 0), np.where(kept[..., None], gradient * slope, 0)


def _plain(
    logits: mx.array, targets: mx.array, weights: mx.array | None, options: Options, reduction: Reduction
) -> mx.array:
    """What a user of MLX would write."""
    kept = targets != options.ignore_index
    safe = mx.where(kept, targets, 0)
    z = logits.astype(mx.float32)
    if options.softcap is not None:
        z = options.softcap * mx.tanh(z / options.softcap)
    losses = mx.fast.cross_entropy(z, safe)
    if options.label_smoothing:
        target = mx.take_along_axis(z, safe[..., None], axis=-1).squeeze(-1)
        losses = losses + options.label_smoothing * (target - z.mean(axis=-1))
    if options.z_loss:
        losses = losses + options.z_loss * mx.square(mx.logsumexp(z, axis=-1))
    return reduce_losses(mx.where(kept, losses, 0.0), kept, weights, reduction)


def _cases() -> list[CrossEntropyCase]:
    cases = []
    for dtype in FLOATS:
        limit = 16384 // dtype.size
        # Around a lane's vector, a simdgroup, a threadgroup and the longest row that each thread holds one vector of.
        for columns in (1, 7, 8, 31, 32, 33, 257, 1023, 1025, limit - 1, limit, limit + 1, 2 * limit + 8):
            cases.append(CrossEntropyCase((4, columns), dtype))
        smallest = CrossEntropyCase((5, 72), dtype)
        cases += [
            replace(smallest, shape=(2, 3, 5, 24)),
            replace(smallest, shape=(67, 40)),
            replace(smallest, shape=(9,), ignored="none"),
            replace(smallest, shape=(0, 5)),
            replace(smallest, options=EVERY),
            replace(smallest, shape=(3, limit + 72), options=EVERY),
            *(
                replace(smallest, values=values)
                for values in ("zeros", "ranges", "spike", "ties", "masked", "low", "20")
            ),
            *(replace(smallest, shape=(3, columns), values="masked") for columns in (300, limit + 100)),
            *(replace(smallest, shape=(6, 48), layout=layout) for layout in LAYOUTS[1:]),
            *(replace(smallest, shape=(4, columns), layout="shifted") for columns in (264, limit + 64)),
        ]
    smallest = CrossEntropyCase((5, 72))
    for reduction in ("mean", "sum", "none"):
        for weighted in (True, False):
            for ignored in ("none", "some", "all"):
                cases.append(replace(smallest, reduction=reduction, weighted=weighted, ignored=ignored))
    cases = list(dict.fromkeys(cases))
    cases += [
        replace(smallest, options=Options(ignore_index=0)),
        replace(smallest, options=Options(label_smoothing=0.3)),
        replace(smallest, options=Options(label_smoothing=1)),
        replace(smallest, options=Options(softcap=0.5)),
        replace(smallest, options=Options(softcap=2), values="masked"),
        replace(smallest, options=Options(softcap=30), values="1e30"),
        replace(smallest, options=Options(z_loss=1e-4)),
        *(replace(smallest, values=scale) for scale in ("1e-30", "1e30")),
        *(replace(smallest, dtype=mx.bfloat16, values=scale) for scale in ("1e-30", "1e30")),
    ]
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    CrossEntropyCase(shape, dtype, weighted=False, ignored="none")
    for dtype in (mx.float32, mx.bfloat16)
    for shape in ((4096, 1024), (512, 32000), (64, 128256))
)

TRAFFIC: Final = (
    CrossEntropyCase((16384, 64), weighted=False, ignored="none"),
    CrossEntropyCase((4096, 264), mx.bfloat16, weighted=False, ignored="none"),
    CrossEntropyCase((480, 4096), weighted=False, ignored="none"),
    CrossEntropyCase((64, 32000), mx.float16, weighted=False, ignored="none"),
    CrossEntropyCase((12, 128256), mx.bfloat16, EVERY, weighted=False, ignored="none"),
)
