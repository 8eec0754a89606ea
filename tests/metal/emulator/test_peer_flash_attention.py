"""The kernels of mlx-train-perf, known to work on Macs, run under `patch()` and give what its plain operations give.

They hold fragments of `simdgroup_matrix` by hand, so they are the check on the emulator's order of lanes.
"""

from collections.abc import Iterator
import sys
from types import ModuleType

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator import kernel_api
import mlx.core as mx
import numpy as np
from peers import assert_close, imported_under_emulator, normal
import pytest

# CI runs a newer Python too, where none of these tests is skipped.
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="mlx-train-perf needs Python 3.11")

MODULES = (
    *("attention.api", "attention.reference", "attention.segments", "attention.kernel.launch"),
    *("core.kernel.launch", "core.loss", "core.naive", "core.chunked", "_compat"),
)
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
VARIANTS = pytest.mark.parametrize("variant", ["scalar", "mma"])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
ROW_TILES = pytest.mark.parametrize("row_tiles", [2, 4])
# Two query heads share keys; the second block of 32 rows is partial.
BATCH, HEADS, KEY_HEADS, LENGTH, DIM = 1, 2, 1, 40, 64
SCALE = DIM**-0.5


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with imported_under_emulator("mlx_train_perf", MODULES) as found, emulator.settings(schedules=2):
        yield found


@pytest.fixture(scope="module")
def attention(modules):
    return modules["attention.kernel.launch"]


