"""What differs between two configs of one run, and what of it its checkpoints allow."""

import json
from typing import Any

from forge_mlx.train.config import TrainConfig
from forge_mlx.train.pretrained_config import PretrainedConfig

# A checkpoint means something else when one of these changes; all other keys may change between two starts.
_FIXED_KEYS = (
    "model",
    "adapter",
    "qat",
    "preference",
    "data",
    "run.seed",
    "train.batch_size",
    "train.seq_len",
    "train.accumulate",
    "optim.name",
)
_IGNORED_KEYS = ("run.dir", "run.resume")
# Where the weights lie that a run goes on from: which ones they are, its checkpoint knows.
_PLACES = ("model.path", "model.revision")
# A section whose keys are the user's: of the patterns the last that fits counts, so that their order means something.
_ORDERED_SECTION = "qat.overrides"
# The trainer replaces null or auto in these by what it chose and writes that down.
_RESOLVED_KEYS = ("model.vocab_size", "run.device", "run.dtype")


def compare(old: TrainConfig, new: TrainConfig) -> tuple[list[str], list[str]]:
    """Keys whose values differ, as ``key: old -> new``.

    Args:
        old: as the run's folder has it.
        new: of this start; values that the trainer is still to fill in are not compared.

    Returns:
        Those that may change between two starts, and those that decide what a checkpoint means.
    """
    before, after = _flatten(anchored(old)), _flatten(anchored(new))
    changed: list[str] = []
    refused: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        filled_in = key in _RESOLVED_KEYS and after.get(key) in (None, "auto")
        if key in _IGNORED_KEYS or before.get(key) == after.get(key) or filled_in:
            continue
        fixed = key not in _PLACES and any(f"{key}.".startswith(f"{prefix}.") for prefix in _FIXED_KEYS)
        (refused if fixed else changed).append(f"{key}: {_said(before.get(key))} -> {_said(after.get(key))}")
    return changed, refused


def anchored(config: TrainConfig) -> TrainConfig:
    """The config of a run with a checkpoint's whole path, where that is here.

    Args:
        config: of a run.
    """
    if not isinstance(config.model, PretrainedConfig):
        return config
    return config.model_copy(update={"model": config.model.anchored()})


def _said(value: Any) -> str:
    """A value with the words that YAML has for it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _flatten(config: TrainConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if prefix == _ORDERED_SECTION:
            # Without any, as where the whole section above is missing.
            flat[f"{prefix} (in this order)"] = list(value) or None
            for key, inner in value.items():
                # Whole: null keeps a module in float, an empty section does not.
                said = inner and {name: chosen for name, chosen in inner.items() if chosen is not None}
                flat[f"{prefix}.{key}"] = said
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    visit("", config.model_dump(mode="json"))
    return flat
