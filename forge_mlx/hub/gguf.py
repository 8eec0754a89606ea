"""Models from GGUF files: codes that stay codes, or floats; the tokenizer from the metadata."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
import json
import math
import os
from pathlib import Path
from typing import Final

from forge_mlx._console import to_stderr
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.registry import family_for
from forge_mlx.hub.gguf_blocks import DECODED, GROUP, Codes, decode
from forge_mlx.hub.gguf_config import read_config
from forge_mlx.hub.gguf_file import GGUFFile, GGUFTensor
from forge_mlx.hub.gguf_names import ROUTER, Source, sources
from forge_mlx.hub.gguf_parts import read_whole
from forge_mlx.hub.gguf_rope import FACTORS
from forge_mlx.hub.gguf_tokenizer import read_tokenizer
from forge_mlx.hub.loaded import Pretrained
from forge_mlx.hub.weights import ALWAYS_FLOAT32
from forge_mlx.kernels.quantize.options import checked_options
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.registry import build_model
from forge_mlx.nn.coded import named_shapes
from forge_mlx.nn.quantized import QUANTIZABLE, coded_layer
from forge_mlx.nn.weight_format import Packed, WeightFormat
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
import numpy as np
from numpy.typing import NDArray

# How many elements are decoded at a time, so that NumPy's copies stay small.
_ELEMENTS: Final = 1 << 24
_NAMED: Final = 4
_FLOATS: Final = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_LARGEST: Final = {mx.float16: 65504.0}


def load_gguf(
    path: str | os.PathLike[str],
    *,
    dtype: mx.Dtype | None = None,
    keep_quantized: bool = True,
    log: Callable[[str], None] = to_stderr,
) -> Pretrained:
    """A model and its tokenizer from a GGUF file of llama.cpp.

    Matrices of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K stay codes: layers of MLX's affine mode with groups of 32,
    of 4 bits, or of 8 for those of 5. With dtype float32 they are exactly what the file says; scales in another dtype
    are rounded to it, which changes nothing in float16 for types whose name ends in a digit. Q6_K, whose groups of 16
    MLX has not, and floats become floats.

    Args:
        path: The file; of a split model the first of its parts.
        dtype: Of the weights, and of the weights that codes stand for; None: bfloat16 or float32 if all of the
            file's matrices are, else float16.
        keep_quantized: Whether codes stay codes; false: they become floats.
        log: Told what of the file is not used.

    Returns:
        The model in eval mode.

    Raises:
        HubError: The file is no model that can be read; the message names what is wrong.
    """
    path = Path(path).expanduser()
    file = open_gguf(path)
    config = read_config(file, log)
    tokenizer = read_fitting_tokenizer(file, config)
    architecture = file.metadata["general.architecture"]
    model = build_model(config)
    expected = dict(named_shapes(model))
    places = _places(file, architecture, config, expected)
    _fill(model, file, places, dtype or _own_dtype(file), keep_quantized)
    model.eval()
    mx.eval(model.parameters())
    family = family_for(config)
    generation = json.loads(tokenizer.files["generation_config.json"])
    return Pretrained(model, tokenizer, path, family.model_type, family.write_config(config), generation)


def read_fitting_tokenizer(file: GGUFFile, config: DecoderConfig) -> HubTokenizer:
    """The tokenizer of a file, each of whose tokens has an embedding.

    Args:
        file: The header.
        config: The model's shape.

    Raises:
        HubError: There is none, or it has more tokens than the model.
    """
    tokenizer = read_tokenizer(file)
    if tokenizer.vocab_size > (config.vocab_size or 0):
        raise HubError(
            f"{file.path}: token_embd.weight must have a row for each of {tokenizer.vocab_size} tokens but has "
            f"{config.vocab_size}."
        )
    return tokenizer


def open_gguf(path: Path) -> GGUFFile:
    """The header of a file, each of whose tensors can be read.

    Args:
        path: The file.

    Raises:
        HubError: It cannot be read.
    """
    try:
        file = read_whole(path)
    except OSError as error:
        raise HubError(f"{path}: cannot be read: {error.strerror}.") from error
    _require_readable(file)
    return file


def _require_readable(file: GGUFFile) -> None:
    unknown = Counter(tensor.type.name for tensor in file.tensors.values() if tensor.type.name not in DECODED)
    if unknown:
        first = next(tensor for tensor in file.tensors.values() if tensor.type.name in unknown)
        counts = ", ".join(f"{count} of {name}" for name, count in unknown.most_common())
        raise HubError(
            f"{file.path}: {first.name}: the type must be one of {', '.join(DECODED)} but is {first.type.name} (in "
            f"all: {counts}). Take the same model in Q8_0 or Q4_K_M, or its Hugging Face folder."
        )


def _own_dtype(file: GGUFFile) -> mx.Dtype:
    found = {
        tensor.type.name for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and not name.endswith(ROUTER)
    }
    return _FLOATS[found.pop()] if len(found) == 1 and found <= _FLOATS.keys() else mx.float16


def _places(
    file: GGUFFile, architecture: str, config: DecoderConfig, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, Source]:
    """Where each parameter lies, once every tensor is known to have its place and shape."""
    found = {name: place for name, place in sources(architecture, config, expected).items() if place is not None}
    problems = []
    for name, place in found.items():
        tensor = file.tensors.get(place.tensor)
        if tensor is None:
            problems.append(f"{place.tensor} is missing")
        elif _shape(tensor, config, place) != expected[name]:
            problems.append(f"{place.tensor} has the shape {tensor.shape}, which gives no {name} of {expected[name]}")
    used = {place.tensor for place in found.values()} | {FACTORS}
    if config.tie_embeddings:
        used.add("output.weight")
    problems += [f"{name} has no place" for name in file.tensors if name not in used]
    if problems:
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise HubError(f"{file.path}: the tensors fit no {architecture}: {'; '.join(problems[:_NAMED])}{more}.")
    return found


def _shape(tensor: GGUFTensor, config: DecoderConfig, place: Source) -> tuple[int, ...]:
    """The shape of the part of a tensor that is a parameter; of one with too few or too many rows, its own."""
    if place.rows is None:
        return tensor.shape
    rows = 3 * config.hidden_size if "attn_qkv" in place.tensor else len(place.rows)
    return (len(place.rows), *tensor.shape[1:]) if tensor.shape[0] == rows else tensor.shape


def _fill(model: GPT, file: GGUFFile, places: Mapping[str, Source], dtype: mx.Dtype, keep_quantized: bool) -> None:
    modules = dict(model.named_modules())
    floats, layers = [], []
    for name, place in places.items():
        tensor = file.tensors[place.tensor]
        module, _, part = name.rpartition(".")
        pieces = _pieces(file, tensor, place.rows)
        has_codes = _is_coded(tensor) and isinstance(modules[module], QUANTIZABLE)
        if keep_quantized and part == "weight" and has_codes:
            layers.append((module, _coded(modules[module], pieces, tensor, dtype)))
        else:
            offset = 1 if model.config.norm_offset and module.endswith("norm") else 0
            own = mx.float32 if name.endswith(ALWAYS_FLOAT32) else dtype
            array = mx.concatenate([_floats(piece, tensor, own, offset) for piece in pieces])
            floats.append((name, array.reshape(-1, *tensor.shape[1:])))
        mx.eval(floats[-1][1] if floats else [], [layer.parameters() for _, layer in layers[-1:]])
    # Biases go into the layers that take the places of the first ones.
    model.update_modules(tree_unflatten(layers))
    model.update(tree_unflatten(floats))


def _is_coded(tensor: GGUFTensor) -> bool:
    return tensor.type.name.startswith("Q") and tensor.type.name != "Q6_K"


def _pieces(file: GGUFFile, tensor: GGUFTensor, rows: NDArray[np.intp] | None) -> Iterator[NDArray[np.float32] | Codes]:
    """A tensor's rows decoded, some at a time: those of all experts in turn; of a vector each element is a row."""
    content = file.read(tensor).reshape(math.prod(tensor.shape[:-1] or tensor.shape), -1)
    if rows is not None:
        content = content[rows]
    at_a_time = max(1, _ELEMENTS // tensor.shape[-1])
    for start in range(0, len(content), at_a_time):
        yield decode(tensor.type.name, content[start : start + at_a_time])


def _floats(piece: NDArray[np.float32] | Codes, tensor: GGUFTensor, dtype: mx.Dtype, offset: int) -> mx.array:
    values = piece.values() if isinstance(piece, Codes) else piece
    return _array(values - offset if offset else values, tensor, dtype)


def _array(values: NDArray[np.float32], tensor: GGUFTensor, dtype: mx.Dtype) -> mx.array:
    largest = float(np.abs(values).max())
    # False for NaN too.
    if not largest <= _LARGEST.get(dtype, np.finfo(np.float32).max):
        raise HubError(
            f"{tensor.file}: {tensor.name}: the values must be finite in {dtype_name(dtype)} but the largest is "
            f"{largest:g}. Load it in float32, or download it again."
        )
    return mx.array(values).astype(dtype)


def _coded(
    layer: nn.Module, pieces: Iterator[NDArray[np.float32] | Codes], tensor: GGUFTensor, dtype: mx.Dtype
) -> nn.Module:
    codes, scales, biases, bits = [], [], [], 4
    for piece in pieces:
        assert isinstance(piece, Codes)
        bits = piece.bits
        codes.append(mx.array(piece.packed()))
        scales.append(_array(piece.scales, tensor, dtype))
        biases.append(_array(piece.biases, tensor, dtype))
    options = checked_options("load_gguf", "affine", bits, GROUP, None)
    packed = Packed(*(_stacked(parts, tensor) for parts in (codes, scales, biases)))
    return coded_layer(layer, packed, WeightFormat(options, dtype))


def _stacked(parts: list[mx.array], tensor: GGUFTensor) -> mx.array:
    rows = mx.concatenate(parts)
    return rows.reshape(-1, *tensor.shape[1:-1], rows.shape[-1])
