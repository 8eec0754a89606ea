"""llama.cpp itself opens what is written here: the same ids of a text, and the same probabilities."""

from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.gguf_write import write_gguf
from gguf_oracle import CONFIGS, V, published, write_gguf_of
from llama_cpp import ask
import mlx.core as mx
import numpy as np
import pytest

pytestmark = pytest.mark.slow

TEXTS = ["the quick brown fox, don't 12345\n\n  naïve", "It's 3.14159!  \n\tx", "東京 <think> 2024 Привет ½ ² "]


def log_probs(model, ids):
    logits = model(mx.array([ids]))[0, -1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits))


def assert_agrees(answer, model, ids, tolerance):
    (top,) = answer.top
    assert answer.count == len(ids)
    expected = log_probs(model, ids)
    assert len(top) == 20
    for token, value in top.items():
        assert abs(value - expected[token]) < tolerance, (token, value, expected[token])


@pytest.mark.parametrize("name", CONFIGS)
def test_probabilities_of_each_architecture(tmp_path, name):
    loaded = load_gguf(write_gguf_of(tmp_path / "model.gguf", published(name), name))
    write_gguf(tmp_path / "ours.gguf", loaded.model, loaded.tokenizer, kind="f32")
    rows = np.random.default_rng(3).integers(3, V - 1, (60, 30)).tolist()
    prompts = [row[: 30 if at % 2 else 9] for at, row in enumerate(rows)]
    # An answer that is no whole character is left out.
    shown = [token for token in range(3, V) if loaded.tokenizer.token_to_bytes(token).strip().isalnum()]
    prompts = [each for each in prompts if log_probs(loaded.model, each).argmax() in shown][:3]
    assert len(prompts) == 3
    for prompt, answer in zip(prompts, ask(tmp_path / "ours.gguf", prompts), strict=True):
        # llama.cpp looks up GELU in a table of float16.
        assert_agrees(answer, loaded.model, prompt, 5e-3 if name.startswith(("gemma", "gpt2")) else 1e-3)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_every_kind_opens_and_cuts_texts_into_the_same_tokens(tmp_path, kind):
    source = load_gguf(write_gguf_of(tmp_path / "model.gguf", published("qwen2"), "qwen2"))
    write_gguf(tmp_path / "ours.gguf", source.model, source.tokenizer, kind=kind)
    # Of what was rounded the ids and the probabilities must agree, not with what there was before.
    ours = load_gguf(tmp_path / "ours.gguf", dtype=mx.float32)
    for text, answer in zip(TEXTS, ask(tmp_path / "ours.gguf", TEXTS), strict=True):
        # llama.cpp rounds the activations too, to float16, or to 8 bits before a product with codes.
        assert_agrees(answer, ours.model, ours.tokenizer.encode(text, specials=True), 0.02 if kind == "f16" else 0.3)
