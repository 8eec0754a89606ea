"""The plan of moe_dispatch: its order, its fields, indices of every dtype, out of range and too many."""

from forge_mlx.kernels import DispatchPlan, moe_dispatch
from forge_mlx.kernels.dispatch.plan import check_row_count, make_plan
import mlx.core as mx
import numpy as np
import pytest

INTEGERS = [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64]


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 1), (33, 2, 5), (500, 8, 64), (3000, 3, 2), (40, 64, 64)])
def test_rows_are_sorted_by_expert_then_token_then_slot(tokens, k, experts):
    indices = np.random.default_rng(0).integers(-1, experts, (tokens, k))
    plan = make_plan(mx.array(indices))
    order = np.argsort(indices.reshape(-1), kind="stable")
    assert np.array_equal(plan.slots, order)
    assert np.array_equal(plan.tokens, order // k)
    assert np.array_equal(plan.experts, np.maximum(indices.reshape(-1)[order], 0))
    assert np.array_equal(plan.positions, np.argsort(order).reshape(tokens, k))
    assert np.array_equal(plan.indices, indices)
    assert all(each.dtype == mx.int32 for each in plan)


def test_experts_as_large_as_int32_are_sorted():
    # Together with its slot, each is beyond int32.
    plan = make_plan(mx.array([[2**31 - 2, 0], [7, 2**31 - 2]]))
    assert plan.experts.tolist() == [0, 7, 2**31 - 2, 2**31 - 2]
    assert plan.slots.tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_what_is_no_index_of_int32_is_minus_one(dtype):
    limits = mx.iinfo(dtype)
    # The last ones would be 1 if they were cut down to 32 bits.
    some = (1, 0, -1, limits.min, limits.max, 2**31 - 1, 2**32 + 1, 1 - 2**32)
    numbers = [each for each in some if limits.min <= each <= limits.max]
    indices = mx.array(np.array(numbers, dtype=object).astype(str(dtype)[9:]))[:, None]
    assert indices.dtype == dtype
    want = [each if 0 <= each < 2**31 - 1 else -1 for each in numbers]
    plan = make_plan(indices)
    assert plan.indices[:, 0].tolist() == want
    assert plan.experts.tolist() == sorted(max(each, 0) for each in want)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (2, 0, 3), (0,)])
def test_without_slots_every_field_is_empty(shape):
    plan = make_plan(mx.zeros(shape, mx.int32))
    assert [each.shape for each in plan] == [(0,), (0,), (0,), shape, shape]


def test_leading_axes_are_kept():
    indices = mx.array(np.random.default_rng(0).integers(0, 5, (2, 3, 4)))
    plan, flat = make_plan(indices), make_plan(indices.reshape(6, 4))
    assert plan.positions.shape == plan.indices.shape == (2, 3, 4)
    assert mx.array_equal(plan.positions.reshape(6, 4), flat.positions)
    assert mx.array_equal(plan.tokens, flat.tokens)
    assert make_plan(mx.array([2, 0])).positions.tolist() == [1, 0]


def test_more_rows_than_int32_counts_raise():
    check_row_count("moe_dispatch", "indices", 2**31 - 1)
    with pytest.raises(ValueError, match=r"\[moe_dispatch\] indices must have fewer than 2\^31 rows together but got"):
        check_row_count("moe_dispatch", "indices", 2**31)


def test_too_many_indices_raise_before_anything_is_computed():
    indices = mx.broadcast_to(mx.array([[1]], mx.int8), (2**16, 2**15))
    with pytest.raises(ValueError, match=r"but got 2147483648\. Split the batch"):
        make_plan(indices)


TRANSFORMS = {"compile": mx.compile, "checkpoint": mx.checkpoint, "nothing": lambda function: function}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_plan_comes_out_of_functions_as_a_plan(transform):
    x, indices = mx.ones((4, 3)), mx.array([[1, 0], [1, 2], [0, 1], [2, 2]])
    rows, plan = TRANSFORMS[transform](lambda x, indices: moe_dispatch(x, indices))(x, indices)
    assert isinstance(plan, DispatchPlan)
    assert all(mx.array_equal(got, want) for got, want in zip(plan, make_plan(indices), strict=True))
    assert rows.shape == (8, 3)


def test_plans_of_vmap_are_those_of_the_elements():
    x, indices = mx.ones((3, 4, 5)), mx.array(np.random.default_rng(0).integers(-1, 4, (3, 4, 2)))
    _, plans = mx.vmap(moe_dispatch)(x, indices)
    assert isinstance(plans, DispatchPlan)
    for number in range(3):
        plan = make_plan(indices[number])
        assert all(mx.array_equal(got[number], want) for got, want in zip(plans, plan, strict=True))
