"""What the kernels of add_rms_norm read and write, counted by the emulator."""

from functools import cache

from forge_mlx.kernels.norms.cases import AddRMSNormCase
import mlx.core as mx
from norm_proofs import counted
import pytest
from room_proofs import thinned

counts = cache(counted)
F16, BF16 = mx.float16, mx.bfloat16
CASES = [
    AddRMSNormCase((48, 4096)),
    AddRMSNormCase((48, 8192), BF16, BF16),
    AddRMSNormCase((2048, 128), F16, F16),
    AddRMSNormCase((2048, 8)),
]


def named(case):
    return case.name


# The others take seconds each.
@pytest.mark.parametrize("case", thinned(CASES, CASES[-2:].__contains__), ids=named)
def test_rows_are_read_and_written_once_in_16_byte_accesses(case):
    (rows, columns), size = case.shape, case.dtype.size
    once = (rows * columns * size, rows * columns * size // 16)
    forward, backward = counts(case)["add_rms_norm_forward"], counts(case)["rms_norm_backward"]
    assert forward.read("x") == forward.read("residual") == forward.written("y") == forward.written("total") == once
    assert backward.read("x") == backward.read("dy") == backward.read("others") == backward.written("dx") == once
    of_rows = sum(backward.read(name)[0] for name in ("inverse_rms", "dr")) + forward.written("inverse_rms")[0]
    assert of_rows <= max(0.05 * once[0], 12 * rows)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_w_and_the_parts_of_dw_move_once_a_threadgroup(case):
    columns, launches = case.shape[-1], counts(case)
    forward, backward = launches["add_rms_norm_forward"], launches["rms_norm_backward"]
    for launch in (forward, backward):
        assert launch.read("w")[0] == launch.groups * columns * case.dtype.size
    assert backward.written("parts")[0] == launches["sum_parts"].read("parts")[0] == backward.groups * columns * 4


def test_arrays_of_two_dtypes_are_read_once():
    case = AddRMSNormCase((48, 1024), BF16, BF16, residual_dtype=mx.float32)
    launches, elements = counts(case), 48 * 1024
    forward = launches["add_rms_norm_forward"]
    # A thread's four elements are 8 bytes of x.
    assert forward.read("x") == (2 * elements, elements // 4)
    assert forward.read("residual") == forward.written("total") == forward.written("y") == (4 * elements, elements // 4)


def test_long_rows_are_read_twice_at_most():
    rows, columns = 6, 4100
    launches = counts(AddRMSNormCase((rows, columns)))
    once = (4 * rows * columns, rows * columns // 4)
    forward = launches["add_rms_norm_forward_long"]
    # The sum is read again, not what it was made of.
    assert forward.read("x") == forward.read("residual") == forward.read("total") == once
    assert forward.written("total") == forward.written("y") == once
    first, second = launches["rms_norm_backward_long_rows"], launches["rms_norm_backward_long"]
    for launch in (first, second):
        assert launch.read("x") == launch.read("dy") == once
    assert second.read("others") == second.written("dx") == once
