"""AdamW: against PyTorch and MLX's own, small tensors kept together, its state, schedules, master weights."""

from forge_mlx.optim import AdamW, OptimConfig, adamw, build_optimizer
from forge_mlx.optim.groups import GroupedOptimizer
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
import numpy as np
import pytest
import torch

STEPS = 100
# Two tensors over the limit for small ones, several below, a list with a gap in what is small.
SHAPES = {
    "embed.weight": (150, 120),
    "layers.0.norm.weight": (24,),
    "layers.0.proj.weight": (12, 24),
    "layers.1.norm.weight": (24,),
    "layers.1.norm.bias": (7,),
    "layers.1.proj.weight": (200, 100),
    "scale": (),
}
SMALL = sorted(SHAPES.keys() - {"embed.weight", "layers.1.proj.weight"})


@pytest.fixture(autouse=True)
def on_cpu():
    with mx.stream(mx.cpu):
        yield


def tree(seed, dtype=mx.float32, names=SHAPES, scale=1.0):
    random = np.random.default_rng(seed)
    arrays = {name: (scale * random.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}
    return tree_unflatten([(name, mx.array(arrays[name]).astype(dtype)) for name in names])


def named(arrays):
    return {name: np.array(array.astype(mx.float32)) for name, array in tree_flatten(arrays)}


def run(optimizer, params, steps, first=1, dtype=mx.float32):
    for step in range(first, steps + 1):
        params = optimizer.apply_gradients(tree(step, dtype), params)
        mx.eval(params, optimizer.state)
    return params


def torch_run(steps, rate=lambda _step: 1e-2, dtype=mx.float32, number=torch.float64, **options):
    tensors = {
        name: torch.tensor(array, dtype=number, requires_grad=True) for name, array in named(tree(0, dtype)).items()
    }
    optimizer = torch.optim.AdamW(tensors.values(), **options)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        for name, array in named(tree(step, dtype)).items():
            tensors[name].grad = torch.tensor(array, dtype=number)
        optimizer.step()
    return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def assert_close(found, want, rtol=1e-5, atol=2e-6):
    assert found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=atol, err_msg=name)


