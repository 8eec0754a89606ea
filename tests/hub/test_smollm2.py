"""SmolLM2-135M-Instruct from its GGUF file: logits of an independent reader, the published tokenizer, sensible text."""

import time

from forge_mlx.data.chat import render_prompt
from forge_mlx.hub.gguf import load_gguf
from forge_mlx.hub.gguf_write import write_gguf
import gguf
from gguf_oracle import CORPUS
import mlx.core as mx
import numpy as np
import pytest
from smollm2 import smollm2_file
from tokenizers import pre_tokenizers
import torch
import transformers

pytestmark = pytest.mark.slow

TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. In 1969, people first walked on the Moon: "
    "def main():\n    print('It took 8 days')\n\nWhat a naïve idea!"
)


@pytest.fixture(scope="module")
def ours():
    return load_gguf(smollm2_file(), dtype=mx.float32)


@pytest.fixture(scope="module")
def their_tokenizer():
    file = smollm2_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers does not know the way to cut that the file names; this is what the published tokenizer.json has.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer


def answer(loaded, question):
    """The greedy answer of a chat."""
    ids = render_prompt(loaded.tokenizer, [{"role": "user", "content": question}])
    cache, found = loaded.model.make_cache(), []
    while not found or (found[-1] not in loaded.tokenizer.stop_ids and len(found) < 40):
        logits = loaded.model(mx.array([ids if not found else found[-1:]]), cache)
        found.append(int(mx.argmax(logits[0, -1])))
    return loaded.tokenizer.decode(found)


def test_logits_are_those_of_an_independent_reader(ours):
    file = smollm2_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ids = ours.tokenizer.encode(TEXT)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    found = np.array(ours.model(mx.array([ids]))[0])
    print(f"largest error {np.abs(found - expected).max():.2e} of logits up to {np.abs(expected).max():.1f}")
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))
    # The text is one that the model knows.
    assert (found.argmax(-1)[:-1] == np.array(ids[1:])).mean() > 0.25


def test_weights_are_those_of_an_independent_reader_to_the_bit():
    tensors = {each.name: each for each in gguf.GGUFReader(smollm2_file()).tensors}
    floats = load_gguf(smollm2_file(), dtype=mx.float32, keep_quantized=False).model
    for layer in (0, 17, 29):
        tensor = tensors[f"blk.{layer}.ffn_down.weight"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(np.array(floats.layers[layer].mlp.down_proj.weight), expected)
    tensor = tensors["token_embd.weight"]
    assert np.array_equal(np.array(floats.embed_tokens.weight), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_ids_are_those_of_the_published_tokenizer(ours, their_tokenizer):
    texts = [
        *CORPUS,
        TEXT,
        "  leading and trailing  ",
        "x=1;y=22;z=333 ½ ² ٣٤ 二〇二六",
        "東京は日本の首都です。 Привет, мир! مرحبا 🙂👍🏽",
        "class A:\n\tdef __init__(self, *args):\n\t\tself.x = {**args}\r\n",
        "".join(map(chr, range(33, 1200))),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ]
    for text in texts:
        expected = their_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ours.tokenizer.encode(text, specials=True) == expected, text
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == text
    conversation = [{"role": "user", "content": "Hi 42"}]
    expected = their_tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert render_prompt(ours.tokenizer, conversation) == expected


def test_greedy_text_is_sensible(ours):
    assert "Paris" in answer(ours, "What is the capital of France?")
    assert "blue" in answer(ours, "What color is the sky on a clear day?").lower()
    assert ours.tokenizer.end_id in ours.tokenizer.stop_ids


def test_loading_takes_little_more_memory_than_the_file():
    mx.clear_cache()
    mx.reset_peak_memory()
    before, start = mx.get_active_memory(), time.perf_counter()
    loaded = load_gguf(smollm2_file())
    seconds, peak = time.perf_counter() - start, mx.get_peak_memory() - before
    print(
        f"loaded in {seconds:.1f} s, peak {peak / 1e6:.1f} MB of a file of {smollm2_file().stat().st_size / 1e6:.1f} MB"
    )
    assert loaded.model.num_parameters() == 134_515_008
    assert peak < 1.15 * smollm2_file().stat().st_size


def test_written_again_every_block_is_as_it_was(ours, tmp_path):
    counts = write_gguf(tmp_path / "again.gguf", ours.model, ours.tokenizer, kind="q8_0")
    assert counts == {"Q8_0": 1, "Q4_1": 210, "F32": 61}
    found = {each.name: each for each in gguf.GGUFReader(tmp_path / "again.gguf").tensors}
    for tensor in gguf.GGUFReader(smollm2_file()).tensors:
        assert found[tensor.name].tensor_type == tensor.tensor_type
        assert np.array_equal(found[tensor.name].data, tensor.data), tensor.name
