"""The cache of keys and values: what it returns, how it grows, what it refuses."""

from forge_mlx.nn.kv_cache import KVCache
import mlx.core as mx
import pytest


def parts(*lengths):
    return [mx.random.normal((2, 3, n, 4), key=mx.random.key(i)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    "lengths",
    [(1,), (255, 1, 1), (256, 1), (257, 300), (3, 1, 1, 600, 1)],
    ids=lambda x: "+".join(map(str, x)),
)
def test_returns_everything_appended(lengths):
    cache = KVCache()
    keys = parts(*lengths)
    for i, part in enumerate(keys):
        got_keys, got_values = cache.update(part, 2 * part)
        want = mx.concatenate(keys[: i + 1], axis=2)
        assert cache.offset == want.shape[2]
        assert mx.array_equal(got_keys, want)
        assert mx.array_equal(got_values, 2 * want)


def test_buffers_grow_by_steps_of_256():
    cache = KVCache()
    assert cache.nbytes == 0
    sizes = []
    for part in parts(1, 255, 1):
        cache.update(part, part)
        sizes.append(cache.nbytes // (2 * 2 * 3 * 4 * 4))
    assert sizes == [256, 256, 512]


def test_keeps_the_dtype():
    cache = KVCache()
    part = parts(3)[0].astype(mx.bfloat16)
    assert cache.update(part, part)[0].dtype == mx.bfloat16


def test_another_batch_is_refused():
    cache = KVCache()
    cache.update(*parts(2, 2))
    other = mx.zeros((1, 3, 2, 4))
    with pytest.raises(ValueError, match=r"\[KVCache\] .* the first, \(2, 3, 4\), but got \(1, 3, 4\)"):
        cache.update(other, other)


def test_another_text_goes_on_from_what_is_kept():
    cache = KVCache()
    first, second, other = parts(5, 4, 3)
    cache.update(first, 2 * first)
    cache.update(second, 2 * second)
    cache.keep(6)
    keys, values = cache.update(other, 2 * other)
    want = mx.concatenate([first, second[:, :, :1], other], axis=2)
    assert mx.array_equal(keys, want)
    assert mx.array_equal(values, 2 * want)
    for length in (-1, 10):
        with pytest.raises(ValueError, match=rf"^\[KVCache\] length must be in 0 \.\.\. 9 but got {length}\.$"):
            cache.keep(length)
