"""Rotary positions in config.json: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""

from collections.abc import Mapping
import math
from typing import Any, Final

from forge_mlx.hub.errors import HubError
from forge_mlx.hub.families.keys import Keys
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.rope_scaling import RopeScaling, yarn_growth

_KINDS: Final = ("default", "linear", "llama3", "yarn")
# What a checkpoint tells of its training: nothing is computed with it.
_NOTES: Final = ("finetuned",)
_BASES: Final = ("rope_theta", "rope_local_base_freq")
# Decimals of a factor that is computed back: the rest is rounding.
_DECIMALS: Final = 12


def read_rope(keys: Keys, base: float) -> dict[str, Any]:
    """Fields of a config: rope_base, and rope_scale or rope_scaling.

    Args:
        keys: Those of a config.json.
        base: The family's own base, for a config.json that does not say it.

    Raises:
        HubError: The rotation is of a kind that the models have not.
    """
    scaling, parameters = keys.inside("rope_scaling"), keys.inside("rope_parameters")
    return _rotation(keys, scaling or parameters, base)


def read_local_rope(keys: Keys, base: float, local_base: float) -> dict[str, Any]:
    """Fields of a config whose sliding layers rotate by themselves: those of `read_rope`, and rope_local_base.

    Args:
        keys: Those of a config.json.
        base: The family's own base.
        local_base: The family's own base of the sliding layers.

    Raises:
        HubError: The rotation is of a kind that the models have not.
    """
    scaling, parameters = keys.inside("rope_scaling"), keys.inside("rope_parameters")
    local_base = _base(keys, "rope_local_base_freq", local_base)
    if parameters is None or not ("full_attention" in parameters or "sliding_attention" in parameters):
        fields = _rotation(keys, scaling or parameters, base)
        return fields | {"rope_local_base": local_base}
    fields = _rotation(keys, scaling or parameters.inside("full_attention"), base)
    sliding = parameters.inside("sliding_attention")
    if sliding is not None:
        local = _rotation(Keys({}, keys.where), sliding, local_base)
        if set(local) != {"rope_base"}:
            raise HubError(f"{sliding.where} must have rope_type 'default' but has another. There is none here.")
        local_base = local["rope_base"]
    return fields | {"rope_local_base": local_base}


def read_latent_rope(keys: Keys, base: float, head_size: int) -> dict[str, Any]:
    """Fields of a config with latent attention: those of `read_rope`, and attention_scale where YaRN changes it.

    Args:
        keys: Those of a config.json.
        base: The family's own base.
        head_size: Size of a head of queries and keys.

    Raises:
        HubError: The rotation is of a kind that the models have not.
    """
    fields = read_rope(keys, base)
    parameters = keys.inside("rope_scaling") or keys.inside("rope_parameters")
    scaling = fields.get("rope_scaling")
    if parameters is None or scaling is None or scaling["kind"] != "yarn":
        return fields
    of_all = parameters.number("mscale_all_dim", 0.0)
    if of_all:
        fields["attention_scale"] = yarn_growth(scaling["factor"], of_all) ** 2 * head_size**-0.5
    return fields


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json, which every version of its readers knows.

    Args:
        config: A model's config.
    """
    return {"rope_theta": config.rope_base, "rope_scaling": _scaling(config)}


def write_latent_rope(config: DecoderConfig) -> dict[str, Any]:
    """What `read_latent_rope` reads.

    Args:
        config: A model's config, with latent attention.
    """
    scaling, of_all = config.rope_scaling, 0.0
    if scaling is not None and scaling.factor > 1:
        growth = math.sqrt(config.score_scale * config.head_size**0.5)
        of_all = round((growth - 1) / (0.1 * math.log(scaling.factor)), _DECIMALS)
    return {"rope_theta": config.rope_base, "rope_scaling": _scaling(config, of_all)}


