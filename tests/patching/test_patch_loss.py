"""forge_mlx.patching.loss is mlx-lm's default_loss for every kind of head, without the logits of all tokens."""

from forge_mlx.patching import head, loss, packed_rows, patch
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm_models import SHAPE, check_close, check_gradients, gradients, make, tokens
import numpy as np
import pytest
import torch

LENGTH = 30


@pytest.fixture(autouse=True)
def chunks_of_few_rows(monkeypatch):
    """So that small batches have several chunks, the last one shorter."""
    monkeypatch.setattr(head, "chunk_rows", lambda *_: 13)


def batch_and_lengths():
    return tokens(2, LENGTH + 1), mx.array([[4, LENGTH], [0, LENGTH - 3]])


def untied(**changes):
    return make("llama", tie_word_embeddings=False, **changes)


def quantised(model):
    nn.quantize(model, 32, 4)
    return model


def adapted(model, *keys, dropout=0.0, use_dora=False):
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": dropout, "keys": list(keys)}, use_dora)
    # lora_b starts at 0, so that lora_a has no gradient.
    for name, array in head.trained(model):
        if name.endswith("lora_b"):
            model.load_weights([(name, mx.random.normal(array.shape, key=mx.random.key(4)))], strict=False)
    return model


def with_bias(model):
    model.lm_head.bias = mx.random.normal((SHAPE["vocab_size"],), key=mx.random.key(8))
    return model


def frozen(model):
    model.freeze()
    model.layers[0].unfreeze()
    return model


HEADS = {
    "tied": (lambda: make("llama"), "Embedding, kernels.linear_cross_entropy"),
    "untied": (untied, "Linear, kernels.linear_cross_entropy"),
    "bias": (lambda: with_bias(untied()), "Linear, kernels.linear_cross_entropy"),
    "frozen": (lambda: frozen(untied()), "Linear, kernels.linear_cross_entropy"),
    "softcap": (lambda: make("gemma2", final_logit_softcapping=0.5), "Embedding, kernels.linear_cross_entropy"),
    "quantised and tied": (lambda: quantised(make("llama")), "QuantizedEmbedding, chunk by chunk"),
    "quantised": (lambda: quantised(untied()), "QuantizedLinear, chunk by chunk"),
    "quantised, softcap": (
        lambda: quantised(make("gemma2", final_logit_softcapping=0.5)),
        "QuantizedEmbedding, chunk by chunk",
    ),
    "LoRA": (lambda: adapted(untied(), "lm_head", "self_attn.q_proj"), "LoRALinear, chunk by chunk"),
    "DoRA": (lambda: adapted(untied(), "lm_head", use_dora=True), "DoRALinear, chunk by chunk"),
    "LoRA on an embedding": (lambda: adapted(make("llama"), "model.embed_tokens"), "LoRAEmbedding, chunk by chunk"),
    "LoRA on a quantised one": (lambda: adapted(quantised(untied()), "lm_head"), "LoRALinear, chunk by chunk"),
}


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_has_default_loss_and_its_gradients(name, is_training):
    make_model, description = HEADS[name]
    model = make_model()
    model.train(is_training)
    expected = gradients(model, default_loss, *batch_and_lengths())
    report = patch(model)
    assert description in report.head
    found = gradients(model, loss, *batch_and_lengths())
    check_close(found[0], expected[0])
    check_gradients(found[1], expected[1])
    own = dict(tree_flatten(model.parameters()))
    check_close(loss(model, *batch_and_lengths())[0], expected[0])
    assert all(own[name] is array for name, array in tree_flatten(model.parameters()))


def test_loss_is_pytorchs_of_the_same_logits():
    model = make("gemma2")
    patch(model)
    batch, lengths = batch_and_lengths()
    logits = torch.tensor(np.array(model(batch[:, :-1]))).double()
    of_token = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), torch.tensor(np.array(batch[:, 1:])).long(), reduction="none"
    )
    counted = torch.cat([of_token[0, 3:LENGTH], of_token[1, : LENGTH - 3]])
    mean, count = loss(model, batch, lengths)
    assert count.item() == len(counted)
    assert mean.item() == pytest.approx(counted.mean().item(), rel=1e-6)


