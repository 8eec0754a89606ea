"""Blocks of rows of one expert: every row has a place among its own expert's, and the way back is the gradient."""

from forge_mlx.nn.expert_blocks import block_rows, into_blocks, make_blocks, out_of_blocks
import mlx.core as mx
import numpy as np
import pytest

SPLITS = {
    "even": [3, 3, 3, 3],
    "one expert has all": [0, 40, 0, 0],
    "whole blocks": [4, 8, 0, 4],
    "one row": [0, 0, 1, 0],
    "a row more than a block": [5, 5, 5, 5],
    "the last has none": [1, 2, 9, 0],
}


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_every_row_stands_in_a_block_of_its_expert(split, size):
    experts = np.repeat(np.arange(4), split)
    rows = np.random.default_rng(0).standard_normal((len(experts), 3)).astype(np.float32)
    blocks = make_blocks(mx.array(experts, mx.int32), 4, size)
    placed = np.array(into_blocks(mx.array(rows), blocks)).reshape(-1, size, 3)
    owners = np.array(blocks.experts)
    assert len(placed) == len(owners) == len(experts) // size + 4
    assert (np.diff(owners) >= 0).all()
    assert ((owners >= 0) & (owners < 4)).all()
    for expert in range(4):
        own = placed[owners == expert].reshape(-1, 3)
        count = split[expert]
        np.testing.assert_array_equal(own[:count], rows[experts == expert])
        assert not own[count:].any()
    np.testing.assert_array_equal(np.array(out_of_blocks(mx.array(placed.reshape(-1, 3)), blocks)), rows)


@pytest.mark.parametrize("way", [into_blocks, out_of_blocks])
def test_gradients_are_those_of_mlx(way):
    experts = mx.array(np.repeat(np.arange(4), [3, 0, 6, 1]), mx.int32)
    blocks = make_blocks(experts, 4, 4)
    shapes = {into_blocks: (10, 24), out_of_blocks: (24, 10)}
    x, dout = (mx.random.normal((count, 5)) for count in shapes[way])

    def plain(x):
        if way is into_blocks:
            return mx.where(blocks.sources[:, None] < 0, 0, x[mx.maximum(blocks.sources, 0)])
        return x[blocks.targets]

    def gradient(function):
        return mx.grad(lambda x, dout: (function(x) * dout).sum(), argnums=(0, 1))(x, dout)

    for got, want in zip(gradient(lambda x: way(x, blocks)), gradient(plain), strict=True):
        assert mx.allclose(got, want, rtol=1e-6, atol=1e-6)

    def of_gradient(function):
        return mx.grad(lambda d: mx.grad(lambda x: (function(x) * d).sum())(x).square().sum())(dout)

    assert mx.allclose(of_gradient(lambda x: way(x, blocks)), of_gradient(plain), rtol=1e-6, atol=1e-6)


def test_vmap_is_a_loop():
    experts = mx.array(np.sort(np.random.default_rng(1).integers(0, 3, (2, 8)), axis=1), mx.int32)
    x = mx.random.normal((2, 8, 4))

    def there_and_back(x, experts):
        blocks = make_blocks(experts, 3, 4)
        return out_of_blocks(2 * into_blocks(x, blocks), blocks)

    assert mx.array_equal(mx.vmap(there_and_back)(x, experts), 2 * x)


def test_few_rows_and_gpus_take_them_one_by_one(monkeypatch):
    assert block_rows(4 * 8, 8) == 16
    assert block_rows(4 * 8 - 1, 8) == 1
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert block_rows(10**6, 8) == 1
