"""What callers of adamw_step see: errors, engines, gradients that raise, vmap, compiled functions, odd gradients."""

import re

from forge_mlx.kernels.optimizer import adamw_step, op, reference
from forge_mlx.metal.engine import use_engine
from forge_mlx.metal.kernel import MetalKernel
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import random

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
FUNCTIONS = {"op": adamw_step, "reference": reference.adamw_step}
IMPLS = ["emulator", "reference"]


def arrays(shape, dtype=mx.float32):
    """w, g, m, v."""
    return random(shape, 0, dtype), random(shape, 1, dtype), random(shape, 2), mx.abs(random(shape, 3))


def assert_close(got, want, rtol=1e-6):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32))
        assert np.abs(a - b).max() <= rtol * np.abs(b).max()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_dtypes_and_number_of_results(dtype, impl):
    given = arrays((5, 3), dtype)
    assert [each.dtype for each in adamw_step(*given, impl=impl, **OPTIONS)] == [dtype, mx.float32, mx.float32]
    with_master = adamw_step(*given, master=given[0].astype(mx.float32), impl=impl, **OPTIONS)
    assert [each.dtype for each in with_master] == [dtype, mx.float32, mx.float32, mx.float32]
    assert mx.array_equal(with_master[0], with_master[3].astype(dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_master_takes_the_place_of_w(impl):
    w, g, m, v = arrays((5, 3), mx.bfloat16)
    master = random((5, 3), 9)
    for other in (w, mx.full(w.shape, float("nan"), w.dtype)):
        found = adamw_step(other, g, m, v, master=master, impl=impl, **OPTIONS)
        assert_close(found[3:], adamw_step(master, g, m, v, impl=impl, **OPTIONS)[:1])


@pytest.mark.parametrize("impl", IMPLS)
def test_an_empty_tensor_stays_empty(impl):
    given = arrays((0, 3), mx.float16)
    assert [each.shape for each in adamw_step(*given, impl=impl, **OPTIONS)] == [(0, 3)] * 3
    assert len(adamw_step(*given, master=mx.zeros((0, 3)), impl=impl, **OPTIONS)) == 4


@pytest.mark.parametrize("impl", IMPLS)
def test_numbers_of_numpy_are_numbers(impl):
    given, numbers = arrays((5, 3)), OPTIONS | {"grad_scale": 0.5}
    of_numpy = {
        **{"lr": np.float32(1e-2), "eps": np.float32(1e-8), "weight_decay": np.float32(0.1), "step": np.int64(3)},
        **{"betas": (np.float32(0.9), np.float64(0.95)), "grad_scale": np.float16(0.5)},
    }
    for each in numbers:
        assert_close(
            adamw_step(*given, impl=impl, **numbers | {each: of_numpy[each]}),
            adamw_step(*given, impl=impl, **numbers),
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("step", [0, -2])
def test_an_array_of_a_step_below_1_gives_nan(step, impl):
    w = adamw_step(*arrays((5, 3)), impl=impl, **OPTIONS | {"step": mx.array(step)})[0]
    assert mx.isnan(w).all()


@pytest.mark.parametrize("name", ["eps", "weight_decay"])
def test_a_constant_is_not_differentiated(name):
    with pytest.raises(ValueError, match=f"{name} must be a Python number but got an mx.array"):
        mx.grad(lambda x: reference.adamw_step(*arrays((5, 3)), **OPTIONS | {name: x})[0].sum())(mx.array(0.1))


W = mx.zeros((2, 3))
# Mistake: arguments that differ, message.
MISTAKES = {
    "w is an integer": ({"w": W.astype(mx.int32)}, r"^\[adamw_step\] w must be float32, .* but got int32"),
    "g is an integer": ({"g": W.astype(mx.int32)}, r"g must be float32, float16 or bfloat16 but got int32"),
    "g is of another shape": ({"g": W[:1]}, r"g must have the shape \(2, 3\), that of w, but got \(1, 3\)\.$"),
    "v is of another shape": ({"v": W.reshape(3, 2)}, r"v must have the shape \(2, 3\), that of w"),
    "m is bfloat16": ({"m": W.astype(mx.bfloat16)}, r"m must be float32 but got bfloat16\. Convert it: m\.astype"),
    "v is float16": ({"v": W.astype(mx.float16)}, "v must be float32 but got float16"),
    "master is float16": ({"master": W.astype(mx.float16)}, "master must be float32 but got float16"),
    "master is of another shape": ({"master": W[0]}, r"master must have the shape \(2, 3\)"),
    "lr is a vector": (
        {"lr": mx.zeros((1,))},
        r"lr must be a real number or a 0-d array of one but got float32 \(1,\)",
    ),
    "lr is missing": ({"lr": None}, "lr must be a real number or a 0-d array of one but got None"),
    "lr is complex": ({"lr": 1j}, "lr must be a real number or a 0-d array of one but got 1j"),
    "lr is a complex array": ({"lr": mx.array(1j)}, r"lr must be a real number .* but got complex64 \(\)"),
    "step is 0": ({"step": 0}, r"step must be a whole number of 1 or more, .* but got 0\.$"),
    "step is below 0 in NumPy": ({"step": np.int64(-1)}, r"step must be a whole number of 1 or more, .* but got -1\.$"),
    "step is 1.5": ({"step": 1.5}, r"step must be a whole number of 1 or more, .* but got 1\.5\.$"),
    "step is nan": ({"step": float("nan")}, "step must be a whole number of 1 or more"),
    "step is bool": ({"step": True}, "step must be a real number"),
    "grad_scale is a vector": ({"grad_scale": mx.zeros((2, 3))}, "grad_scale must be a real number"),
    "beta1 is 1": ({"betas": (1.0, 0.9)}, r"beta1 must lie in \[0, 1\) but got 1\.0"),
    "beta2 is negative": ({"betas": (0.9, -0.1)}, r"beta2 must lie in \[0, 1\) but got -0\.1"),
    "there are three betas": ({"betas": (0.9, 0.9, 0.9)}, r"betas must be two Python numbers but got \(0\.9, 0"),
    "betas is a number": ({"betas": 0.9}, r"betas must be two Python numbers but got 0\.9\.$"),
    "betas is missing": ({"betas": None}, r"betas must be two Python numbers but got None\.$"),
    "betas is an array": ({"betas": mx.array([0.9, 0.95])}, r"betas must be two Python numbers but got an mx\.array"),
    "beta2 is an array": ({"betas": (0.9, mx.array(0.9))}, r"beta2 must be a Python number but got an mx\.array"),
    "eps is missing": ({"eps": None}, r"eps must be a Python number but got None\.$"),
    "eps is an array": ({"eps": mx.array(1e-8)}, r"eps must be a Python number but got an mx\.array: it is a constant"),
    "weight_decay is an array": ({"weight_decay": mx.array(0.1)}, "weight_decay must be a Python number but got an mx"),
    "eps is negative": ({"eps": -1e-8}, "eps must be a finite number of 0 or more but got -1e-08"),
    "weight_decay is nan": ({"weight_decay": float("nan")}, "weight_decay must be a finite number of 0 or more"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_same_errors(mistake, function):
    changed, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[function](**{"w": W, "g": W, "m": W, "v": W, **OPTIONS, **changed})


def test_unknown_engine_is_an_error():
    with pytest.raises(ValueError, match="impl must be among"):
        adamw_step(W, W, W, W, impl="gpu", **OPTIONS)


def test_use_engine_reaches_the_kernel(monkeypatch):
    ran = []
    launch = op._launch
    monkeypatch.setattr(op, "_launch", lambda engine, *rest: ran.append(engine) or launch(engine, *rest))
    with use_engine("emulator"):
        adamw_step(*arrays((2, 3)), **OPTIONS)
    assert ran == ["emulator"]


def test_one_launch_on_the_engine_that_was_asked_for(monkeypatch):
    launched = []
    call = MetalKernel.__call__

    def on_the_emulator(self, *args, engine, **options):
        launched.append(engine)
        return call(self, *args, engine="emulator", **options)

    monkeypatch.setattr(MetalKernel, "__call__", on_the_emulator)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    mx.eval(adamw_step(*arrays((50, 30)), impl="metal", **OPTIONS))
    assert launched == ["metal"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("of", ["w", "g", "m", "v", "master", "lr", "grad_scale"])
def test_a_gradient_raises(of, impl):
    given = dict(zip("wgmv", arrays((5, 3)), strict=True))
    given |= {"master": random((5, 3), 4), "lr": mx.array(0.1), "grad_scale": mx.array(1.0)}

    def loss(x):
        return sum(each.sum() for each in adamw_step(impl=impl, **(OPTIONS | given | {of: x})))

    message = r"^\[adamw_step\] has no gradient: .*Call it outside of mx\.grad"
    with pytest.raises(ValueError, match=message):
        mx.grad(loss)(given[of])
    with pytest.raises(ValueError, match=rf"{message}|Not implemented"):
        mx.jvp(loss, [given[of]], [mx.ones_like(given[of])])
    # The step of another parameter does not disturb a gradient.
    assert mx.grad(lambda x: x.sum() + mx.stop_gradient(loss(mx.stop_gradient(x))))(given[of]).shape == given[of].shape


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_a_gradient_that_is_not_finite_is_passed_on_and_stays_where_it_is(bad, impl):
    w, g, m, v = arrays((40,))
    g[7] = bad
    found = adamw_step(w, g, m, v, impl=impl, **OPTIONS)
    want = adamw_step(w, mx.where(mx.isfinite(g), g, 0), m, v, impl=impl, **OPTIONS)
    for a, b in zip(found, want, strict=True):
        assert mx.isfinite(a).tolist() == [index != 7 for index in range(40)]
        assert mx.array_equal(a[:7], b[:7])
        assert mx.array_equal(a[8:], b[8:])
    assert np.isnan(found[0][7].item())


@pytest.mark.parametrize("impl", IMPLS)
def test_numbers_and_0_d_arrays_give_the_same_bits(impl):
    given = arrays((40,))
    numbers = adamw_step(*given, impl=impl, **OPTIONS, grad_scale=0.3)
    on_device = OPTIONS | {"lr": mx.array(1e-2), "step": mx.array(3, mx.uint64)}
    for a, b in zip(adamw_step(*given, impl=impl, **on_device, grad_scale=mx.array(0.3)), numbers, strict=True):
        assert mx.array_equal(a, b)


@pytest.fixture
def lazy_kernel(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formula, with what the kernel asks of its inputs."""

    def launch(engine, arrays, scalars, options):
        assert engine == "metal"
        assert len({each.shape for each in arrays}) == 1
        assert [each.shape for each in scalars] == [()] * 4
        return reference.update(arrays, scalars, options)

    monkeypatch.setattr(op, "_launch", launch)
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)


@pytest.mark.usefixtures("lazy_kernel")
@pytest.mark.parametrize("impl", ["metal", "reference"])
def test_compiled_once_for_any_lr_step_and_scale(impl):
    traced = []

    def step(w, g, m, v, lr, t, scale):
        traced.append(1)
        return adamw_step(w, g, m, v, impl=impl, **(OPTIONS | {"lr": lr, "step": t, "grad_scale": scale}))

    compiled = mx.compile(step)
    given = arrays((5, 30))
    for number in (1, 2, 50):
        scalars = mx.array(0.1 / number), mx.array(number, mx.uint64), mx.array(1.0 / number)
        found = compiled(*given, *scalars)
        want = adamw_step(
            *given, impl="reference", **(OPTIONS | dict(zip(("lr", "step", "grad_scale"), scalars, strict=True)))
        )
        assert_close(found, want)
    assert len(traced) == 1


def test_compiled_step_is_one_pass_that_does_not_compute_the_scalars(tmp_path):
    def step(w, g, m, v, lr, t):
        return adamw_step(w, g, m, v, impl="reference", **(OPTIONS | {"lr": lr, "step": t}))

    with mx.stream(mx.cpu):
        results = mx.compile(step)(*arrays((5, 30)), mx.array(0.1), mx.array(3))
    mx.export_to_dot(str(tmp_path / "graph.dot"), *results)
    operations = re.findall(r'label ="(\w+)"', (tmp_path / "graph.dot").read_text(encoding="utf-8"))
    (elements,) = [name for name in operations if "Sqrt" in name and "Rsqrt" not in name]
    assert elements.startswith("Compiled")
    assert elements.count("Square") == elements.count("Divide") == 1
    assert "Expm1" not in elements
    assert any("Expm1" in name for name in operations)


@pytest.mark.usefixtures("lazy_kernel")
@pytest.mark.parametrize("impl", ["metal", "reference"])
@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, 0, None, 0), (None, 2, None, None)], ids=str)
def test_vmap(axes, impl):
    given = [
        each if axis is None else mx.moveaxis(mx.stack([each, 2 * each, each - each]), 0, axis)
        for each, axis in zip(arrays((5, 3)), axes, strict=True)
    ]
    found = mx.vmap(lambda *x: adamw_step(*x, impl=impl, **OPTIONS), in_axes=axes)(*given)
    for index in range(3):
        one = [each if axis is None else mx.take(each, index, axis) for each, axis in zip(given, axes, strict=True)]
        assert_close([each[index] for each in found], adamw_step(*one, impl="reference", **OPTIONS))


@pytest.mark.usefixtures("lazy_kernel")
def test_vmap_over_lr_raises_where_a_kernel_runs():
    given = arrays((5, 3))
    with pytest.raises(ValueError, match=r"^\[adamw_step\] lr, step and grad_scale must be shared under mx\.vmap"):
        mx.vmap(lambda lr: adamw_step(*given, impl="metal", **(OPTIONS | {"lr": lr})))(mx.zeros((4,)))
