"""Published models whose tokens go to one expert with a gate that is always 1: they compute what transformers does."""

from forge_mlx.hub.pretrained import load_pretrained, save_pretrained
import mlx.core as mx
import numpy as np
import pytest
from tiny_models import V, as_transformers_4, hugging_face, published, save
import torch

TOKENS = np.random.default_rng(5).integers(0, V, (2, 24))
MODELS = {
    "top-1 of Mixtral": ("mixtral", {"num_experts_per_tok": 1}),
    "one expert of Mixtral": ("mixtral", {"num_experts_per_tok": 1, "num_local_experts": 1}),
    "top-1 of Qwen3-MoE": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
}


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def assert_close(model, expected):
    found = np.array(model(mx.array(TOKENS)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("name", MODELS)
def test_it_is_read_and_written(name, tmp_path):
    family, changes = MODELS[name]
    theirs = published(family, **changes)
    expected = logits(theirs)
    as_transformers_4(save(theirs, tmp_path / "theirs"))
    loaded = load_pretrained(tmp_path / "theirs", log=pytest.fail)
    assert_close(loaded.model, expected)

    save_pretrained(tmp_path / "ours", loaded.model, loaded.tokenizer, source=loaded.config, log=pytest.fail)
    again = hugging_face().AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    again.config._experts_implementation = "eager"
    np.testing.assert_allclose(logits(again), expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))
