"""Adapters of a model to files and back, in the layout that mlx-lm reads and writes."""

from collections.abc import Callable
import difflib
from pathlib import Path
from typing import Any, Final

from forge_mlx._console import to_stderr
from forge_mlx._text import count
from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.adapter_folder import (
    CONFIG_FILE,
    LOOKUP_ONLY,
    PARTS,
    WEIGHTS_FILE,
    AdapterFolder,
    read_folder,
    write_folder,
)
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.layout import Layout
from forge_mlx.hub.families.registry import family_for
from forge_mlx.hub.fingerprint import say_if_other_weights
from forge_mlx.hub.router_adapters import merge_into_routers, router_places, routers_by_name
from forge_mlx.hub.safetensors_files import own_file
from forge_mlx.models.adapter_config import AdapterConfig
from forge_mlx.models.adapter_targets import block_of, num_blocks
from forge_mlx.models.adapters import adapted_layers, add_adapters
from forge_mlx.models.gpt import GPT
from forge_mlx.nn.adapted_base import kind_of, weight_shape
from forge_mlx.nn.lora import adapter_shapes
from forge_mlx.nn.router import Router
import mlx.core as mx
from mlx.utils import tree_unflatten
from pydantic import ValidationError

TEMPLATE_FILE: Final = "chat_template.jinja"
"""What holds the chat template that adapters were trained in, beside them."""

_NAMED: Final = 3
_FINGERPRINT: Final = "base_fingerprint"


def save_adapters(
    folder: Path,
    model: GPT,
    config: AdapterConfig,
    base: str,
    *,
    revision: str | None = None,
    fingerprint: str | None = None,
) -> None:
    """Write `adapters.safetensors` and `adapter_config.json`.

    `mlx_lm.load(base, adapter_path=folder)` then computes what the model does. Modules have the names that mlx-lm gives
    them in the model's family. Where mlx-lm has one layer for several of ours, as GPT-2's q, k and v, they have our
    names behind `model.`, and mlx-lm refuses them; likewise where it has several for one, as for DeepSeek-V3's
    `kv_b_proj`.

    Args:
        folder: Where to: new or empty.
        model: With adapters, of one rank and scale.
        config: What they were made with.
        base: Path or hub id of the model without them.
        revision: Of the hub.
        fingerprint: That of the base's weights, so that others can be told from them; None: they cannot.

    Raises:
        HubError: The model has no adapters, or others than the config says, or some were merged into routers, or
            something is in the folder.
        OSError: A file cannot be written.
    """
    layers = adapted_layers(model)
    if not layers:
        raise HubError("[save_adapters] model must have adapters but has none. Call add_adapters first.")
    for name, layer in layers:
        if (layer.adapter.rank, layer.adapter.scale) != (config.rank, config.scale) or ("m" in layer) != (
            config.method == "dora"
        ):
            raise HubError(
                f"[save_adapters] config must be the one that the adapters were made with but that of {name} has "
                f"{layer._extra_repr()}. Give that one."
            )
    if merged := [name for name in routers_by_name(model) if name in config.targets]:
        raise HubError(
            f"[save_adapters] routers take no adapters, so those read for them were merged, but the config names "
            f"{merged[0]}: the folder would lack them. Write the whole model: merge_adapters, then save_pretrained."
        )
    places = module_places(model)
    modules = {name: {part: layer[part] for part in PARTS if part in layer} for name, layer in layers}
    keys, num_layers = _keys([name for name, _ in layers], places)
    noted = {"revision": revision, _FINGERPRINT: fingerprint}
    content = AdapterFolder(
        {places[name]: parts for name, parts in modules.items()},
        "dora" if config.method == "dora" else "lora",
        config.rank,
        config.scale,
        config.dropout,
        base,
        {"adapter": config.model_dump(mode="json")} | {key: value for key, value in noted.items() if value is not None},
    )
    write_folder(folder, content, keys=keys, num_layers=num_layers)


def load_adapters(
    folder: Path, model: GPT, *, base: Path | None = None, log: Callable[[str], None] = to_stderr
) -> AdapterConfig:
    """Put saved adapters into a model: those of `save_adapters`, or of mlx-lm's own training.

    Routers take no adapters. Those that mlx-lm trained on them are merged into their weights: the model computes the
    same but for rounding to their dtype, and such adapters can neither be trained on nor switched off, nor saved again.

    Args:
        folder: With `adapters.safetensors` and `adapter_config.json`.
        model: Without adapters; changed in place, as by `add_adapters`.
        base: Where the model was read from; None: it is taken for the one that the adapters are for.
        log: Told in a line where the base's weights are not those that the adapters were trained on, and in one how
            many adapters were merged into routers.

    Returns:
        What they are; `targets` are the names of the layers, routers among them.

    Raises:
        HubError: A file is missing or damaged, or does not fit the model; nothing is changed then.
    """
    content, file = read_folder(folder), folder / WEIGHTS_FILE
    if content.own.get(LOOKUP_ONLY) and model.config.tie_embeddings:
        raise HubError(
            f"{folder}: the adapter of the embedding is for the lookup alone, as PEFT trained it, so the head must be "
            "a matrix of its own but is tied to the embedding. Train it anew with PEFT's ensure_weight_tying."
        )
    found = {_own_name(name, model, file): parts for name, parts in content.tensors.items()}
    if len(found) < len(content.tensors):
        raise HubError(f"{file}: two adapters must not be of one layer but {len(content.tensors)} are of {len(found)}.")
    _check_shapes(found, model, file, content.rank)
    config = _config(content, sorted(found), folder / CONFIG_FILE)
    of_routers = {name: found.pop(name) for name in routers_by_name(model) if name in found}
    if not found:
        raise HubError(
            f"{file}: there must be adapters of other layers than routers but all are of routers. Let mlx_lm.fuse "
            "merge them."
        )
    try:
        add_adapters(model, config.model_copy(update={"targets": sorted(found)}), seed=0)
    except ValueError as error:
        raise HubError(f"{file}: {error}") from None
    if of_routers:
        merge_into_routers(model, of_routers, config)
        log(f"{folder}: {count(len(of_routers), 'adapter')} of routers merged into their weights: routers take none")
    arrays = [(f"{name}.{part}", array) for name, parts in found.items() for part, array in parts.items()]
    model.update(tree_unflatten([(name, array.astype(mx.float32)) for name, array in arrays]))
    if base is not None:
        say_if_other_weights(folder, base, content.own.get(_FINGERPRINT), log)
    return config


