"""A model's tensors in safetensors files of a limited size, with the index that finds them."""

from collections.abc import Iterable
import json
from pathlib import Path
from typing import Final

from forge_mlx.hub.safetensors_files import write_tensors
import mlx.core as mx

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
# Readers look for the framework that the arrays are of.
_METADATA: Final = {"format": "mlx"}


def write_shards(folder: Path, tensors: Iterable[tuple[str, mx.array]], max_bytes: int) -> None:
    """Write `model.safetensors`, or shards in the order of the tensors with their index.

    Args:
        folder: Where to.
        tensors: Name and array.
        max_bytes: Largest size of a shard's data; a tensor that is larger has a shard of its own.

    Raises:
        OSError: A file cannot be written.
    """
    shards = _shards(tensors, max_bytes)
    if len(shards) == 1:
        write_tensors(folder / _SINGLE, shards[0], _METADATA)
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard, _METADATA)
        places.update(dict.fromkeys(shard, name))
    total = sum(array.nbytes for shard in shards for array in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shards(tensors: Iterable[tuple[str, mx.array]], max_bytes: int) -> list[dict[str, mx.array]]:
    shards: list[dict[str, mx.array]] = [{}]
    used = 0
    for name, array in tensors:
        if shards[-1] and used + array.nbytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = array
        used += array.nbytes
    return shards
