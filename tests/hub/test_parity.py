"""Models that transformers saved compute here what they compute there and in mlx-lm, and open there again from here."""

import importlib
import json
from pathlib import Path

from forge_mlx.hub.pretrained import load_pretrained, read_shape, save_pretrained
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest
from tiny_models import (
    CONFIGS,
    IGNORES_WINDOWS,
    WINDOW,
    V,
    as_transformers_4,
    hugging_face,
    published,
    save,
)
import torch

# Importing transformers takes seconds.
pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(5).integers(0, V, (2, 3 * WINDOW))


def quiet(line: str) -> None:
    raise AssertionError(line)


def their_logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def their_gradients(model, folder: Path):
    """Gradients of the mean loss: transformers saves them as weights, and from there they have our names."""
    logits = model(torch.tensor(TOKENS)).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(TOKENS[:, 1:]).flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    return dict(tree_flatten(load_pretrained(save(model, folder), log=quiet).model.parameters()))


def our_gradients(model):
    def loss(model):
        logits = model(mx.array(TOKENS))[:, :-1]
        return nn.losses.cross_entropy(logits, mx.array(TOKENS[:, 1:]), reduction="mean")

    return dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))


def mlx_lm_logits(folder, tokens):
    model, _ = importlib.import_module("mlx_lm.utils").load_model(folder)
    return np.array(model(mx.array(tokens)))


