"""A folder of adapters in mlx-lm's layout: `adapters.safetensors`, and `adapter_config.json` with their scale."""

from collections.abc import Mapping
from dataclasses import dataclass, field
import json
import math
from pathlib import Path
from typing import Any, Final, Literal

from forge_mlx._text import one_line
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.json_files import read_object
from forge_mlx.hub.new_folder import new_folder
from forge_mlx.hub.safetensors_files import check_header, own_file, write_tensors
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapters.safetensors"
PARTS: Final = ("lora_a", "lora_b", "m")
"""Parameters of an adapter; m is that of DoRA alone."""
LOOKUP_ONLY: Final = "lookup_only"
"""What forge-mlx notes of an embedding's adapter that a head tied to it has not, as PEFT's may be."""

_TYPES: Final = ("lora", "dora")
_OWN_KEY: Final = "forge_mlx"


@dataclass(frozen=True)
class AdapterFolder:
    """What a folder of adapters holds.

    Attributes:
        tensors: For each module, as the folder names it, its parameters by `PARTS`.
        fine_tune_type: "lora" or "dora".
        rank: Columns of all A.
        scale: Factor of A B.
        dropout: That of training.
        base: Path or hub id of the model that they belong to; None: not said.
        own: What forge-mlx has noted beside what mlx-lm reads.
    """

    tensors: Mapping[str, Mapping[str, mx.array]]
    fine_tune_type: Literal["lora", "dora"]
    rank: int
    scale: float
    dropout: float = 0.0
    base: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> Literal["lora", "dora", "rslora"]:
        """As `AdapterConfig` has it; rslora only where forge-mlx has noted it, as mlx-lm knows the scale alone."""
        noted = self.own.get("adapter")
        is_rslora = isinstance(noted, Mapping) and noted.get("method") == "rslora"
        return "rslora" if is_rslora and self.fine_tune_type == "lora" else self.fine_tune_type

    @property
    def alpha(self) -> float:
        """The factor of A B before the method divides it by the rank, or by its root."""
        return self.scale * (math.sqrt(self.rank) if self.method == "rslora" else self.rank)


def write_folder(folder: Path, content: AdapterFolder, *, keys: list[str], num_layers: int) -> None:
    """Write a folder that `mlx_lm.load(base, adapter_path=folder)` reads.

    Args:
        folder: New or empty.
        content: What to write.
        keys: The modules that mlx-lm gives adapters: in each of the last blocks by their name in there, or whole names.
        num_layers: How many last blocks these are.

    Raises:
        HubError: Something is in the folder, or it cannot be made.
        OSError: A file cannot be written.
    """
    arrays = {f"{name}.{part}": array for name, parts in content.tensors.items() for part, array in parts.items()}
    values = {
        "model": content.base,
        "fine_tune_type": content.fine_tune_type,
        "num_layers": num_layers,
        "lora_parameters": {
            "rank": content.rank,
            "scale": content.scale,
            "dropout": content.dropout,
            "keys": keys,
        },
    }
    if content.own:
        values[_OWN_KEY] = dict(content.own)
    write_files(folder, arrays, WEIGHTS_FILE, values, "mlx")


def write_files(folder: Path, arrays: dict[str, mx.array], name: str, config: Mapping[str, Any], format: str) -> None:
    """Write adapters and their config; the folder is there whole or not at all.

    Args:
        folder: New or empty.
        arrays: By their names in the file.
        name: Of the file of arrays.
        config: What `adapter_config.json` says.
        format: What the file of arrays says that it was written for.

    Raises:
        HubError: Something is in the folder, or it cannot be made.
        OSError: A file cannot be written.
    """
    with new_folder(folder, "save_adapters") as begun:
        write_tensors(begun / name, arrays, {"format": format})
        text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        (begun / CONFIG_FILE).write_text(text, encoding="utf-8")


