"""Folders of adapters from mlx-lm's layout to that of PEFT and back: names, transposed matrices, another config."""

from collections.abc import Mapping
import math
from pathlib import Path
import re
from typing import Any, Final

from forge_mlx.hub.adapter_folder import (
    CONFIG_FILE,
    LOOKUP_ONLY,
    AdapterFolder,
    read_folder,
    read_tensors,
    write_files,
    write_folder,
)
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.json_files import read_object
from forge_mlx.hub.pretrained import is_pretrained, read_shape
from forge_mlx.hub.safetensors_files import own_file
from forge_mlx.models.adapter_targets import num_blocks
import mlx.core as mx

_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
# The ends of PEFT's names -> part, and whether the part is a matrix, which lies the other way round there.
_LINEAR: Final = {"lora_a": ".lora_A.weight", "lora_b": ".lora_B.weight", "m": ".lora_magnitude_vector"}
_EMBEDDING: Final = {"lora_a": ".lora_embedding_A", "lora_b": ".lora_embedding_B"}
_ENDS: Final = {end: part for ends in (_LINEAR, _EMBEDDING) for part, end in ends.items()}
_TABLE: Final = "embed_tokens"
_HEAD: Final = "lm_head"
# Whether an adapter of the embedding holds for a tied head too, as it does in mlx-lm.
_TIES: Final = "ensure_weight_tying"
# A whole table that PEFT writes beside its adapter, unchanged by training.
_COPY: Final = ".base_layer.weight"
# Keys of a PEFT config with the only value that an adapter of ours can have.
_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(
        ("modules_to_save", "target_parameters", "layer_replication", "trainable_token_indices"), (None, [], {})
    ),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config"), (None,)),
}
_KNOWN_PLACE: Final = re.compile(rf"(model\.layers\.\d+\..+|model\.{_TABLE}|{_HEAD})")


def to_peft(source: Path, target: Path) -> None:
    """Write adapters of mlx-lm's layout, forge-mlx's or its own, as PEFT reads them.

    Its modules then have their names in transformers, so that `PeftModel.from_pretrained(model, target)` computes the
    same. Adapters of stacked experts, of a DoRA's embedding and of GPT-2 have no counterpart there. One of the
    embedding holds for a tied head too, as `ensure_weight_tying` says, which PEFT 0.21 reads; of a model whose head is
    not tied PEFT then warns, and computes the same.

    Args:
        source: The folder to read.
        target: The folder to write, new or empty.

    Raises:
        HubError: The source cannot be read, or holds what PEFT has not; or something is in the target.
        OSError: A file cannot be written.
    """
    content = read_folder(source)
    ties = any(map(_is_table, content.tensors)) and _HEAD not in content.tensors and not content.own.get(LOOKUP_ONLY)
    arrays: dict[str, mx.array] = {}
    for name, parts in content.tensors.items():
        _require_counterpart(name, parts, source)
        ends = _EMBEDDING if _is_table(name) else _LINEAR
        arrays |= {f"{_PREFIX}{name}{ends[part]}": mx.contiguous(array.T) for part, array in parts.items()}
        if ties and _is_table(name):
            # PEFT misses a tied head's copy where there is none.
            copied = zip(("lora_b", "lora_a"), ("lora_a", "lora_b"), strict=True)
            arrays |= {f"{_PREFIX}{_HEAD}{_LINEAR[part]}": parts[other] for part, other in copied}
    alpha = content.alpha
    config = {
        "base_model_name_or_path": content.base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": round(alpha) if math.isclose(alpha, round(alpha)) else alpha,
        "lora_dropout": content.dropout,
        "peft_type": "LORA",
        "r": content.rank,
        "target_modules": sorted(content.tensors),
        "task_type": "CAUSAL_LM",
        "use_dora": content.fine_tune_type == "dora",
        "use_rslora": content.method == "rslora",
    }
    write_files(target, arrays, _WEIGHTS, config | ({_TIES: True} if ties else {}), "pt")


