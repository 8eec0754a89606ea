"""What linear_cross_entropy holds and multiplies: peak memory beside whole logits, products in the graph."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial

from forge_mlx.kernels.cross_entropy import cross_entropy
from forge_mlx.kernels.linear_cross_entropy import gradients_in_forward, linear_cross_entropy
from forge_mlx.kernels.linear_cross_entropy.chunks import CHUNK_ROWS
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import pytest

EARLY = {"none": nullcontext, "all": gradients_in_forward, "hidden": partial(gradients_in_forward, weight=False)}
ROWS, COLUMNS, VOCABULARY, CHUNK = 512, 32, 4096, 16


class Head(nn.Module):
    """A layer and a head, or with `tied` the embedding as head.

    Args:
        columns: C.
        vocabulary: V.
        dtype: Of the weights.
        tied: Whether the head is the embedding.
    """

    def __init__(self, columns, vocabulary, dtype=mx.float32, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary if tied else 64, columns)
        self.layer = nn.Linear(columns, columns, bias=False)
        if not tied:
            self.head = nn.Linear(columns, vocabulary, bias=False)
        self.set_dtype(dtype)
        mx.eval(self.parameters())

    def hidden(self, ids):
        return mx.tanh(self.layer(self.embedding(ids)))

    @property
    def head_weight(self):
        return self.head.weight if "head" in self else self.embedding.weight


def loss(chunk, early, model, ids, targets, **options):
    """Through chunks, or of whole logits where `chunk` is None."""
    if chunk is None:
        return cross_entropy(model.hidden(ids) @ model.head_weight.T, targets, **options).sum()
    with EARLY[early]():
        return linear_cross_entropy(model.hidden(ids), model.head_weight, targets, chunk=chunk, **options).sum()


def batch(rows, vocabulary):
    random = np.random.default_rng(0)
    return mx.array(random.integers(0, 64, rows)), mx.array(random.integers(0, vocabulary, rows))


def peak(work):
    """Bytes over what was there before, and what `work` returned."""
    mx.clear_cache()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = work()
    mx.synchronize()
    return mx.get_peak_memory() - before, result


def step_of(function, model, compiled=False, evaluate=mx.eval):
    """A call for loss and gradients, as a tuple of a scalar and a tree."""
    value_and_grad = partial(nn.value_and_grad(model, function), model)
    if compiled:
        value_and_grad = mx.compile(value_and_grad, inputs=model.state)

    def run(*arrays):
        value, gradients = value_and_grad(*arrays)
        evaluate(value, gradients)
        return value, gradients

    return run


def one_after_the_other(value, gradients):
    mx.eval(value)
    for _, gradient in tree_flatten(gradients):
        mx.eval(gradient)


def in_float32(model):
    """A model of the same numbers: on a CPU products of 16 bits take minutes."""
    copy = deepcopy(model)
    copy.set_dtype(mx.float32)
    return copy


def assert_same(got, want, use):
    """Of a 16-bit model the loss and the head's gradient: others go through its own rounding too."""
    got, want = (dict(tree_flatten({"loss": value, **gradients})) for value, gradients in (got, want))
    assert got.keys() == want.keys()
    rtol, names = (1e-2, ("loss", "head.weight")) if use == "bfloat16" else (1e-5, want)
    for name in names:
        array = want[name]
        array, other = (np.array(each.astype(mx.float32)) for each in (array, got[name]))
        assert np.abs(array - other).max() <= rtol * np.abs(array).max(), name


# How the loss is used: the model's options, whether the head is frozen, how it is run and evaluated.
USES = {
    "float32": ({}, False, {}),
    "bfloat16": ({"dtype": mx.bfloat16}, False, {}),
    "frozen head": ({}, True, {}),
    "tied": ({"tied": True}, False, {}),
    "compiled": ({}, False, {"compiled": True}),
    "loss before gradients": ({}, False, {"evaluate": one_after_the_other}),
}


# Without a reduction there are no early gradients.
@pytest.mark.parametrize(
    ("reduction", "early"), [("mean", "none"), ("mean", "all"), ("sum", "hidden"), ("none", "none")]
)
@pytest.mark.parametrize("use", USES)
def test_peak_is_under_a_quarter_of_whole_logits(use, reduction, early):
    options, frozen, how = USES[use]
    arrays = batch(ROWS, VOCABULARY)
    model = Head(COLUMNS, VOCABULARY, **options)
    if frozen:
        model.head.freeze()
    whole, want = peak(lambda: step_of(partial(loss, None, "none", reduction=reduction), in_float32(model))(*arrays))
    chunked, got = peak(lambda: step_of(partial(loss, CHUNK, early, reduction=reduction), model, **how)(*arrays))
    assert whole > 2 * 4 * ROWS * VOCABULARY
    assert chunked < whole / 4
    assert_same(got, want, use)


