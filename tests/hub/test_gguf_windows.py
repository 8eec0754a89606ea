"""A Gemma 3 so short that every layer has the window: a GGUF file says the rotary base of such layers by itself."""

from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.gguf_keys import config_keys
from forge_mlx.hub.gguf_write import write_gguf
from forge_mlx.hub.pretrained import load_pretrained
import gguf
from gguf_oracle import CONFIGS, V, published, write_gguf_of
import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers

ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


def quiet(_line: str) -> None:
    pass


def test_logits_are_those_of_transformers_where_all_layers_slide(tmp_path, monkeypatch):
    shape = CONFIGS["gemma3"]().to_dict() | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention"] * 2,
        "rope_parameters": ROPE,
    }
    monkeypatch.setitem(CONFIGS, "gemma3", lambda: transformers.Gemma3TextConfig(**shape))
    theirs = published("gemma3")
    theirs.save_pretrained(tmp_path / "hub")
    load_gguf(write_gguf_of(tmp_path / "t.gguf", theirs, "gemma3"), log=quiet).tokenizer.save(tmp_path / "hub")
    source = load_pretrained(tmp_path / "hub", log=quiet)
    assert source.model.config.rope_local_base is None
    write_gguf(tmp_path / "model.gguf", source.model, source.tokenizer, kind="f32")
    field = gguf.GGUFReader(tmp_path / "model.gguf").get_field("gemma3.rope.freq_base_swa")
    assert field.contents() == 300.0
    tokens = np.random.default_rng(5).integers(0, V, (2, 24))
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens)).logits.numpy()
    found = np.array(load_gguf(tmp_path / "model.gguf", log=quiet).model(mx.array(tokens)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_windows_whose_rotation_is_scaled_are_refused(tmp_path):
    source = load_gguf(write_gguf_of(tmp_path / "t.gguf", published("gemma3"), "gemma3"), log=quiet)
    scaled = source.model.config.model_copy(update={"rope_local_base": None, "rope_scale": 0.25})
    with pytest.raises(ValueError, match="rope_local_base: null"):
        config_keys(scaled)
