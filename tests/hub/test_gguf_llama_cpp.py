"""llama.cpp itself opens what is written here: the same ids of a text, and the same probabilities."""

import importlib.util
import json
import subprocess
import sys

from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.gguf_write import write_gguf
from gguf_oracle import CONFIGS, V, published, write_gguf_of
import mlx.core as mx
import numpy as np
import pytest

pytestmark = pytest.mark.slow

TEXTS = ["the quick brown fox, don't 12345\n\n  naïve", "It's 3.14159!  \n\tx", "東京 <think> 2024 Привет ½ ² "]
# Run apart: the library writes to the streams of its process, and ends with it if a file is not to its liking.
_ASK = """
import json, sys
import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(parameters)
answers = []
for prompt in json.loads(sys.argv[2]):
    request = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 20}
    answers.append(server.handle_completions(request))
print("ANSWERS" + json.dumps(answers))
"""


def ask(file, prompts):
    """For each prompt, text or ids: how many tokens it has, and the likeliest next ones with their log-probability."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.fail("needs the package xllamacpp: pip install --no-deps xllamacpp==2026.10.11549")
    command = [sys.executable, "-c", _ASK, str(file), json.dumps(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "ANSWERS" in done.stdout, done.stderr[-2000:]
    answers = json.loads(done.stdout.partition("ANSWERS")[2].splitlines()[0])
    found = []
    for answer in answers:
        (token,) = answer["choices"][0]["logprobs"]["content"]
        top = {each["id"]: each["logprob"] for each in token["top_logprobs"]}
        found.append((answer["usage"]["prompt_tokens"], top))
    return found


def log_probs(model, ids):
    logits = model(mx.array([ids]))[0, -1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits))


def assert_agrees(answer, model, ids, tolerance):
    count, top = answer
    assert count == len(ids)
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