@pytest.mark.parametrize("early", EARLY)
def test_peak_in_a_checkpoint(early):
    arrays = batch(ROWS, VOCABULARY)
    hidden, weight = mx.random.normal((ROWS, COLUMNS)), mx.random.normal((VOCABULARY, COLUMNS))

    def gradients(function):
        return mx.grad(mx.checkpoint(function), argnums=(0, 1))(hidden, weight)

    def chunked(hidden, weight):
        with EARLY[early]():
            return linear_cross_entropy(hidden, weight, arrays[1], chunk=CHUNK)

    def run(function):
        found = gradients(function)
        mx.eval(found)
        return found

    whole, want = peak(lambda: run(lambda hidden, weight: cross_entropy(hidden @ weight.T, arrays[1])))
    held, got = peak(lambda: run(chunked))
    assert held < whole / 4
    for a, b in zip(got, want, strict=True):
        assert mx.abs(a - b).max() <= 1e-5 * mx.abs(b).max()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_peak_of_a_loss_alone_is_a_few_chunks(reduction):
    _, targets = batch(ROWS, VOCABULARY)
    hidden, weight = mx.random.normal((ROWS, COLUMNS)), mx.random.normal((VOCABULARY, COLUMNS))
    mx.eval(hidden, weight, targets)
    held, _ = peak(lambda: mx.eval(linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk=CHUNK)))
    assert held < 4 * ROWS * VOCABULARY / 2


@pytest.mark.parametrize("early", ["none", "hidden"])
def test_peak_of_a_frozen_head_is_under_that_of_a_trained_ones_chunk(early):
    rows, vocabulary = CHUNK_ROWS, 16384
    hidden, weight = mx.random.normal((rows, COLUMNS)), mx.random.normal((vocabulary, COLUMNS))
    _, targets = batch(rows, vocabulary)

    def loss(hidden):
        with EARLY[early]():
            return linear_cross_entropy(hidden, weight, targets)

    mx.eval(hidden, weight, targets)
    held, _ = peak(lambda: mx.eval(mx.value_and_grad(loss)(hidden)))
    # Chunks of a quarter of the rows, of which up to ten arrays are there.
    assert held < 3 * 4 * rows * vocabulary


# Minutes: the size that the issue of this room names.
@pytest.mark.slow
@pytest.mark.parametrize("use", ["float32", "bfloat16", "frozen head", "tied"])
def test_peak_at_8192_rows_of_32768_tokens(use):
    options, frozen, _ = USES[use]
    arrays = batch(8192, 32768)
    model = Head(512, 32768, **options)
    if frozen:
        model.head.freeze()

    def chunked(model, ids, targets):
        return linear_cross_entropy(model.hidden(ids), model.head_weight, targets)

    whole, want = peak(lambda: step_of(partial(loss, None, "none"), in_float32(model))(*arrays))
    held, got = peak(lambda: step_of(chunked, model)(*arrays))
    assert held < whole / 4
    assert_same(got, want, use)


def products(tmp_path, *arrays):
    """Products in the graph that would be evaluated for some arrays."""
    file = tmp_path / "graph.dot"
    mx.export_to_dot(str(file), *arrays)
    text = file.read_text()
    return text.count('label ="Matmul"') + text.count('label ="AddMM"')


# Early gradients, which are asked for, then the products of the loss alone, and of the loss with the gradients.
COUNTS = {
    ("none", "both"): (1, 4),
    ("none", "hidden"): (1, 3),
    ("none", "weight"): (1, 3),
    ("all", "both"): (3, 3),
    ("hidden", "both"): (2, 4),
    ("hidden", "hidden"): (2, 2),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("early", "asked"), COUNTS)
def test_products_are_those_of_the_gradients_that_are_asked_for(early, asked, reduction, chunks, tmp_path):
    hidden, weight = mx.random.normal((6, 5)), mx.random.normal((7, 5))
    targets = mx.array([0, 1, 2, 3, 4, 5])

    def loss(hidden, weight):
        with EARLY[early]():
            found = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk=6 // chunks)
        return found.sum()

    numbers = {"both": (0, 1), "hidden": (0,), "weight": (1,)}[asked]
    value, gradients = mx.value_and_grad(loss, argnums=numbers)(hidden, weight)
    gradients = gradients if asked == "both" else [gradients]
    # Without a reduction the gradients wait for their cotangents.
    want = COUNTS["none" if reduction == "none" else early, asked]
    assert (products(tmp_path, value), products(tmp_path, value, *gradients)) == tuple(chunks * n for n in want)


def test_frozen_bias_and_trained_bias(tmp_path):
    hidden, weight, bias = mx.random.normal((6, 5)), mx.random.normal((7, 5)), mx.random.normal((7,))

    def loss(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, mx.array([0, 1, 2, 3, 4, 5]), bias=bias)

    for numbers, count in (((0, 1), 4), ((0, 1, 2), 4), ((0, 2), 3), ((2,), 2)):
        value, gradients = mx.value_and_grad(loss, argnums=numbers)(hidden, weight, bias)
        gradients = gradients if len(numbers) > 1 else [gradients]
        assert products(tmp_path, value, *gradients) == count, numbers
