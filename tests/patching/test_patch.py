"""A patched model of mlx-lm is the same function, of packed documents too, and unpatched it is the same object."""

import copy
from itertools import pairwise
import subprocess
import sys

import forge_mlx
from forge_mlx.patching import loss, packed_rows, patch, unpatch
from forge_mlx.patching.modules import Patched
from forge_mlx.patching.rows import positions_in_documents
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwiGLU
from mlx_lm.tuner.trainer import default_loss
from mlx_lm_models import FAMILIES, VOCAB, check_close, check_gradients, gradients, make, tokens
import numpy as np
import pytest

LENGTH = 20


def summed_logits(model, inputs, weights):
    """Something that has a gradient through every logit."""
    return (model(inputs) * weights).sum()


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_loss_and_every_gradient_are_those_of_the_model_unpatched(case):
    model = make(case)
    batch, lengths = tokens(2, LENGTH + 1), mx.array([[4, LENGTH], [0, LENGTH - 3]])
    weights = mx.random.normal((2, LENGTH, VOCAB), key=mx.random.key(1))
    logits = model(batch[:, :-1])
    of_logits = gradients(model, summed_logits, batch[:, :-1], weights)
    of_loss = gradients(model, default_loss, batch, lengths)
    assert patch(model).replaced
    check_close(model(batch[:, :-1]), logits)
    check_gradients(gradients(model, summed_logits, batch[:, :-1], weights)[1], of_logits[1])
    for is_training in (True, False):
        model.train(is_training)
        found = gradients(model, loss, batch, lengths)
        check_close(found[0], of_loss[0])
        check_gradients(found[1], of_loss[1])
    assert loss(model, batch, lengths)[1].item() == default_loss(model, batch, lengths)[1].item() == 34


DOCUMENTS = (6, 9, 5)


@pytest.mark.parametrize("case", FAMILIES)
def test_packed_documents_are_as_each_by_itself(case):
    model = make(case)
    row = tokens(1, LENGTH)
    ids = mx.array([[number for number, length in enumerate(DOCUMENTS) for _ in range(length)]])
    bounds = [0, 6, 15, 20]
    parts = [row[:, start:end] for start, end in pairwise(bounds)]
    weights = mx.random.normal((1, LENGTH, VOCAB), key=mx.random.key(1))

    def of_parts(model):
        logits = mx.concatenate([model(part) for part in parts], axis=1)
        return (logits * weights).sum()

    def of_row(model):
        with packed_rows(ids):
            return summed_logits(model, row, weights)

    expected_logits = mx.concatenate([model(part) for part in parts], axis=1)
    expected = gradients(model, of_parts)
    patch(model)
    with packed_rows(ids):
        check_close(model(row), expected_logits)
    found = gradients(model, of_row)
    check_gradients(found[1], expected[1])
    # Loss: what follows a document's last token is no target of it.
    targets = sum((len(part[0]) - 1) * default_loss(model, part, mx.array([[1, 99]]))[0] for part in parts)
    mean, count = loss(model, row, mx.array([[1, LENGTH]]), ids)
    assert count.item() == LENGTH - len(DOCUMENTS)
    check_close(mean * count, targets)


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_generation_with_a_cache_is_the_same(case):
    model = make(case)
    model.eval()
    prompt = tokens(1, 11)[0]

    def generated():
        steps = list(generate_step(prompt, model, max_tokens=12))
        return [int(token) for token, _ in steps], mx.stack([logprobs for _, logprobs in steps])

    ids, logprobs = generated()
    patch(model)
    patched_ids, patched_logprobs = generated()
    assert patched_ids == ids
    check_close(patched_logprobs, logprobs)


@pytest.mark.parametrize("case", ["gemma3_text", "mixtral", "phi3, long rope"])
def test_unpatch_gives_back_every_class_object_and_bit(case):
    model = make(case)
    inputs = tokens(2, LENGTH)
    before = {path: (module, type(module), dict(vars(module))) for path, module in model.named_modules()}
    arrays = dict(tree_flatten(model.parameters()))
    logits = model(inputs)
    patch(model)
    assert isinstance(model.layers[0].self_attn, Patched)
    assert isinstance(model.layers[0].self_attn, before["model.layers.0.self_attn"][1])
    assert unpatch(model) > 0
    after = dict(model.named_modules())
    assert list(after) == list(before)
    for path, (module, kind, attributes) in before.items():
        assert after[path] is module
        assert type(module) is kind
        assert dict(vars(module)) == attributes
    assert all(arrays[name] is array for name, array in tree_flatten(model.parameters()))
    assert mx.array_equal(model(inputs), logits).item()
    assert unpatch(model) == 0


