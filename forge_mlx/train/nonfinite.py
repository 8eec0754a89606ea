"""When the loss is no longer a number: find where it began."""

from typing import Any

from forge_mlx.data.batch import Batch
from forge_mlx.nn.parameters import cast_floats, named_arrays
from forge_mlx.train.objective import batch_arrays, document_arguments
import mlx.core as mx
import mlx.nn as nn

Tree = dict[str, Any]


def nonfinite_arrays(tree: Tree) -> list[str]:
    """Names of the arrays that hold an infinity or NaN, in the tree's order."""
    flags = {name: mx.all(mx.isfinite(array)) for name, array in named_arrays(tree)}
    mx.eval(flags)
    return [name for name, finite in flags.items() if not finite.item()]


class _Recorder(nn.Module):
    """Stands in for a layer and notes whether its output is finite."""

    def __init__(self, layer: nn.Module, name: str, found: list[str]) -> None:
        super().__init__()
        self._layer, self._name, self._found = layer, name, found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._layer(*args, **kwargs)
        if not self._found and not mx.all(mx.isfinite(output)).item():
            self._found.append(self._name)
        return output


def first_bad_layer(model: nn.Module, batch: Batch) -> str | None:
    """Name of the first of ``model.layers`` whose output is not finite, ``head`` if only the logits are not.

    Args:
        model: a decoder with a list ``layers``.
        batch: rows of tokens.
    """
    found: list[str] = []
    layers = model.layers
    model.layers = [_Recorder(layer, f"layers.{i}", found) for i, layer in enumerate(layers)]
    inputs, _, _, segment_ids, positions, *_ = batch_arrays(batch)
    try:
        logits = model(inputs, **document_arguments(segment_ids, positions))
    finally:
        model.layers = layers
    if found:
        return found[0]
    return None if mx.all(mx.isfinite(logits)).item() else "head"


def describe_nonfinite(model: nn.Module, batches: list[Batch], grads: Tree, dtype: mx.Dtype) -> str:
    """One sentence that says where the first value that is not finite stands.

    Args:
        model: with the weights *before* the update.
        batches: of the failed step.
        grads: the gradients of the failed step.
        dtype: of the forward pass: float16 overflows where float32 does not.
    """
    params = model.parameters()
    if bad := nonfinite_arrays(params):
        return f"the first bad parameter is {bad[0]}"
    model.update(cast_floats(params, dtype))
    try:
        for batch in batches:
            if layer := first_bad_layer(model, batch):
                return f"all parameters are finite; the first bad output is that of {layer}"
    finally:
        model.update(params)
    if bad := nonfinite_arrays(grads):
        # The backward pass goes from the last parameter to the first and spreads what is bad on its way.
        return f"all parameters and activations are finite; the bad gradient nearest to the loss is that of {bad[-1]}"
    return "parameters, activations and gradients are finite; the sum over them overflowed"
