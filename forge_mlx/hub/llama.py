"""Models as Hugging Face's Llama folders, which mlx-lm and transformers open."""

from collections import Counter
from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any, Final

from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.llama_config import llama_config
from forge_mlx.hub.tokenizer_files import tokenizer_files
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.models.gpt import GPT
from forge_mlx.models.registry import build_model
from forge_mlx.nn.embedding import Embedding
from forge_mlx.nn.expert_linear import ExpertLinear
from forge_mlx.nn.fake_quant import FakeQuantized
from forge_mlx.nn.linear import Linear
from forge_mlx.nn.norms import RMSNorm
from forge_mlx.nn.parameters import named_arrays, named_leaves
from forge_mlx.nn.quantized import MLX_MODES, Coded, QuantizedEmbedding, QuantizedExpertLinear, QuantizedLinear
from forge_mlx.nn.router import Router
import mlx.core as mx
import mlx.nn as nn

# By class itself: what derives from one of these may compute something else.
_FLOAT: Final = {nn.Linear, Linear, nn.Embedding, Embedding, RMSNorm, ExpertLinear, Router}
_QUANTIZED: Final = {
    *(nn.QuantizedLinear, QuantizedLinear),
    *(nn.QuantizedEmbedding, QuantizedEmbedding),
    QuantizedExpertLinear,
}
# Where a layout puts its experts, and what it calls the three matrices of each.
_MOE_PLACES: Final = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
_MIXTRAL_NAMES: Final = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

_OTHER_FORMATS: Final = (
    f"Train with weights {', '.join(MLX_MODES)} or ternary, and without activations; a checkpoint from before "
    "qat.start_step is exported as a float model. "
)

# How many of the layers that do not fit a message names.
_NAMED: Final = 4


def export_llama(
    folder: Path, model: GPT, tokenizer: Tokenizer, *, texts_begin_with_end: bool = False
) -> dict[str, Any]:
    """Write a folder that `mlx_lm.load` opens, and where nothing is quantised `transformers` too.

    The model becomes a `llama`; with qk_norm a `qwen3`; with experts a `mixtral` or a `qwen3_moe`. Arrays are written
    as they are, in their dtypes: the codes of quantised layers too, whose group size, bits and mode `config.json` names
    under `quantization` as mlx-lm does. Tokens have the ids of `tokenizer`. `config.json` is written last, so that a
    folder which a full disk cut short is no model.

    Args:
        folder: where to; made if need be, and empty.
        model: a `GPT` or an `MoE`, float or converted by `convert_qat` or `mlx.nn.quantize`.
        tokenizer: the model's.
        texts_begin_with_end: whether the end token stood before every text that the model was trained on: then the
            exported tokenizer puts it there.

    Returns:
        What `config.json` says.

    Raises:
        ValueError: the layout cannot say what the model computes, the tokenizer is no BPE model or not the model's, or
            the folder is not empty or cannot be made. Nothing is written then.
        OSError: a file cannot be written.
    """
    _require_new(folder)
    config = llama_config(model.config)
    modules = _leaves(model)
    _require_layers(modules, model)
    _require_tokens(tokenizer, config["vocab_size"])
    arrays = dict(_named_weights(model, config["model_type"], modules))
    end = tokenizer.end_id
    tokens = {"bos_token_id": end if texts_begin_with_end else None, "eos_token_id": end, "pad_token_id": None}
    config |= tokens | {"dtype": _dtype(arrays)}
    quantization = _quantization(modules, config["model_type"])
    if quantization:
        # The second is what transformers looks at: it refuses the folder then, where it would read codes as weights.
        config |= {"quantization": quantization, "quantization_config": quantization}
    files: dict[str, dict[str, Any]] = {
        **tokenizer_files(tokenizer, max_seq_len=model.config.max_seq_len, texts_begin_with_end=texts_begin_with_end),
        "generation_config.json": tokens,
        "config.json": config,
    }
    _make(folder)
    with (folder / "model.safetensors").open("wb") as file:
        mx.save_safetensors(file, arrays, {"format": "mlx"})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return config


def _require_new(folder: Path) -> None:
    # mlx-lm reads every model*.safetensors that it finds.
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"[export_llama] folder must be new or empty but got {folder}. Give another or remove it.")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"[export_llama] folder must be one that can be made but got {folder}: {error.strerror}. Give another."
        ) from error


