import itertools
import json

from forge_mlx.data import BatchStream, eval_batches, training_rows, validation_rows
from forge_mlx.data.batch import Batch
import numpy as np
import pytest
from token_files import token_file


def stream_of(tokens, batch_size, seq_len, seed):
    return BatchStream(training_rows(tokens, seq_len, "concat"), batch_size, seed)


def evaluation(tokens, batch_size, seq_len, max_tokens=None):
    return eval_batches(validation_rows(tokens, seq_len, "concat"), batch_size, max_tokens)


def take(stream, count):
    """Rows of inputs and of targets, int32 `[count, batch_size, seq_len]` each."""
    batches = list(itertools.islice(stream, count))
    assert all(set(batch[2:]) == {None} for batch in batches)
    return np.stack([batch.inputs for batch in batches]), np.stack([batch.targets for batch in batches])


@pytest.mark.parametrize(("num_tokens", "batch_size", "seq_len"), [(100, 3, 7), (64, 4, 8), (41, 4, 10), (2, 1, 1)])
def test_each_token_is_a_target_once_an_epoch_but_for_a_rest(tmp_path, num_tokens, batch_size, seq_len):
    rows = training_rows(token_file(tmp_path, num_tokens), seq_len, "concat")
    stream = BatchStream(rows, batch_size, seed=3)
    rows_per_epoch = num_tokens // seq_len
    assert (rows.num_rows, rows.num_targets) == (rows_per_epoch, rows_per_epoch * seq_len)
    epochs = 6
    inputs, targets = take(stream, epochs * rows_per_epoch)
    assert inputs.shape == targets.shape == (epochs * rows_per_epoch, batch_size, seq_len)
    assert inputs.dtype == targets.dtype == np.int32
    assert (targets == (inputs + 1) % num_tokens).all()
    assert (inputs[..., 1:] == targets[..., :-1]).all()
    targets = targets.reshape(-1, seq_len)
    for epoch in range(epochs):
        seen = targets[epoch * rows_per_epoch : (epoch + 1) * rows_per_epoch].ravel()
        assert len(set(seen.tolist())) == len(seen) == rows_per_epoch * seq_len > num_tokens - seq_len


def test_epochs_differ_in_order_and_phase(tmp_path):
    stream = stream_of(token_file(tmp_path, 1000), 1, 10, seed=0)
    first, second = (take(stream, 100)[0][:, 0, 0] for _ in range(2))
    assert len(set(first % 10)) == len(set(second % 10)) == 1
    assert first[0] % 10 != second[0] % 10
    assert (np.diff(first) != 10).any()
    assert set((first - first.min()) // 10) == set(range(100))


def test_seed_decides_the_batches(tmp_path):
    tokens = token_file(tmp_path, 500)
    one, same, other = (take(stream_of(tokens, 2, 10, seed), 60) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_batches_are_the_same_in_every_version(tmp_path):
    """A saved position is worth nothing once these numbers change."""
    stream = stream_of(token_file(tmp_path, 1000), 2, 3, seed=1234)
    assert take(stream, 2)[0][..., 0].tolist() == [[559, 490], [971, 775]]


def test_restored_stream_continues_exactly(tmp_path):
    tokens = token_file(tmp_path, 103)
    stream = stream_of(tokens, 3, 7, seed=5)
    for steps in range(25):
        state = json.loads(json.dumps(stream.state_dict()))
        assert state.pop("packing") == "concat"
        assert all(type(value) is int for value in state.values())
        # A state of the time before there was a choice has none either.
        restored = stream_of(tokens, 3, 7, seed=5)
        restored.load_state_dict(state)
        assert restored.state_dict() == {**state, "packing": "concat"}
        following = take(restored, 7)
        again = stream_of(tokens, 3, 7, seed=5)
        for unbroken, resumed in zip(take(again, steps + 7), following, strict=True):
            assert np.array_equal(unbroken[steps:], resumed)
        next(stream)


def test_epoch_counts_with_fraction(tmp_path):
    stream = stream_of(token_file(tmp_path, 101), 5, 10, seed=0)
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
    state = stream_of(token_file(tmp_path, 103), 3, 7, seed=5).state_dict()
    other = stream_of(token_file(tmp_path, num_tokens, fingerprint), batch_size, seq_len, seed)
    with pytest.raises(ValueError, match=f"must belong to the same data, but its {key} is"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"), [({"row": 15}, "0 ... 14 rows"), ({"epoch": -1}, "epoch -1"), ({"x": 1}, "keys")]
)
def test_state_that_is_none_is_refused(tmp_path, change, message):
    stream = stream_of(token_file(tmp_path, 103), 3, 7, seed=5)
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict({**stream.state_dict(), **change})


def test_corpus_shorter_than_one_batch(tmp_path):
    tokens = token_file(tmp_path, 31)
    message = (
        r"must fill one batch, 4 rows of 8 tokens, but its 31 tokens fill 3 \(packing: concat\)\. Lower the batch size"
    )
    with pytest.raises(ValueError, match=message):
        stream_of(tokens, 4, 8, seed=0)
    inputs, targets = take(stream_of(token_file(tmp_path, 32), 4, 8, seed=0), 1)
    assert sorted(targets.ravel().tolist()) == list(range(32))
    assert (targets == (inputs + 1) % 32).all()


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "seed", "name"),
    [(0, 1, 0, "batch_size"), (1, 0, 0, "seq_len"), (1, 1, -1, "seed")],
)
def test_arguments_out_of_range(tmp_path, batch_size, seq_len, seed, name):
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        stream_of(token_file(tmp_path, 50), batch_size, seq_len, seed)


