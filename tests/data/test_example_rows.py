"""Rows of examples: what each holds, every target once an epoch, and streams that go on where they stopped."""

import itertools
import json

from forge_mlx.data import BatchStream, eval_batches
from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_rows import ExampleRows, ExampleTokens, PaddedRows
import numpy as np
import pytest


def examples(lengths, seed=0, share=0.4):
    """Examples of these numbers of tokens, each token another number, with a target or more in each."""
    rng = np.random.default_rng(seed)
    first = 1
    made = []
    for length in lengths:
        mask = rng.random(length) < share
        mask[rng.integers(1, length)] = True
        made.append(Encoded(np.arange(first, first + length, dtype=np.int32), mask))
        first += length
    return made


def written(tokens, targets):
    """An example by hand: its tokens, and 1 for those that are learnt."""
    return Encoded(np.array(tokens, np.int32), np.array([each == "1" for each in targets]))


MIXED = [5, 2, 9, 4, 4, 8, 3, 21, 4, 9, 17, 5, 2, 7, 10, 4, 6, 6]


def test_a_packed_row_token_by_token():
    tokens = ExampleTokens.of(
        [
            written([11, 12, 13, 14, 15], "00011"),
            written([21, 22, 23], "011"),
            written([31, 32], "11"),
        ]
    )
    rows = ExampleRows(tokens, 8)
    assert (rows.num_rows, rows.num_targets, rows.num_positions) == (1, 5, 7)
    batch = rows.batch(np.array([0]))
    assert batch.inputs.tolist() == [[11, 12, 13, 14, 21, 22, 31, 0]]
    assert batch.targets.tolist() == [[12, 13, 14, 15, 22, 23, 32, 0]]
    assert batch.weights.tolist() == [[0, 0, 1, 1, 1, 1, 1, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1, 2, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 0]]
    assert [each.dtype for each in batch[:5]] == [np.int32, np.int32, np.float32, np.int32, np.int32]


def test_padded_rows_token_by_token():
    tokens = ExampleTokens.of([written([11, 12, 13, 14, 15], "00011"), written([21, 22, 23], "010")])
    rows = PaddedRows(tokens, 5)
    batch = rows.batch(np.array([1, 0]))
    assert batch.inputs.tolist() == [[21, 22, 0, 0, 0], [11, 12, 13, 14, 0]]
    assert batch.targets.tolist() == [[22, 23, 0, 0, 0], [12, 13, 14, 15, 0]]
    assert batch.weights.tolist() == [[1, 0, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, -1, -1, -1], [0, 0, 0, 0, -1]]
    assert batch.positions.tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 0]]


def test_a_long_example_in_pieces():
    """Each piece begins with the last token of the one before it; the piece without a target is no row."""
    tokens = ExampleTokens.of([written([1, 2, 3, 4, 5, 6, 7, 8], "01000001")])
    rows = ExampleRows(tokens, 3)
    assert (rows.num_rows, rows.num_targets) == (2, 2)
    assert (rows.piece_lengths.tolist(), rows.left_out.tolist()) == ([3, 1], [3])
    batch = rows.batch(np.arange(2))
    assert batch.inputs.tolist() == [[1, 2, 3], [7, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4], [8, 0, 0]]
    assert batch.weights.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 0, 0]]


@pytest.mark.parametrize("kind", [ExampleRows, PaddedRows])
@pytest.mark.parametrize("seq_len", [4, 8, 20, 64])
def test_every_target_comes_once_an_epoch(kind, seq_len):
    made = examples(MIXED)
    wanted = sorted(token for example in made for token in example.ids[1:][example.is_target[1:]].tolist())
    before = {int(token): int(last) for example in made for last, token in itertools.pairwise(example.ids)}
    rows = kind(ExampleTokens.of(made), seq_len)
    assert rows.num_targets == len(wanted)
    stream = BatchStream(rows, 1, seed=3)
    for _ in range(3):
        found = []
        for batch in itertools.islice(stream, rows.num_rows):
            counts = batch.weights[0] == 1
            assert counts.any()
            real = batch.segment_ids[0] >= 0
            assert all(before[t] == i for i, t in zip(batch.inputs[0][real], batch.targets[0][real], strict=True))
            assert not counts[~real].any()
            found += batch.targets[0][counts].tolist()
        assert sorted(found) == wanted