def read_folder(folder: Path) -> AdapterFolder:
    """Read what mlx-lm's or forge-mlx's training wrote.

    Args:
        folder: With both files.

    Raises:
        HubError: One of them is missing, damaged, or says something that no adapter is.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not own_file(folder, name).is_file():
            raise HubError(f"{folder}: must be a folder of adapters but has no {name}.{_other_layout(folder)}")
    file = folder / CONFIG_FILE
    values = read_object(file)
    kind = values.get("fine_tune_type", "lora")
    if kind == "full":
        raise HubError(f"{file}: fine_tune_type must be lora or dora but is full: it holds whole weights, no adapters.")
    if kind not in _TYPES:
        raise HubError(f"{file}: fine_tune_type must be lora or dora but got {kind!r}.")
    parameters = values.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise HubError(f"{file}: lora_parameters must be an object with rank and scale but got {parameters!r}.")
    scale = _number(file, parameters, "scale", None)
    dropout = _number(file, parameters, "dropout", 0.0)
    tensors = read_tensors(folder / WEIGHTS_FILE)
    modules = _by_module(folder / WEIGHTS_FILE, tensors, kind)
    rank = _common_rank(folder / WEIGHTS_FILE, modules)
    if parameters.get("rank", rank) != rank:
        raise HubError(
            f"{file}: lora_parameters.rank must be that of the tensors, {rank}, but got {parameters['rank']!r}."
        )
    base, own = values.get("model"), values.get(_OWN_KEY)
    return AdapterFolder(
        modules,
        kind,
        rank,
        scale,
        dropout,
        base if isinstance(base, str) else None,
        own if isinstance(own, dict) else {},
    )


def read_tensors(file: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file in the order of their names; its header is checked against its length first.

    Args:
        file: The file.

    Raises:
        HubError: It is damaged, or holds something else than floats.
    """
    check_header(file)
    try:
        tensors = mx.load(str(file), format="safetensors")
        assert isinstance(tensors, dict)
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:
        raise HubError(f"{file}: cannot be read: {one_line(error)}.") from None
    for name, array in tensors.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            raise HubError(f"{file}: {name} must be floats but is {dtype_name(array.dtype)}.")
    return dict(sorted(tensors.items()))


def _by_module(file: Path, tensors: Mapping[str, mx.array], kind: str) -> dict[str, dict[str, mx.array]]:
    wanted = PARTS if kind == "dora" else PARTS[:2]
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in tensors.items():
        module, _, part = name.rpartition(".")
        if part not in wanted or not module:
            raise HubError(f"{file}: a tensor of a {kind} must end with {' or '.join(wanted)} but there is {name}.")
        found.setdefault(module, {})[part] = array
    if not found:
        raise HubError(f"{file}: must hold adapters but is empty.")
    for module, parts in found.items():
        missing = [part for part in wanted if part not in parts]
        if missing:
            raise HubError(f"{file}: {module} must have {' and '.join(wanted)} but {missing[0]} is missing.")
    return found


def _common_rank(file: Path, modules: Mapping[str, Mapping[str, mx.array]]) -> int:
    ranks = {}
    for name, parts in modules.items():
        a, b = parts["lora_a"], parts["lora_b"]
        stacked = a.ndim == 3 and b.ndim == 3
        if not stacked and not (a.ndim == 2 and b.ndim == 2):
            raise HubError(f"{file}: {name} must have two matrices but lora_a is {a.shape} and lora_b is {b.shape}.")
        ranks[name] = a.shape[1]
        if b.shape[2 if stacked else 0] != ranks[name]:
            raise HubError(f"{file}: {name} must have one rank but lora_a is {a.shape} and lora_b is {b.shape}.")
    if len(set(ranks.values())) > 1:
        different = ", ".join(
            f"{rank} of {name}" for name, rank in sorted(ranks.items(), key=lambda item: item[1])[:: len(ranks) - 1]
        )
        raise HubError(f"{file}: all adapters must have one rank but there are {different}.")
    return next(iter(ranks.values()))


def _number(file: Path, values: Mapping[str, Any], key: str, default: float | None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        more = " alpha / rank is what it would be." if key == "scale" and "alpha" in values else ""
        raise HubError(f"{file}: lora_parameters.{key} must be a number but got {value!r}.{more}")
    return float(value)


def _other_layout(folder: Path) -> str:
    if (folder / "adapter_model.safetensors").is_file():
        return " It is one of PEFT's: python -m forge_mlx.adapter from-peft converts it."
    if (folder / "final" / CONFIG_FILE).is_file():
        return f" Those of this run are in {folder / 'final'}."
    return ""