def test_models_share_no_state_through_what_mlx_lm_shares():
    one, other = make("mixtral"), make("mixtral")
    shared = one.layers[0].block_sparse_moe.switch_mlp["activation"]
    assert shared is other.layers[0].block_sparse_moe.switch_mlp["activation"]
    patch(one)
    assert type(shared) is SwiGLU
    assert not any(isinstance(module, Patched) for module in other.modules())
    duplicate = copy.deepcopy(one)
    unpatch(one)
    check_close(duplicate(tokens(1, LENGTH)), one(tokens(1, LENGTH)))


def test_patching_twice_is_patching_what_is_new():
    model = make("llama")
    first = patch(model)
    assert patch(model) == first
    model.model.norm = nn.RMSNorm(32)
    assert type(model.model.norm) is nn.RMSNorm
    assert patch(model) == first
    assert isinstance(model.model.norm, Patched)


def test_report_names_what_is_replaced_and_what_is_not_and_why():
    report = patch(make("qwen3_moe"))
    replaced = {row.kind: (row.count, row.by) for row in report.replaced}
    assert replaced == {
        "qwen3_moe.Qwen3MoeModel": (1, "masks stay unmade; documents from packed_rows"),
        "qwen3_moe.Attention": (3, "kernels.flash_attention"),
        "qwen3_moe.MLP": (2, "kernels.swiglu"),
        "switch_layers.SwitchGLU": (1, "kernels.swiglu between its products"),
        "nn.RMSNorm": (13, "kernels.rms_norm"),
        "nn.RoPE": (3, "kernels.rope"),
    }
    kept = {row.kind: row.why for row in report.kept}
    assert "routing" in kept["qwen3_moe.Qwen3MoeSparseMoeBlock"]
    assert "products" in kept["nn.Linear"]
    assert "of no type" not in " ".join(kept.values())
    text = str(report)
    assert text.startswith("qwen3_moe.Model, kernels on reference (")
    assert "with a KV cache (generation) attention is mlx-lm's own" in text
    assert text.endswith("no logits of all tokens: Linear, kernels.linear_cross_entropy")


def test_every_family_is_reported_without_an_unknown_module():
    for case in FAMILIES:
        assert [row.kind for row in patch(make(case)).kept if "of no type" in row.why] == [], case


def test_what_has_no_replacement_is_kept_and_packing_refuses_it():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = make("llama", rope_scaling=scaling, max_position_embeddings=8)
    inputs = tokens(1, LENGTH)
    logits = model(inputs)
    report = patch(model)
    (row,) = [row for row in report.kept if row.kind == "rope_utils.DynamicNTKScalingRoPE"]
    assert (row.count, row.why) == (3, "its base follows the length of the row; packed_rows refuses it")
    check_close(model(inputs), logits)
    with (
        pytest.raises(ValueError, match="rotary module must be one that patch replaces but got DynamicNTKScalingRoPE"),
        packed_rows(mx.zeros((1, LENGTH), mx.int32)),
    ):
        model(inputs)


class ReGLU(nn.Module):
    def __call__(self, x, gate):
        return nn.relu(gate) * x


def test_experts_with_another_activation_are_kept():
    model = make("mixtral")
    for layer in model.layers:
        layer.block_sparse_moe.switch_mlp.activation = ReGLU()
    inputs = tokens(1, LENGTH)
    logits = model(inputs)
    report = patch(model)
    assert "switch_layers.SwitchGLU" in [row.kind for row in report.kept]
    check_close(model(inputs), logits)


def test_a_mask_or_a_layer_of_ones_own_goes_mlx_lms_way():
    model = make("llama")
    x = mx.random.normal((1, 6, 32), key=mx.random.key(2))
    mask = mx.random.bernoulli(0.5, (6, 6), key=mx.random.key(3)) | (mx.eye(6) > 0)
    attention = model.layers[0].self_attn
    expected = attention(x, mask)
    patch(model)
    check_close(attention(x, mask), expected)


