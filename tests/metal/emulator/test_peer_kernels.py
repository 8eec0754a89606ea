"""The kernels of mlx-lm run under `patch()`, give what its plain operations give, and only true bugs are found."""

from collections.abc import Iterator
import sys
from types import ModuleType

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import RaceError
from mlx import nn
import mlx.core as mx
import numpy as np
from peers import assert_close, imported_under_emulator, normal
import pytest

# CI runs a newer Python too, where none of these tests is skipped.
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="mlx-lm needs Python 3.11")

MODULES = (
    *("models.gated_delta", "models.ssm", "models.rwkv7", "models.bitlinear_layers", "models.kimi_k3"),
    *("models.deepseek_v41", "tuner.losses", "kernels"),
)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with imported_under_emulator("mlx_lm", MODULES) as found:
        yield found


@pytest.fixture
def three_schedules() -> Iterator[None]:
    with emulator.settings(schedules=3):
        yield


@pytest.fixture
def gated_delta(modules):
    return modules["models.gated_delta"]


def gated_delta_inputs(dtype: mx.Dtype, key_dim: int, *, vector_gate: bool = False) -> list[mx.array]:
    """q, k `[B, T, Hk, Dk]`, v `[B, T, Hv, Dv]`, g, beta `[B, T, Hv]`, state `[B, Hv, Dv, Dk]`."""
    batch, length, key_heads, heads, value_dim = 2, 3, 1, 2, 8
    gate = (batch, length, heads, key_dim) if vector_gate else (batch, length, heads)
    return [
        normal(batch, length, key_heads, key_dim, seed=1, dtype=dtype, scale=0.2),
        normal(batch, length, key_heads, key_dim, seed=2, dtype=dtype, scale=0.2),
        normal(batch, length, heads, value_dim, seed=3, dtype=dtype),
        mx.sigmoid(normal(*gate, seed=4)),
        mx.sigmoid(normal(batch, length, heads, seed=5, dtype=dtype)),
        normal(batch, heads, value_dim, key_dim, seed=6),
    ]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("vector_gate", [False, True], ids=["scalar gate", "vector gate"])
@pytest.mark.usefixtures("three_schedules")
def test_gated_delta(gated_delta, dtype, vector_gate):
    inputs = gated_delta_inputs(dtype, 64, vector_gate=vector_gate)
    got, want = gated_delta.gated_delta_kernel(*inputs), gated_delta.gated_delta_ops(*inputs)
    for ours, plain in zip(got, want, strict=True):
        assert_close(ours, plain, dtype)


@pytest.mark.parametrize("vector_gate", [False, True], ids=["scalar gate", "vector gate"])
@pytest.mark.usefixtures("three_schedules")
def test_gated_delta_with_a_mask(gated_delta, vector_gate):
    inputs = gated_delta_inputs(mx.float32, 64, vector_gate=vector_gate)
    mask = mx.array([[True, True, False], [True, True, True]])
    got, want = gated_delta.gated_delta_kernel(*inputs, mask), gated_delta.gated_delta_ops(*inputs, mask)
    # The kernel writes zeros where the mask is off; the plain version leaves those rows to whatever comes out.
    assert_close(got[0], mx.where(mask[..., None, None], want[0], 0))
    assert_close(got[1], want[1])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("three_schedules")
def test_packed_gated_delta(gated_delta, dtype):
    inputs = gated_delta_inputs(dtype, 128)
    packed, want = gated_delta.gated_delta_kernel(*inputs), gated_delta.gated_delta_ops(*inputs)
    tree = gated_delta.gated_delta_kernel_xtree(*inputs)
    for ours, plain, other in zip(packed, want, tree, strict=True):
        assert_close(ours, plain, dtype)
        # The package promises that these two are equal bit for bit.
        assert mx.array_equal(ours, other)


@pytest.mark.usefixtures("three_schedules")
def test_gated_delta_update_takes_the_kernel(gated_delta):
    q, k, v, _, _, state = gated_delta_inputs(mx.float32, 64)
    a, b = normal(2, 3, 2, seed=7), normal(2, 3, 2, seed=8)
    arguments = (q, k, v, a, b, normal(2, seed=9), normal(2, seed=10), state)
    emulator.reset()
    got = gated_delta.gated_delta_update(*arguments)
    assert len(emulator.report().launches) == 1
    for ours, plain in zip(got, gated_delta.gated_delta_update(*arguments, use_kernel=False), strict=True):
        assert_close(ours, plain)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("three_schedules")
