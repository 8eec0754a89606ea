"""The token shift against its formula, in one call and in several."""

from forge_mlx.nn.token_shift import LastToken, TokenShift
import mlx.core as mx
import numpy as np
import pytest


@pytest.fixture
def shift():
    module = TokenShift(5)
    module.weight = mx.array([0.5, -1.0, 0.0, 2.0, 0.3])
    return module


def formula(x, weight):
    shifted = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
    return x + weight * shifted


def test_each_position_gets_its_share_of_the_one_before(shift):
    x = np.random.default_rng(0).standard_normal((2, 7, 5)).astype(np.float32)
    np.testing.assert_allclose(np.array(shift(mx.array(x))), formula(x, np.array(shift.weight)), rtol=1e-6)


def test_calls_that_continue_equal_one_call(shift):
    x = mx.random.normal((2, 7, 5), key=mx.random.key(1))
    last = LastToken()
    parts = [shift(x[:, a:b], last) for a, b in ((0, 3), (3, 4), (4, 7))]
    assert mx.array_equal(mx.concatenate(parts, axis=1), shift(x))


def test_every_channel_starts_at_the_documented_share():
    assert TokenShift(3).weight.tolist() == pytest.approx([0.3] * 3)


def test_another_batch_is_refused(shift):
    last = LastToken()
    shift(mx.zeros((2, 1, 5)), last)
    with pytest.raises(ValueError, match=r"batch of the first, 2, but got 3\. Start a new cache"):
        shift(mx.zeros((3, 1, 5)), last)


def test_no_share_goes_over_the_start_of_a_document(shift):
    x = np.random.default_rng(2).standard_normal((2, 7, 5)).astype(np.float32)
    ids = np.array([[0, 0, 0, 1, 1, -1, -1], [4, 2, 2, 2, 2, 2, 3]])
    want = formula(x, np.array(shift.weight))
    # A position whose predecessor is of another document is as the first of a row.
    starts = np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    want[starts] = x[starts]
    got = shift(mx.array(x), segment_ids=mx.array(ids))
    np.testing.assert_allclose(np.array(got), want, rtol=1e-6)
    half = shift(mx.array(x).astype(mx.bfloat16), segment_ids=mx.array(ids))
    assert half.dtype == shift(mx.array(x).astype(mx.bfloat16)).dtype


def test_documents_and_a_call_before_are_refused_together(shift):
    with pytest.raises(ValueError, match=r"\[TokenShift\] segment_ids must be left out with the last position"):
        shift(mx.zeros((1, 2, 5)), LastToken(), segment_ids=mx.zeros((1, 2), mx.int32))


def test_wrong_documents_are_named(shift):
    for ids, message in (
        (
            mx.zeros((1, 3), mx.int32),
            r"segment_ids must have the shape \(1, 2\), an id for each position, but got \(1, 3\)",
        ),
        (mx.zeros((1, 2)), "segment_ids must be integers but got float32"),
    ):
        with pytest.raises(ValueError, match=rf"\[TokenShift\] {message}"):
            shift(mx.zeros((1, 2, 5)), segment_ids=ids)