def from_peft(source: Path, target: Path) -> int:
    """Write adapters of PEFT's layout as mlx-lm and `load_adapters` read them.

    Without `ensure_weight_tying` PEFT adapts the embedding alone, and not a head that is tied to it, which mlx-lm's
    layout cannot say: that is an error where the model's folder is here, else when `load_adapters` meets such a model.

    Args:
        source: The folder to read, with `adapter_model.safetensors`.
        target: The folder to write, new or empty.

    Returns:
        How many whole embedding tables, which PEFT writes beside their adapters, were left out.

    Raises:
        HubError: The source cannot be read, or holds what mlx-lm's layout has not; or something is in the target.
        OSError: A file cannot be written.
    """
    values = _read_config(source)
    tensors = read_tensors(source / _WEIGHTS)
    modules: dict[str, dict[str, mx.array]] = {}
    copies = [name for name in tensors if name.endswith(_COPY)]
    for name, array in tensors.items():
        if name in copies:
            continue
        # Older versions name the magnitudes as a module.
        plain = name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name
        end = next((each for each in _ENDS if plain.endswith(each)), None)
        if end is None or not plain.startswith(_PREFIX):
            raise HubError(f"{source / _WEIGHTS}: a tensor must be of a LoRA or DoRA adapter but there is {name}.")
        module = plain.removeprefix(_PREFIX).removesuffix(end)
        modules.setdefault(module, {})[_ENDS[end]] = mx.contiguous(array.T)
    for name, parts in modules.items():
        _require_counterpart(name, parts, source)
    is_lookup_only = _has_table_alone(modules, values, source)
    rank, use_rslora, use_dora = values["r"], bool(values.get("use_rslora")), bool(values.get("use_dora"))
    method = "dora" if use_dora else "rslora" if use_rslora else "lora"
    content = AdapterFolder(
        modules,
        "dora" if use_dora else "lora",
        rank,
        values["lora_alpha"] / (math.sqrt(rank) if use_rslora else rank),
        float(values.get("lora_dropout") or 0.0),
        values.get("base_model_name_or_path"),
        {"adapter": {"method": method}} | ({LOOKUP_ONLY: True} if is_lookup_only else {}),
    )
    names = sorted(modules)
    write_folder(target, content, keys=names, num_layers=num_blocks([name.removeprefix("model.") for name in names]))
    return len(copies)


def _read_config(folder: Path) -> dict[str, Any]:
    if not own_file(folder, CONFIG_FILE).is_file():
        raise HubError(f"{folder}: must be a folder of PEFT's adapters but has no {CONFIG_FILE}.")
    if not own_file(folder, _WEIGHTS).is_file():
        pickled = (
            " adapter_model.bin is a pickle, which can run code and is not read."
            * (folder / "adapter_model.bin").is_file()
        )
        raise HubError(f"{folder}: must be a folder of PEFT's adapters but has no {_WEIGHTS}.{pickled}")
    file = folder / CONFIG_FILE
    values = read_object(file)
    if "peft_type" not in values:
        raise HubError(f"{file}: peft_type must be LORA but is missing. Is it a folder of PEFT's?")
    for key, allowed in _ONLY.items():
        if key in values and values[key] not in allowed:
            raise HubError(f"{file}: {key} must be {allowed[0]!r} to be converted but got {values[key]!r}.")
    for key in ("r", "lora_alpha"):
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int if key == "r" else (int, float)) or value <= 0:
            raise HubError(f"{file}: {key} must be a number greater than 0 but got {value!r}.")
    return values


def _has_table_alone(modules: dict[str, dict[str, mx.array]], values: Mapping[str, Any], source: Path) -> bool:
    """Whether the embedding has an adapter that a tied head has not; a tied head's copy of it is taken out."""
    table = next((parts for name, parts in modules.items() if _is_table(name)), None)
    if table is None:
        return False
    if values.get(_TIES):
        head = modules.get(_HEAD, {})
        if head.keys() == table.keys() and all(
            mx.array_equal(head[ours], table[theirs].T) for ours, theirs in (("lora_a", "lora_b"), ("lora_b", "lora_a"))
        ):
            del modules[_HEAD]
        return False
    base = values.get("base_model_name_or_path")
    folder = Path(base) if isinstance(base, str) else None
    if folder is not None and folder.exists() and is_pretrained(folder) and read_shape(folder).tie_embeddings:
        raise HubError(
            f"{source / CONFIG_FILE}: {_TIES} must be true for an adapter of {_TABLE} in {base}, whose head is tied to "
            "it, but is not: mlx-lm's layout has no adapter of the lookup alone. Train it anew with it, or without "
            f"{_TABLE} among the targets."
        )
    return True


def _is_table(name: str) -> bool:
    return name.rpartition(".")[2] == _TABLE


def _require_counterpart(name: str, parts: Mapping[str, mx.array], source: Path) -> None:
    """Raise where the two layouts do not mean the same."""
    if _KNOWN_PLACE.fullmatch(name) is None:
        raise HubError(
            f"{source}: adapters must be of linear layers with the names that Llama's have in transformers, or of "
            f"{_TABLE}, but there are some of {name}."
        )
    if any(array.ndim > 2 for array in parts.values()):
        raise HubError(f"{source}: adapters must be of single matrices but {name} has stacked experts.")
    if _is_table(name) and "m" in parts:
        raise HubError(
            f"{source}: adapters of {_TABLE} must be without magnitudes but {name} has some: PEFT's belong to the "
            "columns of the table, mlx-lm's to its rows."
        )
