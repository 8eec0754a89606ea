"""Preference pairs as rows: who stands where, what counts, and the reference that comes along."""

import itertools
import json

from forge_mlx.data import BatchStream, eval_batches
from forge_mlx.data.chat import Encoded
from forge_mlx.data.example_rows import ExampleTokens
from forge_mlx.data.preference_rows import PreferenceRows
import numpy as np
import pytest


def pairs(count, seed=0):
    """Pair i: the prompt [100 i, ...], the chosen answer with odd, the rejected with even numbers from 10000 on."""
    rng = np.random.default_rng(seed)
    texts = []
    for index in range(count):
        prompt = 100 * index + np.arange(rng.integers(1, 5))
        for parity in (1, 0):
            answer = 10_000 + 100 * index + 2 * np.arange(rng.integers(1, 6)) + parity
            ids = np.concatenate([prompt, answer]).astype(np.int32)
            texts.append(Encoded(ids, np.arange(len(ids)) >= len(prompt)))
    return ExampleTokens.of(texts)


def test_a_pair_token_by_token():
    chosen = Encoded(np.array([1, 2, 3, 4], np.int32), np.array([False, False, True, True]))
    rejected = Encoded(np.array([1, 2, 5, 6, 7], np.int32), np.array([False, False, True, True, True]))
    rows = PreferenceRows(ExampleTokens.of([chosen, rejected]), 5)
    assert (rows.num_rows, rows.num_targets, rows.num_positions) == (1, 5, 7)
    batch = rows.batch(np.array([0]))
    assert batch.inputs.tolist() == [[1, 2, 3, 0, 0], [1, 2, 5, 6, 0]]
    assert batch.targets.tolist() == [[2, 3, 4, 0, 0], [2, 5, 6, 7, 0]]
    assert batch.weights.tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, -1, -1], [0, 0, 0, 0, -1]]
    assert batch.reference is None


def test_pairs_stay_together_and_come_once_an_epoch():
    rows = PreferenceRows(pairs(11), 64)
    assert rows.seq_len == 64
    stream = BatchStream(rows, 1, seed=2)
    for _ in range(2):
        seen = []
        for batch in itertools.islice(stream, 11):
            chosen, rejected = (row[weights > 0] for row, weights in zip(batch.targets, batch.weights, strict=True))
            assert (chosen % 2 == 1).all()
            assert (rejected % 2 == 0).all()
            numbers = {*((chosen - 10_000) // 100), *((rejected - 10_000) // 100), *(batch.inputs[:, 0] // 100)}
            assert len(numbers) == 1
            seen += numbers
        assert sorted(seen) == list(range(11))
    # 11 pairs in batches of 3: the fourth batch is of two epochs.
    assert {batch.inputs.shape for batch in itertools.islice(BatchStream(rows, 3, seed=2), 9)} == {(6, 64)}


def test_the_reference_comes_along_with_its_pair():
    plain = PreferenceRows(pairs(7), 64)
    number = np.arange(7, dtype=np.float32)
    rows = plain.with_reference(-number, -100 - number)
    for batch in itertools.islice(BatchStream(rows, 3, seed=4), 8):
        assert batch.reference.dtype == np.float32
        pair = batch.inputs[:, 0] // 100
        assert batch.reference[0::2].tolist() == (-pair[0::2]).tolist()
        assert batch.reference[1::2].tolist() == (-100 - pair[1::2]).tolist()
    assert plain.batch(np.array([0])).reference is None


def test_validation_is_filled_up_with_pairs_that_count_nothing():
    rows = PreferenceRows(pairs(5), 64).with_reference(*np.ones((2, 5), np.float32))
    batches = list(eval_batches(rows, 2))
    assert {batch.inputs.shape for batch in batches} == {(4, 64)}
    assert {batch.reference.shape for batch in batches} == {(4,)}
    assert batches[-1].weights[2:].sum() == 0
    assert batches[-1].reference.tolist() == [1, 1, 0, 0]
    assert sum(batch.counted_targets().size for batch in batches) == rows.num_targets


def test_a_restored_stream_goes_on_exactly():
    rows = PreferenceRows(pairs(7), 64).with_reference(*np.random.default_rng(0).normal(size=(2, 7)).astype(np.float32))
    unbroken = list(itertools.islice(BatchStream(rows, 3, seed=1), 12))
    stopped = BatchStream(rows, 3, seed=1)
    for _ in range(5):
        next(stopped)
    # A reference that is attached later does not change what a position belongs to.
    resumed = BatchStream(PreferenceRows(pairs(7), 64), 3, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for batch in unbroken[5:]:
        assert all(map(np.array_equal, batch[:5], next(resumed)[:5]))


def test_texts_that_are_no_pairs():
    texts = [Encoded(np.arange(length, dtype=np.int32), np.ones(length, bool)) for length in (4, 9, 4)]
    with pytest.raises(ValueError, match="must be pairs of texts"):
        PreferenceRows(ExampleTokens.of(texts), 10)
    with pytest.raises(ValueError, match=r"at most 8 tokens, but got 2 texts in 3 pieces, 0 of them without"):
        PreferenceRows(ExampleTokens.of(texts[:2]), 7)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (np.zeros(3), r"chosen must have one number for each of 4 pairs but has the shape \(3,\)"),
        (np.array([0, 1, np.nan, 2]), "chosen must be finite but is nan for pair 2"),
    ],
)
def test_references_that_do_not_fit(chosen, message):
    with pytest.raises(ValueError, match=message):
        PreferenceRows(pairs(4), 64).with_reference(chosen, np.zeros(4))
