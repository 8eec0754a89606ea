"""`packing: documents`: what a row holds, what an epoch holds, and that a stream goes on where it stopped."""

import itertools
import json

from forge_mlx.data import BatchStream, eval_batches, training_rows, validation_rows
from forge_mlx.data.documents import DocumentRows
from forge_mlx.data.piece_rows import pack
import numpy as np
import pytest
from token_files import END, document_file, token_file

MIXED = [5, 1, 8, 3, 3, 7, 2, 20, 3, 8, 16, 4, 1, 6, 9, 3, 5, 5]
CORPORA = {
    "mixed": MIXED,
    "one-document": [6],
    "one-long-document": [43],
    "one-token-documents": [1] * 17,
    "full-rows": [8, 8, 8],
    "twice-a-row": [16, 16],
}
SEQ_LEN = 8


def stream_of(tokens, batch_size=2, seq_len=SEQ_LEN, seed=3):
    return BatchStream(training_rows(tokens, seq_len, "documents"), batch_size, seed)


def take(stream, count):
    """The fields of some batches, stacked: int32 or float32 `[count * batch_size, seq_len]` each."""
    batches = [batch[:5] for batch in itertools.islice(stream, count)]
    return [np.concatenate(each) for each in zip(*batches, strict=True)]


def segments(batch):
    """The inputs, targets and positions of each segment, row by row; checks all that a row promises."""
    inputs, targets, weights, ids, positions, *_ = batch
    assert [each.dtype for each in batch[:5]] == [np.int32, np.int32, np.float32, np.int32, np.int32]
    assert ((ids >= 0) == (weights == 1)).all()
    for padding in (inputs, targets, weights, positions):
        assert (padding[ids < 0] == 0).all()
    found = []
    for row, row_ids in enumerate(ids):
        used = row_ids[row_ids >= 0]
        # They follow each other from the start of the row, numbered from 0.
        assert row_ids[len(used) :].tolist() == [-1] * (len(row_ids) - len(used))
        assert used.tolist() == sorted(used.tolist())
        assert set(used.tolist()) == set(range(used.max(initial=-1) + 1))
        found.append([tuple(each[row][row_ids == i] for each in (inputs, targets, positions)) for i in set(used)])
    return found


@pytest.mark.parametrize("name", CORPORA)
def test_an_epoch_holds_every_token_once_and_no_document_in_two_rows(tmp_path, name):
    tokens = document_file(tmp_path, CORPORA[name])
    rows = training_rows(tokens, SEQ_LEN, "documents")
    documents = np.split(np.array(tokens.tokens), np.cumsum(CORPORA[name])[:-1])
    wanted = []
    for document in documents:
        before = [END, *document[:-1]]
        for start in range(0, len(document), SEQ_LEN):
            wanted.append((before[start : start + SEQ_LEN], document[start : start + SEQ_LEN].tolist()))
    assert rows.num_targets == sum(len(targets) for _, targets in wanted) == tokens.num_tokens
    stream = BatchStream(rows, 1, seed=3)
    for _ in range(3):
        packed = [segment for row in segments(take(stream, rows.num_rows)) for segment in row]
        assert sorted((inputs.tolist(), targets.tolist()) for inputs, targets, _ in packed) == sorted(wanted)
        assert all(places.tolist() == list(range(len(places))) for _, _, places in packed)


def test_long_documents_are_counted(tmp_path):
    tokens = document_file(tmp_path, MIXED)
    rows = training_rows(tokens, SEQ_LEN, "documents")
    # 20, 16 and 9 tokens are longer than a row of 8.
    assert (rows.cut_documents, rows.cut_pieces) == (3, 3 + 2 + 2)
    assert training_rows(tokens, 20, "documents").cut_documents == 0


def slow_best_fit(lengths, seq_len):
    rooms = []
    for length in lengths:
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(seq_len - length)
    return sorted(rooms)


@pytest.mark.parametrize("seq_len", [1, 7, 30, 64])
def test_rows_are_filled_by_best_fit(seq_len):
    rng = np.random.default_rng(seq_len)
    lengths = rng.integers(1, seq_len + 1, 300).tolist()
    for order in (lengths, sorted(lengths, reverse=True)):
        rows, offsets = pack(order, seq_len)
        used = np.zeros((rows.max() + 1, seq_len), int)
        for row, offset, length in zip(rows, offsets, order, strict=True):
            used[row, offset : offset + length] += 1
        assert used.max() == 1
        assert used.sum() == sum(lengths)
        assert sorted((seq_len - used.sum(1)).tolist()) == slow_best_fit(order, seq_len)


def test_the_longest_come_first(tmp_path):
    # In the order of the corpus, 3 and 3 would share a row and leave none for 5.
    rows = training_rows(document_file(tmp_path, [3, 3, 5, 5]), SEQ_LEN, "documents")
    assert rows.num_rows == 2