def one_base(source: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a source that name no other base than is written: readers differ in which they take.

    Args:
        source: Keys of a config.json.
        written: Those of the model, by `write_rope`.
    """
    kept = {key: value for key, value in source.items() if key not in _BASES or value == written.get(key)}
    base, parameters = written.get("rope_theta"), source.get("rope_parameters")
    if isinstance(parameters, dict) and parameters.get("rope_theta", base) != base:
        kept["rope_parameters"] = {**parameters, "rope_theta": base}
    return kept


def _scaling(config: DecoderConfig, mscale_all_dim: float | None = None) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None if config.rope_scale == 1 else {"rope_type": "linear", "factor": 1 / config.rope_scale}
    scaling = config.rope_scaling
    said = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
    if scaling.kind == "llama3":
        return said | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    of_attention = _attention_keys(scaling, mscale_all_dim)
    return said | {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, **of_attention}


def _attention_keys(scaling: RopeScaling, mscale_all_dim: float | None) -> dict[str, float]:
    """YaRN's factor on attention, and the two numbers that mlx-lm, which does not read it, computes the same from.

    The second of them is free where it does not change the scores, as in ordinary attention: None.
    """
    if scaling.attention_factor is None and not mscale_all_dim:
        return {}
    said = {"attention_factor": scaling.rotation_factor}
    growth = 0.1 * math.log(scaling.factor)
    if not growth:
        return said
    of_all = 1.0 if mscale_all_dim is None else mscale_all_dim
    mscale = (scaling.rotation_factor * yarn_growth(scaling.factor, of_all) - 1) / growth
    return said | {"mscale": round(mscale, _DECIMALS), "mscale_all_dim": of_all}


def _rotation(keys: Keys, parameters: Keys | None, base: float) -> dict[str, Any]:
    """Fields of one kind of layers."""
    base = _base(keys, "rope_theta", base)
    keys.only("partial_rotary_factor", 1.0)
    if parameters is None:
        return {"rope_base": base}
    fields: dict[str, Any] = {"rope_base": _base(parameters, "rope_theta", base)}
    parameters.only("partial_rotary_factor", 1.0)
    kind = parameters.take("rope_type", parameters.take("type", "default"))
    if kind not in _KINDS:
        raise HubError(
            f"{parameters.where}: rope_type must be among {', '.join(_KINDS)} but got {kind!r}: forge_mlx has no other."
        )
    if kind == "linear":
        fields["rope_scale"] = 1 / _at_least_one(parameters)
    elif kind != "default":
        fields["rope_scaling"] = _read_scaling(keys, parameters, kind)
    left = parameters.left(_NOTES) if kind != "default" else []
    if left:
        raise HubError(f"{parameters.where}: {left[0]} must be left out with rope_type {kind!r} but is there.")
    return fields


def _base(keys: Keys, key: str, default: float) -> float:
    base = keys.number(key, default)
    if base is None or not 1 < base < math.inf:
        raise HubError(f"{keys.where}: {key} must be a finite number above 1 but got {base}.")
    return base


def _at_least_one(parameters: Keys) -> float:
    factor = parameters.number("factor")
    if factor is None or not 1 <= factor < math.inf:
        raise HubError(f"{parameters.where}: factor must be a number of 1 or more but got {factor}.")
    return factor


def _read_scaling(keys: Keys, parameters: Keys, kind: str) -> dict[str, Any]:
    length = parameters.take("original_max_position_embeddings")
    parameters.require_possible("original_max_position_embeddings", length)
    fields: dict[str, Any] = {
        "kind": kind,
        "factor": _at_least_one(parameters),
        "original_max_seq_len": keys.count("max_position_embeddings") if length is None else length,
    }
    if kind == "llama3":
        options = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    else:
        options = {"beta_fast": 32.0, "beta_slow": 1.0}
        parameters.only("truncate", True)
        fields["attention_factor"] = _attention_factor(parameters, fields["factor"])
    return fields | {name: parameters.number(name, default) for name, default in options.items()}


def _attention_factor(parameters: Keys, factor: float) -> float | None:
    """As transformers computes it from what a config.json may say instead."""
    said = parameters.number("attention_factor")
    mscale, of_all = parameters.number("mscale"), parameters.number("mscale_all_dim")
    if said is not None or not (mscale and of_all):
        return said
    if factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * of_all * math.log(factor) + 1)
