"""Checkpoints of codes as mlx-lm writes them: `quantization` in config.json, and `scales` beside weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.latent_layout import OF_KEYS, OF_VALUES
from forge_mlx.hub.families.layout import Layout
from forge_mlx.kernels.quantize.options import Mode, Options, checked_options
from forge_mlx.nn.latent_attention import LatentAttention
from forge_mlx.nn.quantized import QUANTIZABLE, coded_layer
from forge_mlx.nn.router import Router
from forge_mlx.nn.weight_format import MLX_MODES, Packed, WeightFormat
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

_PARTS: Final = ("weight", "scales", "biases")
_KEYS: Final = {"group_size", "bits", "mode"}
# What MLX's formats with scales of a byte have: bits of a code and group size.
_OF_BYTE_SCALES: Final = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
_WORD_BITS: Final = 32


@dataclass(frozen=True)
class Quantization:
    """What config.json says of codes.

    Attributes:
        layers: Module, without what stands before its name -> its format, or False where it is float. Others have the
            format that their shapes tell, as in mlx-lm.
        where: What errors call it.
    """

    layers: Mapping[str, Options | bool]
    where: str


class Decoded(NamedTuple):
    """How many layers of which a checkpoint has codes are float here.

    Attributes:
        routers: Whose weights are float in every model.
        latents: Whose kv_b_proj a checkpoint has in two parts, with groups that one matrix cannot have.
    """

    routers: int
    latents: int


def read_quantization(values: Mapping[str, Any], layout: Layout, where: str) -> Quantization | None:
    """`quantization` of a config.json; None where it has none.

    Args:
        values: The keys of config.json.
        layout: The family's.
        where: What errors call it: the file.

    Raises:
        HubError: It is of another kind than mlx-lm's, or says something that is no format of MLX's.
    """
    said = values.get("quantization")
    if said is None:
        other = values.get("quantization_config")
        if other is None:
            return None
        if not isinstance(other, dict) or "quant_method" in other or not {"group_size", "bits"} <= other.keys():
            method = other.get("quant_method") if isinstance(other, dict) else other
            raise HubError(
                f"{where}: quantization_config must be mlx-lm's, with group_size, bits and mode, but is of {method!r}. "
                "Get the float checkpoint, or convert this one to floats."
            )
        said = other
    if not isinstance(said, dict):
        raise HubError(f"{where}: quantization must be an object but got {said!r}.")
    _options({key: said[key] for key in said.keys() & _KEYS}, f"{where}: quantization")
    layers: dict[str, Options | bool] = {}
    for name, entry in said.items():
        if isinstance(entry, dict):
            layers[layout.bare(name)] = _options(entry, f"{where}: quantization.{name}")
        elif isinstance(entry, bool):
            layers[layout.bare(name)] = entry
        elif name not in _KEYS:
            raise HubError(f"{where}: quantization.{name} must be an object, true or false but got {entry!r}.")
    return Quantization(layers, where)


def put_codes(
    model: nn.Module,
    layout: Layout,
    quantization: Quantization,
    tensors: dict[str, mx.array],
    dtype: mx.Dtype,
    where: str,
) -> Decoded:
    """Replace the layers of which a checkpoint has codes; what stays float here is decoded.

    Args:
        model: A float model, changed in place.
        layout: The family's.
        quantization: What config.json says.
        tensors: Those of the checkpoint by their names without a prefix; what is decoded is replaced.
        dtype: What the floats of the model are.
        where: What errors call the checkpoint: its folder.

    Returns:
        How many layers were decoded.

    Raises:
        HubError: The arrays of a layer fit no format, or another than config.json says, or not together.
    """
    routers, latents, replaced = 0, 0, []
    for name, layer in list[tuple[str, nn.Module]](model.named_modules()):
        if isinstance(layer, Router):
            routers += _decode(tensors, layout.place(name), layer.weight.shape[-1], quantization, dtype, where)
        if isinstance(layer, LatentAttention):
            widths = {OF_KEYS: layer.qk_nope_head_dim, OF_VALUES: layer.kv_lora_rank}
            of_layer = [
                _decode(tensors, f"{layout.place(name)}.{part}", width, quantization, dtype, where)
                for part, width in widths.items()
            ]
            latents += any(of_layer)
        if not isinstance(layer, QUANTIZABLE):
            continue
        pieces = layout.pieces(f"{name}.scales", tensors)
        piece = next((each for each in pieces if all(part in tensors for part in each.names)), None)
        said = quantization.layers.get(layout.place(name))
        if piece is None or said is False:
            continue
        parts = {part: tensors.get(piece.names[0].removesuffix("scales") + part) for part in _PARTS}
        options = _format_of(layer.weight.shape[-1], parts, said, f"{quantization.where}: {layout.place(name)}")
        replaced.append((name, coded_layer(layer, None, WeightFormat(options, dtype))))
    model.update_modules(cast(dict[str, Any], tree_unflatten(replaced)))
    return Decoded(routers, latents)


def _options(entry: Mapping[str, Any], where: str) -> Options:
    unknown = sorted(entry.keys() - _KEYS)
    if unknown:
        raise HubError(f"{where}.{unknown[0]} must be left out: a format has only {', '.join(sorted(_KEYS))}.")
    mode = entry.get("mode", "affine")
    if mode not in MLX_MODES:
        raise HubError(f"{where}.mode must be among {', '.join(MLX_MODES)} but got {mode!r}.")
    try:
        return checked_options("quantization", cast(Mode, mode), entry.get("bits"), entry.get("group_size"), None)
    except ValueError as error:
        raise HubError(f"{where}: {str(error).removeprefix('[quantization] ')}") from None


def _format_of(width: int, parts: Mapping[str, mx.array | None], said: Options | bool | None, where: str) -> Options:
    """The format that the shapes of codes and scales tell, which must be the one that config.json says of them."""
    weight, scales = parts["weight"], parts["scales"]
    if weight is None or not weight.ndim or weight.dtype != mx.uint32 or scales is None or 0 in (scales.shape or (0,)):
        raise HubError(
            f"{where}: codes must be a uint32 weight with scales but there is another thing. Convert it anew."
        )
    bits, group_size = weight.shape[-1] * _WORD_BITS // width, width // scales.shape[-1]
    mode = "affine" if scales.dtype != mx.uint8 else _OF_BYTE_SCALES.get((bits, group_size), "unknown")
    try:
        found = checked_options("quantization", cast(Mode, mode), bits, group_size, None)
    except ValueError:
        raise HubError(
            f"{where}: codes must be of one of MLX's formats but have {bits} bits in groups of {group_size}, scales in "
            f"{scales.dtype}, for a width of {width}."
        ) from None
    if isinstance(said, Options) and said != found:
        raise HubError(
            f"{where}: codes must be of the format that quantization says, {said.mode} of {said.bits} bits in groups "
            f"of {said.group_size}, but have {found.bits} bits in groups of {found.group_size}, {found.mode}."
        )
    return found


def _decode(
    tensors: dict[str, mx.array], module: str, width: int, quantization: Quantization, dtype: mx.Dtype, where: str
) -> bool:
    """Replace the codes of a module by the weight that they stand for; False where there are none."""
    said = quantization.layers.get(module)
    if f"{module}.scales" not in tensors or said is False:
        return False
    parts = {part: tensors.get(f"{module}.{part}") for part in _PARTS}
    options = _format_of(width, parts, said, f"{quantization.where}: {module}")
    weight, scales = parts["weight"], parts["scales"]
    assert weight is not None
    assert scales is not None
    biases = parts["biases"]
    if options.has_biases != (biases is not None):
        be, is_ = ("be there", "is missing") if options.has_biases else ("be left out", "is there")
        raise HubError(f"{where}: {module}.biases must {be} beside codes of the mode {options.mode} but {is_}.")
    try:
        made = WeightFormat(options, dtype).values(Packed(weight, scales, biases).scaled_for(dtype))
    except ValueError as error:
        raise HubError(f"{where}: {module}: {str(error).removeprefix('[dequantize] ')}") from None
    for part in _PARTS:
        tensors.pop(f"{module}.{part}", None)
    tensors[f"{module}.weight"] = made
    return True