def with_own_template(folder: Path, tokenizer: HubTokenizer) -> HubTokenizer:
    """The tokenizer with the chat template that lies beside adapters; as it is where there is none.

    Args:
        folder: Of adapters.
        tokenizer: Of the model that they are for.

    Raises:
        HubError: It cannot be read.
        ValueError: It is no Jinja.
    """
    file = own_file(folder, TEMPLATE_FILE)
    if not file.is_file():
        return tokenizer
    try:
        return tokenizer.with_chat_template(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise HubError(f"{file}: cannot be read: {error}.") from None


def module_places(model: GPT) -> dict[str, str]:
    """What mlx-lm calls each layer that can have an adapter, by our name; adapted layers are one each.

    Args:
        model: Any model.
    """
    adapted = dict(adapted_layers(model))
    names = [
        name
        for name, module in sorted(model.named_modules())
        if name in adapted or (kind_of(module) is not None and name.rpartition(".")[0] not in adapted)
    ]
    layout = _layout(model)
    places = {name: layout.module(name, coded=True) for name in names}
    taken = list(places.values())
    return {
        name: place if taken.count(place) == 1 else Layout().module(name, coded=True) for name, place in places.items()
    }


def _layout(model: GPT) -> Layout:
    try:
        return family_for(model.config).layout
    except HubError:
        # A model of no family has a folder of forge-mlx's alone, and Llama's names.
        return Layout()


def _own_name(place: str, model: GPT, file: Path) -> str:
    layout = _layout(model)
    places = module_places(model) | router_places(model, layout)
    ours = {layout.bare(each): name for name, each in places.items()}
    found = ours.get(layout.bare(place))
    if found is None:
        near = difflib.get_close_matches(layout.bare(place), list(ours), n=1, cutoff=0.4)
        raise HubError(
            f"{file}: each adapter must be of a layer of the model but there is one of {place}"
            f"{f', nearest to {near[0]}' if near else ''}. Is it of another model?"
        )
    return found


def _check_shapes(found: dict[str, Any], model: GPT, file: Path, rank: int) -> None:
    modules = dict(model.named_modules())
    problems = []
    for name, parts in found.items():
        kind = "linear" if isinstance(modules[name], Router) else kind_of(modules[name])
        assert kind is not None
        weight = weight_shape(modules[name])
        wanted = dict(zip(PARTS, (*adapter_shapes(kind, weight, rank), weight[-2:-1]), strict=True))
        problems += [
            f"{name}.{part} {array.shape} instead of {wanted[part]}"
            for part, array in parts.items()
            if array.shape != wanted[part]
        ]
    if problems:
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise HubError(f"{file}: shapes must fit the model but there are {'; '.join(problems[:_NAMED])}{more}.")


def _config(content: AdapterFolder, names: list[str], file: Path) -> AdapterConfig:
    try:
        return AdapterConfig(
            method=content.method,
            rank=content.rank,
            alpha=content.alpha,
            dropout=content.dropout,
            targets=names,
        )
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise HubError(f"{file}: describes no adapters: {'; '.join(problems)}.") from None


def _keys(chosen: list[str], places: dict[str, str]) -> tuple[list[str], int]:
    """What mlx-lm is to be told: which modules get adapters, and in how many of the last blocks.

    Names in a block, as mlx-lm writes them itself, where the same modules of each of the last blocks are chosen; else
    whole names.
    """
    total = num_blocks(list(places))
    blocks = {block for name in chosen if (block := block_of(name)) is not None}
    first = min(blocks, default=total)
    inside = {name: _inside(name, places[name]) for name in places}
    keys = {key for name in chosen if (key := inside[name]) is not None}
    expected = {
        name for name, key in inside.items() if key in keys and (block := block_of(name)) is not None and block >= first
    }
    in_blocks = {name for name in chosen if block_of(name) is not None}
    if expected == in_blocks:
        elsewhere = [places[name] for name in chosen if name not in in_blocks]
        return [*sorted(keys), *elsewhere], total - first
    return [places[name] for name in chosen], total - first


def _inside(name: str, place: str) -> str | None:
    """The name of a module inside its block; None: it is in none, or its place is not numbered as its block is."""
    block = block_of(name)
    _, found, inside = place.partition(f".{block}.")
    return inside if block is not None and found else None
