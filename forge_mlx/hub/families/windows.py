"""Sliding windows in config.json: which layers have one."""

from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.keys import Keys
from forge_mlx.models.decoder_config import DecoderConfig

_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"


def read_windows(keys: Keys, default: list[int], window: int | None = None) -> dict[str, Any]:
    """Fields of a config: sliding_window and sliding_layers; none where no layer slides.

    Args:
        keys: Those of a config.json, with num_hidden_layers.
        default: The layers that slide where `layer_types` does not say it.
        window: The family's own window, for a config.json that does not say it.

    Raises:
        HubError: `layer_types` does not name a kind for each layer.
    """
    window = keys.take("sliding_window", window)
    count = keys.count("num_hidden_layers")
    kinds = keys.take("layer_types")
    layers = [layer for layer in default if layer < count]
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_SLIDING, _FULL) for kind in kinds):
            raise HubError(
                f"{keys.where}: layer_types must be {_SLIDING} or {_FULL} for each of {count} layers but got {kinds!r}."
            )
        layers = [layer for layer, kind in enumerate(kinds) if kind == _SLIDING]
    if window is None or not layers:
        return {}
    return {"sliding_window": window, "sliding_layers": None if len(layers) == count else layers}


def read_switched_windows(keys: Keys) -> dict[str, Any]:
    """Fields of a config of Qwen's: `use_sliding_window` switches it on, for layers from `max_window_layers` on.

    Args:
        keys: Those of a config.json, with num_hidden_layers.

    Raises:
        HubError: `layer_types` does not name a kind for each layer.
    """
    first, count = keys.count("max_window_layers", 28), keys.count("num_hidden_layers")
    used = keys.take("use_sliding_window", False)
    fields = read_windows(keys, list(range(first, count)))
    return fields if used else {}


def slides(config: DecoderConfig) -> list[int]:
    """The layers with a window.

    Args:
        config: A model's config.
    """
    return [layer for layer in range(config.num_layers) if config.window_of(layer) is not None]


def layer_types(config: DecoderConfig) -> list[str]:
    """`layer_types` of a config.json.

    Args:
        config: A model's config.
    """
    return [_SLIDING if layer in slides(config) else _FULL for layer in range(config.num_layers)]


def write_switched_windows(config: DecoderConfig) -> dict[str, Any]:
    """What `read_switched_windows` reads.

    Args:
        config: A model's config.
    """
    layers = slides(config)
    return {
        "use_sliding_window": bool(layers),
        "sliding_window": config.sliding_window,
        "max_window_layers": layers[0] if layers else config.num_layers,
        "layer_types": layer_types(config),
    }
