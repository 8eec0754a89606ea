"""Which layers the patterns of a `QATConfig` name, and how each of them is quantised."""

from collections.abc import Mapping
from dataclasses import replace
import difflib
from fnmatch import fnmatchcase

from forge_mlx.models.qat_config import LayerQuantization, QATConfig, QATOverride
from forge_mlx.nn.adapted_base import kind_of
import mlx.nn as nn


def chosen_formats(
    where: str, model: nn.Module, candidates: Mapping[str, nn.Module], config: QATConfig
) -> dict[str, LayerQuantization]:
    """How each layer that the patterns choose is quantised, by its name, in the order of the names.

    Args:
        where: What messages begin with: the function, and the argument if the config is one of several.
        model: The model.
        candidates: The layers that can be quantised, by their names.
        config: The patterns; of the overrides that fit a layer the last counts.

    Raises:
        ValueError: When a pattern fits no candidate or has no effect, nothing is left to quantise, or a layer in two
            places would be quantised in two ways.
    """
    modules = {name: module for name, module in sorted(model.named_modules()) if name}
    names = sorted(candidates)
    picked = {name for pattern in config.modules for name in _matches(where, pattern, "modules", names, modules)}
    last = _last_overrides(where, model, modules, sorted(picked), names, config)
    chosen = {}
    for name, override in sorted(last.items()):
        if override is not None:
            how = config.merged(override)
            chosen[name] = replace(how, activations=None) if _keeps_input(model, name, modules[name]) else how
    _check_effect(where, chosen, config)
    _check_shared(where, candidates, chosen)
    return chosen


def _last_overrides(
    where: str,
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    picked: list[str],
    names: list[str],
    config: QATConfig,
) -> dict[str, QATOverride | None]:
    """The last override that fits each layer, each of them with an effect."""
    last: dict[str, QATOverride | None] = dict.fromkeys(picked, QATOverride())
    decided_by: dict[str, str] = {}
    for pattern, override in config.overrides.items():
        found = _matches(where, pattern, "overrides", picked, modules, names)
        decided_by.update(dict.fromkeys(found, pattern))
        if (
            override is not None
            and override.activations == "int8"
            and all(_keeps_input(model, name, modules[name]) for name in found)
        ):
            raise ValueError(
                f"{where} overrides: activations must be left out for {pattern!r}, which fits only the output head or "
                "embeddings, whose input stays float, but got int8. Remove it."
            )
        last.update(dict.fromkeys(found, override))
    covered = [pattern for pattern in config.overrides if pattern not in decided_by.values()]
    if covered:
        raise ValueError(
            f"{where} overrides: a pattern must decide about a layer but all that {covered[0]!r} fits are fitted by "
            "later ones, and the last counts. Move it behind them or remove it."
        )
    return last


def _matches(
    where: str,
    pattern: str,
    key: str,
    names: list[str],
    modules: Mapping[str, nn.Module],
    candidates: list[str] | None = None,
) -> list[str]:
    """Those of some names that a pattern fits, at least one; `candidates` are more, which `modules` left out."""
    found = [name for name in names if fnmatchcase(name, pattern)]
    if found:
        return found
    left_out = [name for name in candidates or [] if fnmatchcase(name, pattern)]
    others = [name for name in modules if fnmatchcase(name, pattern)]
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    if any(name.startswith(f"{pattern}.") for name in names):
        way_out = f"It is the name of what holds such layers: write {pattern}.*."
    elif left_out:
        way_out = f"{left_out[0]} is not among `modules`: add it there."
    elif others:
        way_out = f"{others[0]} is a {type(modules[others[0]]).__name__}, which stays float."
    else:
        way_out = (
            f"Near it are {', '.join(near)}." if near else f"There are {len(names)}, such as {', '.join(names[:3])}."
        )
    raise ValueError(f"{where} {key}: a pattern must fit a layer to quantise but got {pattern!r}. {way_out}")


def _keeps_input(model: nn.Module, name: str, layer: nn.Module) -> bool:
    """Whether a layer's input stays float: ids, and what the head gets, as a loss may read the head's matrix alone."""
    return kind_of(layer) == "embedding" or name == getattr(model, "head_name", None)


def _check_effect(where: str, chosen: Mapping[str, LayerQuantization], config: QATConfig) -> None:
    """Raise where nothing would be quantised of what the config asks for."""
    if not chosen:
        raise ValueError(
            f"{where} overrides: a layer must be left to quantise but null fits all that `modules` chooses. Remove an "
            "override, or train without quantisation."
        )
    if config.activations is not None and all(how.activations is None for how in chosen.values()):
        raise ValueError(
            f"{where} activations must be null where the inputs of all quantised layers stay float, as those of "
            f"embeddings and of the output head do, but got {config.activations}. Set it to null or quantise others."
        )


def _check_shared(where: str, candidates: Mapping[str, nn.Module], chosen: Mapping[str, LayerQuantization]) -> None:
    """Raise where a layer that stands in several places, and has one weight, would be quantised in several ways."""
    ways: dict[int, dict[str, LayerQuantization | None]] = {}
    for name, layer in sorted(candidates.items()):
        ways.setdefault(id(layer), {})[name] = chosen.get(name)
    for found in ways.values():
        if len(set(found.values())) > 1:
            raise ValueError(
                f"{where} a layer in several places must be quantised alike in all of them but {', '.join(found)}, "
                "which are one layer, are not. Let the same patterns fit them."
            )
