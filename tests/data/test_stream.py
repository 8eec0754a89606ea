import itertools
import json

from forge_mlx.data import BatchStream, TokenFile, eval_batches
from forge_mlx.data.cache import TokenWriter
import numpy as np
import pytest


def token_file(tmp_path, num_tokens, fingerprint="0123456789abcdef0123"):
    """Every token is its own position."""
    path = tmp_path / f"{num_tokens}.{fingerprint}.bin"
    writer = TokenWriter(path, vocab_size=50_000, tokenizer="t", fingerprint=fingerprint)
    writer.add(np.arange(num_tokens, dtype=np.int32), num_tokens)
    writer.close()
    return TokenFile(path)


def take(stream, count):
    return list(itertools.islice(stream, count))


@pytest.mark.parametrize(("num_tokens", "batch_size", "seq_len"), [(100, 3, 7), (64, 4, 8), (41, 4, 10), (2, 1, 1)])
def test_each_token_is_a_target_once_an_epoch_but_for_a_rest(tmp_path, num_tokens, batch_size, seq_len):
    stream = BatchStream(token_file(tmp_path, num_tokens), batch_size, seq_len, seed=3)
    rows_per_epoch = num_tokens // seq_len
    assert stream.rows_per_epoch == rows_per_epoch
    epochs = 6
    batches = take(stream, epochs * rows_per_epoch)
    assert all(batch.shape == (batch_size, seq_len + 1) and batch.dtype == np.int32 for batch in batches)
    rows = np.concatenate(batches)
    assert ((rows[:, 1:] - rows[:, :-1]) % num_tokens == 1 % num_tokens).all()
    for epoch in range(epochs):
        targets = rows[epoch * rows_per_epoch : (epoch + 1) * rows_per_epoch, 1:].ravel()
        assert len(set(targets.tolist())) == len(targets) == rows_per_epoch * seq_len > num_tokens - seq_len


def test_epochs_differ_in_order_and_phase(tmp_path):
    stream = BatchStream(token_file(tmp_path, 1000), 1, 10, seed=0)
    first, second = (np.concatenate(take(stream, 100))[:, 0] for _ in range(2))
    assert len(set(first % 10)) == len(set(second % 10)) == 1
    assert first[0] % 10 != second[0] % 10
    assert (np.diff(first) != 10).any()
    assert set((first - first.min()) // 10) == set(range(100))


def test_seed_decides_the_batches(tmp_path):
    tokens = token_file(tmp_path, 500)
    one, same, other = (take(BatchStream(tokens, 2, 10, seed), 60) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_batches_are_the_same_in_every_version(tmp_path):
    """A saved position is worth nothing once these numbers change."""
    stream = BatchStream(token_file(tmp_path, 1000), 2, 3, seed=1234)
    assert [batch[:, 0].tolist() for batch in take(stream, 2)] == [[559, 490], [971, 775]]


def test_restored_stream_continues_exactly(tmp_path):
    tokens = token_file(tmp_path, 103)
    stream = BatchStream(tokens, 3, 7, seed=5)
    for steps in range(25):
        state = json.loads(json.dumps(stream.state_dict()))
        assert all(type(value) is int for value in state.values())
        restored = BatchStream(tokens, 3, 7, seed=5)
        restored.load_state_dict(state)
        assert restored.state_dict() == state
        following = take(restored, 7)
        again = BatchStream(tokens, 3, 7, seed=5)
        assert np.array_equal(take(again, steps + 7)[steps:], following)
        next(stream)


def test_epoch_counts_with_fraction(tmp_path):
    stream = BatchStream(token_file(tmp_path, 101), 5, 10, seed=0)
    assert stream.epoch == 0
    take(stream, 3)
    assert stream.epoch == 1.5


@pytest.mark.parametrize(
    ("num_tokens", "fingerprint", "batch_size", "seq_len", "seed", "key"),
    [
        (120, "0123456789abcdef0123", 3, 7, 5, "num_tokens"),
        (103, "1123456789abcdef0123", 3, 7, 5, "corpus"),
        (103, "0123456789abcdef0123", 2, 7, 5, "batch_size"),
        (103, "0123456789abcdef0123", 3, 8, 5, "seq_len"),
        (103, "0123456789abcdef0123", 3, 7, 6, "seed"),
    ],
)
def test_state_of_another_stream_is_refused(tmp_path, num_tokens, fingerprint, batch_size, seq_len, seed, key):
    state = BatchStream(token_file(tmp_path, 103), 3, 7, seed=5).state_dict()
    other = BatchStream(token_file(tmp_path, num_tokens, fingerprint), batch_size, seq_len, seed)
    with pytest.raises(ValueError, match=f"must belong to the same data, but its {key} is"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"), [({"row": 15}, "0 ... 14 rows"), ({"epoch": -1}, "epoch -1"), ({"x": 1}, "keys")]
)
def test_state_that_is_none_is_refused(tmp_path, change, message):
    stream = BatchStream(token_file(tmp_path, 103), 3, 7, seed=5)
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict({**stream.state_dict(), **change})


def test_corpus_shorter_than_one_batch(tmp_path):
    tokens = token_file(tmp_path, 32)
    message = r"batch_size \* seq_len \+ 1 = 33 tokens, but has 32. Lower the batch size \(4\) or the seq"
    with pytest.raises(ValueError, match=message):
        BatchStream(tokens, 4, 8, seed=0)
    assert next(BatchStream(token_file(tmp_path, 33), 4, 8, seed=0)).shape == (4, 9)


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "seed", "name"),
    [(0, 1, 0, "batch_size"), (1, 0, 0, "seq_len"), (1, 1, -1, "seed")],
)
def test_arguments_out_of_range(tmp_path, batch_size, seq_len, seed, name):
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        BatchStream(token_file(tmp_path, 50), batch_size, seq_len, seed)


@pytest.mark.parametrize(
    ("num_tokens", "batch_size", "seq_len"), [(50, 2, 7), (50, 7, 7), (57, 2, 7), (2, 3, 7), (9, 2, 4)]
)
def test_every_validation_target_counts_once(tmp_path, num_tokens, batch_size, seq_len):
    counted = []
    for batch, mask in eval_batches(token_file(tmp_path, num_tokens), batch_size, seq_len):
        assert batch.shape == (batch_size, seq_len + 1)
        assert mask.shape == (batch_size, seq_len)
        assert (batch.dtype, mask.dtype) == (np.int32, np.float32)
        targets = batch[:, 1:][mask == 1]
        assert (targets == batch[:, :-1][mask == 1] + 1).all()
        counted += targets.tolist()
        assert mask.sum() == (mask == 1).sum() > 0
    assert sorted(counted) == list(range(1, num_tokens))


def test_limited_validation_is_evenly_spaced(tmp_path):
    tokens = token_file(tmp_path, 1001)
    starts = [batch[0, 0] for batch, _ in eval_batches(tokens, 1, 10, max_tokens=45)]
    assert starts == [0, 200, 400, 600, 800]
    assert len(list(eval_batches(tokens, 1, 10, max_tokens=10_000))) == 100


def test_validation_without_a_target(tmp_path):
    with pytest.raises(ValueError, match="at least 2 tokens but has 1"):
        eval_batches(token_file(tmp_path, 1), 1, 1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        eval_batches(token_file(tmp_path, 9), 1, 1, max_tokens=0)
