"""Cross entropy against PyTorch in float64: values, gradients, masks, extremes and transformations."""

from forge_mlx.kernels.cross_entropy import op
from forge_mlx.nn.losses import cross_entropy, cross_entropy_sum
import mlx.core as mx
import numpy as np
import pytest
import torch
import torch.nn.functional as F

SHAPES = [(1, 1), (3, 2), (7, 31), (5, 33), (64, 129)]


ONLY_ONE_EXP = pytest.mark.parametrize("form", ["one_exp"], indirect=True)
"""For what MLX's own form does not promise."""


@pytest.fixture(params=["one_exp", "fused"], autouse=True)
def form(request, monkeypatch):
    """Both plain forms: the CPU's own, and the one for GPUs, which MLX also runs (unfused) on a CPU."""
    monkeypatch.setattr(op, "_has_fused_kernel", lambda: request.param == "fused")
    return request.param


def case(rows, vocab, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    weights = rng.uniform(0.1, 2.0, rows).astype(np.float32)
    return logits, targets, weights


def oracle(logits, targets, weights, reduction):
    """Loss and gradients with respect to logits and weights, from PyTorch in float64."""
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(targets, dtype=torch.int64)
    kept = t != -100
    nll = F.cross_entropy(z, t, reduction="none", ignore_index=-100)
    loss = (nll * w)[kept].sum()
    if reduction == "mean":
        loss = loss / w[kept].sum()
    loss.backward()
    return loss.item(), z.grad.numpy(), w.grad.numpy()


def close(got, want, rtol=1e-5):
    want = np.asarray(want)
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= rtol * max(np.max(np.abs(want)), 1e-30)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_torch_with_weights_and_ignored_targets(shape, reduction):
    logits, targets, weights = case(*shape)
    if shape[0] > 1:
        targets[1::3] = -100
    want, d_logits, d_weights = oracle(logits, targets, weights, reduction)

    def loss(z, w):
        return cross_entropy(z, mx.array(targets), weights=w, reduction=reduction)

    got, (dz, dw) = mx.value_and_grad(loss, argnums=(0, 1))(mx.array(logits), mx.array(weights))
    if shape[1] == 1:
        assert got.item() == want == 0
        assert not np.any(np.array(dz))
        return
    close(got, want)
    close(dz, d_logits)
    close(dw, d_weights, 1e-4)
    assert not np.any(np.array(dz)[targets == -100])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_none_keeps_the_shape_of_the_targets(compiled):
    logits, targets, _ = case(6, 17)
    targets[2] = -100
    want = F.cross_entropy(torch.tensor(logits).double(), torch.tensor(targets).long(), reduction="none")
    function = lambda z, t: cross_entropy(z, t, reduction="none")  # noqa: E731
    got = (mx.compile(function) if compiled else function)(
        mx.array(logits).reshape(2, 3, 17), mx.array(targets).reshape(2, 3)
    )
    assert got.shape == (2, 3)
    close(np.array(got).ravel(), want.numpy())


def test_a_single_position_without_batch_axes():
    logits, targets, _ = case(1, 9)
    want = F.cross_entropy(torch.tensor(logits).double(), torch.tensor(targets).long())
    got = cross_entropy(mx.array(logits[0]), mx.array(targets[0]))
    assert got.shape == ()
    close(got, want.numpy())


def test_sum_and_count_add_up_over_batches():
    logits, targets, weights = case(8, 13)
    targets[[1, 6]] = -100
    parts = [
        cross_entropy_sum(mx.array(logits[s]), mx.array(targets[s]), weights=mx.array(weights[s]))
        for s in (slice(0, 3), slice(3, 8))
    ]
    total, count = (sum(x.item() for x in column) for column in zip(*parts, strict=True))
    close(count, weights[targets != -100].astype(np.float64).sum())
    close(total / count, oracle(logits, targets, weights, "mean")[0])
    _, unweighted = cross_entropy_sum(mx.array(logits), mx.array(targets))
    assert unweighted.item() == 6


@pytest.mark.parametrize("option", [{"label_smoothing": 0.1}, {"softcap": 2.0}, {"z_loss": 0.01}], ids=str)
def test_sum_passes_every_option_on(option):
    logits, targets, weights = case(8, 13)
    targets[[1, 6]] = -100
    arguments = mx.array(logits), mx.array(targets)
    total, count = cross_entropy_sum(*arguments, weights=mx.array(weights), **option)
    mean = cross_entropy(*arguments, weights=mx.array(weights), **option)
    close(total / count, mean.item(), 1e-6)
    close(total, cross_entropy(*arguments, weights=mx.array(weights), reduction="sum", **option).item(), 1e-7)
    assert abs(total.item() - cross_entropy(*arguments, weights=mx.array(weights), reduction="sum").item()) > 1e-3
    with pytest.raises(ValueError, match="impl must be among"):
        cross_entropy_sum(*arguments, impl="emulater")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_ignored_is_zero_with_zero_gradients(reduction):
    logits, targets, weights = case(4, 5)
    ignored = mx.full(targets.shape, -100, mx.int32)
    loss, grads = mx.value_and_grad(
        lambda z, w: cross_entropy(z, ignored, weights=w, reduction=reduction), argnums=(0, 1)
    )(mx.array(logits), mx.array(weights))
    assert loss.item() == 0
    assert all(not np.any(np.array(g)) for g in grads)


def test_another_ignore_index():
    logits, targets, _ = case(4, 5)
    targets[:] = [0, 1, 0, 3]
    _, count = cross_entropy_sum(mx.array(logits), mx.array(targets), ignore_index=0)
    assert count.item() == 2


def test_extreme_logits(form):
    logits = np.array([[1e4, 0, -1e4], [1e4, 1e4 - 1, 0], [-np.inf, 2, 1], [-1e30, -1e30, 0]], np.float32)
    targets = np.array([0, 1, 1, 2], np.int32)
    ones = np.ones(4, np.float32)
    want, d_logits, _ = oracle(logits, targets, ones, "sum")
    loss, grad = mx.value_and_grad(lambda z: cross_entropy(z, mx.array(targets), reduction="sum"))(mx.array(logits))
    # MLX's form subtracts the target from a logsumexp: beside logits of 1e4 a loss is exact to 1e-3.
    assert abs(loss.item() - want) <= (1e-3 if form == "fused" else 1e-6)
    close(grad, d_logits, 1e-3 if form == "fused" else 1e-6)


def test_a_target_that_cannot_occur_costs_infinity():
    loss = cross_entropy(mx.array([[-mx.inf, 2.0]]), mx.array([0]))
    assert loss.item() == np.inf


@ONLY_ONE_EXP
def test_small_losses_beside_large_logits_are_not_rounded_away():
    loss = cross_entropy(mx.array([[20000.0, 20000.0 - 5]]), mx.array([0]))
    close(loss, np.log1p(np.exp(-5.0)), 1e-4)


@pytest.mark.parametrize("target", [5, -1, -99, 2**30])
def test_an_unknown_target_makes_loss_and_gradient_nan(target):
    logits, targets, _ = case(3, 5)
    targets[1] = target
    loss, grad = mx.value_and_grad(lambda z: cross_entropy(z, mx.array(targets), reduction="sum"))(mx.array(logits))
    assert np.isnan(loss.item())
    assert np.isnan(np.array(grad)).any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_logits_are_reduced_in_float32(dtype):
    logits, targets, weights = case(16, 300)
    rounded = mx.array(logits).astype(dtype)
    exact = np.array(rounded.astype(mx.float32))
    want, d_logits, _ = oracle(exact, targets, np.ones_like(weights), "mean")
    loss, grad = mx.value_and_grad(lambda z: cross_entropy(z, mx.array(targets)))(rounded)
    assert loss.dtype == mx.float32
    assert grad.dtype == dtype
    close(loss, want)
    close(grad.astype(mx.float32), d_logits, 1e-2)


def test_second_derivatives_match_torch(form):
    logits, targets, weights = case(3, 5)
    direction = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32)
    z = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    loss = (F.cross_entropy(z, torch.tensor(targets).long(), reduction="none") ** 2 * w).sum()
    (first,) = torch.autograd.grad(loss, z, create_graph=True)
    want = torch.autograd.grad((first * torch.tensor(direction)).sum() + (first**3).sum(), (z, w))

    def first_along(z, w):
        grad = mx.grad(lambda z: (cross_entropy(z, mx.array(targets), reduction="none") ** 2 * w).sum())(z)
        return (grad * mx.array(direction)).sum() + (grad**3).sum()

    second = mx.grad(first_along, argnums=(0, 1))
    if form == "fused" and mx.default_device() == mx.gpu:
        with pytest.raises(ValueError, match="Cannot calculate VJP"):
            second(mx.array(logits), mx.array(weights))
        return
    got = second(mx.array(logits), mx.array(weights))
    for a, b in zip(got, want, strict=True):
        close(a, b.numpy(), 1e-4)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (None, 0)], ids=str)