def attention_inputs(dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """q, k, v and the gradient of the output, `[B, H, T, D]`."""
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return tuple(normal(BATCH, h, LENGTH, DIM, seed=seed, dtype=dtype) for seed, h in enumerate(heads))


def segments(modules, packed: bool):
    """Three documents in one row, none of which ends where a block of keys does; None for one document."""
    if not packed:
        return None
    starts = np.repeat([0, 7, 29], [7, 22, 11]).astype(np.int32)
    ids = np.repeat([0, 1, 2], [7, 22, 11]).astype(np.int32)
    return modules["attention.segments"].PackedMask(seg_id=mx.array(ids)[None], seg_start=mx.array(starts)[None])


def segment_arguments(mask) -> dict[str, mx.array]:
    return {} if mask is None else {"seg_id": mask.seg_id, "seg_start": mask.seg_start}


@DTYPES
@VARIANTS
@PACKED
def test_attention_forward(modules, attention, dtype, variant, packed):
    q, k, v, _ = attention_inputs(dtype)
    mask = segments(modules, packed)
    tile = attention.TileShape(variant=variant)
    got = attention.launch_flash_fwd(q, k, v, scale=SCALE, causal=True, tile=tile, **segment_arguments(mask))
    want = modules["attention.reference"].flash_attention_reference(q, k, v, scale=SCALE, segments=mask)
    assert_close(got[0], want[0], dtype)
    assert_close(got[1], want[1])


@VARIANTS
def test_attention_forward_without_a_mask(modules, attention, variant):
    q, k, v, _ = attention_inputs(mx.float32)
    tile = attention.TileShape(variant=variant)
    got = attention.launch_flash_fwd(q, k, v, scale=SCALE, causal=False, tile=tile)
    want = modules["attention.reference"].flash_attention_reference(q, k, v, scale=SCALE, causal=False)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@DTYPES
@VARIANTS
@PACKED
def test_attention_backward(modules, attention, dtype, variant, packed):
    q, k, v, dout = attention_inputs(dtype)
    mask = segments(modules, packed)
    out, lse = modules["attention.reference"].flash_attention_reference(q, k, v, scale=SCALE, segments=mask)
    rowsum = attention.launch_bwd_D(dout, out)
    assert_close(rowsum, (dout.astype(mx.float32) * out.astype(mx.float32)).sum(-1))
    arguments = (q, k, v, dout, lse, rowsum)
    options = {"scale": SCALE, "causal": True, "variant": variant, **segment_arguments(mask)}
    got = (attention.launch_bwd_dq(*arguments, **options), *attention.launch_bwd_dkv(*arguments, **options))
    want = modules["attention.api"]._flash_attention_backward(
        q, k, v, out, lse, dout, scale=SCALE, causal=True, segments=mask
    )
    for ours, plain in zip(got, want, strict=True):
        assert_close(ours, plain, dtype)


def test_attention_in_ranges_of_queries_is_the_same_bit_for_bit(attention):
    q, k, v, _ = attention_inputs(mx.float32)
    options = {"scale": SCALE, "causal": True, "tile": attention.TileShape(variant="mma")}
    whole = attention.launch_flash_fwd(q, k, v, **options)
    parts = attention.launch_flash_fwd(q, k, v, **options, _force_ranges=[(0, 32), (32, 40)])
    for one, other in zip(whole, parts, strict=True):
        assert mx.array_equal(one, other)


def test_public_attention_takes_the_kernels(modules, monkeypatch):
    api = modules["attention.api"]
    # The release names the versions of MLX that its author has tried on a Mac.
    monkeypatch.setattr(modules["_compat"], "VERIFIED_MLX_VERSIONS", frozenset({mx.__version__}))
    # It times its kernels before it uses them, to keep each launch short.
    for name in ("calibrated_fwd_rate", "calibrated_bwd_dq_rate", "calibrated_bwd_dkv_rate"):
        monkeypatch.setattr(api, name, lambda **_: 1e12)
    q, k, v, dout = attention_inputs(mx.float32)

    def loss(implementation):
        return lambda q, k, v: (api.flash_attention(q, k, v, scale=SCALE, impl=implementation) * dout).sum()

    emulator.reset()
    got = mx.value_and_grad(loss("auto"), argnums=(0, 1, 2))(q, k, v)
    assert len(emulator.report().launches) == 4
    want = mx.value_and_grad(loss("reference"), argnums=(0, 1, 2))(q, k, v)
    assert_close(got[0], want[0])
    for ours, plain in zip(got[1], want[1], strict=True):
        assert_close(ours, plain)


def test_kernel_kept_from_before_is_not_emulated_until_the_cache_is_cleared(attention, monkeypatch):
    attention._bwd_d_kernel.cache_clear()
    with monkeypatch.context() as unpatched:
        # As before the block.
        unpatched.setattr(mx.fast, "metal_kernel", kernel_api._mlx_metal_kernel)
        attention._bwd_d_kernel(DIM, False)
    assert not isinstance(attention._bwd_d_kernel(DIM, False), kernel_api.EmulatedKernel)
    attention._bwd_d_kernel.cache_clear()
    assert isinstance(attention._bwd_d_kernel(DIM, False), kernel_api.EmulatedKernel)


ROWS, VOCABULARY, TILE = 20, 70, 32


def loss_inputs(dtype: mx.Dtype, dim: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """hidden `[N, D]`, weight `[V, D]`, targets and the gradient of the loss `[N]`."""
    targets = mx.array(np.random.default_rng(9).integers(0, VOCABULARY, ROWS).astype(np.int32))
    hidden, weight = normal(ROWS, dim, seed=1, dtype=dtype), normal(VOCABULARY, dim, seed=2, dtype=dtype, scale=0.2)
    return hidden, weight, targets, normal(ROWS, seed=3)


@DTYPES
@ROW_TILES
@pytest.mark.parametrize("dim", [64, 44], ids=["D64", "D44"])
def test_cross_entropy_forward(modules, dtype, row_tiles, dim):
    hidden, weight, targets, _ = loss_inputs(dtype, dim)
    lse, target = modules["core.kernel.launch"].forward(
        hidden, weight, targets, row_tiles=row_tiles, tile=TILE, rate_macs_per_s=None
    )
    logits = hidden.astype(mx.float32) @ weight.astype(mx.float32).T
    assert_close(lse, mx.logsumexp(logits, axis=-1))
    assert_close(target, mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1))


@ROW_TILES
def test_quantised_cross_entropy_forward(modules, row_tiles):
    hidden, weight, targets, _ = loss_inputs(mx.float32, 128)
    packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
    spec = modules["core.chunked"].QuantSpec(w_q=packed, scales=scales, biases=biases, group_size=64, bits=4)
    lse, target = modules["core.kernel.launch"].forward_quantized(
        hidden, spec, targets, row_tiles=row_tiles, tile=TILE, rate_macs_per_s=None
    )
    dense = mx.dequantize(packed, scales, biases, group_size=64, bits=4)
    assert_close(lse - target, modules["core.naive"].naive_linear_ce(hidden, dense, targets))


def plain_gradients(modules, hidden, weight, targets, cotangent):
    """lse, and the gradients for hidden and weight, by the package's plain operations in float32."""
    hidden, weight = hidden.astype(mx.float32), weight.astype(mx.float32)
    logits = hidden @ weight.T
    lse = mx.logsumexp(logits, axis=-1)
    gradients = modules["core.chunked"].chunked_backward(
        hidden=hidden,
        matmul_chunk=lambda v0, v1: logits[:, v0:v1],
        w_chunk=lambda v0, v1: weight[v0:v1],
        targets=targets,
        lse=lse,
        cotangent=cotangent,
        v=VOCABULARY,
        chunk_size=TILE,
        head_trainable=True,
    )
    return lse, *gradients


@DTYPES
@ROW_TILES
@pytest.mark.parametrize("kernel", ["backward_dhidden", "backward_dhidden_mma"], ids=["scalar", "mma"])
def test_cross_entropy_backward_for_hidden(modules, dtype, row_tiles, kernel):
    hidden, weight, targets, cotangent = loss_inputs(dtype, 44)
    lse, want, _ = plain_gradients(modules, hidden, weight, targets, cotangent)
    got = getattr(modules["core.kernel.launch"], kernel)(
        hidden, weight, targets, lse, lse, cotangent, row_tiles=row_tiles, tile=TILE, rate_macs_per_s=None
    )
    assert_close(got, want, dtype)


@ROW_TILES
def test_cross_entropy_backward_for_the_weight(modules, row_tiles):
    hidden, weight, targets, cotangent = loss_inputs(mx.float32, 40)
    lse, _, want = plain_gradients(modules, hidden, weight, targets, cotangent)
    # Float atomics add in any order: the last bits change with the schedule, as the package says of it.
    with emulator.settings(schedules=1):
        got = modules["core.kernel.launch"].backward_dw(
            hidden, weight, targets, lse, lse, cotangent, row_tiles=row_tiles, tile=TILE, rate_macs_per_s=None
        )
    assert_close(got, want)
