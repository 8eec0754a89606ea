"""What callers of flash_attention see: errors, engines, strides, second derivatives, vmap, checkpoints, compiling."""

from forge_mlx.kernels._common.proof import RTOL
from forge_mlx.kernels.attention import (
    attention,
    flash_attention,
    flash_attention_backward,
    flash_supported,
    launch,
    reference,
)
from forge_mlx.kernels.attention.options import Options
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import assert_close, random

ENGINES = ["emulator", "reference"]
Q, K, V = mx.zeros((2, 4, 5, 16)), mx.zeros((2, 2, 7, 16)), mx.zeros((2, 2, 7, 8))
IDS = mx.zeros((2, 5), mx.int32), mx.zeros((2, 7), mx.int32)
SINKS = mx.zeros((4,))


def backward(q, k, v, **options):
    """flash_attention_backward of a result of the right shape."""
    out = mx.zeros((*q.shape[:3], v.shape[3]) if q.ndim == v.ndim == 4 else (1,), mx.float32)
    lse = mx.zeros(q.shape[:3])
    return flash_attention_backward(q, k, v, out, out, lse=lse, **options)


FUNCTIONS = {"flash_attention": flash_attention, "flash_attention_backward": backward, "attention": attention}
# Mistake: what is given in place of the right arrays, options, message.
MISTAKES = {
    "q is an integer": ({"q": Q.astype(mx.int32)}, {}, "q must be float32, float16 or bfloat16 but got int32"),
    "q has 3 axes": ({"q": Q[0]}, {}, r"q must be \[batch, heads, length, head_dim\] but got the shape \(4, 5, 16\)"),
    "dtypes differ": ({"k": K.astype(mx.float16)}, {}, "k must have the dtype of q, float32, but got float16"),
    "a head of 12": (
        {"q": Q[..., :12], "k": K[..., :12]},
        {},
        "head_dim must be a multiple of 8 from 8 to 256 but got 12",
    ),
    "v of 4": ({"v": V[..., :4]}, {}, "head_dim of v must be a multiple of 8 .* but got 4"),
    "a head of 264": ({"q": mx.zeros((2, 4, 5, 264)), "k": mx.zeros((2, 2, 7, 264))}, {}, "from 8 to 256 but got 264"),
    "another batch": ({"k": K[:1]}, {}, r"k must have the shape \(2, 2, 7, 16\), with the batch .* but got \(1, "),
    "another length of v": ({"v": V[:, :, :6]}, {}, r"v must have the shape \(2, 2, 7, 8\), with the batch, heads"),
    "heads do not divide": ({"q": Q[:, :3]}, {}, "the heads of q must be a multiple of those of k, 2, but got 3"),
    "no heads of k": ({"k": K[:, :0], "v": V[:, :0]}, {}, "the heads of q must be a multiple of those of k, 0"),
    "causal is 1": ({}, {"causal": 1}, "causal must be True or False but got 1"),
    "window is 0": ({}, {"window": 0}, "window must be a whole number of keys, 1 or more, or None but got 0"),
    "window is a float": ({}, {"window": 2.0}, "window must be a whole number .* but got 2.0"),
    "a window of both sides": ({}, {"window": 3, "causal": False}, "window needs causal=True but got causal=False"),
    "softcap is 0": ({}, {"softcap": 0.0}, r"softcap must lie in 1e-10 to 1e\+30 or be None but got 0"),
    "softcap is infinite": ({}, {"softcap": float("inf")}, "softcap must be within float32's range"),
    "scale is an array": ({}, {"scale": mx.array(1.0)}, "scale must be a Python number but got an mx.array"),
    "scale is nan": ({}, {"scale": float("nan")}, "scale must be within float32's range"),
    "one array of ids": ({}, {"segment_ids": IDS[0]}, "segment_ids must be a pair, .* for 5 queries and 7 keys"),
    "three arrays of ids": ({}, {"segment_ids": (*IDS, IDS[0])}, "segment_ids must be an array, or a pair .* got 3"),
    "ids are floats": (
        {},
        {"segment_ids": (IDS[0], IDS[1] * 1.0)},
        r"segment_ids\[1\] must be integers but got float32",
    ),
    "ids of another length": ({}, {"segment_ids": (IDS[1], IDS[1])}, r"segment_ids\[0\] must have the shape \(2, 5\)"),
    "sinks are integers": ({}, {"sinks": SINKS.astype(mx.int32)}, "sinks must be float32, float16 or bfloat16"),
    "too few sinks": ({}, {"sinks": SINKS[:2]}, r"sinks must have the shape \(4,\), one logit for each head of q"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    wrong, options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=rf"^\[{function}\] .*{message}"):
        FUNCTIONS[function](**{"q": Q, "k": K, "v": V, **wrong}, **options)


def test_unknown_variants_and_engines_raise():
    with pytest.raises(ValueError, match=r"\[flash_attention\] variant must be among auto, scalar, mma but got 'simd'"):
        flash_attention(Q, K, V, variant="simd")
    with pytest.raises(ValueError, match=r"variant must be auto on the engine reference .* but got 'mma'"):
        flash_attention(Q, K, V, variant="mma", impl="reference")
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        flash_attention(Q, K, V, impl="emulater")
    with pytest.raises(RuntimeError, match=r"\[flash_attention\] engine cuda cannot run"):
        flash_attention(Q, K, V, impl="cuda")


def test_supported_heads_are_those_that_do_not_raise():
    for size in range(300):
        assert flash_supported(size) == (size % 8 == 0 and 8 <= size <= 256)
    assert flash_supported(64, 128, mx.bfloat16)
    assert not flash_supported(64, 129)
    assert not flash_supported(64, dtype=mx.float64)


Q3, K3, V3 = random((2, 4, 6, 16), 0), random((2, 2, 9, 16), 1), random((2, 2, 9, 24), 2)
IDS3 = mx.array([[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 2, 2]]), mx.array([[0] * 4 + [1] * 3 + [-1] * 2, [2] * 9])
SINKS3 = random((4,), 3)
EVERY = {"window": 5, "softcap": 2.0, "segment_ids": IDS3}


def plain(q, k, v, sinks=None, *, scale=0.25, causal=True, window=None, softcap=None, segment_ids=(None, None)):
    """out and lse by the formula, whose gradient is MLX's own."""
    options = Options(scale, causal, window, softcap)
    if sinks is not None:
        sinks = mx.broadcast_to(sinks.astype(mx.float32), q.shape[:2])
    return reference.forward(q, k, v, *segment_ids, sinks, options)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", [mx.int8, mx.int64, mx.uint32], ids=str)
def test_ids_of_any_integer_dtype(dtype, impl):
    ids = tuple(each.astype(dtype) for each in IDS3)
    # What is negative stays so, or becomes negative at 32 bits.
    assert_close(flash_attention(Q3, K3, V3, segment_ids=ids, impl=impl), plain(Q3, K3, V3, segment_ids=IDS3)[0])


@pytest.mark.parametrize("impl", ENGINES)
def test_numbers_of_numpy_are_numbers(impl):
    options = {"scale": np.float32(0.5), "window": np.int64(4), "softcap": np.float64(2)}
    got = flash_attention(Q3, K3, V3, impl=impl, **options)
    assert_close(got, plain(Q3, K3, V3, scale=0.5, window=4, softcap=2.0)[0])


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_sinks_of_any_dtype_get_their_gradient_in_it(dtype, impl):
    sinks = SINKS3.astype(dtype)

    def loss(function):
        return lambda sinks: (function(Q3, K3, V3, sinks) * random((2, 4, 6, 24), 4)).sum()

    got = mx.grad(loss(lambda q, k, v, sinks: flash_attention(q, k, v, sinks=sinks, impl=impl)))(sinks)
    want = mx.grad(loss(lambda *arrays: plain(*arrays)[0]))(sinks.astype(mx.float32))
    assert got.dtype == dtype
    assert_close(got.astype(mx.float32), want, RTOL[dtype])


STRIDED = {
    "heads in rows": lambda x: mx.contiguous(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "every other row": lambda x: mx.repeat(x, 2, axis=2)[:, :, ::2],
    "backwards": lambda x: mx.contiguous(x[:, :, ::-1])[:, :, ::-1],
    "one head for all": lambda x: mx.broadcast_to(x[:, :1], x.shape),
    "one batch for all": lambda x: mx.broadcast_to(x[:1], x.shape),
    "parts of longer heads": lambda x: mx.concatenate([x, x, x], axis=3)[..., x.shape[3] : 2 * x.shape[3]],
    "odd places": lambda x: mx.concatenate([x, x[..., :1]], axis=3)[..., : x.shape[3]],
    "behind others": lambda x: mx.concatenate([x, x, x], axis=0)[1 : 1 + x.shape[0]],
    "columns in columns": lambda x: mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3),
}


@pytest.mark.parametrize("variant", ["mma", pytest.param("scalar", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides_give_the_result(name, variant):
    arrays = [STRIDED[name](each) for each in (Q3, K3, V3, random((2, 4, 6, 24), 4))]

    def run(function, q, k, v, dout):
        (out,), gradients = mx.vjp(function, [q, k, v], [dout])
        return [out, *gradients]

    got = run(lambda *qkv: flash_attention(*qkv, variant=variant, impl="emulator"), *arrays)
    want = run(lambda *qkv: plain(*qkv)[0], *map(mx.contiguous, arrays))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_kernels_get_arrays_as_they_lie(monkeypatch):
    seen = {}
    call = MetalKernel.__call__

    def see(self, inputs, **options):
        seen.setdefault(self.source.name, {}).update(inputs)
        assert not self.ensure_row_contiguous
        return call(self, inputs, **options)

    monkeypatch.setattr(MetalKernel, "__call__", see)
    q, k, v, dout = (STRIDED["heads in rows"](each) for each in (Q3, K3, V3, random((2, 4, 6, 24), 4)))
    mx.eval(mx.vjp(lambda *qkv: flash_attention(*qkv, impl="emulator"), [q, k, v], [dout]))
    given = {"q": q, "k": k, "v": v, "dout": dout}
    assert len(seen) == 4
    for name, inputs in seen.items():
        assert {"q", "k", "v"} <= inputs.keys() or name.endswith("delta")
        for argument in inputs.keys() & given.keys():
            want = np.array(given[argument], copy=False).strides
            # NumPy's view of the same memory tells how the elements lie.
            assert np.array(inputs[argument], copy=False).strides == want, (name, argument)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("shapes", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)], ids=str)
def test_empty_arrays_give_zeros_and_zero_gradients(shapes, impl):
    batch, heads, queries, keys = shapes
    q, k = mx.ones((batch, heads, queries, 16)), mx.ones((batch, heads // 2, keys, 16))
    results, gradients = mx.vjp(
        lambda q, k, v: flash_attention(q, k, v, return_lse=True, impl=impl),
        [q, k, k[..., :8]],
        [mx.ones((batch, heads, queries, 8)), mx.ones((batch, heads, queries))],
    )
    assert results[0].shape == (batch, heads, queries, 8)
    assert not results[0].any().item()
    assert (results[1] == -mx.inf).all().item()
    for gradient, array in zip(gradients, (q, k, k[..., :8]), strict=True):
        assert gradient.shape == array.shape
        assert not gradient.any().item()


@pytest.mark.parametrize("impl", ENGINES)
def test_no_keys_leave_the_sink(impl):
    out, lse = flash_attention(Q3, K3[:, :, :0], V3[:, :, :0], sinks=SINKS3, return_lse=True, impl=impl)
    assert not out.any().item()
    assert mx.array_equal(lse, mx.broadcast_to(SINKS3[:, None], (2, 4, 6)))


def losses(function, **options):
    """A number that depends on out and on lse in every way."""

    def loss(*arrays):
        out, lse = function(*arrays, **options)
        return (out**3).sum() + (mx.where(lse == -mx.inf, 0, lse) ** 2).sum()

    return loss


def ours(impl):
    def call(q, k, v, sinks=None, **options):
        return flash_attention(q, k, v, sinks=sinks, return_lse=True, impl=impl, **options)

    return call


def second_derivative(loss, *arrays):
    """Gradients of a weighted sum of the first gradients."""
    numbers = tuple(range(len(arrays)))

    def first(*inner):
        gradients = mx.grad(loss, argnums=numbers)(*inner)
        return sum((gradient * random(gradient.shape, 9 + index)).sum() for index, gradient in enumerate(gradients))

    return mx.grad(first, argnums=numbers)(*arrays)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("options", [{}, EVERY], ids=["causal", "every option"])
def test_second_derivative(options, impl):
    arrays = [Q3, K3, V3, *([SINKS3] if options else [])]
    got = second_derivative(losses(ours(impl), **options), *arrays)
    want = second_derivative(losses(plain, **options), *arrays)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-4)


@pytest.mark.parametrize("impl", ENGINES)
def test_in_a_checkpoint(impl):
    def gradients(wrap):
        return mx.grad(wrap(losses(ours(impl), **EVERY)), argnums=(0, 1, 2, 3))(Q3, K3, V3, SINKS3)

    for a, b in zip(gradients(mx.checkpoint), gradients(lambda loss: loss), strict=True):
        assert mx.array_equal(a, b)


def test_every_launch_is_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    mx.eval(mx.vjp(lambda q: flash_attention(q, K3, V3, impl="metal"), [Q3], [random((2, 4, 6, 24), 4)]))
    assert launched == ["metal"] * 4
    with use_engine("metal"):
        mx.eval(flash_attention(Q3, K3, V3))
    assert launched == ["metal"] * 5


# Head size, queries, options, and whether MLX's own op is the better one for them.
CHOICES = {
    "causal": (64, 3, {}, True),
    "full": (72, 3, {"causal": False}, True),
    "a scale": (64, 3, {"scale": 0.5}, True),
    "a window": (64, 3, {"window": 2}, False),
    "softcap": (64, 3, {"softcap": 2.0}, False),
    "sinks": (64, 3, {"sinks": mx.zeros((2,))}, False),
    "segments": (64, 5, {"segment_ids": mx.zeros((1, 5), mx.int32)}, False),
    "lse": (64, 3, {"return_lse": True}, False),
    "a variant": (64, 3, {"variant": "mma"}, False),
    "more queries than keys": (64, 6, {}, False),
    "a head that MLX has no kernel for": (40, 3, {}, False),
    "a long head": (256, 3, {}, False),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_automatic_takes_mlx_for_plain_attention_alone(choice, monkeypatch):
    size, queries, options, wanted = CHOICES[choice]
    taken = []
    fast = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda *a, **b: taken.append("mlx") or fast(*a, **b))

    def run(engine, _variant, *rest):
        taken.append(engine)
        return reference.forward(*rest)

    monkeypatch.setattr(launch, "forward", run)
    q, k = mx.zeros((1, 2, queries, size)), mx.zeros((1, 1, 5, size))
    flash_attention(q, k, k, **options)
    # By name the kernels run, whatever it is.
    flash_attention(q, k, k, **options, impl="metal")
    assert taken == ["mlx" if wanted else "metal", "metal"]


@pytest.fixture(params=["reference", "metal"])
def engine(request, monkeypatch):
    """The reference, and an engine whose launches are lazy, as those of a GPU: with what the kernels ask of inputs."""

    def check(name, q, k, v, q_segments, k_segments, sinks):
        assert name == "metal"
        assert q.ndim == k.ndim == v.ndim == 4
        assert sinks is None or sinks.shape == q.shape[:2]
        assert q_segments is None or q_segments.shape == (q.shape[0], q.shape[2])
        assert k_segments is None or k_segments.shape == (k.shape[0], k.shape[2])

    def forward(name, _variant, *rest):
        check(name, *rest[:6])
        return reference.forward(*rest)

    def backward(name, _variant, *rest):
        check(name, *rest[:6])
        return reference.backward(*rest)

    monkeypatch.setattr(launch, "forward", forward)
    monkeypatch.setattr(launch, "backward", backward)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    return request.param


def stacked(array, axis, count=3):
    """Several arrays along a new axis."""
    return mx.stack([array + 0.1 * index for index in range(count)], axis=axis)


# What is mapped: q, k, v, sinks and their axes.
MAPPED = {
    "all": ([stacked(Q3, 0), stacked(K3, 0), stacked(V3, 0), stacked(SINKS3, 0)], (0, 0, 0, 0)),
    "q": ([stacked(Q3, 2), K3, V3, SINKS3], (2, None, None, None)),
    "k and v, at the end": ([Q3, stacked(K3, 4), stacked(V3, 4), SINKS3], (None, 4, 4, None)),
    "sinks": ([Q3, K3, V3, stacked(SINKS3, 1)], (None, None, None, 1)),
}


@pytest.mark.parametrize("options", [{}, EVERY], ids=["causal", "every option"])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_gradients(name, options, engine):
    arrays, axes = MAPPED[name]
    numbers = (0, 1, 2, 3)

    def of_vmap(function):
        return mx.grad(losses(mx.vmap(lambda *inner: function(*inner, **options), in_axes=axes)), argnums=numbers)(
            *arrays
        )

    def vmap_of(function):
        return mx.vmap(mx.grad(losses(function, **options), argnums=numbers), in_axes=axes)(*arrays)

    for transformed in (of_vmap, vmap_of):
        for a, b in zip(transformed(ours(engine)), transformed(plain), strict=True):
            assert_close(a, b, 1e-4)


def test_vmap_of_segment_ids(engine):
    ids = tuple(mx.stack([each, mx.zeros_like(each), each[::-1]]) for each in IDS3)

    got = mx.vmap(lambda mine, other: ours(engine)(Q3, K3, V3, segment_ids=(mine, other)))(*ids)[0]
    assert_close(got, mx.stack([plain(Q3, K3, V3, segment_ids=pair)[0] for pair in zip(*ids, strict=True)]))


def test_compiled_function(engine):
    def gradients(function):
        return mx.grad(losses(function, **EVERY), argnums=(0, 1, 2, 3))

    got = mx.compile(gradients(ours(engine)))(Q3, K3, V3, SINKS3)
    for a, b in zip(got, gradients(plain)(Q3, K3, V3, SINKS3), strict=True):
        assert_close(a, b, 1e-4)


def test_options_are_not_mixed_up():
    two, three, again = (flash_attention(Q3, K3, V3, window=window, impl="reference") for window in (2, 3, 2))
    assert mx.array_equal(two, again)
    assert not mx.array_equal(two, three)
