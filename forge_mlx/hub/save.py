"""Models as Hugging Face folders, which mlx-lm and transformers open."""

from collections import Counter
from collections.abc import Callable, Mapping
import json
from pathlib import Path
from typing import Any, Final

from forge_mlx._console import to_stderr
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.family import Family, different_fields, resolve
from forge_mlx.hub.families.registry import describe, family_for
from forge_mlx.hub.families.rope import one_base
from forge_mlx.hub.new_folder import new_folder
from forge_mlx.hub.savable import QUANTIZED, require_savable
from forge_mlx.hub.shards import write_shards
from forge_mlx.hub.tokenizer_class import readable_as_it_is, with_own_template
from forge_mlx.hub.tokenizer_files import tokenizer_files
from forge_mlx.hub.weights import ALWAYS_FLOAT32
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.coded import Coded
from forge_mlx.nn.parameters import named_arrays
import mlx.core as mx
import mlx.nn as nn

MAX_SHARD_BYTES: Final = 5_000_000_000
"""Largest size of a file of weights, that of transformers."""
_CALLER: Final = "save_pretrained"
_FORMAT_KEYS: Final = ("group_size", "bits", "mode")
# Keys of a source that tell of its own files: how they are stored, and which have code that none of these readers need.
_OF_FILES: Final = {"quantization", "quantization_config", "dtype", "torch_dtype", "auto_map"}
_GENERATION: Final = "generation_config.json"


def save_pretrained(
    folder: Path,
    model: GPT,
    tokenizer: HubTokenizer | Tokenizer,
    *,
    source: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    dtype: mx.Dtype | None = None,
    texts_begin_with_end: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    log: Callable[[str], None] = to_stderr,
) -> dict[str, Any]:
    """Write a folder that `mlx_lm.load` opens, and where nothing is quantised `transformers` too.

    The family is that of the source where it can say what the model computes, else the first that can. Codes of
    quantised layers are written as they are; their group size, bits and mode `config.json` names under `quantization`
    as mlx-lm does. Tokens have the ids of `tokenizer`. All of it is written beside the folder first, which a full disk
    so cannot leave half written. The end tokens of `generation_config.json` are all at which the model stops here:
    those that it had, and the one with which the chat template ends a turn.

    Args:
        folder: Where to: new or empty.
        model: A `GPT` or an `MoE`, float or converted by `convert_qat` or `mlx.nn.quantize`.
        tokenizer: The model's.
        source: config.json of the checkpoint that the model comes from: what still holds of it is kept.
        generation: generation_config.json; None or empty: the tokenizer's, else its tokens.
        dtype: What floats are rounded to, scales of codes too; None: they are written as they are. Biases that steer a
            router stay float32.
        texts_begin_with_end: For a SentencePiece tokenizer: whether the end token stood before every text that the
            model was trained on; then the written tokenizer puts it there.
        max_shard_bytes: Largest size of a file of weights; more of them have an index.
        log: Told in a line each what is new in the tokenizer's files, and what mlx-lm does not read of the folder.

    Returns:
        What `config.json` says.

    Raises:
        ValueError: No family can say what the model computes, the tokenizer is not the model's or cannot be written, or
            something is in the folder, or it cannot be made. Nothing is written then.
        OSError: A file cannot be written.
    """
    family, config = _shape(model, source)
    modules = require_savable(model)
    _require_tokens(tokenizer, config["vocab_size"])
    arrays = {name: _cast(name, array, dtype) for name, array in named_arrays(model.parameters())}
    quantization = _quantization(modules, family)
    # Lists, so that what a layout refuses is refused before anything is written.
    tensors = list(family.layout.written(arrays, coded=bool(quantization)))
    tokens, files = _tokens_and_files(tokenizer, model.config.max_seq_len, texts_begin_with_end, log)
    # What a checkpoint says of its tokens goes before what its tokenizer says.
    config = tokens | config if isinstance(tokenizer, HubTokenizer) else config | tokens
    given = dict(generation) if generation else files.get(_GENERATION)
    files[_GENERATION] = _generation(given, tokens, tokenizer, log)
    config["dtype"] = _dtype(arrays)
    if quantization:
        # The second is what transformers looks at: it refuses the folder then, where it would read codes as weights.
        config |= {"quantization": quantization, "quantization_config": quantization}
    with new_folder(folder, _CALLER) as begun:
        write_shards(begun, tensors, max_shard_bytes)
        for name, content in {**files, "config.json": config}.items():
            _write(begun / name, content)
    _warn_of_mlx_lm(model, family, log)
    return config


def _shape(model: GPT, source: Mapping[str, Any] | None) -> tuple[Family, dict[str, Any]]:
    """The family, and the keys of config.json that do not depend on how arrays are stored."""
    if not source:
        family = family_for(model.config)
        return family, family.write_config(model.config)
    described = describe(source, f"[{_CALLER}] source")
    family = described.family
    kept = {key: value for key, value in described.values.items() if key not in _OF_FILES}
    if type(described.config) is type(model.config) and not different_fields(model.config, described.config):
        if model.config.rope_scaling is not None:
            # Where it leaves something of this out, or says it in other words, mlx-lm computes something else.
            kept.pop("rope_scaling", None)
        # Whatever else it says of the shape is true; older readers may need the keys that it leaves out.
        written = family.write_config(model.config)
        return family, {**written, **one_base(kept, written), **family.constants}
    if family.differences(model.config):
        family = family_for(model.config)
    unknown = {key: value for key, value in kept.items() if key in described.unknown}
    return family, {**unknown, **family.write_config(model.config)}