def test_vmap_and_its_gradient_match_a_loop(axes):
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((4, 4, 6)).astype(np.float32)
    targets = rng.integers(0, 6, (4, 4)).astype(np.int32)
    one = lambda z, t: cross_entropy(z, t, reduction="sum")  # noqa: E731
    z = mx.array(logits if axes[0] is not None else logits[0])
    t = mx.array(targets if axes[1] is not None else targets[0])

    def looped(z):
        rows = [mx.take(z, i, axes[0]) if axes[0] is not None else z for i in range(4)]
        return sum(one(rows[i], t[i] if axes[1] is not None else t) for i in range(4))

    mapped = lambda z: mx.vmap(one, in_axes=axes)(z, t).sum()  # noqa: E731
    want, d_want = mx.value_and_grad(looped)(z)
    got, d_got = mx.value_and_grad(mapped)(z)
    close(got, np.array(want))
    close(d_got, np.array(d_want))
    per_row = mx.vmap(mx.grad(one), in_axes=axes)(z, t)
    for i in range(4):
        row = mx.take(z, i, axes[0]) if axes[0] is not None else z
        close(per_row[i], np.array(mx.grad(one)(row, t[i] if axes[1] is not None else t)))


@ONLY_ONE_EXP
def test_a_step_takes_one_exponential_a_logit(tmp_path):
    logits, targets, _ = case(4, 5)
    loss, grad = mx.value_and_grad(lambda z: cross_entropy(z, mx.array(targets)))(mx.array(logits))
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), loss, grad)
    text = graph.read_text()
    assert text.count('label ="Exp"') == 1
    assert "Softmax" not in text
    assert "LogSumExp" not in text


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}, {"softcap": 2.0}], ids=str
)
def test_options_are_the_same_in_both_forms(options):
    logits, targets, weights = (mx.array(each) for each in case(8, 13))

    def run(impl):
        return mx.value_and_grad(lambda z: cross_entropy(z, targets, weights=weights, impl=impl, **options))(logits)

    for got, want in zip(run("reference"), run("emulator"), strict=True):
        close(got, np.array(want))


def bad(**changes):
    arguments = {"logits": mx.zeros((2, 3)), "targets": mx.zeros((2,), mx.int32), **changes}
    return cross_entropy(arguments.pop("logits"), arguments.pop("targets"), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": mx.zeros((2, 3), mx.int32)}, "logits must be float32, float16 or bfloat16 but got int32"),
        ({"targets": mx.zeros((2,))}, "targets must be integers but got float32"),
        ({"targets": mx.zeros((3,), mx.int32)}, r"got \(3,\) for logits \(2, 3\)"),
        ({"logits": mx.array(1.0), "targets": mx.array(0)}, r"1 or more axes but got the shape \(\)"),
        ({"weights": mx.ones((3,))}, r"weights must have the shape \(2,\), that of targets, but got \(3,\)"),
        ({"reduction": "average"}, "reduction must be one of .* but got 'average'"),
    ],
)
def test_errors_name_the_rule_and_the_value(changes, message):
    with pytest.raises(ValueError, match=r"\[cross_entropy\] .*" + message):
        bad(**changes)