def test_epochs_differ_in_order_and_in_who_shares_a_row(tmp_path):
    tokens = document_file(tmp_path, [5, 3] * 40)
    stream = stream_of(tokens, batch_size=1)
    epochs = [take(stream, 40) for _ in range(2)]
    assert [len(row) for epoch in epochs for row in segments(epoch)] == [2] * 80
    pairs = [[tuple(row) for row in epoch[1].tolist()] for epoch in epochs]
    assert len(set(pairs[0]) & set(pairs[1])) < 5
    firsts = [[row[0] for row in epoch] for epoch in pairs]
    assert sorted(firsts[0]) == sorted(firsts[1]) != firsts[0] != firsts[1]


def test_seed_decides_the_batches(tmp_path):
    tokens = document_file(tmp_path, MIXED)
    one, same, other = (take(stream_of(tokens, seed=seed), 20) for seed in (1, 1, 2))
    assert all(map(np.array_equal, one, same))
    assert not np.array_equal(one[0], other[0])


def test_batches_are_the_same_in_every_version(tmp_path):
    """A saved position is worth nothing once these numbers change."""
    inputs, *_ = take(stream_of(document_file(tmp_path, MIXED), seed=1234), 3)
    assert inputs[:, [0, -1]].tolist() == [[38, 45], [1, 60], [46, 80], [1, 96], [1, 52], [69, 76]]


def test_restored_stream_continues_exactly(tmp_path):
    tokens = document_file(tmp_path, MIXED)
    stream = stream_of(tokens, batch_size=3)
    assert stream.rows.num_rows % 3
    for steps in range(3 * stream.rows.num_rows):
        state = json.loads(json.dumps(stream.state_dict()))
        restored = stream_of(tokens, batch_size=3)
        restored.load_state_dict(state)
        assert restored.state_dict() == state
        following = take(restored, 7)
        again = take(stream_of(tokens, batch_size=3), steps + 7)
        for unbroken, resumed in zip(again, following, strict=True):
            assert np.array_equal(unbroken[3 * steps :], resumed)
        next(stream)


@pytest.mark.parametrize(("old", "new"), [("concat", "documents"), ("documents", "concat")])
def test_a_position_in_another_packing_is_refused(tmp_path, old, new):
    streams = {each: BatchStream(training_rows(document_file(tmp_path, MIXED), 8, each), 2, 3) for each in (old, new)}
    message = rf"its packing is {old} and the stream's is {new}\. Resume with the same .* and packing, or start anew"
    with pytest.raises(ValueError, match=message):
        streams[new].load_state_dict(streams[old].state_dict())
    with pytest.raises(ValueError, match=r"row 99 of epoch 0"):
        streams[old].load_state_dict({**streams[old].state_dict(), "row": 99})


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_validation_token_counts_once(tmp_path, name, batch_size):
    tokens = document_file(tmp_path, CORPORA[name])
    batches = list(eval_batches(validation_rows(tokens, SEQ_LEN, "documents"), batch_size))
    assert all(batch.inputs.shape == (batch_size, SEQ_LEN) for batch in batches)
    counted = np.concatenate([batch.counted_targets() for batch in batches])
    assert sorted(counted.tolist()) == sorted(tokens.tokens.tolist())
    for batch in batches:
        segments(batch)
        assert batch.counted_targets().size


def test_limited_validation_takes_rows_of_long_and_of_short_documents(tmp_path):
    rows = validation_rows(document_file(tmp_path, [8, 7, 6, 5] * 5), SEQ_LEN, "documents")
    # 130 targets in 20 rows.
    batches = list(eval_batches(rows, 1, max_tokens=26))
    assert [batch.counted_targets().size for batch in batches] == [8, 7, 6, 5]
    assert len(list(eval_batches(rows, 1, max_tokens=129))) == 20


def test_other_end_tokens_than_documents_are_refused(tmp_path):
    tokens = document_file(tmp_path, [4, 4])
    tokens.num_documents = 3
    with pytest.raises(
        ValueError, match=r"must have one end token, but .* has 2 of them for 3 documents\. Set data\.p"
    ):
        DocumentRows(tokens, 8)
    # A file whose last token ends no document.
    with pytest.raises(ValueError, match=r"has 1 of them for 0 documents"):
        DocumentRows(token_file(tmp_path, 9), 8)


def test_borders_are_found_across_blocks(tmp_path, monkeypatch):
    tokens = document_file(tmp_path, MIXED)
    whole = take(stream_of(tokens), 9)
    for block in (1, 2, 5):
        monkeypatch.setattr("forge_mlx.data.documents._BLOCK", block)
        assert all(map(np.array_equal, whole, take(stream_of(tokens), 9)))


def test_fewer_rows_than_a_batch_are_refused(tmp_path):
    message = r"4 rows of 8 tokens, but its 14 tokens fill 2 \(packing: documents\)\. Lower the batch size"
    with pytest.raises(ValueError, match=message):
        stream_of(document_file(tmp_path, [7, 7]), batch_size=4)
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        training_rows(document_file(tmp_path, [7, 7]), 0, "documents")


def test_a_large_corpus_is_packed_without_waste(tmp_path):
    lengths = np.random.default_rng(0).lognormal(4, 1, 20_000).astype(int) + 1
    rows = training_rows(document_file(tmp_path, lengths.tolist()), 1024, "documents")
    assert rows.num_targets > 0.99 * rows.num_rows * rows.seq_len
