"""Records of the routing against NumPy, who collects them, and the losses that are made of them."""

import contextvars
from functools import partial
import math
import threading

from forge_mlx.nn.router import Router
from forge_mlx.nn.routing_record import (
    RoutingRecord,
    aux_loss,
    record_routing,
    routing_penalty,
    routing_records,
    z_loss,
)
import mlx.core as mx
import numpy as np
import pytest

WIDTH, EXPERTS, CHOSEN = 6, 5, 2


def some(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def router(scores):
    made = Router(WIDTH, EXPERTS, CHOSEN, scores=scores)
    made.weight = mx.array(some((EXPERTS, WIDTH), 1))
    return made


def recorded(scores, x, is_token=None):
    routing = router(scores)(mx.array(x))
    with routing_records() as records:
        record_routing(routing.logits, routing.scores, routing.indices, is_token)
    (record,) = records
    return record, routing


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
def test_a_record_is_the_sums_of_its_tokens(scores, padded):
    x = some((3, 4, WIDTH))
    is_token = np.random.default_rng(2).random((3, 4)) < 0.6 if padded else np.ones((3, 4), bool)
    record, routing = recorded(scores, x, mx.array(is_token) if padded else None)
    logits = (x.astype(np.float64) @ some((EXPERTS, WIDTH), 1).T.astype(np.float64))[is_token]
    p = np.exp(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))
    p = p / p.sum(axis=1, keepdims=True)
    chosen = np.array(routing.indices)[is_token]
    assert record.load.tolist() == np.bincount(chosen.reshape(-1), minlength=EXPERTS).tolist()
    want = {
        "probability_sum": p.sum(axis=0),
        "entropy_sum": -(p * np.log(p)).sum(),
        "z_sum": (np.log(np.exp(logits).sum(axis=1)) ** 2).sum(),
        "tokens": is_token.sum(),
    }
    for name, value in want.items():
        got = getattr(record, name)
        assert got.dtype == mx.float32
        assert np.abs(np.array(got) - value).max() <= 1e-5 * np.abs(value).max()
    assert record.load.dtype == mx.int32


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_extreme_logits_stay_finite(scores):
    x = 1e4 * some((20, WIDTH))

    def losses(x):
        routing = router(scores)(x)
        with routing_records() as records:
            record_routing(routing.logits, routing.scores, routing.indices, None)
        return routing_penalty(records, aux_loss_weight=1.0, router_z_loss_weight=1e-9), records[0]

    (value, record), gradient = mx.value_and_grad(losses)(mx.array(x))
    for array in (value, gradient, *record):
        assert mx.isfinite(array.astype(mx.float32)).all().item()


def test_padding_alone_counts_nothing():
    record, _ = recorded("softmax", some((2, 3, WIDTH)), mx.zeros((2, 3), mx.bool_))
    assert record.load.tolist() == [0] * EXPERTS
    assert record.tokens.item() == 0
    assert (aux_loss(record).item(), z_loss(record).item()) == (0, 0)


def run(seed=0):
    routing = router("softmax")(mx.array(some((4, WIDTH), seed)))
    record_routing(routing.logits, routing.scores, routing.indices, None)


def test_only_what_is_open_collects():
    run()
    with routing_records() as outer:
        run(1)
        with routing_records() as inner:
            run(2)
            run(3)
        run(4)
    run(5)
    assert (len(outer), len(inner)) == (2, 2)
    with pytest.raises(RuntimeError, match="stop"), routing_records() as stopped:
        raise RuntimeError("stop")
    run()
    assert stopped == []


def test_threads_do_not_meet():
    """MLX's streams belong to threads, so the layer runs here and only what is collected is looked at there."""
    found = {}

    def collect(name):
        with routing_records() as records:
            barrier.wait(10)
            records.append(name)
            barrier.wait(10)
        found[name] = list(records)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=partial(contextvars.Context().run, collect, name)) for name in ("one", "two")]
    with routing_records() as outside:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == {"one": ["one"], "two": ["two"]}
    assert outside == []


def test_records_of_two_passes_add_up():
    x = some((6, WIDTH))
    whole, _ = recorded("softmax", x)
    parts = [recorded("softmax", part)[0] for part in (x[:2], x[2:])]
    for one, two, both in zip(*parts, whole, strict=True):
        assert mx.allclose(one + two, both, rtol=1e-6)


@pytest.mark.slow
def test_records_come_out_of_a_compiled_and_differentiated_function():
    weight, x = mx.array(some((EXPERTS, WIDTH), 1)), mx.array(some((7, WIDTH)))
    made = router("softmax")

    def loss(weight, x):
        made.weight = weight
        with routing_records() as records:
            routing = made(x)
            record_routing(routing.logits, routing.scores, routing.indices, None)
        return routing_penalty(records, aux_loss_weight=1.0, router_z_loss_weight=0.5), records

    (value, (record,)), gradient = mx.compile(mx.value_and_grad(loss))(weight, x)
    (want, (expected,)), direct = mx.value_and_grad(loss)(weight, x)
    assert mx.allclose(value, want, rtol=1e-6)
    assert mx.allclose(gradient, direct, rtol=1e-5, atol=1e-7)
    for one, two in zip(record, expected, strict=True):
        assert mx.allclose(one, two, rtol=1e-6)


def test_aux_loss_is_1_at_balance_and_e_over_k_at_collapse():
    def record(load, means):
        numbers = [mx.array(value) for value in (0.0, 0.0, 10.0)]
        return RoutingRecord(mx.array(load), 10 * mx.array(means), *numbers)

    assert math.isclose(aux_loss(record([5, 5, 5, 5], [0.25] * 4)).item(), 1, rel_tol=1e-6)
    assert math.isclose(aux_loss(record([10, 10, 0, 0], [0.5, 0.5, 0.0, 0.0])).item(), 2, rel_tol=1e-6)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("loss", [aux_loss, z_loss], ids=["aux", "z"])
def test_losses_and_their_gradients_match_finite_differences(loss, scores):
    """In float64 NumPy; the load is held where it is, as it has no gradient."""
    x, weight = some((9, WIDTH)).astype(np.float64), some((EXPERTS, WIDTH), 1).astype(np.float64)
    record, _ = recorded(scores, x.astype(np.float32))
    shares = np.array(record.load) / (9 * CHOSEN)

    def formula(weight):
        logits = x @ weight.T
        if loss is z_loss:
            return (np.log(np.exp(logits).sum(axis=1)) ** 2).mean()
        p = np.exp(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))
        return EXPERTS * (shares * (p / p.sum(axis=1, keepdims=True)).mean(axis=0)).sum()

    def penalty(weight):
        made = router(scores)
        made.weight = weight
        routing = made(mx.array(x.astype(np.float32)))
        with routing_records() as records:
            record_routing(routing.logits, routing.scores, routing.indices, None)
        return loss(records[0])

    value, gradient = mx.value_and_grad(penalty)(mx.array(weight.astype(np.float32)))
    want = np.zeros_like(weight)
    for place in np.ndindex(*weight.shape):
        step = np.zeros_like(weight)
        step[place] = 1e-5
        want[place] = (formula(weight + step) - formula(weight - step)) / 2e-5
    assert abs(value.item() - formula(weight)) <= 1e-5 * formula(weight)
    assert np.abs(np.array(gradient) - want).max() <= 1e-4 * np.abs(want).max()


def test_a_penalty_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"\[routing_penalty\] records must hold one for each MoE layer but got none"):
        routing_penalty([], aux_loss_weight=0.1, router_z_loss_weight=0)
