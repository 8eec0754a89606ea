"""The layers of codes in a model folder: what ``config.json`` says of them, and a model with them from what it says."""

from collections.abc import Mapping
from typing import Any, Literal, cast

from forge_mlx._config import Section
from forge_mlx.kernels.quantize.options import Granularity, Mode, checked_options
from forge_mlx.metal.dtypes import FLOATS_BY_NAME, dtype_name
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.quantized import QUANTIZABLE, coded_layer
from forge_mlx.nn.weight_format import Activations, WeightFormat, option_arguments
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from pydantic import ValidationError, model_validator

_DtypeName = Literal["float32", "float16", "bfloat16"]


class CodedLayer(Section):
    """What a folder says of one layer of codes; options that its mode does not take are left out."""

    layer: str
    mode: Mode
    bits: int | None = None
    group_size: int | None = None
    granularity: Granularity | None = None
    dtype: _DtypeName
    activations: Activations | None = None

    @model_validator(mode="after")
    def _check_options(self) -> "CodedLayer":
        self.format()
        return self

    def format(self) -> WeightFormat:
        """The format of its codes.

        Raises:
            ValueError: the mode does not take an option.
        """
        options = checked_options("quantization", self.mode, self.bits, self.group_size, self.granularity)
        return WeightFormat(options, FLOATS_BY_NAME[self.dtype], self.activations)


def describe_layers(model: nn.Module) -> dict[str, Any]:
    """For each layer of codes its name and what a folder says of it, ready for JSON.

    Args:
        model: one that ``convert_qat`` has converted, or any other.

    Raises:
        ValueError: a layer quantises its weight in every call, so that the arrays of the model are not what it computes
            with, or is one of ``mlx.nn.quantize``.
    """
    found = {}
    for name, layer in sorted(model.named_modules()):
        if isinstance(layer, FakeQuantized) and layer.enabled:
            raise ValueError(
                f"[save_model] the model must be converted before it is saved but {name} is a {type(layer).__name__}, "
                "whose weight is not yet in codes. Call forge_mlx.models.qat.convert_qat."
            )
        if isinstance(layer, Coded):
            found[name] = _describe(layer).model_dump(exclude_none=True)
        elif isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            raise ValueError(
                f"[save_model] layers must be floating or of convert_qat but {name} is a {type(layer).__name__} of "
                "mlx.nn, for which a folder has no entry. Use forge_mlx.models.qat instead of mlx.nn.quantize."
            )
    return found


def _describe(layer: Coded) -> CodedLayer:
    format = layer.format
    return CodedLayer(
        layer=type(layer).__name__,
        **option_arguments(format.options),
        dtype=cast(_DtypeName, dtype_name(format.dtype)),
        activations=format.activations,
    )


def rebuild_layers(model: nn.Module, described: Mapping[str, Any]) -> None:
    """Replace layers of a float model by layers of codes, all zeros, as ``describe_layers`` gave them.

    Args:
        model: changed in place.
        described: what it gave.

    Raises:
        ValueError: an entry is none, or fits no layer of the model; the message begins with its key.
    """
    layers = dict(model.named_modules())
    for name, entry in described.items():
        try:
            saved = CodedLayer.model_validate(entry)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, [name, *e['loc']]))}: {e['msg']}" for e in error.errors()]
            raise ValueError("; ".join(problems)) from None
        if name not in layers:
            raise ValueError(f"{name}: the model has no such layer")
        _check_width(name, layers[name], saved)
        made = coded_layer(layers[name], None, saved.format())
        if type(made).__name__ != saved.layer:
            raise ValueError(f"{name}.layer: must be {type(made).__name__} here but got {saved.layer!r}")
        model.update_modules(tree_unflatten([(name, made)]))


def check_dtypes(model: nn.Module) -> None:
    """Raise unless the arrays of all layers of codes have the dtypes of their formats.

    Args:
        model: any model.

    Raises:
        ValueError: an array has another; the message begins with its name.
    """
    for name, layer in sorted(model.named_modules()):
        if not isinstance(layer, Coded):
            continue
        scales = layer.format.options.scale_dtype(layer.format.dtype)
        for part, dtype in {"weight": mx.uint32, "scales": scales, "biases": scales}.items():
            array = layer.get(part)
            if array is not None and array.dtype != dtype:
                raise ValueError(f"{name}.{part} must be {dtype_name(dtype)} but is {dtype_name(array.dtype)}")


def _check_width(name: str, layer: nn.Module, saved: CodedLayer) -> None:
    multiple = saved.format().options.columns_multiple
    if not isinstance(layer, QUANTIZABLE):
        raise ValueError(f"{name}: a {type(layer).__name__} has no matrix that could be in codes")
    weight = layer.weight
    if weight.shape[-1] % multiple:
        raise ValueError(
            f"{name}: the last axis of the weight must be a multiple of {multiple} but it is {weight.shape}"
        )
