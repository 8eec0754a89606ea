"""Embedding is MLX's module on the room's embedding; Attention turns its heads by the room's rope."""

from forge_mlx.kernels.embedding import op
from forge_mlx.kernels.rope import op as rope_op
from forge_mlx.metal.engine import use_engine
from forge_mlx.nn import Attention, Embedding, KVCache
import mlx.core as mx
import mlx.nn as nn


def test_embedding_is_mlxs_module_with_the_same_table():
    mx.random.seed(1)
    ours = Embedding(11, 6)
    mx.random.seed(1)
    theirs = nn.Embedding(11, 6)
    ids, x = mx.array([[3, 0], [10, 3]]), mx.random.normal((2, 6))
    assert isinstance(ours, nn.Embedding)
    assert list(ours.parameters()) == ["weight"]
    assert mx.array_equal(ours.weight, theirs.weight)
    assert mx.array_equal(ours(ids), theirs(ids))
    assert mx.array_equal(ours.as_linear(x), theirs.as_linear(x))


def test_embedding_of_an_unknown_id_is_zero():
    got = Embedding(11, 6)(mx.array([11, -1, 2]))
    assert not got[:2].any()
    assert got[2].all()


def test_gradient_of_a_tied_embedding_holds_both_uses():
    ids, x = mx.array([3, 3, 0]), mx.random.normal((2, 6), key=mx.random.key(1))
    theirs = nn.Embedding(11, 6)
    ours = Embedding(11, 6)
    ours.weight = theirs.weight

    def gradient(table):
        def loss(table):
            return (table(ids) ** 3).sum() + (table.as_linear(x) ** 2).sum()

        return nn.value_and_grad(table, loss)(table)[1]["weight"]

    assert mx.allclose(gradient(ours), gradient(theirs), rtol=1e-5, atol=1e-6)


def test_modules_run_on_the_engine_that_is_asked_for(monkeypatch):
    ran = []

    def spy(room, name):
        function = getattr(room, name)
        monkeypatch.setattr(room, name, lambda engine, *rest: ran.append((name, engine)) or function(engine, *rest))

    spy(op, "_gather")
    spy(rope_op, "_rotate")
    table = Embedding(11, 16)
    attention = Attention(16, num_heads=2, num_kv_heads=1, head_dim=8)
    want = attention(table(mx.array([[1, 2, 3]])))
    ran.clear()
    with use_engine("emulator"):
        got = attention(table(mx.array([[1, 2, 3]])))
    # Queries and keys.
    assert ran == [("_gather", "emulator"), ("_rotate", "emulator"), ("_rotate", "emulator")]
    assert mx.allclose(got, want, rtol=1e-4, atol=1e-6)


def test_attention_turns_by_base_scale_and_the_cache_s_offset():
    attention = Attention(16, num_heads=2, num_kv_heads=1, head_dim=8, rope_base=100.0, rope_scale=0.5)
    x = mx.random.normal((1, 5, 16), key=mx.random.key(0))
    cache = KVCache()
    attention(x[:, :3], cache)
    attention(x[:, 3:], cache)
    keys = attention.k_proj(x).reshape(1, 5, 1, 8).transpose(0, 2, 1, 3)
    want = mx.fast.rope(keys, 8, traditional=False, base=100.0, scale=0.5, offset=0)
    assert mx.allclose(cache.update(keys[:, :, :0], keys[:, :, :0])[0], want, rtol=1e-5, atol=1e-6)