def test_no_example_sees_another():
    """In a row, the ids change exactly where another example begins, and positions begin anew there."""
    made = examples(MIXED)
    owner = {int(token): index for index, example in enumerate(made) for token in example.ids}
    rows = ExampleRows(ExampleTokens.of(made), 24)
    batch = rows.batch(np.arange(rows.num_rows))
    for inputs, ids, places in zip(batch.inputs, batch.segment_ids, batch.positions, strict=True):
        used = ids >= 0
        owners = [owner[int(token)] for token in inputs[used]]
        assert len(set(zip(owners, ids[used].tolist(), strict=True))) == len(set(owners)) == ids.max() + 1
        starts = [made[index].ids[0] for index in owners]
        assert (inputs[used] - starts == places[used]).all()


@pytest.mark.parametrize("kind", [ExampleRows, PaddedRows])
def test_a_restored_stream_goes_on_exactly(kind):
    def stream():
        return BatchStream(kind(ExampleTokens.of(examples(MIXED)), 12), 4, seed=5)

    unbroken = stream()
    batches = list(itertools.islice(unbroken, 25))
    for steps in (0, 3, 11, 19):
        first = stream()
        for _ in range(steps):
            next(first)
        resumed = stream()
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for batch in batches[steps : steps + 6]:
            assert all(map(np.array_equal, batch[:5], next(resumed)[:5]))


def test_a_position_in_examples_with_another_mask_is_refused():
    made = examples(MIXED)
    state = BatchStream(ExampleRows(ExampleTokens.of(made), 12), 2, 1).state_dict()
    made[3].is_target[:] = True
    with pytest.raises(ValueError, match="must belong to the same data, but its corpus is"):
        BatchStream(ExampleRows(ExampleTokens.of(made), 12), 2, 1).load_state_dict(state)


def test_a_position_in_another_layout_is_refused():
    tokens = ExampleTokens.of(examples(MIXED))
    state = BatchStream(PaddedRows(tokens, 12), 2, 1).state_dict()
    with pytest.raises(ValueError, match="its packing is padded and the stream's is examples"):
        BatchStream(ExampleRows(tokens, 12), 2, 1).load_state_dict(state)


@pytest.mark.parametrize("kind", [ExampleRows, PaddedRows])
def test_validation_counts_every_target_once(kind):
    rows = kind(ExampleTokens.of(examples(MIXED)), 12)
    batches = list(eval_batches(rows, 4))
    assert {batch.inputs.shape for batch in batches} == {(4, 12)}
    assert sum(batch.counted_targets().size for batch in batches) == rows.num_targets
    few = list(eval_batches(rows, 1, max_tokens=rows.num_targets // 3))
    assert len(few) == -(-rows.num_rows // 3)


@pytest.mark.parametrize(("longest", "seq_len", "width"), [(5, 512, 64), (64, 512, 64), (65, 512, 128), (65, 100, 100)])
def test_padded_rows_are_as_long_as_the_longest_needs(longest, seq_len, width):
    assert PaddedRows(ExampleTokens.of(examples([3, longest + 1, 4])), seq_len).seq_len == width


def test_rows_are_filled():
    """Best fit: 7 + 1, 5 + 3 and 4 + 4 inputs fill three rows of 8."""
    rows = ExampleRows(ExampleTokens.of(examples([4, 5, 8, 2, 6, 5])), 8)
    assert (rows.num_rows, rows.num_positions) == (3, 24)


@pytest.mark.parametrize("kind", [ExampleRows, PaddedRows])
def test_fewer_rows_than_a_batch(kind):
    """A batch of 5 of 2 rows holds two epochs and a half; a stream that is restored goes on with the next ones."""
    tokens = ExampleTokens.of(examples([9, 9]))
    stream = BatchStream(kind(tokens, 8), 5, seed=0)
    states, batches, epochs = [], [], []
    for _ in range(4):
        states.append(stream.state_dict())
        batches.append(next(stream))
        epochs.append(stream.epoch)
    assert epochs == [2.5, 5, 7.5, 10]
    inputs = np.concatenate([batch.inputs for batch in batches])
    assert inputs.shape[0] == 20
    for epoch in range(10):
        # Each row once an epoch.
        found = sorted(row[:8].tolist() for row in inputs[2 * epoch : 2 * epoch + 2])
        assert found == sorted(tokens.tokens[start : start + 8].tolist() for start in (0, 9))
    other = BatchStream(kind(tokens, 8), 5, seed=0)
    for state, batch in zip(states[::-1], batches[::-1], strict=True):
        other.load_state_dict(state)
        for ours, theirs in zip(next(other), batch, strict=True):
            np.testing.assert_array_equal(ours, theirs)
