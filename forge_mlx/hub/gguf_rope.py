"""Rotary positions in a GGUF file: keys of the metadata, and for Llama 3.1's scaling a tensor of factors."""

import math
from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_blocks import decode
from forge_mlx.hub.gguf_file import GGUFFile
from forge_mlx.hub.gguf_metadata import Metadata
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.rope_scaling import RopeScaling, scaled_periods
import numpy as np
from numpy.typing import NDArray

FACTORS: Final = "rope_freqs.weight"
"""The tensor that each period is multiplied by."""

# All of Meta's checkpoints were stretched from this length, with these limits; the file holds only what came of them.
_LLAMA3: Final[dict[str, Any]] = {"original_max_seq_len": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


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
            keys["rope.scaling.attn_factor"] = scaling.attention_factor / _yarn_factor(scaling.factor)
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
        # The largest one is a frequency's that is divided by the whole factor.
        scaling = RopeScaling(kind="llama3", factor=float(factors.max()), **_LLAMA3)
        if np.allclose(factors, _factors(scaling, head_dim, base), rtol=1e-4, atol=0):
            return scaling
    raise HubError(
        f"{file.path}: {FACTORS} must be those of Llama 3.1's scaling but are others, from which the scaling cannot be "
        "told. Open the Hugging Face folder."
    )


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
    return found if share == 1 else found | {"attention_factor": share * _yarn_factor(factor)}


def _yarn_factor(factor: float) -> float:
    return 0.1 * math.log(factor) + 1
