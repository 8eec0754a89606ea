"""Frequencies of stretched contexts against those that transformers computes for the published models."""

from forge_mlx.models.rope_scaling import RopeScaling, scaled_periods
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = {
    "llama-3.1": (128, 5e5, {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8192}),
    "llama-3.2-1b": (64, 5e5, {"kind": "llama3", "factor": 32.0, "original_max_seq_len": 8192}),
    "llama3-other-bounds": (
        *(64, 1e4),
        {"kind": "llama3", "factor": 3.0, "original_max_seq_len": 99, "low_freq_factor": 0.5, "high_freq_factor": 9.0},
    ),
    "qwen2.5": (128, 1e6, {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 32768}),
    "yarn-other-bounds": (
        *(96, 1e4),
        {"kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "beta_fast": 64.0, "beta_slow": 2.0},
    ),
    "yarn-attention-factor": (
        *(64, 1e4),
        {"kind": "yarn", "factor": 16.0, "original_max_seq_len": 2048, "attention_factor": 0.7},
    ),
    # The ramp ends before it begins, or where it begins.
    "yarn-tiny-length": (64, 1e4, {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 2}),
    "yarn-short-length": (64, 1e4, {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 7}),
    "yarn-factor-1": (64, 1e4, {"kind": "yarn", "factor": 1.0, "original_max_seq_len": 64}),
}


def of_transformers(size, base, keys):
    keys = dict(keys)
    kind, length = keys.pop("kind"), keys.pop("original_max_seq_len")
    if kind == "llama3":
        keys = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **keys}
    parameters = {"rope_type": kind, "rope_theta": base, "original_max_position_embeddings": length, **keys}
    factor = int(keys["factor"])
    config = transformers.LlamaConfig(
        head_dim=size, max_position_embeddings=factor * length, rope_parameters=parameters
    )
    inverse, attention = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return inverse.double().numpy(), attention


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_factor_are_those_of_transformers(name):
    size, base, keys = CASES[name]
    scaling = RopeScaling(**keys)
    want, factor = of_transformers(size, base, keys)
    periods = scaled_periods(scaling, size, base)
    assert periods.dtype == np.float32
    # They compute in float32.
    assert np.abs(periods.astype(np.float64) * want - 1).max() <= 2e-6
    assert scaling.rotation_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5"])
def test_fast_pairs_stay_and_slow_ones_are_divided(name):
    size, base, keys = CASES[name]
    ratio = scaled_periods(RopeScaling(**keys), size, base) / base ** (np.arange(0, size, 2) / size)
    assert ratio[0] == pytest.approx(1, rel=1e-6)
    assert ratio[-1] == pytest.approx(keys["factor"], rel=1e-6)
    assert (np.diff(ratio) >= -1e-5).all()
    assert ((ratio > 1.01) & (ratio < 0.99 * keys["factor"])).any()