def _require_tokens(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"[export_llama] the tokenizer must be the model's, of at most {vocab_size} tokens, but has "
            f"{tokenizer.vocab_size}. Give the one that the model was trained with."
        )


def _leaves(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules that have parameters, by their dotted names."""
    return {name: module for name, module in named_leaves(model) if module.parameters()}


def _require_layers(modules: dict[str, nn.Module], model: GPT) -> None:
    """Raise unless each layer is one that the layout has, under the name that its place has."""
    prepared = [name for name, module in modules.items() if isinstance(module, FakeQuantized)]
    if prepared:
        raise ValueError(
            f"[export_llama] the model must hold the codes that it was trained for but {prepared[0]} and "
            f"{len(prepared) - 1} more are fake-quantised. Call convert_qat first."
        )
    expected = _leaves(build_model(model.config))
    problems = [f"{name} missing" for name in expected if name not in modules]
    for name, module in modules.items():
        if name not in expected or type(module) not in _FLOAT | _QUANTIZED:
            problems.append(f"{name}: a {type(module).__name__}" + _mode(module))
        elif isinstance(module, Coded) and module.format.activations is not None:
            problems.append(f"{name}: inputs in {module.format.activations}")
    if problems:
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        # Other layers of codes are those of a model that was trained for them.
        way_out = _OTHER_FORMATS if any(isinstance(module, Coded) for module in modules.values()) else ""
        raise ValueError(
            f"[export_llama] the layers must be float or of one of MLX's quantised formats but the model has "
            f"{'; '.join(problems[:_NAMED])}{more}. {way_out}Fuse or replace these, or keep forge_mlx's own folder."
        )


def _mode(module: nn.Module) -> str:
    return f" ({module.mode})" if isinstance(module, Coded) else ""


def _named_weights(model: GPT, model_type: str, modules: dict[str, nn.Module]) -> Iterator[tuple[str, mx.array]]:
    """Each array under its name in the layout.

    An expert is a matrix of its own, as in Hugging Face's checkpoints, which mlx-lm stacks when it loads them; codes
    of experts are stacked already, as mlx-lm writes them, since it does not stack them for each layout.
    """
    stacked = any(isinstance(module, QuantizedExpertLinear) for module in modules.values())
    for name, array in named_arrays(model.parameters()):
        path = _path(name, model_type)
        if stacked or ".experts." not in name:
            yield path, array
        else:
            before, _, matrix = path.partition(".switch_mlp.")
            matrix, _, rest = matrix.partition(".")
            matrix = _MIXTRAL_NAMES[matrix] if model_type == "mixtral" else matrix
            for expert in range(array.shape[0]):
                yield f"{before}.experts.{expert}.{matrix}.{rest}", array[expert]


def _path(name: str, model_type: str) -> str:
    """The dotted name of a module or an array in mlx-lm's model."""
    if model_type in _MOE_PLACES and (".mlp.router" in name or ".mlp.experts." in name):
        name = name.replace(".mlp.", f".{_MOE_PLACES[model_type]}.")
        name = name.replace(".router", ".gate").replace(".experts.", ".switch_mlp.")
    return name if name.startswith("lm_head") else f"model.{name}"


def _quantization(modules: dict[str, nn.Module], model_type: str) -> dict[str, Any]:
    """The most frequent format, and by module those that have another; empty for a float model."""
    formats = {
        _path(name, model_type): (module.group_size, module.bits, module.mode)
        for name, module in modules.items()
        if type(module) in _QUANTIZED
    }
    if not formats:
        return {}
    (most, _), *_ = Counter(formats.values()).most_common(1)
    keys = ("group_size", "bits", "mode")
    others = {name: dict(zip(keys, each, strict=True)) for name, each in formats.items() if each != most}
    return dict(zip(keys, most, strict=True)) | others


def _dtype(arrays: dict[str, mx.array]) -> str:
    """The dtype of the floats; of several, the first of float32, bfloat16 and float16."""
    found = {array.dtype for array in arrays.values()}
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        if dtype in found:
            return dtype_name(dtype)
    raise ValueError("[export_llama] the model must have float parameters but has none. Give a whole model.")