def _generation(
    given: bytes | dict[str, Any] | None,
    tokens: Mapping[str, int | None],
    tokenizer: HubTokenizer | Tokenizer,
    log: Callable[[str], None],
) -> bytes | dict[str, Any]:
    """`generation_config.json`: what is given, else the tokens; with all end tokens, as it is where it has them."""
    said = json.loads(given) if isinstance(given, bytes) else dict(given or tokens)
    if not isinstance(tokenizer, HubTokenizer):
        return said
    listed = said.get("eos_token_id")
    named = listed if isinstance(listed, list) else [] if listed is None else [listed]
    new = sorted(tokenizer.stop_ids - set(named))
    if not new:
        return said if given is None else given
    if given is not None:
        names = ", ".join(map(tokenizer.token_name, new))
        log(f"{_GENERATION}: other readers are told to stop at {names} too, as the model does here")
    return {**said, "eos_token_id": [*named, *new]}


def _require_tokens(tokenizer: HubTokenizer | Tokenizer, vocab_size: int) -> None:
    needed = tokenizer.plain_vocab_size if isinstance(tokenizer, HubTokenizer) else tokenizer.vocab_size
    if needed > vocab_size:
        raise HubError(
            f"[{_CALLER}] the tokenizer must be the model's, of at most {vocab_size} tokens, but has {needed}. "
            "Give the one that the model was trained with."
        )


def _tokens_and_files(
    tokenizer: HubTokenizer | Tokenizer, max_seq_len: int, texts_begin_with_end: bool, log: Callable[[str], None]
) -> tuple[dict[str, int | None], dict[str, Any]]:
    """What config.json says of special tokens, and the tokenizer's files: bytes, or what becomes JSON."""
    if isinstance(tokenizer, HubTokenizer):
        begin, files = tokenizer.bos_id, with_own_template(tokenizer, readable_as_it_is(tokenizer.files, log), log)
    else:
        begin = tokenizer.end_id if texts_begin_with_end else None
        files = dict(tokenizer_files(tokenizer, max_seq_len=max_seq_len, texts_begin_with_end=texts_begin_with_end))
    return {"bos_token_id": begin, "eos_token_id": tokenizer.end_id, "pad_token_id": None}, files


def _quantization(modules: Mapping[str, nn.Module], family: Family) -> dict[str, Any]:
    """The most frequent format, and by module those that have another; empty for a float model."""
    formats = {
        family.layout.module(name, coded=True): (module.group_size, module.bits, module.mode)
        for name, module in modules.items()
        if type(module) in QUANTIZED
    }
    if not formats:
        return {}
    (most, _), *_ = Counter(formats.values()).most_common(1)
    others = {name: dict(zip(_FORMAT_KEYS, each, strict=True)) for name, each in formats.items() if each != most}
    return dict(zip(_FORMAT_KEYS, most, strict=True)) | others


def _cast(name: str, array: mx.array, dtype: mx.Dtype | None) -> mx.array:
    if dtype is None or name.endswith(ALWAYS_FLOAT32) or not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array.astype(dtype)


def _dtype(arrays: Mapping[str, mx.array]) -> str:
    """The dtype of the floats; of several, the first of float32, bfloat16 and float16."""
    found = {array.dtype for name, array in arrays.items() if not name.endswith(ALWAYS_FLOAT32)}
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        if dtype in found:
            return dtype_name(dtype)
    raise HubError(f"[{_CALLER}] the model must have float parameters but has none. Give a whole model.")


def _write(file: Path, content: Any) -> None:
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _warn_of_mlx_lm(model: GPT, family: Family, log: Callable[[str], None]) -> None:
    said, opened = resolve(model.config), resolve(model.config.model_copy(update=dict(family.fixed_in_mlx_lm)))
    others = [f"{name} but {opened[name]}" for name in family.fixed_in_mlx_lm if said[name] != opened[name]]
    if others:
        log(f"mlx-lm 0.32 does not open this folder: of a {family.model_type} it knows no {', no '.join(others)}")
    fields = type(model.config).model_fields
    ignored = [name for name in family.ignored_by_mlx_lm if getattr(model.config, name) != fields[name].default]
    scaling = model.config.rope_scaling
    if scaling is not None and scaling.factor == 1 != scaling.rotation_factor and "rope_scaling" not in ignored:
        ignored.append("rope_scaling.attention_factor")
    if ignored:
        log(f"mlx-lm 0.32 does not read {' and '.join(ignored)} of a {family.model_type}: there it computes without")
    cut = [name for name, module in model.named_modules() if name.endswith(".kv_b_proj") and isinstance(module, Coded)]
    if cut:
        log(
            f"mlx-lm 0.32 cuts kv_b_proj of a {family.model_type} in two and quantises both anew: there {len(cut)} "
            "layers compute something else. For equal logits leave '*.kv_b_proj' float"
        )