def test_a_model_inside_one_for_more_than_text_is_patched():
    from mlx_lm.models import gemma3

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 7, "sliding_window_pattern": 2}
    shape |= {"model_type": "gemma3_text"}
    model = gemma3.Model(gemma3.ModelArgs(model_type="gemma3", text_config=shape, vocab_size=VOCAB))
    batch, lengths = tokens(1, LENGTH), mx.array([[1, LENGTH]])
    expected = gradients(model, default_loss, batch, lengths)
    report = patch(model)
    assert "gemma3_text.Attention" in [row.kind for row in report.replaced]
    check_gradients(gradients(model, loss, batch, lengths)[1], expected[1])


class Unknown(nn.Module):
    pass


@pytest.mark.parametrize("function", [patch, lambda model: loss(model, tokens(1, 3), mx.array([[1, 2]]))])
@pytest.mark.parametrize("model", [Unknown(), nn.Linear(2, 2), None], ids=["other", "layer", "none"])
def test_unknown_model_is_named_with_the_known_families(function, model):
    with pytest.raises(ValueError, match=r"model must be one of mlx_lm.models .*llama, mixtral.* but got .*\. Load it"):
        function(model)


def test_heads_that_are_too_large_leave_the_model_as_it_was():
    model = make("llama", head_dim=264)
    with pytest.raises(ValueError, match=r"at most 256 elements but got 264 in .*self_attn \(llama.Attention\)"):
        patch(model)
    assert not any(isinstance(module, Patched) for module in model.modules())


def test_packed_rows_that_nothing_reads_are_an_error():
    model = make("llama")
    ids = mx.zeros((1, 4), mx.int32)
    with (
        pytest.raises(RuntimeError, match="a patched model must be called in the block but none was"),
        packed_rows(ids),
    ):
        model(tokens(1, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mx.zeros((4,), mx.int32),), r"segment_ids must have the axes \[B, T\] but got the shape \(4,\)"),
        ((mx.zeros((1, 4)),), "segment_ids must be integers but got float32"),
        (
            (mx.zeros((1, 4), mx.int32), mx.zeros((1, 3), mx.int32)),
            r"positions must have the shape .*\(1, 4\), but got",
        ),
        ((mx.zeros((1, 5), mx.int32),), r"shape of the tokens, \(1, 4\), but got \(1, 5\)"),
    ],
    ids=["axes", "dtype", "positions", "tokens"],
)
def test_packed_rows_check_their_arguments(arguments, message):
    model = make("llama")
    patch(model)
    with pytest.raises(ValueError, match=message), packed_rows(*arguments):
        model(tokens(1, 4))


def test_packed_rows_with_a_cache_are_an_error():
    model = make("llama")
    patch(model)
    with (
        pytest.raises(ValueError, match="a cache must be left out, as it holds one text a row"),
        packed_rows(mx.zeros((1, 4), mx.int32)),
    ):
        model(tokens(1, 4), model.make_cache())


def test_positions_of_ones_own_are_used():
    model = make("llama")
    row, ids = tokens(1, 8), mx.zeros((1, 8), mx.int32)
    patch(model)
    with packed_rows(ids):
        counted = model(row)
    # Rotary positions act by their differences alone.
    with packed_rows(ids, mx.arange(8)[None] + 40):
        check_close(model(row), counted)
    with packed_rows(ids, mx.arange(8)[None] * 2):
        assert mx.abs(model(row) - counted).max().item() > 1e-3


def test_places_in_documents_are_counted_from_each_change_of_the_id():
    ids = np.random.default_rng(0).integers(-1, 3, (5, 30)).repeat(2, axis=1)
    expected = np.zeros(ids.shape, np.int32)
    for row, places in zip(ids, expected, strict=True):
        for index in range(1, len(row)):
            places[index] = places[index - 1] + 1 if row[index] == row[index - 1] else 0
    np.testing.assert_array_equal(np.array(positions_in_documents(mx.array(ids))), expected)


def test_the_package_offers_both_and_imports_no_mlx_lm():
    assert forge_mlx.patch is patch
    assert forge_mlx.unpatch is unpatch
    code = "import forge_mlx, sys; assert 'forge_mlx.patching' not in sys.modules; forge_mlx.patch; "
    code += "assert not [name for name in sys.modules if name.startswith('mlx_lm')]"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
