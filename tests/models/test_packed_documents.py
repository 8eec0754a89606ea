"""Documents that share a row: each gives, to the bit, what it gives among any other documents."""

from forge_mlx.metal.engine import use_engine
from forge_mlx.models.gpt import GPT, GPTConfig
from forge_mlx.train.objective import summed_loss
import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
import numpy as np
import pytest

VOCABULARY, LENGTH = 29, 24
SHAPE = {"vocab_size": VOCABULARY, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_seq_len": LENGTH}
MODELS = {
    "rope-window-sinks-softcap": {
        "token_shift": True,
        "sliding_window": 5,
        "attention_sinks": True,
        "attention_softcap": 3.0,
        "qk_norm": True,
        "num_kv_heads": 1,
        "mlp": "relu2",
    },
    "learned-positions": {
        "token_shift": True,
        "position": "learned",
        "norm": "layer_norm",
        "bias": True,
        "mlp": "gelu",
        "tie_embeddings": False,
    },
}
ENGINES = ["reference", pytest.param("emulator", marks=pytest.mark.slow)]
# The document that is looked at, where it lies, and what its loss is about.
START, SIZE = 6, 9
DOCUMENT, TARGETS = np.random.default_rng(0).integers(0, VOCABULARY, (2, SIZE)).astype(np.int32)


def build(name, **changes):
    """A model whose parameters are all random."""
    model = GPT(GPTConfig(**{**SHAPE, **MODELS[name], **changes}))
    rng = np.random.default_rng(1)
    model.update(tree_map(lambda p: mx.array(rng.normal(0, 0.4, p.shape).astype(np.float32)), model.parameters()))
    return model


def row(*documents):
    """Tokens, segment ids and positions of documents in a row, and padding behind them, int32 `[LENGTH]` each."""
    lengths = [len(each) for each in documents]
    padding = LENGTH - sum(lengths)
    ids = np.repeat([*range(len(documents)), -1], [*lengths, padding])
    places = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(padding)])
    tokens = np.concatenate([*documents, np.zeros(padding)])
    return tuple(each.astype(np.int32) for each in (tokens, ids, places))


def batches(seed):
    """The document at its place among others: other tokens, other lengths, padding; the row below changes too."""
    rng = np.random.default_rng(seed)

    def some(length):
        return rng.integers(0, VOCABULARY, length)

    return [
        (row(some(6), DOCUMENT, some(9)), row(some(LENGTH))),
        (row(some(6), DOCUMENT, some(9)), row(some(LENGTH))),
        (row(some(2), some(3), some(1), DOCUMENT, some(4)), row(some(5), some(12))),
        (row(some(6), DOCUMENT), row()),
    ]


def of_the_document(model, batch, *, isolated=True):
    """Its logits, and every gradient of a loss on it alone."""
    tokens, ids, places = (mx.array(np.stack(each)) for each in zip(*batch, strict=True))
    here = (0, slice(START, START + SIZE))
    weights, targets = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.int32)
    weights[here], targets[here] = 1, TARGETS
    documents = (ids, places) if isolated else (None, None)

    def loss(params):
        model.update(params)
        return summed_loss(model, tokens, mx.array(targets), mx.array(weights), *documents)

    params = model.trainable_parameters()
    grads = mx.grad(loss)(params)
    model.update(params)
    logits = model(tokens, segment_ids=documents[0], positions=documents[1])
    found = {name: np.array(grad) for name, grad in tree_flatten(grads)}
    return {"logits": np.array(logits)[here], **found}


def differing(one, other):
    assert one.keys() == other.keys()
    assert all(np.isfinite(value).all() for value in one.values())
    return [name for name in one if not np.array_equal(one[name], other[name])]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_neither_logits_nor_gradients_change_by_a_bit_with_the_neighbours(name, engine):
    model = build(name)
    with use_engine(engine):
        first, *others = (of_the_document(model, batch) for batch in batches(2))
    for other in others:
        assert differing(first, other) == []
    # All of it was computed: the rows of the table whose tokens the document has, the sinks, the shift.
    assert all(np.abs(value).max() > 0 for name, value in first.items() if not name.endswith("k_proj.bias"))