@pytest.mark.parametrize(
    ("num_tokens", "batch_size", "seq_len"), [(50, 2, 7), (50, 7, 7), (57, 2, 7), (2, 3, 7), (9, 2, 4)]
)
def test_every_validation_target_counts_once(tmp_path, num_tokens, batch_size, seq_len):
    counted = []
    for batch in evaluation(token_file(tmp_path, num_tokens), batch_size, seq_len):
        assert batch.inputs.shape == batch.targets.shape == batch.weights.shape == (batch_size, seq_len)
        assert (batch.inputs.dtype, batch.targets.dtype, batch.weights.dtype) == (np.int32, np.int32, np.float32)
        assert set(batch[3:]) == {None}
        counts = batch.weights == 1
        targets = batch.targets[counts]
        assert (targets == batch.inputs[counts] + 1).all()
        assert np.array_equal(targets, batch.counted_targets())
        counted += targets.tolist()
        assert batch.weights.sum() == counts.sum() > 0
    assert sorted(counted) == list(range(1, num_tokens))


def test_limited_validation_is_evenly_spaced(tmp_path):
    tokens = token_file(tmp_path, 1001)
    starts = [batch.inputs[0, 0] for batch in evaluation(tokens, 1, 10, max_tokens=45)]
    assert starts == [0, 200, 400, 600, 800]
    assert len(list(evaluation(tokens, 1, 10, max_tokens=10_000))) == 100


def test_validation_without_a_target(tmp_path):
    with pytest.raises(ValueError, match="at least 2 tokens but has 1"):
        evaluation(token_file(tmp_path, 1), 1, 1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        evaluation(token_file(tmp_path, 9), 1, 1, max_tokens=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        evaluation(token_file(tmp_path, 9), 1, 0)


def test_rows_that_fill_up_a_batch_count_nothing():
    rows = np.ones((2, 3), np.int32)
    plain = Batch(rows, rows).filled_up(3)
    assert plain.weights.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert set(plain[3:]) == {None}
    packed = Batch(rows, rows, rows.astype(np.float32), 0 * rows, rows).filled_up(4)
    assert packed.segment_ids[2:].tolist() == [[-1] * 3] * 2
    for array in (packed.inputs, packed.targets, packed.weights, packed.positions):
        assert array.tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