def assert_close(found, expected, tolerance=1e-4):
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=tolerance * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_pytorch_s(tmp_path, name):
    theirs = published(name)
    ours = load_pretrained(save(theirs, tmp_path / "one"), log=quiet)
    assert ours.family == name.split(",")[0]
    assert ours.model.config == read_shape(tmp_path / "one")
    assert not any(module.training for module in ours.model.modules())
    expected = their_logits(theirs)
    assert np.abs(expected).max() > 1
    assert_close(ours.model(mx.array(TOKENS)), expected)
    found = our_gradients(ours.model)
    gradients = their_gradients(theirs, tmp_path / "gradients")
    assert found.keys() == {key for key in gradients if not key.endswith("selection_bias")}
    for key, gradient in found.items():
        scale = np.abs(np.array(gradients[key])).max()
        if name == "gpt2" and key.endswith("k_proj.bias"):
            # Without rotation softmax does not see it: its gradient is rounding.
            assert max(scale, np.abs(np.array(gradient)).max()) < 1e-7
            continue
        np.testing.assert_allclose(np.array(gradient), np.array(gradients[key]), rtol=0, atol=1e-4 * scale, err_msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_and_the_keys_of_transformers_4_say_the_same(tmp_path, name):
    theirs = published(name)
    ours = load_pretrained(save(theirs, tmp_path / "one"), log=quiet).model
    folder = save(theirs, tmp_path / "shards", shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    as_transformers_4(folder)
    again = load_pretrained(folder, log=quiet).model
    assert again.config == ours.config
    assert mx.array_equal(again(mx.array(TOKENS)), ours(mx.array(TOKENS)))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_logits_are_mlx_lm_s_of_the_same_folder(tmp_path, name):
    """mlx-lm reads GPT-2 without the prefix that transformers writes: it reads what we save, in the test below."""
    folder = save(published(name), tmp_path / "one")
    as_transformers_4(folder)
    tokens = TOKENS[:, :WINDOW] if name in IGNORES_WINDOWS else TOKENS
    ours = load_pretrained(folder, log=quiet).model
    assert_close(ours(mx.array(tokens)), mlx_lm_logits(folder, tokens))


@pytest.mark.parametrize("with_source", [True, False], ids=["its config", "a new config"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_we_save_opens_in_both(tmp_path, name, with_source):
    theirs = published(name)
    opened = load_pretrained(save(theirs, tmp_path / "one"), log=quiet)
    lines = []
    save_pretrained(
        tmp_path / "ours",
        opened.model,
        opened.tokenizer,
        source=opened.config if with_source else None,
        generation=opened.generation,
        max_shard_bytes=20_000,
        log=lines.append,
    )
    again = hugging_face().AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    again.config._experts_implementation = "eager"
    assert type(again) is type(theirs)
    assert_close(their_logits(again.eval()), their_logits(theirs), 1e-6)
    family = name.split(",")[0]
    assert bool(lines) == (family in IGNORES_WINDOWS - {"qwen3", "dots1"})
    tokens = TOKENS[:, :WINDOW] if family in IGNORES_WINDOWS else TOKENS
    assert_close(mlx_lm_logits(tmp_path / "ours", tokens), their_logits(theirs, tokens))
    twice = load_pretrained(tmp_path / "ours", log=quiet)
    assert mx.array_equal(twice.model(mx.array(TOKENS)), opened.model(mx.array(TOKENS)))
    assert twice.generation == opened.generation
    assert twice.tokenizer.files["tokenizer.json"] == opened.tokenizer.files["tokenizer.json"]
    if with_source:
        assert (
            twice.config.items() >= {k: v for k, v in opened.config.items() if k != "num_nextn_predict_layers"}.items()
        )


SPECIAL = {
    "size of heads": ("qwen2", {"head_dim": 20}),
    "capped scores": ("gemma3_text", {"attn_logit_softcapping": 2.0}),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_keys_that_a_family_seldom_has(tmp_path, name):
    family, change = SPECIAL[name]
    theirs = published(family, **change)
    lines = []
    opened = load_pretrained(save(theirs, tmp_path / "one"), log=lines.append)
    assert_close(opened.model(mx.array(TOKENS)), their_logits(theirs))
    said = "1 keys are not known and not used: attn_logit_softcapping" if name == "capped scores" else None
    assert [line.partition(": ")[2] for line in lines] == ([] if said is None else [said])
    for folder, source in (("with", opened.config), ("without", None)):
        save_pretrained(tmp_path / folder, opened.model, opened.tokenizer, source=source, log=[].append)
        again = hugging_face().AutoModelForCausalLM.from_pretrained(tmp_path / folder, attn_implementation="eager")
        assert_close(their_logits(again.eval()), their_logits(theirs), 1e-6)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("scaling", "left_out"),
    [
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, ()),
        ({**YARN, "mscale": 0.7}, ()),
        ({**YARN, "attention_factor": 1.3, "beta_fast": 16.0}, ()),
        (YARN, ("original_max_position_embeddings",)),
        ({**YARN, "finetuned": True}, ()),
    ],
    ids=["both mscales", "one mscale", "said", "no length", "finetuned"],
)
@pytest.mark.parametrize("keys", [4, 5], ids=["transformers 4", "transformers 5"])
def test_yarn_is_saved_in_words_that_both_read(tmp_path, scaling, left_out, keys):
    theirs = published("llama", rope_parameters={**scaling, "rope_theta": 1e4})
    folder = save(theirs, tmp_path / "one")
    if keys == 4:
        as_transformers_4(folder)
        config = json.loads((folder / "config.json").read_text())
        for key in left_out:
            del config["rope_scaling"][key]
        (folder / "config.json").write_text(json.dumps(config))
        theirs = hugging_face().AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    opened = load_pretrained(folder, log=quiet)
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config, log=quiet)
    again = hugging_face().AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    expected = their_logits(theirs)
    assert_close(their_logits(again.eval()), expected, 1e-6)
    assert_close(opened.model(mx.array(TOKENS)), expected)
    assert_close(mlx_lm_logits(tmp_path / "ours", TOKENS), expected)


def test_what_mlx_lm_cannot_be_told_of_yarn_is_said(tmp_path):
    scaling = {**YARN, "factor": 1.0, "attention_factor": 1.3, "rope_theta": 1e4}
    opened = load_pretrained(save(published("llama", rope_parameters=scaling), tmp_path / "one"), log=quiet)
    lines = []
    save_pretrained(tmp_path / "ours", opened.model, opened.tokenizer, source=opened.config, log=lines.append)
    assert lines == ["mlx-lm 0.32 does not read rope_scaling.attention_factor of a llama: there it computes without"]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_sixteen_bits(tmp_path, name, dtype):
    folder = save(published(name), tmp_path / "one")
    model = load_pretrained(folder, dtype=dtype, log=quiet).model
    kept = {key for key, array in tree_flatten(model.parameters()) if array.dtype != dtype}
    assert kept == {key for key, _ in tree_flatten(model.parameters()) if key.endswith("selection_bias")}
    exact = load_pretrained(folder, log=quiet)
    save_pretrained(tmp_path / "ours", exact.model, exact.tokenizer, source=exact.config, dtype=dtype, log=print)
    again = load_pretrained(tmp_path / "ours", log=quiet)
    assert mx.array_equal(again.model(mx.array(TOKENS)), model(mx.array(TOKENS)))
    unrounded = dict(tree_flatten(exact.model.parameters()))
    for key in kept:
        for each in (model, again.model):
            assert mx.array_equal(dict(tree_flatten(each.parameters()))[key], unrounded[key])
    assert again.config["dtype"] == str(dtype).removeprefix("mlx.core.")


def test_the_text_part_of_a_gemma_3_of_text_and_images(tmp_path):
    text = CONFIGS["gemma3_text"]()
    vision = hugging_face().SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(3)
    both = hugging_face().Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = hugging_face().Gemma3ForConditionalGeneration._from_config(both, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    lines = []
    opened = load_pretrained(save(model, tmp_path / "both"), log=lines.append)
    assert opened.family == "gemma3_text"
    (line,) = lines
    assert line.endswith("tensors that are no part of the text model were left out")
    kinds = torch.zeros(TOKENS.shape, dtype=torch.long)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS), token_type_ids=kinds).logits.numpy()
    assert_close(opened.model(mx.array(TOKENS)), expected)
    save_pretrained(tmp_path / "text", opened.model, opened.tokenizer, source=opened.config)
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "gemma3_text"
    again = hugging_face().AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    assert_close(their_logits(again), expected)
