"""Rotary positions in a GGUF file: keys of the metadata, and for Llama 3.1's scaling a tensor of factors."""

from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_blocks import decode
from forge_mlx.hub.gguf_file import GGUFFile
from forge_mlx.hub.gguf_metadata import Metadata
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.rope_scaling import RopeScaling, scaled_periods, yarn_growth
import numpy as np
from numpy.typing import NDArray

FACTORS: Final = "rope_freqs.weight"
"""The tensor that each period is multiplied by."""

# All of Meta's checkpoints were stretched from this length, with these limits. The file holds only what came of them:
# another length with as many times larger limits gives the same.
_LENGTH: Final = 8192
_LLAMA3: Final[dict[str, Any]] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# How near a factor must be to count as 1, or as the largest.
_NEAR: Final = 1e-6
# How far factors may be from those of a scaling: by the arithmetic of other converters, or by rounding alone.
_CLOSE: Final = 1e-4
_SAME: Final = 2e-7


def read_rope(metadata: Metadata, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Fields of a config: rope_base, and rope_scale or rope_scaling.

    Args:
        metadata: The file's.
        file: The header.
        head_dim: Size of a head.

    Raises:
        HubError: The rotation is of a kind that the models have not.
    """
    own = metadata.own
    base = metadata.number(own("rope.freq_base"), 10000.0)
    if base <= 1:
        raise HubError(f"{file.path}: {own('rope.freq_base')} must be greater than 1 but got {base}.")
    kind = metadata.text(own("rope.scaling.type"), "none")
    if kind not in ("none", "linear", "yarn"):
        raise HubError(f"{file.path}: {own('rope.scaling.type')} must be none, linear or yarn but got {kind!r}.")
    # What the key was called before there was a type.
    factor = metadata.number(own("rope.scaling.factor"), metadata.number(own("rope.scale_linear"), 1.0))
    if factor < 1:
        raise HubError(f"{file.path}: {own('rope.scaling.factor')} must be at least 1 but got {factor}.")
    found: dict[str, Any] = {"rope_base": base}
    if FACTORS in file.tensors:
        if kind != "none":
            raise HubError(f"{file.path}: must have {FACTORS} or {own('rope.scaling.type')} but has both.")
        return found | {"rope_scaling": _llama3(file, head_dim, base)}
    if kind == "yarn":
        return found | {"rope_scaling": _yarn(metadata, factor)}
    linear = kind == "linear" or metadata.has(own("rope.scale_linear"))
    return found | ({"rope_scale": 1 / factor} if linear and factor != 1 else {})


def rope_keys(config: DecoderConfig) -> dict[str, Any]:
    """What the metadata says of a model's rotation, keys without the architecture's name.

    Args:
        config: A model's config.
    """
    keys: dict[str, Any] = {"rope.freq_base": config.rope_base, "rope.dimension_count": config.rotary_size}
    scaling = config.rope_scaling
    if config.rope_scale != 1:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 1 / config.rope_scale}
    elif scaling is not None and scaling.kind == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling.factor,
            "rope.scaling.original_context_length": scaling.original_max_seq_len,
        }
        if scaling.attention_factor is not None:
            keys["rope.scaling.attn_factor"] = scaling.attention_factor / yarn_growth(scaling.factor)
    return keys


def rope_factors(config: DecoderConfig) -> NDArray[np.float32] | None:
    """The tensor `FACTORS`, float32 `[head_dim / 2]`; None where there is none.

    Args:
        config: A model's config.
    """
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    return _factors(config.rope_scaling, config.rotary_size, config.rope_base)


def _factors(scaling: RopeScaling, size: int, base: float) -> NDArray[np.float32]:
    periods = base ** (np.arange(0, size, 2) / size)
    # Of periods that stay, rounding may leave a little less than 1.
    factors: NDArray[np.float32] = np.maximum(scaled_periods(scaling, size, base) / periods, 1).astype(np.float32)
    return factors


def _llama3(file: GGUFFile, head_dim: int, base: float) -> RopeScaling:
    tensor = file.tensors[FACTORS]
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise HubError(
            f"{file.path}: {FACTORS} must be an F32 of the shape ({head_dim // 2},) but is {tensor.type.name} of "
            f"{tensor.shape}."
        )
    factors = np.asarray(decode("F32", file.read(tensor)[None]))[0]
    if factors.min() >= 1 and np.isfinite(factors).all():
        found = _limits(factors.astype(np.float64), head_dim, base)
        rounded = {name: float(f"{value:.6g}") for name, value in found.items()}
        for limits, tolerance in ((_LLAMA3, _CLOSE), (rounded, _SAME), (found, _CLOSE)):
            # The largest one is a frequency's that is divided by the whole factor.
            scaling = RopeScaling(kind="llama3", factor=float(factors.max()), original_max_seq_len=_LENGTH, **limits)
            if np.allclose(factors, _factors(scaling, head_dim, base), rtol=tolerance, atol=0):
                return scaling
    raise HubError(
        f"{file.path}: {FACTORS} must be those of a scaling as Llama 3.1's but are others, from which none can be "
        "told. Open the Hugging Face folder."
    )


def _limits(factors: NDArray[np.float64], size: int, base: float) -> dict[str, float]:
    """low_freq_factor and high_freq_factor for which factors are these, if there are any.

    What a frequency keeps rises in a line with how often it turns in the original length, from 0 at low_freq_factor to
    1 at high_freq_factor.
    """
    turns = _LENGTH / (2 * np.pi * base ** (np.arange(0, size, 2) / size))
    largest = factors.max()
    kept = (1 / factors - 1 / largest) / (1 - 1 / largest) if largest > 1 else np.ones_like(factors)
    divided, whole = factors >= largest * (1 - _NEAR), factors <= 1 + _NEAR
    # The nearest pairs on both sides of those that lie on the line.
    slow = turns[divided].max(initial=turns.min() / 2)
    fast = turns[whole].min(initial=max(turns.max(), slow) * 2)
    between = np.flatnonzero(~divided & ~whole)
    if len(between) > 1:
        first, last = between[0], between[-1]
        slope = (kept[first] - kept[last]) / (turns[first] - turns[last])
        slow = turns[last] - kept[last] / slope if slope > 0 else slow
        fast = slow + 1 / slope if slope > 0 else fast
    elif len(between):
        # Of all lines through the one pair one that leaves room for its neighbours on both sides.
        share, place = kept[between[0]], turns[between[0]]
        slow = (max(slow, (place - share * fast) / (1 - share)) + place) / 2
        fast = slow + (place - slow) / share
    return {"low_freq_factor": float(slow), "high_freq_factor": float(fast)} if 0 < slow < fast else _LLAMA3


def _yarn(metadata: Metadata, factor: float) -> dict[str, Any]:
    own = metadata.own
    found: dict[str, Any] = {
        "kind": "yarn",
        "factor": factor,
        "original_max_seq_len": metadata.integer(own("rope.scaling.original_context_length")),
        "beta_fast": metadata.number(own("rope.scaling.yarn_beta_fast"), 32.0),
        "beta_slow": metadata.number(own("rope.scaling.yarn_beta_slow"), 1.0),
    }
    share = metadata.number(own("rope.scaling.attn_factor"), 1.0)
    return found if share == 1 else found | {"attention_factor": share * yarn_growth(factor)}
