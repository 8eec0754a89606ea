"""Barriers and simdgroup functions: which lanes act together, and what is told when they cannot."""

from forge_mlx.metal.emulator.errors import BarrierError, DeadlockError, InactiveLaneError, MetalError
import numpy as np
import pytest
from runtime_launch import ALL, result, start

X = np.arange(64, dtype=np.float32)
INDEX = "uint i = thread_position_in_threadgroup.x;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def sums_of(groups: list[list[int]], size: int = 64) -> np.ndarray:
    """For each lane the sum of X over the group it is in, else 0."""
    want = np.zeros(size, np.float32)
    for group in groups:
        want[group] = X[group].sum()
    return want


@pytest.mark.parametrize("schedules", [1, 4])
def test_both_sides_of_a_branch_exchange(schedules: int):
    body = INDEX + "out[i] = i % 3 == 0 ? simd_sum(x[i]) : simd_sum(x[i] + 100.0f);"
    outcome = start(body, {"x": X}, schedules=schedules)
    third = [i for i in range(64) if i % 3 == 0]
    groups = [[i for i in third if i < 32], [i for i in third if i >= 32]]
    rest = [[i for i in range(64) if i % 3 and i // 32 == side] for side in (0, 1)]
    want = sums_of(groups)
    for group in rest:
        want[group] = (X[group] + 100).sum()
    np.testing.assert_array_equal(result(outcome), want)
    # Two in each simdgroup, though both are the same function of one header.
    assert outcome.counts.simdgroup_functions == 4


def test_lanes_leave_a_loop_at_different_rounds_and_meet_again():
    body = """
    uint i = thread_position_in_threadgroup.x;
    float total = 0.0f;
    for (uint round = 0; round <= i % 4; round++) {
        total += simd_sum(1.0f);
    }
    out[i] = total;
    all[i] = simd_sum(1.0f);
    """
    outputs = {name: np.zeros(32, np.float32) for name in ("out", "all")}
    outcome = start(body, {}, outputs, grid=32, schedules=3)
    # Rounds 0, 1, 2, 3 see 32, 24, 16, 8 lanes.
    np.testing.assert_array_equal(result(outcome), np.cumsum([32, 24, 16, 8])[np.arange(32) % 4])
    np.testing.assert_array_equal(result(outcome, 1), np.full(32, 32))
    assert outcome.counts.simdgroup_functions == 5


def test_the_outermost_call_decides_which_lanes_are_together():
    # Both calls of `part` come to the same simd_sum: the places differ in an outer frame alone.
    header = "__attribute__((noinline)) float part(float v) { return simd_sum(v); }"
    body = INDEX + "if (i < 8) { out[i] = part(1.0f); } else { out[i] = part(2.0f) + 0.5f; }"
    outcome = start(body, {}, grid=32, header=header, schedules=3)
    np.testing.assert_array_equal(result(outcome), np.where(np.arange(32) < 8, 8, 48.5))


def test_lanes_that_came_further_wait_for_those_behind():
    # Lane 0 comes to the last sum at once; it must not go through alone.
    body = """
    uint i = thread_position_in_threadgroup.x;
    float before = 0.0f;
    if (i != 0) {
        before = simd_sum(1.0f);
    }
    out[i] = before * 100.0f + simd_sum(1.0f);
    """
    for schedules in (1, 4):
        outcome = start(body, {}, grid=32, schedules=schedules)
        np.testing.assert_array_equal(result(outcome), np.where(np.arange(32) == 0, 32, 3132))


def test_lanes_that_have_returned_are_left_out():
    body = INDEX + "if (i >= 20) { out[i] = -1.0f; return; }\nout[i] = simd_sum(1.0f);"
    outcome = start(body, {}, grid=32)
    np.testing.assert_array_equal(result(outcome), np.where(np.arange(32) < 20, 20, -1))
    (warning,) = outcome.warnings
    assert "k body:3" in warning
    assert "lanes 0-19" in warning
    assert "thread 20 has returned" in warning.lower()


def test_a_partial_last_simdgroup_is_no_finding():
    outcome = start(INDEX + "out[i] = simd_sum(1.0f);", {}, grid=40)
    np.testing.assert_array_equal(result(outcome), np.where(np.arange(40) < 32, 32, 8))
    assert outcome.warnings == ()


def test_a_partial_reduction_is_told_once_for_each_place():
    body = INDEX + "float s = 0.0f;\nfor (uint k = 0; k < 9; k++) {\nif (i % 2) s += simd_sum(1.0f);\n}\nout[i] = s;"
    outcome = start(body, {}, grid=64)
    assert len(outcome.warnings) == 1
    assert start(body, {}, grid=64, checks=ALL - {"barriers"}).warnings == ()


def test_a_partial_shuffle_of_active_lanes_is_no_finding():
    body = INDEX + "out[i] = 0.0f;\nif (i < 16) { out[i] = simd_shuffle_xor(x[i], ushort(1)); }"
    outcome = start(body, {"x": X}, grid=32)
    np.testing.assert_array_equal(result(outcome), np.where(np.arange(32) < 16, np.arange(32) ^ 1, 0))
    assert outcome.warnings == ()


def test_a_shuffle_from_an_inactive_lane():
    body = INDEX + "out[i] = 0.0f;\nif (i < 16) {\nout[i] = simd_shuffle(x[i], ushort(i + 1));\n}"
    with pytest.raises(InactiveLaneError, match="lane 16") as info:
        start(body, {"x": X}, grid=32)
    assert [str(place) for place in info.value.locations] == ["k body:4"]
    assert [thread.index for thread in info.value.threads] == [15]
    assert "lanes 0-15" in str(info.value)
    start(body, {"x": X}, grid=32, checks=ALL - {"barriers"})


@pytest.mark.parametrize(
    ("condition", "says"), [("i < 16", "lanes 0-15"), ("i % 2 == 1", "lanes 1, 3,"), ("i == 5", "only lane 5")]
)
def test_part_of_a_simdgroup_loads_a_matrix(condition: str, says: str):
    body = INDEX + f"out[i] = 0.0f;\nif ({condition}) {{\nsimdgroup_float8x8 m;\nsimdgroup_load(m, x, 8);\n}}"
    with pytest.raises(BarrierError, match=says) as info:
        start(body, {"x": X}, grid=32)
    assert str(info.value.locations[0]) == "k body:5"


def test_a_simdgroup_of_fewer_than_32_threads_loads_a_matrix():
    body = INDEX + "simdgroup_float8x8 m;\nsimdgroup_load(m, x, 8);\nout[i] = 0.0f;"
    with pytest.raises(BarrierError, match="has only 8 threads"):
        start(body, {"x": X}, grid=40)


def test_a_matrix_product_is_counted_once():
    body = """
    simdgroup_float8x8 a, b, c(0);
    simdgroup_load(a, x, 8);
    simdgroup_load(b, x, 8);
    for (uint k = 0; k < 3; k++) {
        simdgroup_multiply_accumulate(c, a, b, c);
    }
    if (thread_position_in_grid.x < 32) {
        simdgroup_store(c, out, 8);
    }
    """
    outcome = start(body, {"x": X}, {"out": np.zeros(64, np.float32)}, grid=64, threadgroup=64)
    np.testing.assert_array_equal(result(outcome).reshape(8, 8), 3 * (X.reshape(8, 8) @ X.reshape(8, 8)))
    assert outcome.counts.matrix_multiply_accumulates == 6
    assert outcome.counts.matrix_flops == 6 * 1024


def test_a_barrier_after_early_returns():
    body = INDEX + "out[i] = 0.0f;\nif (i == 40) return;\n" + BARRIER + "out[i] = 1.0f;"
    with pytest.raises(BarrierError) as info:
        start(body)
    error = info.value
    assert type(error) is BarrierError
    assert [str(place) for place in error.locations] == ["k body:4"]
    assert [thread.index for thread in error.threads] == [0, 40]
    assert "63 of 64" in str(error)
    assert "thread 40 has returned" in str(error)


def test_two_different_barriers_meet():
    body = INDEX + "if (i < 32) {\n" + BARRIER + "} else {\n" + BARRIER + "}\nout[i] = 0.0f;"
    with pytest.raises(BarrierError) as info:
        start(body)
    error = info.value
    assert type(error) is BarrierError
    assert [str(place) for place in error.locations] == ["k body:3", "k body:5"]
    assert [thread.index for thread in error.threads] == [0, 32]


def test_one_barrier_in_a_helper_is_two_places_by_its_callers():
    header = "__attribute__((noinline)) void wait() {\n" + BARRIER + "}"
    body = INDEX + "out[i] = 0.0f;\nif (i < 32) { wait(); out[i] = 1.0f; } else { out[i] = 2.0f; wait(); }"
    with pytest.raises(BarrierError, match="two barriers") as info:
        start(body, header=header)
    assert [str(place) for place in info.value.locations] == ["k header:2", "k header:2"]


def test_simdgroups_wait_for_each_other_at_different_barriers_in_turn():
    # Different rounds of one loop are the same place: the barrier completes, as it does on a GPU.
    body = INDEX + "for (uint k = 0; k < 3; k++) {\n" + BARRIER + "}\nout[i] = 0.0f;"
    assert start(body).counts.threadgroup_barriers == 3


def test_part_of_a_simdgroup_at_simdgroup_barrier():
    body = INDEX + "out[i] = 0.0f;\nif (i % 32 < 8) {\nsimdgroup_barrier(mem_flags::mem_none);\n}"
    with pytest.raises(BarrierError, match="8 of 32") as info:
        start(body)
    assert str(info.value.locations[0]) == "k body:4"


def test_two_simdgroup_barriers_meet():
    wait = "simdgroup_barrier(mem_flags::mem_none);"
    body = INDEX + f"if (i % 32 < 8) {{\n{wait}\n}} else {{\n{wait}\n}}\nout[i] = 0.0f;"
    with pytest.raises(BarrierError, match="two barriers met by one simdgroup") as info:
        start(body)
    assert [str(place) for place in info.value.locations] == ["k body:3", "k body:5"]


def test_simdgroups_pass_their_own_barriers_apart():
    body = INDEX + "if (i < 32) { simdgroup_barrier(mem_flags::mem_none); }\nout[i] = 1.0f;"
    assert start(body, grid=64).counts.simdgroup_barriers == 1


def test_deadlock():
    body = INDEX + "if (i == 3) {\nsimdgroup_barrier(mem_flags::mem_none);\n} else {\n" + BARRIER + "}\nout[i] = 0.0f;"
    with pytest.raises(DeadlockError) as info:
        start(body)
    assert [thread.index for thread in info.value.threads] == [3, 0]
    assert [str(place) for place in info.value.locations] == ["k body:3", "k body:5"]


def test_without_the_check_a_barrier_lets_through_who_came():
    body = INDEX + "out[i] = 0.0f;\nif (i < 40) {\n" + BARRIER + "}\nelse {\n" + BARRIER + "}\nout[i] = 1.0f;"
    with pytest.raises(MetalError):
        start(body)
    outcome = start(body, checks=ALL - {"barriers"})
    np.testing.assert_array_equal(result(outcome), np.ones(64))


def test_exchanged_values_of_every_width():
    body = INDEX + "ushort s = simd_shuffle_xor(ushort(i), ushort(3));\n"
    body += "float4 v = simd_shuffle_down(float4(i, 2 * i, 3 * i, 4 * i), ushort(0));\nout[i] = s + v.w;"
    np.testing.assert_array_equal(result(start(body, {}, grid=32)), (np.arange(32) ^ 3) + 4 * np.arange(32))


def test_functions_of_a_quadgroup():
    outcome = start(INDEX + "out[i] = quad_sum(x[i]);", {"x": X}, grid=32)
    np.testing.assert_array_equal(result(outcome), np.repeat(X[:32].reshape(8, 4).sum(1), 4))


def test_recursion_depth_orders_places():
    # The same return addresses, one call deeper: not the same place.
    header = """
    __attribute__((noinline)) float down(uint depth, float v) {
        if (depth == 0) return simd_sum(v);
        float w = down(depth - 1, v);
        return w + 0.25f;
    }
    """
    body = INDEX + "out[i] = down(i % 2, 1.0f);"
    outcome = start(body, {}, grid=32, header=header, checks=ALL - {"language"})
    np.testing.assert_array_equal(result(outcome), np.where(np.arange(32) % 2, 16.25, 16))


def test_what_inactive_lanes_hand_in_is_zero():
    body = """
    uint i = thread_position_in_threadgroup.x;
    uint mine = i + 1;
    uint all[32];
    uint before = 0;
    for (uint k = 0; k < 32; k++) all[k] = 77;
    if (i % 2 == 0) {
        uint active = emu_exchange(EMU_SHUFFLE, &mine, 4, all);
        before = active == 0x55555555u ? 1 : 0;
    }
    for (uint k = 0; k < 32; k++) out[i * 32 + k] = all[k];
    out[1024 + i] = before;
    """
    outputs = {"out": np.zeros(1056, np.uint32)}
    outcome = start(body, {}, outputs, grid=32, checks=ALL - {"language"})
    got = result(outcome, 0, np.uint32)
    lanes = np.arange(32)
    want = np.where(lanes % 2 == 0, lanes + 1, 0)
    np.testing.assert_array_equal(got[:1024].reshape(32, 32)[::2], np.tile(want, (16, 1)))
    assert (got[:1024].reshape(32, 32)[1::2] == 77).all()
    np.testing.assert_array_equal(got[1024:], lanes % 2 == 0)


def test_the_outermost_call_decides_which_lanes_go_first():
    # `second` lies before `first` in the code, and is called after it.
    header = "__attribute__((noinline)) float second(float v) { return simd_sum(v); }\n"
    header += "__attribute__((noinline)) float first(float v) { return simd_sum(v); }"
    body = INDEX + "float v = 0.0f;\nif (i < 8) v = first(1.0f);\nout[i] = v * 100.0f + second(1.0f);"
    outcome = start(body, {}, grid=32, header=header)
    np.testing.assert_array_equal(result(outcome), np.where(np.arange(32) < 8, 832, 32))
