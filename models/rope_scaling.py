"""Rotary frequencies of a context that was stretched: Llama 3.1's scaling and YaRN."""

import math
from typing import Final, Literal

from forge_mlx._config import Section
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

_KEYS_OF_KIND: Final = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor"),
}
# How wide YaRN's ramp is at least, in pairs.
_NARROWEST_RAMP: Final = 0.001


class RopeScaling(Section):
    """How rotary frequencies change for a context `factor` times as long as that of the pre-training."""

    kind: Literal["llama3", "yarn"] = Field(description="Llama 3.1's scaling, or YaRN (arXiv:2309.00071).")
    factor: float = Field(ge=1, description="How many times longer the context becomes.")
    original_max_seq_len: int = Field(ge=1, description="Longest sequence before that, in tokens.")
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: frequencies that turn at most so often in the original length are divided."
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: frequencies that turn at least so often in the original length stay."
    )
    beta_fast: float = Field(
        32.0, gt=0, description="yarn: frequencies that turn at least so often in the original length stay."
    )
    beta_slow: float = Field(
        1.0, gt=0, description="yarn: frequencies that turn at most so often in the original length are divided."
    )
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="yarn: factor on rotated queries and on rotated keys; null: 0.1 ln(factor) + 1.",
    )

    @property
    def rotation_factor(self) -> float:
        """Factor on rotated queries and on rotated keys, the default filled in."""
        if self.kind == "llama3":
            return 1.0
        return yarn_growth(self.factor) if self.attention_factor is None else self.attention_factor

    @model_validator(mode="after")
    def _check_kind(self) -> "RopeScaling":
        fields = type(self).model_fields
        unused = [
            name
            for kind, names in _KEYS_OF_KIND.items()
            for name in names
            if kind != self.kind and getattr(self, name) != fields[name].default
        ]
        if unused:
            raise ValueError(f"{' and '.join(unused)} must not be set with kind: {self.kind}. Remove it.")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be greater than low_freq_factor, {self.low_freq_factor}, but got "
                f"{self.high_freq_factor}. Change one of them."
            )
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast must be greater than beta_slow, {self.beta_slow}, but got {self.beta_fast}. Change one of "
                "them."
            )
        return self


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1, YaRN's factor on queries and on keys of a context that is `factor` times as long.

    Args:
        factor: How many times longer the context becomes, 1 or more.
        mscale: How much of that growth there is.
    """
    return 0.1 * mscale * math.log(factor) + 1


def scaled_periods(scaling: RopeScaling, size: int, base: float) -> NDArray[np.float32]:
    """base^(2i / size), of which each is multiplied by `factor`, left alone, or something between the two.

    With turns_i = original_max_seq_len / (2 pi base^(2i / size)), how often pair i turns in the original length, its
    frequency is (1 - s_i) / factor + s_i times what it was. For llama3 s_i is (turns_i - low_freq_factor) /
    (high_freq_factor - low_freq_factor), cut off at 0 and 1. For yarn 1 - s_i rises linearly in i, from 0 at the last
    pair that turns `beta_fast` times to 1 at the first that turns `beta_slow` times.

    Args:
        scaling: The scaling.
        size: How many elements of a head rotate, even.
        base: Base of the frequencies.

    Returns:
        `[size / 2]`, periods over 2 pi as `forge_mlx.kernels.rope` takes them, computed in float64.
    """
    periods = base ** (np.arange(0, size, 2) / size)
    turns = scaling.original_max_seq_len / (2 * np.pi * periods)
    if scaling.kind == "llama3":
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        share = 1 - _ramp(scaling, size, base)
    kept = np.clip(share, 0, 1)
    scaled: NDArray[np.float32] = (periods / ((1 - kept) / scaling.factor + kept)).astype(np.float32)
    return scaled


def _ramp(scaling: RopeScaling, size: int, base: float) -> NDArray[np.float64]:
    """How far each pair has come from the last that stays to the first that is divided by the whole factor."""

    def pair(turns: float) -> float:
        return size * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair(scaling.beta_fast)), 0)
    last = min(math.ceil(pair(scaling.beta_slow)), size - 1)
    width = last - first
    # As transformers: no width counts as a narrow ramp, and a negative one (of a tiny original length) turns it round.
    return (np.arange(size // 2) - first) / (width if width else _NARROWEST_RAMP)