@pytest.mark.parametrize("name", MODELS)
def test_without_segments_the_neighbours_leak_in(name):
    model = build(name)
    first, *others = (of_the_document(model, batch, isolated=False) for batch in batches(2))
    # The row without tokens before and behind differs in what lies behind alone, which causal order hides.
    for other in others[:2]:
        assert "logits" in differing(first, other)
        assert len(differing(first, other)) > 5


@pytest.mark.parametrize("leak", ["token shift", "attention"])
def test_one_leak_alone_is_seen(leak, monkeypatch):
    model = build("rope-window-sinks-softcap", num_layers=1)
    part = model.token_shift if leak == "token shift" else model.layers[0].self_attn
    call = type(part).__call__
    monkeypatch.setattr(
        type(part), "__call__", lambda *args, **options: call(*args, **{**options, "segment_ids": None})
    )
    first, second, *_ = (of_the_document(model, batch) for batch in batches(2))
    assert "logits" in differing(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_row_gives_what_its_documents_give_alone(name):
    model = build(name)
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, VOCABULARY, length) for length in (6, 1, 9, 4)]
    tokens, ids, places = (mx.array(each[None]) for each in row(*documents))
    logits = np.array(model(tokens, segment_ids=ids, positions=places))[0]
    start = 0
    for document in documents:
        alone = np.array(model(mx.array(document[None])))[0]
        part = logits[start : start + len(document)]
        assert np.abs(part - alone).max() <= 1e-5 * np.abs(alone).max()
        start += len(document)
    assert np.isfinite(logits).all()


def test_positions_are_those_of_the_rotation():
    tokens = mx.array(np.random.default_rng(4).integers(0, VOCABULARY, (2, LENGTH)))
    twice = mx.broadcast_to(2 * mx.arange(LENGTH), tokens.shape)
    model, stretched = build("rope-window-sinks-softcap"), build("rope-window-sinks-softcap", rope_scale=2.0)
    assert mx.array_equal(model(tokens, positions=twice), stretched(tokens))
    assert not mx.array_equal(model(tokens), stretched(tokens))


@pytest.mark.parametrize("name", ["segment_ids", "positions"])
def test_documents_that_do_not_fit_are_named(name):
    model = build("rope-window-sinks-softcap")
    tokens = mx.zeros((1, 3), mx.int32)
    with pytest.raises(ValueError, match=rf"\[GPT\] {name} must be left out with a cache, which holds one text a row"):
        model(tokens, model.make_cache(), **{name: tokens})
    for wrong, what in ((mx.zeros((1, 4), mx.int32), r"\(1, 4\)"), (mx.zeros((1, 3)), "float32")):
        with pytest.raises(ValueError, match=rf"\[GPT\] {name} must be integers of the shape of tokens, .*{what}"):
            model(tokens, **{name: wrong})


def test_learned_positions_are_those_given_however_long_the_row():
    model = build("learned-positions")
    document = np.arange(LENGTH)
    tokens, ids, places = (mx.array(np.tile(each, 2)[None]) for each in (document, 0 * document, document))
    ids = mx.where(mx.arange(2 * LENGTH) < LENGTH, ids, 1)
    got = np.array(model(tokens, segment_ids=ids, positions=places))[0]
    alone = np.array(model(mx.array(document[None])))[0]
    for half in (got[:LENGTH], got[LENGTH:]):
        assert np.abs(half - alone).max() <= 1e-5 * np.abs(alone).max()


def test_what_is_no_array_is_named():
    model = build("learned-positions")
    tokens = np.zeros((1, 3), np.int32)
    with pytest.raises(ValueError, match=r"\[GPT\] tokens must be an mx.array but got numpy.ndarray\. Convert it"):
        model(tokens)
    for name in ("segment_ids", "positions"):
        with pytest.raises(ValueError, match=rf"\[GPT\] {name} must be an mx.array but got numpy.ndarray\. Convert it"):
            model(mx.array(tokens), **{name: tokens})