def test_ssm(modules, dtype):
    ssm = modules["models.ssm"]
    batch, heads, head_dim, groups, state_dim = 2, 4, 16, 2, 64
    arguments = (
        normal(batch, 1, heads, head_dim, seed=1, dtype=dtype),
        normal(heads, seed=2),
        normal(batch, 1, groups, state_dim, seed=3, dtype=dtype),
        normal(batch, 1, groups, state_dim, seed=4, dtype=dtype),
        normal(heads, seed=5, dtype=dtype),
        normal(batch, 1, heads, seed=6),
        normal(heads, seed=7),
        normal(batch, heads, head_dim, state_dim, seed=8),
        (0.001, 100.0),
    )
    got, want = ssm.ssm_update_kernel(*arguments), ssm.ssm_attn(*arguments)
    for ours, plain in zip(got, want, strict=True):
        assert_close(ours, plain, dtype)


@pytest.mark.usefixtures("three_schedules")
def test_wkv7(modules):
    rwkv7 = modules["models.rwkv7"]
    batch, length, heads, dim = 2, 3, 2, 32
    r, w, k, v, a, b = (normal(batch, length, heads, dim, seed=seed, scale=0.3) for seed in range(6))
    state = normal(batch, heads, dim, dim, seed=6)
    got_y, got_state = rwkv7.wkv7_kernel(r, w, k, v, a, b, state)
    outputs = []
    for t in range(length):
        y, state = rwkv7._wkv7_step_ops(r[:, t], w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        outputs.append(y.squeeze(-1))
    assert_close(got_y, mx.stack(outputs, axis=1))
    assert_close(got_state, state)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("invert", [False, True], ids=["scale", "inverse scale"])
@pytest.mark.usefixtures("three_schedules")
def test_bitlinear(modules, dtype, invert):
    rows, columns = 12, 160
    layer = modules["models.bitlinear_layers"].BitLinear(columns, rows, bias=False, invert_weight_scales=invert)
    packed = np.random.default_rng(0).integers(0, 256, (rows // 4, columns), dtype=np.uint8)
    layer.weight, layer.weight_scale = mx.array(packed), mx.array([0.7]).astype(dtype)
    x = normal(5, columns, dtype=dtype)
    # Four rows a byte, two bits each, -1 to 2.
    weight = np.concatenate([(packed >> 2 * part & 3).astype(np.int32) - 1 for part in range(4)])
    scale = layer.weight_scale.astype(mx.float32)
    want = (x.astype(mx.float32) @ mx.array(weight.astype(np.float32)).T) * (1 / scale if invert else scale)
    assert_close(layer(x), want, dtype)


@pytest.mark.usefixtures("three_schedules")
def test_expert_routing(modules):
    experts, top_k = 40, 4
    logits, bias = normal(9, experts, seed=1), normal(experts, seed=2, scale=0.1)
    inds, weights = modules["kernels"].expert_routing(
        logits, bias, top_k=top_k, multiplier=0.5, score_eps=1e-6, route_scale=2.5
    )
    scores = mx.sigmoid(logits * 0.5)
    want = mx.argsort(-(scores + bias), axis=-1)[:, :top_k]
    assert mx.array_equal(inds, want.astype(mx.uint32))
    chosen = mx.take_along_axis(scores, want, axis=-1)
    assert_close(weights, chosen / (chosen.sum(-1, keepdims=True) + 1e-6) * 2.5)


def rounded_rms_norm(x: mx.array, eps: float, dtype: mx.Dtype) -> mx.array:
    """`x / sqrt(mean(x^2) + eps)` in float32, rounded to a type."""
    x = x.astype(mx.float32)
    return (x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps)).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [40, 768], ids=["one simdgroup", "three simdgroups"])
@pytest.mark.usefixtures("three_schedules")
def test_norm_add_norm(modules, dtype, dim):
    branch, stream = normal(3, dim, seed=1, dtype=dtype), normal(3, dim, seed=2)
    alpha, beta, post = (normal(dim, seed=seed) for seed in (3, 4, 5))
    next_norm = nn.RMSNorm(dim, eps=1e-5)
    next_norm.weight = normal(dim, seed=6)
    options = {"alpha": alpha, "beta": beta, "post_eps": 1e-6}
    scaled = post.astype(dtype) * branch
    want = alpha * stream + beta * rounded_rms_norm(scaled, 1e-6, dtype).astype(mx.float32)
    want_normed = mx.fast.rms_norm(want, next_norm.weight, 1e-5)

    kernels = modules["kernels"]
    got, normed = kernels.norm_add_norm(branch, stream, post_weight=post, next_norm=next_norm, **options)
    assert_close(got, want, dtype)
    assert_close(normed, want_normed, dtype)
    # Only the second half, of the same stream: the package says that the values are equal.
    assert mx.array_equal(kernels.pre_norm(got, next_norm, dtype=dtype), normed)
    plain, nothing = kernels.norm_add_norm(branch, stream, post_weight=None, next_norm=None, **options)
    assert_close(plain, alpha * stream + beta * rounded_rms_norm(branch, 1e-6, dtype).astype(mx.float32), dtype)
    assert nothing is None


@pytest.mark.parametrize("dim", [96, 1024], ids=["one simdgroup", "eight simdgroups"])
@pytest.mark.usefixtures("three_schedules")
def test_post_expert_norm_combine(modules, dim):
    experts, weights, norm = normal(2, 3, 4, dim, seed=1), mx.abs(normal(2, 3, 4, seed=2)), normal(dim, seed=3)
    got = modules["kernels"].post_expert_norm_combine(experts, weights, norm_weight=norm, eps=1e-5)
    assert_close(got, (rounded_rms_norm(experts * norm, 1e-5, mx.float32) * weights[..., None]).sum(-2))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("offset", [None, 5, [3, 11]], ids=["no rotation", "one offset", "an offset a row"])
@pytest.mark.usefixtures("three_schedules")
def test_qk_norm(modules, dtype, offset):
    batch, length, heads, key_heads, dim = 2, 3, 4, 2, 48
    qkvg = normal(batch, length, 2 * (heads + key_heads) * dim, dtype=dtype)
    options = {"n_heads": heads, "n_kv_heads": key_heads, "head_dim": dim, "eps": 1e-5, "query_scale": 1.5}
    if offset is None:
        got = modules["kernels"].qk_norm(qkvg, **options)
    else:
        offset = mx.array(offset) if isinstance(offset, list) else offset
        got = modules["kernels"].qk_norm_rope(qkvg, **options, rope_base=10000.0, offset=offset)
    both = qkvg[..., : (heads + key_heads) * dim].reshape(batch, length, heads + key_heads, dim)
    both = rounded_rms_norm(both, 1e-5, dtype)
    q = (both[..., :heads, :].astype(mx.float32) * 1.5).astype(dtype)
    for ours, plain in zip(got, (q, both[..., heads:, :]), strict=True):
        if offset is not None:
            rotated = plain.swapaxes(1, 2)
            rotated = mx.fast.rope(rotated, dim, traditional=True, base=10000.0, scale=1.0, offset=offset)
            plain = rotated.swapaxes(1, 2)
        assert_close(ours, plain, dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("three_schedules")
def test_rms_norm_sigmoid_gate_of_a_transposed_array(modules, dtype):
    batch, heads, length, dim = 2, 3, 5, 40
    x = normal(batch, length, heads, dim, seed=1, dtype=dtype).swapaxes(1, 2)
    gate = normal(batch, length, heads * dim, seed=2, dtype=dtype)
    got = modules["kernels"].rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    normed = rounded_rms_norm(x, 1e-5, mx.float32).swapaxes(1, 2).reshape(batch, length, heads * dim)
    assert_close(got, normed * mx.sigmoid(gate.astype(mx.float32)), dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("three_schedules")
def test_residual_mix_of_kimi(modules, dtype):
    kimi = modules["models.kimi_k3"]
    blocks = kimi.ResidualBlocks(1e-5)
    for seed in range(3):
        blocks.append(normal(1, 2, 96, seed=seed, dtype=dtype))
    arguments = (blocks, normal(1, 2, 96, seed=7, dtype=dtype), normal(96, seed=8, scale=0.3), 1e-5)
    assert_close(kimi._attn_res_mix(*arguments), kimi._attn_res_mix(*arguments, use_kernel=False), dtype)


@pytest.mark.usefixtures("three_schedules")
def test_sinkhorn_of_deepseek(modules, monkeypatch):
    deepseek = modules["models.deepseek_v41"]
    comb, eps = mx.softmax(normal(2, 5, 4, 4), axis=-1), mx.array([1e-6])
    got = deepseek._sinkhorn(comb, iters=6, eps=eps)
    monkeypatch.setattr(deepseek, "_sinkhorn_kernel", None)
    assert_close(got, deepseek._sinkhorn(comb, iters=6, eps=eps))


# The four loss kernels use one array for the maxima and, right after every simdgroup has read them all, for the sums:
#     barrier; max = shared[lane]; ...; if (lane == 0) shared[simdgroup] = sum; barrier
# Nothing between the read and the write makes a simdgroup wait. One that is ahead stores its sum while another, still
# to read, takes that sum for a maximum. kl_forward and js_forward then reuse the array for the divergence behind a
# barrier with mem_none, which orders no memory, and kl_forward reads that behind another one. So the races are true;
# how Apple's GPUs schedule simdgroups may hide them.
FORWARD_AND_BACKWARD = ["kl_forward", "kl_backward", "js_forward", "js_backward"]
LOSSES = pytest.mark.parametrize("name", ["kl", "js"])
VOCABULARIES = pytest.mark.parametrize("vocabulary", [700, 5000], ids=["part of a block", "a block and a part"])


def ordered(source: str) -> str:
    """A loss kernel's source with a barrier after the maxima are read, and with barriers that order memory."""
    comment = "// Share the sum_exp across the threadgroup"
    assert source.count(comment) == 1
    source = source.replace(comment, "threadgroup_barrier(mem_flags::mem_threadgroup);")
    return source.replace("mem_none", "mem_threadgroup")


@pytest.fixture
def corrected_losses(modules, monkeypatch):
    """mlx-lm's module of losses, its kernels built of corrected sources."""
    losses = modules["tuner.losses"]

    def build(source, **arguments):
        return emulator.metal_kernel(source=ordered(source), **arguments)

    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    for name in FORWARD_AND_BACKWARD:
        monkeypatch.setattr(losses, f"_{name}_kernel", getattr(losses, f"_make_{name}_kernel")())
    return losses


def plain_loss(name: str, q: mx.array, p: mx.array) -> mx.array:
    """KL(p || q) or the Jensen-Shannon divergence, a row each, in float32."""
    log_q, log_p = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (q, p))
    if name == "kl":
        return (mx.exp(log_p) * (log_p - log_q)).sum(-1)
    middle = mx.logaddexp(log_q, log_p) - np.log(2)
    return 0.5 * (mx.exp(log_p) * (log_p - middle) + mx.exp(log_q) * (log_q - middle)).sum(-1)


@LOSSES
@VOCABULARIES
@pytest.mark.usefixtures("three_schedules")
def test_losses_with_more_barriers(corrected_losses, name, vocabulary):
    loss = getattr(corrected_losses, f"{name}_div_loss")
    q, p = normal(2, vocabulary, seed=1), normal(2, vocabulary, seed=2)
    got, gradient = mx.value_and_grad(lambda q: loss(q, p).sum())(q)
    want, want_gradient = mx.value_and_grad(lambda q: plain_loss(name, q, p).sum())(q)
    assert_close(got, want)
    assert_close(gradient, want_gradient)


@pytest.mark.parametrize("name", FORWARD_AND_BACKWARD)
def test_race_in_the_losses_is_found(modules, monkeypatch, name):
    losses, sources = modules["tuner.losses"], []

    def build(source, **arguments):
        sources.append(source)
        return emulator.metal_kernel(source=source, **arguments)

    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    kernel = getattr(losses, f"_make_{name}_kernel")()
    logits, row = normal(1, 700, seed=1), mx.ones((1,))
    inputs = [logits, logits, *([row] if "backward" in name else []), *([row] if name == "js_backward" else [])]
    outputs = 2 if name == "js_forward" else 1
    with pytest.raises(RaceError) as info:
        kernel(
            inputs=inputs,
            template=[("T", mx.float32), ("V", 700)],
            grid=(1024, 1, 1),
            threadgroup=(1024, 1, 1),
            output_shapes=[(1, 700) if "backward" in name else (1,)] * outputs,
            output_dtypes=[mx.float32] * outputs,
        )
    error = info.value
    assert error.buffer == "shared"
    # The sum of one simdgroup over the maximum that another has yet to read.
    read, write = (sources[0].split("\n")[location.line - 1].strip() for location in error.locations)
    assert (read, write) == ("max_q = shared[simd_lane_id * 2 + 0];", "shared[simd_group_id * 2 + 0] = sum_exp_q;")
    assert len({thread.index // 32 for thread in error.threads}) == 2
