"""What the kernels of rms_norm read and write, counted by the emulator."""

from functools import cache

from forge_mlx.kernels.norms.cases import RMSNormCase
import mlx.core as mx
from norm_proofs import counted
import pytest

counts = cache(counted)
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
CASES = [
    RMSNormCase((48, 4096)),
    RMSNormCase((48, 8192), BF16, BF16),
    RMSNormCase((600, 1000), F16, F16),
    RMSNormCase((2048, 128), BF16, BF16),
    RMSNormCase((2048, 8)),
    pytest.param(RMSNormCase((4096, 4096)), marks=pytest.mark.slow),
    pytest.param(RMSNormCase((4096, 8192), BF16, BF16), marks=pytest.mark.slow),
]
LONG = [RMSNormCase((6, 4100)), pytest.param(RMSNormCase((6, 128256), BF16, BF16), marks=pytest.mark.slow)]


def named(case):
    return case.name


@pytest.mark.parametrize("case", CASES, ids=named)
def test_rows_are_read_and_written_once_in_16_byte_accesses(case):
    (rows, columns), size = case.shape, case.dtype.size
    once = (rows * columns * size, rows * columns * size // 16)
    forward, backward = counts(case)["rms_norm_forward"], counts(case)["rms_norm_backward"]
    assert forward.read("x") == forward.written("y") == once
    assert backward.read("x") == backward.read("dy") == backward.written("dx") == once
    # Only add_rms_norm reads it.
    assert "others" not in backward.buffers or backward.read("others") == (0, 0)
    # One number a row: at most one lane of each simdgroup reads it.
    of_rows = sum(backward.read(name)[0] for name in ("inverse_rms", "dr")) + forward.written("inverse_rms")[0]
    assert of_rows <= max(0.05 * once[0], 12 * rows)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_w_and_the_parts_of_dw_move_once_a_threadgroup(case):
    columns, size = case.shape[-1], case.dtype.size
    forward, backward, summed = (counts(case)[name] for name in ("rms_norm_forward", "rms_norm_backward", "sum_parts"))
    for launch in (forward, backward):
        assert launch.read("w")[0] == launch.groups * columns * size
    assert backward.written("parts")[0] == summed.read("parts")[0] == backward.groups * columns * 4
    assert summed.written("total")[0] == columns * size


@pytest.mark.parametrize("case", LONG, ids=named)
def test_long_rows_are_read_twice_at_most(case):
    (rows, columns), launches = case.shape, counts(case)
    nbytes = rows * columns * case.dtype.size
    forward = launches["rms_norm_forward_long"]
    assert forward.read("x") == (2 * nbytes, 2 * nbytes // 16)
    assert forward.written("y") == (nbytes, nbytes // 16)
    first, second = launches["rms_norm_backward_long_rows"], launches["rms_norm_backward_long"]
    for launch in (first, second):
        assert launch.read("x") == launch.read("dy") == (nbytes, nbytes // 16)
    assert second.written("dx") == (nbytes, nbytes // 16)
    groups_below_each_other = second.written("parts")[0] // (columns * 4)
    assert groups_below_each_other == -(-rows // 4)
