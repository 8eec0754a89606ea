"""Models as GGUF files, which llama.cpp and what is built on it open."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
import os
from pathlib import Path
from typing import Final, Literal, NamedTuple

from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_blocks import Codes, encode, encode_q4_1
from forge_mlx.hub.gguf_container import Outline, write_container
from forge_mlx.hub.gguf_keys import config_keys
from forge_mlx.hub.gguf_names import ROUTER, Source, sources
from forge_mlx.hub.gguf_rope import FACTORS, rope_factors
from forge_mlx.hub.gguf_vocabulary import tokenizer_keys
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.registry import build_model
from forge_mlx.nn.coded import Coded, named_shapes
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

Kind = Literal["f32", "f16", "q8_0", "q4_0"]

_MATRICES: Final[dict[Kind, str]] = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
# As llama.cpp's file_type has it: what most matrices are.
_FILE_TYPES: Final = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
_LARGEST_HALF: Final = 65504.0


class _Entry(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        type: Name of its type.
        shape: Rows first.
        parts: Parameters that make it, one above the other.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    parts: list[tuple[str, Source]]


def write_gguf(
    path: str | os.PathLike[str],
    model: GPT,
    tokenizer: TextTokenizer,
    *,
    kind: Kind,
    name: str | None = None,
    texts_begin_with_end: bool = False,
) -> dict[str, int]:
    """Write one file with a model, its tokenizer and its chat template.

    Vectors, routers and learned positions are F32 in every kind, as llama.cpp wants them. In q4_0 the embedding and the
    output head, which suffer most, are Q8_0. Rows that are no whole blocks of 32 are F16. In q8_0 and q4_0, layers of
    codes of MLX's affine mode of 4 bits with groups of 32 keep their codes, as Q4_1, whose scales and biases are
    float16; of other codes the weight that they stand for is written.

    The tokenizer is byte-level BPE of a way to cut text that llama.cpp has a name for, or SentencePiece's BPE.

    Args:
        path: A new file.
        model: A `GPT`, float or converted by `convert_qat`.
        tokenizer: The model's.
        kind: What matrices are.
        name: What the file calls the model; None: the file's name.
        texts_begin_with_end: Whether the end token stood before every text that the model was trained on; of a
            `HubTokenizer`, its files say it.

    Returns:
        How many tensors have each type.

    Raises:
        HubError: The file exists, llama.cpp would compute something else than the model or cut text otherwise than
            the tokenizer, or a value does not fit the type. Nothing is written then.
        OSError: The file cannot be written.
    """
    target = Path(path).expanduser()
    if kind not in _MATRICES:
        raise HubError(f"[write_gguf] kind must be one of {', '.join(_MATRICES)} but got {kind!r}.")
    if target.exists():
        raise HubError(f"[write_gguf] path must be a new file but {target} exists. Give another or remove it.")
    keys = config_keys(model.config)
    modules = dict(model.named_modules())
    entries = _entries(model, modules, keys["general.architecture"], kind)
    metadata = {
        **keys,
        "general.name": target.stem if name is None else name,
        "general.file_type": _file_type(entries),
        "general.quantization_version": 2,
        **tokenizer_keys(tokenizer, model.config.vocab_size or 0, texts_begin_with_end=texts_begin_with_end),
    }
    outlines = [Outline(entry.name, entry.type, entry.shape) for entry in entries]
    write_container(target, metadata, outlines, (_content(entry, model.config, modules) for entry in entries))
    return dict(Counter(entry.type for entry in entries))


def _file_type(entries: list[_Entry]) -> int:
    matrices = Counter(entry.type for entry in entries if len(entry.shape) > 1 and not entry.name.endswith(ROUTER))
    return _FILE_TYPES[matrices.most_common(1)[0][0]]


def _entries(model: GPT, modules: Mapping[str, nn.Module], architecture: str, kind: Kind) -> list[_Entry]:
    shapes = dict(named_shapes(model))
    prepared = [name for name, module in modules.items() if isinstance(module, FakeQuantized)]
    if prepared:
        raise HubError(
            f"[write_gguf] the model must hold the codes that it was trained for but {prepared[0]} and "
            f"{len(prepared) - 1} more are fake-quantised. Call convert_qat first."
        )
    expected = {name for name, _ in named_arrays(build_model(model.config).parameters())}
    if shapes.keys() != expected:
        strange = sorted(shapes.keys() ^ expected)
        raise HubError(
            f"[write_gguf] the model must have the parameters of its config but differs in {strange[0]} and "
            f"{len(strange) - 1} more. Merge adapters first."
        )
    parts: dict[str, list[tuple[str, Source]]] = {}
    for parameter, place in sources(architecture, model.config, shapes).items():
        if place is None:
            raise HubError(f"[write_gguf] every parameter must have a tensor in GGUF but {parameter} has none.")
        parts.setdefault(place.tensor, []).append((parameter, place))
    entries = []
    for tensor, made_of in parts.items():
        first = shapes[made_of[0][0]]
        shape = (sum(shapes[parameter][0] for parameter, _ in made_of), *first[1:])
        entries.append(_Entry(tensor, _type_of(tensor, shape, modules, made_of, kind), shape, made_of))
    factors = rope_factors(model.config)
    if factors is not None:
        entries.append(_Entry(FACTORS, "F32", factors.shape, []))
    return entries


def _type_of(
    tensor: str, shape: tuple[int, ...], modules: Mapping[str, nn.Module], parts: list[tuple[str, Source]], kind: Kind
) -> str:
    if len(shape) == 1 or tensor.startswith("position_embd") or tensor.endswith(ROUTER):
        return "F32"
    quantized = kind in ("q8_0", "q4_0")
    if quantized and shape[-1] % 32:
        return "F16"
    if quantized and all(keeps_codes(modules[parameter.rpartition(".")[0]]) for parameter, _ in parts):
        return "Q4_1"
    if kind == "q4_0" and tensor in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    return _MATRICES[kind]


def keeps_codes(module: nn.Module) -> bool:
    """Whether a layer's codes are in files of q8_0 and q4_0 as they are, as Q4_1.

    Args:
        module: Any layer.
    """
    if not isinstance(module, Coded):
        return False
    options = module.format.options
    return (options.mode, options.bits, options.group_size) == ("affine", 4, 32)


def _content(entry: _Entry, config: DecoderConfig, modules: Mapping[str, nn.Module]) -> NDArray[np.uint8]:
    if entry.name == FACTORS:
        factors = rope_factors(config)
        assert factors is not None
        return encode("F32", factors[None])
    pieces = [_rows(entry, config, modules, parameter, place) for parameter, place in entry.parts]
    return np.concatenate(pieces)


def _rows(
    entry: _Entry, config: DecoderConfig, modules: Mapping[str, nn.Module], parameter: str, place: Source
) -> NDArray[np.uint8]:
    """The rows that one parameter gives, in the file's order."""
    name, _, part = parameter.rpartition(".")
    module = modules[name]
    if entry.type == "Q4_1" and isinstance(module, Coded):
        rows = encode_q4_1(_codes(module, parameter))
    else:
        array = _values(module) if isinstance(module, Coded) and part == "weight" else module[part]
        offset = 1 if config.norm_offset and name.endswith("norm") else 0
        # One expert at a time, so that NumPy's copies stay small.
        matrices = array if array.ndim == 3 else array.reshape(1, array.shape[0], -1)
        pieces = (np.array(matrix.astype(mx.float32)) + np.float32(offset) for matrix in matrices)
        rows = np.concatenate([encode(entry.type, _checked(values, parameter, entry.type)) for values in pieces])
    if place.rows is None or "attn_qkv" in place.tensor:
        return rows
    return rows[np.argsort(place.rows)]


def _values(module: Coded) -> mx.array:
    """The weight of a layer of codes, which the file's type is to be the first to round."""
    return replace(module.format, dtype=mx.float32).values(module.packed().scaled_for(mx.float32))


def _checked(values: NDArray[np.float32], parameter: str, type_name: str) -> NDArray[np.float32]:
    largest = float(np.abs(values).max())
    limit = {"F32": float(np.finfo(np.float32).max), "Q8_0": 127 * _LARGEST_HALF, "Q4_0": 8 * _LARGEST_HALF}
    # False for NaN too.
    if not largest <= limit.get(type_name, _LARGEST_HALF):
        raise HubError(
            f"[write_gguf] {parameter} must have values that {type_name} can hold but the largest is {largest:g}. "
            "Write f32, or mend the weights."
        )
    return values


def _codes(module: Coded, parameter: str) -> Codes:
    packed = module.packed()
    words = np.array(packed.codes)
    nibbles = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    assert packed.biases is not None
    scales, biases = (
        _checked(np.array(array.astype(mx.float32)), parameter, "F16") for array in (packed.scales, packed.biases)
    )
    return Codes(4, nibbles.astype(np.uint8).reshape(len(words), -1), scales, biases)