OPTIONS = {
    "usual": {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "other": {"betas": (0.8, 0.999), "eps": 1e-3, "weight_decay": 2.0},
}


@pytest.mark.parametrize("number", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_100_steps_are_those_of_pytorch(options, number):
    found = run(AdamW(1e-2, **OPTIONS[options]), tree(0), STEPS)
    assert {array.dtype for _, array in tree_flatten(found)} == {mx.float32}
    assert_close(named(found), torch_run(STEPS, number=number, **OPTIONS[options]))


@pytest.mark.parametrize("options", OPTIONS)
def test_100_steps_are_those_of_mlx(options):
    settings = OPTIONS[options] | {"betas": list(OPTIONS[options]["betas"])}
    want = run(optim.AdamW(1e-2, bias_correction=True, **settings), tree(0), STEPS)
    assert_close(named(run(AdamW(1e-2, **OPTIONS[options]), tree(0), STEPS)), named(want))


def test_without_bias_correction_it_is_mlxs_default():
    want = run(optim.AdamW(1e-2, [0.9, 0.95]), tree(0), 10)
    assert_close(named(run(AdamW(1e-2, (0.9, 0.95), bias_correction=False), tree(0), 10)), named(want))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_master_weights_make_16_bit_weights_follow_float32(dtype):
    options = OPTIONS["usual"]
    want = torch_run(STEPS, dtype=dtype, **options)
    optimizer = AdamW(1e-2, **options, master_weights=True)
    found = run(optimizer, tree(0, dtype), STEPS, dtype=dtype)
    assert {array.dtype for _, array in tree_flatten(found)} == {dtype}
    masters = {name.removesuffix(".master"): a for name, a in optimizer.flat_state().items() if name.endswith("master")}
    assert_close({name: np.array(array) for name, array in masters.items()}, want)
    for name, array in tree_flatten(found):
        assert mx.array_equal(array, masters[name].astype(dtype)), name
    without = run(AdamW(1e-2, **options), tree(0, dtype), STEPS, dtype=dtype)
    errors = [max(np.abs(each[name] - want[name]).max() for name in want) for each in (named(found), named(without))]
    assert errors[0] < errors[1]


def test_float32_weights_have_no_master():
    optimizer = AdamW(1e-2, master_weights=True)
    optimizer.init(tree(0))
    assert not any(name.endswith("master") for name in optimizer.flat_state())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("master", [False, True], ids=["", "master"])
def test_small_tensors_are_stepped_in_one_call_with_the_same_bits(dtype, master, monkeypatch):
    calls = []
    call = adamw.AdamWStep.__call__
    monkeypatch.setattr(
        adamw.AdamWStep, "__call__", lambda self, w, *rest: calls.append(w.size) or call(self, w, *rest)
    )
    together = run(AdamW(1e-2, master_weights=master), tree(0, dtype), 1, dtype=dtype)
    assert sorted(calls) == sorted([sum(int(np.prod(SHAPES[name])) for name in SMALL), 150 * 120, 200 * 100])
    calls.clear()
    monkeypatch.setattr(adamw, "SMALL", -1)
    apart = run(AdamW(1e-2, master_weights=master), tree(0, dtype), 1, dtype=dtype)
    assert len(calls) == len(SHAPES)
    for (name, a), (_, b) in zip(tree_flatten(together), tree_flatten(apart), strict=True):
        assert a.shape == SHAPES[name]
        assert mx.array_equal(a, b), name


def test_small_tensors_of_two_dtypes_are_kept_apart():
    params = tree(0)
    params["layers"][0]["norm"]["weight"] = params["layers"][0]["norm"]["weight"].astype(mx.bfloat16)
    optimizer = AdamW(1e-2)
    found = run(optimizer, params, 2)
    flat = {key: part["m"].size for key, part in optimizer.state.items() if key.startswith("flat:")}
    assert flat == {"flat:bfloat16": 24, "flat:float32": 12 * 24 + 24 + 7 + 1}
    assert found["layers"][0]["norm"]["weight"].dtype == mx.bfloat16
    assert found["layers"][1]["norm"]["weight"].dtype == mx.float32


def test_state_by_parameter_has_the_names_and_values_of_mlxs_adamw():
    ours, mlx = AdamW(1e-2, (0.9, 0.95)), optim.AdamW(1e-2, [0.9, 0.95], bias_correction=True)
    for optimizer in (ours, mlx):
        run(optimizer, tree(0), 3)
    found, want = ours.flat_state(), dict(tree_flatten(mlx.state))
    assert found.keys() == want.keys()
    for name, array in want.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_allclose(np.array(found[name]), np.array(array), rtol=1e-6, atol=1e-9, err_msg=name)


def test_a_state_of_mlxs_adamw_goes_on():
    mlx = optim.AdamW(1e-2, [0.9, 0.95], bias_correction=True)
    params = run(mlx, tree(0), 5)
    saved = {name: mx.array(np.array(array)) for name, array in tree_flatten(mlx.state)}
    want = run(mlx, params, 10, first=6)
    ours = AdamW(1e-2, (0.9, 0.95))
    ours.state = tree_unflatten(list(saved.items()))
    ours.init(params)
    loaded = AdamW(1e-2, (0.9, 0.95))
    loaded.init(params)
    loaded.load_flat_state(saved)
    for optimizer in (ours, loaded):
        assert optimizer.step.item() == 5
        assert_close(named(run(optimizer, params, 10, first=6)), named(want))


def test_checkpoints_from_before_load_into_the_groups():
    options = {"betas": [0.9, 0.95], "eps": 1e-8, "bias_correction": True}
    before = GroupedOptimizer(
        [optim.AdamW(1e-3, weight_decay=0.1, **options), optim.AdamW(1e-3, weight_decay=0.0, **options)],
        [lambda _, array: array.ndim >= 2],
    )
    before.init(tree(0))
    params = run(before, tree(0), 3)
    saved = {name: mx.array(np.array(array)) for name, array in before.flat_state().items()}
    now = build_optimizer(OptimConfig())
    now.init(params)
    now.load_flat_state(saved)
    assert_close(named(run(now, params, 6, first=4)), named(run(before, params, 6, first=4)))


@pytest.mark.parametrize("way", ["flat_state", "state"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_restored_state_goes_on_bit_for_bit(dtype, way):
    unbroken = run(AdamW(1e-2, master_weights=True), tree(0, dtype), 6, dtype=dtype)
    optimizer = AdamW(1e-2, master_weights=True)
    half = run(optimizer, tree(0, dtype), 3, dtype=dtype)
    fresh = AdamW(5.0, master_weights=True)
    if way == "state":
        fresh.state = tree_unflatten([(name, mx.array(np.array(a))) for name, a in tree_flatten(optimizer.state)])
        # The order of the parameters does not count.
        fresh.init(tree(0, dtype, names=sorted(SHAPES, reverse=True)))
    else:
        fresh.init(half)
        container = fresh.state
        fresh.load_flat_state({name: mx.array(np.array(array)) for name, array in optimizer.flat_state().items()})
        # Compiled functions hold on to it.
        assert fresh.state is container
    resumed = run(fresh, half, 6, first=4, dtype=dtype)
    for (name, a), (_, b) in zip(tree_flatten(unbroken), tree_flatten(resumed), strict=True):
        assert mx.array_equal(a, b), name


def test_flat_arrays_of_other_parameters_are_an_error():
    optimizer = AdamW(1e-2)
    optimizer.init(tree(0))
    fresh = AdamW(1e-2)
    fresh.state = dict(optimizer.state)
    with pytest.raises(
        ValueError, match=r"^\[AdamW\] a flat state of these 4 parameters must have 320 elements but has"
    ):
        fresh.init(tree(0, names=SHAPES.keys() - {"layers.0.norm.weight"}))


def test_parameters_without_a_gradient_stay_with_their_moments():
    optimizer = AdamW(1e-2)
    params = run(optimizer, tree(0), 2)
    before = optimizer.flat_state()
    some = ["layers.1.norm.bias", "layers.1.proj.weight", "scale"]
    gradients = tree(3, names=some)
    updated = optimizer.apply_gradients(gradients, params)
    assert [name for name, _ in tree_flatten(updated)] == [name for name, _ in tree_flatten(gradients)]
    after = optimizer.flat_state()
    whole = AdamW(1e-2)
    run(whole, tree(0), 2)
    full = dict(tree_flatten(whole.apply_gradients(tree(3), params)))
    for name, array in tree_flatten(updated):
        assert mx.array_equal(array, full[name]), name
    for name in SHAPES:
        changed = not mx.array_equal(before[f"{name}.m"], after[f"{name}.m"])
        assert changed == (name in some), name
        if name in some:
            assert mx.array_equal(after[f"{name}.v"], whole.flat_state()[f"{name}.v"])


def test_parameters_may_be_added_by_init_and_not_without():
    optimizer = AdamW(1e-2)
    early = [name for name in SHAPES if name != "layers.0.norm.weight"]
    params = tree(0)
    optimizer.apply_gradients(tree(1, names=early), params)
    before = optimizer.flat_state()
    with pytest.raises(ValueError, match=r"^\[AdamW\] layers\.0\.norm\.weight has no state: call init"):
        optimizer.apply_gradients(tree(2), params)
    optimizer.init(params)
    after = optimizer.flat_state()
    for name, array in before.items():
        assert mx.array_equal(after[name], array), name
    assert not after["layers.0.norm.weight.m"].any()
    optimizer.apply_gradients(tree(2), params)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_grad_scale_is_a_factor_on_the_gradients(compiled):
    options = {"eps": 1e-2}
    scaled, plain = AdamW(1e-2, **options), AdamW(1e-2, **options)
    for optimizer in (scaled, plain):
        optimizer.init(tree(0))
    traced = []

    def step(gradients, params, scale):
        traced.append(1)
        return scaled.apply_gradients(gradients, params, scale)

    apply = mx.compile(step, inputs=scaled.state, outputs=scaled.state) if compiled else step
    found = want = tree(0)
    for number in (1, 2, 3):
        scale = mx.array(0.5 / number)
        scaled.learning_rate = plain.learning_rate = 0.1 / number
        found = apply(tree(number), found, scale)
        want = plain.apply_gradients(tree_map(lambda g, by=scale: g * by, tree(number)), want)
        mx.eval(found, scaled.state, want, plain.state)
    assert_close(named(found), named(want), rtol=1e-6, atol=1e-7)
    assert scaled.step.item() == 3
    assert len(traced) == (1 if compiled else 3)


def test_a_schedule_is_called_with_the_step():
    optimizer = AdamW(optim.linear_schedule(1e-2, 0.0, 100), **OPTIONS["usual"])
    found = run(optimizer, tree(0), 20)
    assert_close(named(found), torch_run(20, lambda step: 1e-2 * (1 - (step - 1) / 100), **OPTIONS["usual"]))
    assert optimizer.learning_rate.item() == pytest.approx(1e-2 * 0.81)


def test_update_of_a_module_with_frozen_and_private_arrays():
    model = nn.Sequential(nn.Linear(4, 3), nn.RoPE(4), nn.Linear(3, 2))
    model.layers[0].freeze()
    frozen = mx.array(model.layers[0].weight)
    optimizer = AdamW(1e-2, master_weights=True)

    def loss(model, x):
        return (model.layers[2](model.layers[0](x)) ** 2).sum()

    values = []
    for _ in range(20):
        value, gradients = nn.value_and_grad(model, loss)(model, mx.ones((2, 4)))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        values.append(value.item())
    assert values[-1] < values[0]
    assert mx.array_equal(model.layers[0].weight, frozen)
    assert {name for name in optimizer.flat_state() if name.endswith(".m")} == {"layers.2.weight.m", "layers.2.bias.m"}


def test_what_a_state_holds_of_other_parameters_stays():
    mlx = optim.AdamW(1e-2, [0.9, 0.95], bias_correction=True)
    params = run(mlx, tree(0), 2)
    optimizer = AdamW(1e-2, (0.9, 0.95))
    optimizer.state = tree_unflatten([(name, mx.array(np.array(array))) for name, array in tree_flatten(mlx.state)])
    optimizer.init(tree(0, names=["scale", "embed.weight"]))
    assert optimizer.flat_state().keys() == dict(tree_flatten(mlx.state)).keys()
    optimizer.init(params)
    want = run(mlx, params, 4, first=3)
    assert_close(named(run(optimizer, params, 4, first=3)), named(want))


def test_apply_single_is_the_step_of_one_tensor():
    optimizer, state = AdamW(1e-2), {}
    w, g = mx.array([1.0, -2.0]), mx.array([0.5, 3.0])
    optimizer.init_single(w, state)
    optimizer.state["step"] = mx.array(1, mx.uint64)
    found = optimizer.apply_single(g, w, state)
    whole = AdamW(1e-2)
    assert mx.array_equal(found, whole.apply_gradients({"w": g}, {"w": w})["w"])
    assert mx.array_equal(state["m"], whole.flat_state()["w.m"])


def test_wrong_settings_are_an_error():
    with pytest.raises(ValueError, match=r"beta2 must lie in \[0, 1\) but got 1\.5"):
        AdamW(1e-2, (0.9, 1.5))


# The flat arrays have as many elements either way.
MISMATCHES = {
    "gradients of each other": ({"a": (3,), "b": (4,)}, {"a": (4,), "b": (3,)}, "a: its gradient must have the shape"),
    "a transposed gradient": ({"a": (2, 3)}, {"a": (3, 2)}, r"a: its gradient must have the shape \(2, 3\) but got"),
}


@pytest.mark.parametrize("mistake", MISMATCHES)
def test_shapes_are_checked_though_small_tensors_are_joined(mistake):
    shapes, of_gradients, message = MISMATCHES[mistake]
    parameters = {name: mx.zeros(shape) for name, shape in shapes.items()}
    optimizer = AdamW(0.1)
    optimizer.init(parameters)
    before = optimizer.flat_state()
    with pytest.raises(ValueError, match=message):
        optimizer.apply_gradients({name: mx.ones(shape) for name, shape in of_gradients.items()}, parameters)
    after = optimizer.flat_state()
    assert all(mx.array_equal(after[name], array) for name, array in before.items())


def test_small_parameter_of_another_dtype_than_in_init_raises():
    parameters = {"a": mx.ones(3), "b": mx.ones(4)}
    optimizer = AdamW(0.1)
    updated = optimizer.apply_gradients(parameters, parameters)
    updated["b"] = updated["b"].astype(mx.bfloat16)
    with pytest.raises(ValueError, match="b must be float32, as it was in init, but got bfloat16"):
        optimizer.apply_gradients(parameters, updated)
