"""Which layers of a model the patterns of an `AdapterConfig` name."""

import difflib
from fnmatch import fnmatchcase
import re
from typing import Final

from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.nn.adapted_base import kind_of
import mlx.nn as nn

_BLOCK: Final = re.compile(r"layers\.(\d+)\.")


def chosen_layers(model: nn.Module, config: AdapterConfig) -> dict[str, nn.Module]:
    """The layers that get adapters, by their names, in the order of the names.

    Args:
        model: A model without adapters.
        config: The patterns, and how many of the last blocks count.

    Raises:
        ValueError: When a pattern fits no layer that can have an adapter, or the model has fewer blocks than asked for.
    """
    possible = {name: layer for name, layer in sorted(model.named_modules()) if name and kind_of(layer) is not None}
    in_reach = _in_last_blocks(list(possible), config.layers)
    chosen = {name for pattern in config.targets for name in _matches(pattern, in_reach, possible, model)}
    return {name: layer for name, layer in possible.items() if name in chosen}


def block_of(name: str) -> int | None:
    """The number of the block that a layer is in; None: in none.

    Args:
        name: The layer's dotted name.
    """
    found = _BLOCK.match(name)
    return int(found.group(1)) if found else None


def num_blocks(names: list[str]) -> int:
    """How many blocks there are, by the names of the layers in them.

    Args:
        names: Dotted names of all layers.
    """
    return 1 + max((block for block in map(block_of, names) if block is not None), default=-1)


def _in_last_blocks(names: list[str], layers: int | None) -> list[str]:
    if layers is None:
        return names
    total = num_blocks(names)
    if layers > total:
        raise ValueError(
            f"[add_adapters] layers must be at most the number of blocks, {total}, but got {layers}. Lower it, or "
            "leave it out for all."
        )
    return [name for name in names if (block := block_of(name)) is None or block >= total - layers]


def _matches(pattern: str, names: list[str], possible: dict[str, nn.Module], model: nn.Module) -> list[str]:
    found = [name for name in names if _fits(name, pattern)]
    if found:
        return found
    modules = {name: module for name, module in sorted(model.named_modules()) if name}
    others = [name for name in modules if _fits(name, pattern) and name not in possible]
    earlier = [name for name in possible if _fits(name, pattern)]
    inside = [name for name in names if name.startswith(f"{pattern}.")]
    if earlier:
        way_out = f"{earlier[0]} is in a block before the last ones that `layers` names: raise that."
    elif inside:
        way_out = f"It is the name of what holds such layers: write {pattern}.*."
    elif others:
        way_out = f"{others[0]} is a {type(modules[others[0]]).__name__}, which takes none."
    else:
        way_out = _nearest(pattern, names)
    raise ValueError(
        f"[add_adapters] targets: a pattern must fit a layer that takes adapters but got {pattern!r}. {way_out}"
    )


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name if "." in pattern else name.rpartition(".")[2], pattern)


def _nearest(pattern: str, names: list[str]) -> str:
    # A bare pattern is near to last parts, of which each counts once.
    known = names if "." in pattern else sorted({name.rpartition(".")[2] for name in names})
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    return f"Near it are {', '.join(near)}." if near else f"There are {len(known)}, such as {', '.join(known[:3])}."
