"""kernels/_common/vector.h on the emulator: every start and end, and how many accesses it takes."""

from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import resource

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Denormals and the largest numbers of each 16-bit type among them.
NUMBERS = np.array([0.0, -0.0, 1.0, -2.5, 6e-8, 65504.0, np.inf, -np.inf, 3.0, 1e-5, 1 / 3, -7.0], np.float32)


def copy(dtype, target_dtype, size, count, *, skip_in=0, skip_out=0, slice_off=0):
    """target, what the registers held, and the counts of the launch."""
    threads = max(1, -(-count // size))
    source = mx.array(np.resize(NUMBERS, skip_in + slice_off + max(count, 8))).astype(dtype)[slice_off:]
    inputs = {"source": source, "count": count, "skip_in": skip_in, "skip_out": skip_out}
    emulator.reset()
    target, held = resource("vector_copy")(
        inputs,
        output_shapes=[(skip_out + count + 1,), (threads * size,)],
        output_dtypes=[target_dtype, mx.float32],
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template={"T": dtype, "U": target_dtype, "N": size},
        init_value=-1.0,
        engine="emulator",
    )
    mx.eval(target, held)
    wanted = source[skip_in : skip_in + count]
    assert mx.array_equal(target[skip_out : skip_out + count], wanted.astype(mx.float32).astype(target_dtype))
    assert (target[:skip_out] == -1).all()
    assert (target[skip_out + count :] == -1).all()
    assert mx.array_equal(held[:count], wanted.astype(mx.float32))
    assert (held[count:] == 0).all()
    return {each.name: each for each in emulator.report().launches[0].counts.buffers}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 31, 64])
def test_copy_of_every_length(dtype, count):
    copy(dtype, dtype, 16 // dtype.size, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slice_off", range(1, 9))
def test_source_that_begins_anywhere_in_its_buffer(dtype, slice_off):
    size = 16 // dtype.size
    reads = copy(dtype, dtype, size, 4 * size, slice_off=slice_off)["source"].reads
    assert reads == (4 if slice_off % size == 0 else 4 * size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_target_that_begins_anywhere(dtype):
    size = 16 // dtype.size
    for skip in range(size + 1):
        writes = copy(dtype, dtype, size, 4 * size, skip_in=1, skip_out=skip)["target"].writes
        assert writes == (4 if skip % size == 0 else 4 * size)


@pytest.mark.parametrize(
    ("dtype", "target", "size"),
    [(a, b, 16 // a.size) for a in DTYPES for b in DTYPES if a != b],
    ids=lambda value: str(value)[9:] if isinstance(value, mx.Dtype) else None,
)
def test_other_dtype_on_each_side(dtype, target, size):
    counts = copy(dtype, target, size, 5 * size)
    assert counts["source"].reads == 5
    assert counts["target"].writes == 5 * max(1, size * target.size // 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_vectors_take_one_access_each(dtype):
    size = 16 // dtype.size
    counts = copy(dtype, dtype, size, 10 * size + 1)
    assert counts["source"].reads == 10 + 1
    assert counts["target"].writes == 10 + 1


def test_array_of_fewer_than_8_elements():
    source = mx.array([1.0, 2.0, 3.0])
    target, held = resource("vector_copy")(
        {"source": source, "count": 3, "skip_in": 0, "skip_out": 0},
        output_shapes=[(3,), (4,)],
        output_dtypes=[mx.float32, mx.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        template={"T": mx.float32, "U": mx.float32, "N": 4},
        engine="emulator",
    )
    assert target.tolist() == [1, 2, 3]
    assert held.tolist() == [1, 2, 3, 0]