def test_dropout_in_a_head_is_the_same_for_the_loss_and_its_gradient():
    model = adapted(untied(), "lm_head", dropout=0.5)
    patch(model)
    model.train()
    name, start = next((name, array) for name, array in head.trained(model) if name.endswith("lora_b"))
    direction = mx.random.normal(start.shape, key=mx.random.key(6))

    def at(step):
        model.load_weights([(name, start + step * direction)], strict=False)
        mx.random.seed(7)
        return gradients(model, loss, *batch_and_lengths())

    slope = (at(1e-2)[0] - at(-1e-2)[0]) / 2e-2
    expected = (at(0.0)[1][name] * direction).sum()
    assert slope.item() == pytest.approx(expected.item(), rel=2e-3)


def test_dropout_in_an_mlp_is_the_same_in_the_backward_pass():
    model = adapted(make("llama"), "mlp.down_proj", dropout=0.5)
    model.train()
    mx.random.seed(7)
    expected = gradients(model, default_loss, *batch_and_lengths())
    patch(model)
    mx.random.seed(7)
    check_gradients(gradients(model, loss, *batch_and_lengths())[1], expected[1])


def test_no_counted_target_is_a_loss_of_zero():
    for model in (make("llama"), quantised(make("llama"))):
        mean, count = loss(model, tokens(1, 5), mx.array([[3, 2]]))
        assert (mean.item(), count.item()) == (0.0, 0)


def test_segments_hide_other_documents_and_padding_from_the_loss():
    model = make("llama")
    batch, lengths = tokens(1, 12), mx.array([[3, 11]])
    ids = mx.array([[4, 4, 4, 4, 4, 2, 2, 2, 2, -1, -1, -1]])
    patch(model)
    mean, count = loss(model, batch, lengths, ids)
    with packed_rows(ids[:, :-1]):
        logits = model(batch[:, :-1])
    of_token = nn.losses.cross_entropy(logits, batch[:, 1:])[0]
    # Targets 3 and 4 of the first document, and 3 of the second: not its own first token, nor the padding.
    counted = mx.concatenate([of_token[2:4], of_token[5:8]])
    assert count.item() == 5
    check_close(mean, counted.mean())


def test_segments_need_a_patched_model():
    with pytest.raises(RuntimeError, match="a patched model must be called in the block"):
        loss(make("llama"), tokens(1, 5), mx.array([[1, 4]]), mx.zeros((1, 5), mx.int32))


def test_second_derivatives_of_a_quantised_head_raise():
    model = quantised(make("llama"))
    key = "model.norm.weight"

    def slope(weight):
        def value(weight):
            model.load_weights([(key, weight)], strict=False)
            return loss(model, *batch_and_lengths())[0]

        return mx.grad(value)(weight).sum()

    with pytest.raises(ValueError, match="second derivatives must be left out"):
        mx.grad(slope)(model.model.norm.weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mx.zeros((4,), mx.int32), mx.zeros((1, 2), mx.int32)), r"batch must have the axes \[B, T \+ 1\]"),
        ((mx.zeros((2, 1), mx.int32), mx.zeros((2, 2), mx.int32)), r"T of 1 or more but got \(2, 1\)"),
        ((mx.zeros((2, 4)), mx.zeros((2, 2), mx.int32)), "batch must be integers but got float32"),
        ((mx.zeros((2, 4), mx.int32), mx.zeros((2,), mx.int32)), r"lengths must have the shape \(2, 2\)"),
        (
            (mx.zeros((2, 4), mx.int32), mx.zeros((2, 2), mx.int32), mx.zeros((2, 3), mx.int32)),
            r"segment_ids must have the shape \(2, 4\)",
        ),
    ],
    ids=["axes", "length", "dtype", "lengths", "segments"],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        loss(make("llama"), *arguments)


@pytest.mark.parametrize("is_quantised", [False, True], ids=["float32", "quantised"])
def test_peak_memory_knows_neither_scores_nor_logits(is_quantised, monkeypatch):
    monkeypatch.undo()
    length, vocab = 1024, 8192
    model = make("llama", vocab_size=vocab, num_hidden_layers=2)
    if is_quantised:
        quantised(model)
    adapted(model, "self_attn.q_proj", "mlp.down_proj")
    batch = mx.random.randint(0, vocab, (1, length + 1))

    def peak(function):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradients(model, function, batch, mx.array([[1, length]]))
        return mx.get_peak_memory() - before

    stock = peak(default_loss)
    patch(model)
    of_logits, of_scores = 4 * length * vocab, 4 * 4 * length * length
    assert stock > 2 * of_logits + 2 * of_scores
    # A chunk of 256 rows has a quarter of the logits, and there are some arrays of that size at once.
    assert peak(loss) < min(2 * of_logits, stock / 2)
