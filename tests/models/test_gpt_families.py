"""The published families against transformers' own models at small sizes: logits, every gradient, greedy text, rows.

Sequences are longer than the windows, and positions pass the length before a context was stretched.
"""

import re

from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.nn.losses import cross_entropy
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

VOCAB, LENGTH = 37, 19
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
THEIRS = {**SIZES, **HEADS, "rms_norm_eps": 0.01, "attn_implementation": "eager"}
OURS = {
    "vocab_size": VOCAB,
    "num_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_seq_len": 64,
    "norm_eps": 0.01,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
GEMMA = {"mlp": "geglu_tanh", "norm_offset": True, "post_norms": True, "embedding_scale": 24**0.5}
# A padding token's row of the embedding would get no gradient of its lookups.
GEMMA_OF_THEM = {
    **THEIRS,
    "query_pre_attn_scalar": 5,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": None,
}
THREE_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def rotary(kind="default", base=500.0, **keys):
    return {"rope_type": kind, "rope_theta": base, **keys}


# The name of a family: its config in transformers, and what it is here.
FAMILIES = {
    "llama3": (
        transformers.LlamaConfig(
            **THEIRS,
            tie_word_embeddings=False,
            rope_parameters=rotary("llama3", original_max_position_embeddings=20, **LLAMA3),
        ),
        {
            **OURS,
            "tie_embeddings": False,
            "rope_base": 500.0,
            "rope_scaling": {"kind": "llama3", "original_max_seq_len": 20, **LLAMA3},
        },
    ),
    "llama-yarn-biases": (
        transformers.LlamaConfig(
            **THEIRS,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=rotary("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0),
        ),
        {
            **OURS,
            "attention_bias": True,
            "rope_base": 500.0,
            "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 16, "beta_fast": 2.0},
        },
    ),
    "llama-linear-mlp-bias": (
        transformers.LlamaConfig(
            **THEIRS, tie_word_embeddings=True, mlp_bias=True, rope_parameters=rotary("linear", factor=4.0)
        ),
        {**OURS, "mlp_bias": True, "rope_base": 500.0, "rope_scale": 0.25},
    ),
    "mistral": (
        transformers.MistralConfig(
            **THEIRS, tie_word_embeddings=False, sliding_window=5, rope_parameters=rotary(base=1e4)
        ),
        {**OURS, "tie_embeddings": False, "sliding_window": 5},
    ),
    "qwen2": (
        transformers.Qwen2Config(
            **THEIRS,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
            rope_parameters=rotary(),
        ),
        {**OURS, "attention_bias": "qkv", "sliding_window": 5, "sliding_layers": [1, 2], "rope_base": 500.0},
    ),
    "qwen3": (
        transformers.Qwen3Config(**THEIRS, tie_word_embeddings=True, rope_parameters=rotary()),
        {**OURS, "qk_norm": True, "rope_base": 500.0},
    ),
    "gemma2": (
        transformers.Gemma2Config(
            **GEMMA_OF_THEM,
            sliding_window=4,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            rope_parameters=rotary(),
            layer_types=THREE_LAYERS,
        ),
        {
            **OURS,
            **GEMMA,
            "rope_base": 500.0,
            "sliding_window": 4,
            "sliding_layers": [0, 2],
            "attention_scale": 5.0**-0.5,
            "attention_softcap": 2.0,
            "logit_softcap": 3.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(
            **GEMMA_OF_THEM,
            sliding_window=4,
            layer_types=THREE_LAYERS,
            rope_parameters={
                "full_attention": rotary("linear", factor=8.0),
                "sliding_attention": rotary(base=30.0),
            },
        ),
        {
            **OURS,
            **GEMMA,
            "qk_norm": True,
            "rope_base": 500.0,
            "rope_scale": 0.125,
            "rope_local_base": 30.0,
            "sliding_window": 4,
            "sliding_layers": [0, 2],
            "attention_scale": 5.0**-0.5,
        },
    ),
    "gpt2": (
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=24,
            n_layer=3,
            n_head=4,
            n_inner=20,
            n_positions=64,
            layer_norm_epsilon=0.01,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        ),
        {
            **{key: value for key, value in OURS.items() if key not in ("num_kv_heads", "head_dim")},
            "norm": "layer_norm",
            "position": "learned",
            "mlp": "gelu_tanh",
            "bias": True,
        },
    ),
}

OF_GEMMA = {
    "post_attention_layernorm": "attention_output_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
}
OF_GPT2 = {
    r"^transformer\.": "",
    r"^wte\b": "embed_tokens",
    r"^wpe\b": "embed_positions",
    r"^h\.": "layers.",
    r"\bln_1\b": "input_layernorm",
    r"\bln_2\b": "post_attention_layernorm",
    r"\bln_f\b": "norm",
    r"\battn\.c_proj\b": "self_attn.o_proj",
    r"\bc_fc\b": "up_proj",
    r"\bmlp\.c_proj\b": "mlp.down_proj",
}


def ours(family, named):
    """Their parameters, or the gradients of those, as NumPy arrays under our names."""
    found = {}
    for name, tensor in named.items():
        array = tensor.detach().numpy()
        if family != "gpt2":
            name = name.removeprefix("model.")
            if family.startswith("gemma"):
                name = ".".join(OF_GEMMA.get(part, part) for part in name.split("."))
            found[name] = array
            continue
        for pattern, replacement in OF_GPT2.items():
            name = re.sub(pattern, replacement, name)
        if array.ndim == 2 and not name.startswith("embed"):
            array = array.T
        if ".attn.c_attn." in name:
            parts = {f"self_attn.{part}_proj": each for part, each in zip("qkv", np.split(array, 3), strict=True)}
            found |= {name.replace("attn.c_attn", part): each for part, each in parts.items()}
        else:
            found[name] = array
    return found


def built(family):
    """Their model with random parameters, and ours with the same; a norm's scale is off 1 in both kinds of norm."""
    config, settings = FAMILIES[family]
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # A small embedding, or a model with a tied head would only repeat the token that it has just read.
            spread = 0.08 if "embed_tokens" in name or "wte" in name else 0.3 if parameter.ndim > 1 else 0.1
            start = float("norm" in name and name.endswith("weight") and not family.startswith("gemma"))
            parameter.copy_(start + spread * torch.randn(parameter.shape, generator=draw))
    model = GPT(GPTConfig.model_validate(settings)).eval()
    weights = ours(family, dict(theirs.named_parameters()))
    assert weights.keys() == dict(tree_flatten(model.parameters())).keys()
    model.update(tree_unflatten([(name, mx.array(array)) for name, array in weights.items()]))
    return theirs, model


def some_tokens(batch=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length)).astype(np.int32)


def error(got, want):
    return np.abs(np.array(got) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_are_those_of_transformers(family):
    theirs, model = built(family)
    tokens, targets = some_tokens(), some_tokens(seed=1)
    want = theirs(torch.tensor(tokens).long()).logits
    F.cross_entropy(want.flatten(0, 1), torch.tensor(targets).long().flatten()).backward()
    wanted = ours(family, {name: parameter.grad for name, parameter in theirs.named_parameters()})

    _, grads = nn.value_and_grad(model, lambda model: cross_entropy(model(mx.array(tokens)), mx.array(targets)))(model)
    assert error(model(mx.array(tokens)), want.detach().numpy()) <= 1e-5
    grads = dict(tree_flatten(grads))
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        if name.endswith("k_proj.bias") and model.config.position == "learned":
            # It moves all scores of a query alike, so both are rounding.
            assert np.abs(np.array(grad)).max() <= 1e-6
        else:
            assert error(grad, wanted[name]) <= 1e-4, name


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_from_a_cache_is_that_of_transformers(family):
    theirs, model = built(family)
    tokens = some_tokens(4, 7)
    with torch.no_grad():
        prompt = torch.tensor(tokens).long()
        options = {"attention_mask": torch.ones_like(prompt), "eos_token_id": None, "pad_token_id": 0}
        want = theirs.generate(prompt, max_new_tokens=16, do_sample=False, **options).numpy()
    assert len(set(want[:, 7:].flatten())) > 4
    cache = model.make_cache()
    logits, found = model(mx.array(tokens), cache), [mx.array(tokens)]
    for _ in range(16):
        found.append(mx.argmax(logits[:, -1:], axis=-1).astype(mx.int32))
        logits = model(found[-1], cache)
    assert np.array_equal(np.array(mx.concatenate(found, axis=1)), want)
    # Without a cache, each token again from the whole sequence.
    assert np.array_equal(np.array(mx.argmax(model(mx.array(want))[:, 6:-1], axis=-1)), want[:, 7:])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_a_cache_are_those_of_transformers(family):
    theirs, model = built(family)
    tokens = some_tokens(length=40)
    cache = model.make_cache()
    parts = [model(mx.array(tokens[:, a:b]), cache) for a, b in ((0, 3), (3, 16), (16, 17), (17, 18), (18, 40))]
    with torch.no_grad():
        want = theirs(torch.tensor(tokens).long()).logits.numpy()
    assert error(mx.concatenate(parts, axis=1), want) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_in_a_row_are_what_they_are_alone(family):
    _, model = built(family)
    lengths = (9, 1, 12, 6)
    documents = [some_tokens(1, length, seed=length) for length in lengths]
    ids = np.repeat([*range(len(lengths)), -1], [*lengths, 3])[None].astype(np.int32)
    places = np.concatenate([np.arange(length) for length in (*lengths, 3)])[None].astype(np.int32)
    row = mx.array(np.concatenate([*documents, np.zeros((1, 3), np.int32)], axis=1))
    packed = np.array(model(row, segment_ids=mx.array(ids), positions=mx.array(places)))
    start = 0
    for document in documents:
        end = start + document.shape[1]
        assert error(packed[:, start:end], np.array(model(mx.array(document)))) <= 1e-5
        start = end


def test_16_bit_norms_add_their_1_in_float32():
    """As Gemma's do: bfloat16 has no number between 1 and 1.0078."""
    theirs = transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm(24, eps=0.01).bfloat16()
    model = built("gemma3")[1]
    x = np.random.default_rng(3).standard_normal((5, 24)).astype(np.float32)
    weight = np.linspace(0.001, 0.01, 24).astype(np.float32)
    theirs.weight.data = torch.tensor(weight).bfloat16()
    norm = model.layers[0].input_layernorm
    norm.weight = mx.array(weight).astype(mx.bfloat16)
    got = norm(mx.array(x).astype(mx.bfloat16))
    assert got.dtype == mx.bfloat16
    want = theirs(torch.tensor(x).bfloat16()).float().detach().numpy()
    # A result between two numbers may be rounded to either; one of a rounded scale is off in most places.
    assert (np.array(got.astype(mx.float32)) != want).mean() < 0.02
    normed, total = norm.of_sum(mx.array(x).astype(mx.bfloat16), mx.zeros((5, 24), mx.bfloat16))
    assert mx.array_equal(normed, got)
    assert total.dtype == mx.bfloat16


def test_the_embeddings_factor_is_rounded_to_its_dtype():
    """As Gemma's is: sqrt(24), 4.89898, becomes 4.90625 in bfloat16."""
    model = built("gemma3")[1]
    model.set_dtype(mx.bfloat16)
    seen = []
    model.layers = [lambda x, *_, **__: seen.append(x) or x] * 3
    model.hidden(mx.array([[5]]))
    assert mx.array_equal(seen[0][0, 0], model.embed_tokens.weight[5] * mx.array(4.90625, mx.bfloat16))
