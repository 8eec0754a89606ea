"""DeepSeek-V3 in a stretched context: logits and gradients of transformers and mlx-lm, and folders that both open."""

import importlib
import json

from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest
from tiny_models import V, as_transformers_4, hugging_face, published, save
import torch

# Importing transformers takes seconds.
pytestmark = pytest.mark.slow

ORIGINAL = 16
TOKENS = np.random.default_rng(5).integers(0, V, (2, 3 * ORIGINAL))
# With these betas the four pairs that rotate are one that stays, one between, and two that are divided.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    **{"beta_fast": 2.0, "beta_slow": 0.05},
}
CASES = {
    "as published": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "two mscales": {**YARN, "mscale": 0.6, "mscale_all_dim": 2.5},
    "of scores alone": {**YARN, "mscale_all_dim": 1.5},
    "of rotation alone": {**YARN, "mscale": 1.5},
    "factor said": {**YARN, "attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 1.0},
    "factor said alone": {**YARN, "attention_factor": 0.8},
    "neither": YARN,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        **{"low_freq_factor": 0.05, "high_freq_factor": 2.0},
    },
}


def quiet(line: str) -> None:
    raise AssertionError(line)


def theirs_of(scaling, **changes):
    return published("deepseek_v3", rope_parameters=dict(scaling), **changes)


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def far(found, wanted):
    found, wanted = np.array(found), np.array(wanted)
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def mlx_lm_logits(folder):
    model, _ = importlib.import_module("mlx_lm.utils").load_model(folder)
    return model(mx.array(TOKENS))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_every_gradient_are_pytorch_s(tmp_path, name):
    theirs = theirs_of(CASES[name])
    ours = load_pretrained(save(theirs, tmp_path / "one"), log=quiet).model
    plain = published("deepseek_v3")
    assert far(their_logits(plain), their_logits(theirs)) > 0.02
    logits = theirs(torch.tensor(TOKENS)).logits
    assert far(ours(mx.array(TOKENS)), logits.detach().numpy()) <= 1e-4
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(TOKENS[:, 1:]).flatten()).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    # Saved as weights they have our names when they are read.
    wanted = dict(tree_flatten(load_pretrained(save(theirs, tmp_path / "two"), log=quiet).model.parameters()))

    def loss(model):
        return nn.losses.cross_entropy(model(mx.array(TOKENS))[:, :-1], mx.array(TOKENS[:, 1:]), reduction="mean")

    found = dict(tree_flatten(nn.value_and_grad(ours, loss)(ours)[1]))
    assert found.keys() == {key for key in wanted if not key.endswith("selection_bias")}
    for key, gradient in found.items():
        assert far(gradient, wanted[key]) <= 1e-4, key


@pytest.mark.parametrize("name", CASES)
def test_single_tokens_behind_a_cache(tmp_path, name):
    theirs = theirs_of(CASES[name])
    ours = load_pretrained(save(theirs, tmp_path / "one"), log=quiet).model
    cache = ours.make_cache()
    first, *others = np.split(TOKENS, [ORIGINAL, *range(ORIGINAL + 1, TOKENS.shape[1])], axis=1)
    found = mx.concatenate([ours(mx.array(part), cache) for part in (first, *others)], axis=1)
    assert far(found, their_logits(theirs)) <= 1e-4


@pytest.mark.parametrize("with_source", [True, False], ids=["its config", "a new config"])
@pytest.mark.parametrize("keys", [4, 5], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("name", CASES)
def test_what_we_save_opens_in_both(tmp_path, name, keys, with_source):
    theirs = theirs_of(CASES[name])
    folder = save(theirs, tmp_path / "one")
    if keys == 4:
        as_transformers_4(folder)
    opened = load_pretrained(folder, log=quiet)
    source = opened.config if with_source else None
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=source, log=quiet)
    wanted = their_logits(theirs)
    again = hugging_face().AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    again.config._experts_implementation = "eager"
    assert far(their_logits(again.eval()), wanted) <= 1e-6
    assert far(mlx_lm_logits(tmp_path / "ours"), wanted) <= 1e-4
    assert far(load_pretrained(tmp_path / "ours", log=quiet).model(mx.array(TOKENS)), wanted) <= 1e-4


def test_the_published_numbers_are_written_as_they_were(tmp_path):
    opened = load_pretrained(save(theirs_of(CASES["as published"]), tmp_path / "one"), log=quiet)
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, log=quiet)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    said = {**written["rope_scaling"], "rope_theta": written["rope_theta"]}
    assert said == {**CASES["as published"], "attention_factor": 1.0}


def test_latents_have_an_eps_of_their_own(tmp_path):
    """As in Moonlight: rms_norm_eps is that of the other norms alone."""
    theirs = published("deepseek_v3", rms_norm_eps=0.03, q_lora_rank=None)
    opened = load_pretrained(save(theirs, tmp_path / "one"), log=quiet)
    assert (opened.model.config.norm_eps, opened.model.config.latent_eps) == (0.03, 1e-6)
    wanted = their_logits(theirs)
    assert far(opened.model(mx.array(TOKENS)), wanted) <= 1e-4
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, log=quiet)
    assert far(mlx_lm_logits(tmp_path / "ours"), wanted) <= 1e-4
    assert load_pretrained(tmp_path / "ours", log=quiet).model.config == opened.model.config


def test_small_latents_see_their_eps(tmp_path):
    """Latents near 0, which an eps of the other norms would have shrunk."""
    theirs = published("deepseek_v3", rms_norm_eps=0.03)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if key.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
                parameter *= 1e-3
    ours = load_pretrained(save(theirs, tmp_path / "one"), log=quiet).model
    assert far(ours(mx.array(TOKENS)), their_logits(theirs)) <= 1e-4
