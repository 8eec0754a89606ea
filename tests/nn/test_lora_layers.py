"""Adapted layers: values and gradients against PEFT and PyTorch in float64, over float layers and layers of codes."""

from forge_mlx.kernels import fake_quant
from forge_mlx.kernels.quantize.options import checked_options
from forge_mlx.nn import Embedding, ExpertLinear, FakeQuantEmbedding, FakeQuantExpertLinear, FakeQuantLinear, Linear
from forge_mlx.nn.adapted_base import float_weight
from forge_mlx.nn.dora import DoRAEmbedding, DoRALinear
from forge_mlx.nn.lora import AdapterOptions, LoRAEmbedding, LoRAExpertLinear, LoRALinear
from forge_mlx.nn.qat_lora import (
    FakeQuantDoRALinear,
    FakeQuantLoRAEmbedding,
    FakeQuantLoRAExpertLinear,
    FakeQuantLoRALinear,
)
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
import numpy as np
import peft
import pytest
import torch

IN, OUT, RANK, SCALE = 64, 40, 3, 1.7
OPTIONS = AdapterOptions(RANK, SCALE)
KEY = mx.random.key(3)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, IN))
DY = RNG.standard_normal((2, 5, OUT))
IDS = np.array([[3, 0, 39], [3, 3, 7]])
EXPERTS = np.array([0, 1, 1, 3])
AFFINE = checked_options("test", "affine", 4, 32, None)


def linear(bias=True):
    layer = Linear(IN, OUT, bias=bias)
    layer.weight = mx.array(np.random.default_rng(1).standard_normal((OUT, IN)) * 0.3, mx.float32)
    if bias:
        layer.bias = mx.array(np.random.default_rng(2).standard_normal(OUT), mx.float32)
    return layer


def table():
    layer = Embedding(OUT, IN)
    layer.weight = linear().weight
    return layer


def experts():
    layer = ExpertLinear(IN, OUT, 4)
    layer.weight = mx.array(np.random.default_rng(1).standard_normal((4, OUT, IN)) * 0.3, mx.float32)
    return layer


def started(layer, seed=4):
    """The layer with random A and B, and magnitudes away from the norms."""
    rng = np.random.default_rng(seed)
    layer.lora_a = mx.array(rng.standard_normal(layer.lora_a.shape) * 0.2, mx.float32)
    layer.lora_b = mx.array(rng.standard_normal(layer.lora_b.shape) * 0.2, mx.float32)
    if "m" in layer:
        layer.m = layer.m * mx.array(rng.uniform(0.5, 1.5, layer.m.shape), mx.float32)
    return layer


def double(array):
    return torch.tensor(np.array(array.astype(mx.float32), dtype=np.float64))


def our_gradients(layer, x, dy, call=None):
    """The output, and the gradients of sum(dy * output) by x and what is trainable."""
    call = call or (lambda layer, x: layer(x))

    def loss(parameters, x):
        layer.update(parameters)
        out = call(layer, x)
        return (mx.array(dy, mx.float32) * out).sum(), out

    held = layer.trainable_parameters()
    argnums = (0, 1) if mx.issubdtype(x.dtype, mx.floating) else (0,)
    (_, out), found = mx.value_and_grad(loss, argnums=argnums)(held, x)
    layer.update(held)
    found = found if isinstance(found, tuple) else (found,)
    return {"out": out, **of_adapter(found[0]), **({"x": found[1]} if len(found) > 1 else {})}


def of_adapter(tree):
    """The arrays of a tree without the empty trees of what is frozen."""
    return {name: array for name, array in tree_flatten(tree) if isinstance(array, mx.array)}


def assert_alike(found, expected, tolerance=2e-6):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        want = want.detach().numpy()
        got = np.array(found[name], dtype=np.float64)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=name)


def peft_gradients(layer, x, dy, *, weight=None, dora=False, bias=True):
    """The same of PEFT's layer in float64, its parameters as ours lie."""

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(IN, OUT, bias=bias, dtype=torch.float64)

        def forward(self, x):
            return self.lin(x)

    holder = Holder()
    holder.lin.weight.data = double(layer.base.weight if weight is None else weight)
    if bias:
        holder.lin.bias.data = double(layer.base.bias)
    config = peft.LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules=["lin"], use_dora=dora)
    adapted = peft.get_peft_model(holder, config).base_model.model.lin.double()
    a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    a.data, b.data = double(layer.lora_a).T.contiguous(), double(layer.lora_b).T.contiguous()
    if dora:
        adapted.lora_magnitude_vector["default"].weight.data = double(layer.m)
    inputs = torch.tensor(x, requires_grad=True)
    out = adapted(inputs)
    (out * torch.tensor(dy)).sum().backward()
    found = {"out": out, "x": inputs.grad, "lora_a": a.grad.T, "lora_b": b.grad.T}
    return found | ({"m": adapted.lora_magnitude_vector["default"].weight.grad} if dora else {})


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("method", [LoRALinear, DoRALinear])
def test_a_linear_layer_is_peft_s(method, bias):
    layer = started(method(linear(bias), OPTIONS, key=KEY))
    expected = peft_gradients(layer, X, DY, dora=method is DoRALinear, bias=bias)
    assert_alike(our_gradients(layer, mx.array(X, mx.float32), DY), expected)
    row = mx.array(X[0, 0], mx.float32)
    assert mx.array_equal(layer(row), layer(row[None])[0])


CODED = {
    "mlx.nn": lambda: linear().to_quantized(32, 4),
    "affine": lambda: FakeQuantLinear(linear(), AFFINE).to_coded(),
    "nvfp4": lambda: FakeQuantLinear(linear(), checked_options("test", "nvfp4", None, None, None)).to_coded(),
    "int8": lambda: FakeQuantLinear(linear(), checked_options("test", "int8", None, None, None)).to_coded(),
}


@pytest.mark.parametrize("codes", CODED)
@pytest.mark.parametrize("method", [LoRALinear, DoRALinear])
def test_over_codes_it_is_peft_s_over_the_weight_that_they_stand_for(method, codes):
    layer = started(method(CODED[codes](), OPTIONS, key=KEY))
    weight = float_weight(layer.base)
    expected = peft_gradients(layer, X, DY, weight=weight, dora=method is DoRALinear)
    assert_alike(our_gradients(layer, mx.array(X, mx.float32), DY), expected, 5e-6)


def torch_gradients(function, layer, *inputs):
    """Output and gradients of a formula in PyTorch, of A, B, perhaps m, and float inputs."""
    names = [name for name in ("lora_a", "lora_b", "m") if name in layer]
    parts = [double(layer[name]).requires_grad_() for name in names]
    arrays = [torch.tensor(each) for each in inputs]
    floats = [each.requires_grad_() for each in arrays if each.is_floating_point()]
    out, dy = function(double(float_weight(layer.base)), *parts, *arrays)
    (out * dy).sum().backward()
    found = {"out": out, **{name: part.grad for name, part in zip(names, parts, strict=True)}}
    return found | ({"x": floats[0].grad} if floats else {})


def adapted_table(weight, a, b, m=None):
    moved = weight + SCALE * a @ b
    return moved if m is None else (m / moved.norm(dim=1).detach())[:, None] * moved


@pytest.mark.parametrize("method", [LoRAEmbedding, DoRAEmbedding])
def test_a_table_is_pytorch_s_as_embedding_and_as_head(method):
    layer = started(method(table(), OPTIONS, key=KEY))
    dy = np.random.default_rng(5).standard_normal((*IDS.shape, IN))

    def rows(weight, *rest):
        *parts, ids = rest
        return adapted_table(weight, *parts)[ids], torch.tensor(dy)

    def head(weight, *rest):
        *parts, x = rest
        return x @ adapted_table(weight, *parts).T, torch.tensor(DY)

    assert_alike(our_gradients(layer, mx.array(IDS), dy), torch_gradients(rows, layer, IDS))
    for call in (lambda layer, x: layer.as_linear(x), lambda layer, x: x @ layer.effective_weight().T):
        found = our_gradients(layer, mx.array(X, mx.float32), DY, call)
        assert_alike(found, torch_gradients(head, layer, X))
    assert not layer(mx.array([-1, OUT])).any()


def test_experts_are_pytorch_s():
    layer = started(LoRAExpertLinear(experts(), OPTIONS, key=KEY))
    x, dy = (np.random.default_rng(6).standard_normal((4, 3, size)) for size in (IN, OUT))

    def formula(weight, a, b, x):
        chosen = (weight + SCALE * b @ a)[torch.tensor(EXPERTS)]
        return x @ chosen.mT, torch.tensor(dy)

    found = our_gradients(layer, mx.array(x, mx.float32), dy, lambda layer, x: layer(x, mx.array(EXPERTS)))
    assert_alike(found, torch_gradients(formula, layer, x))


ALL = {
    "lora": lambda: (LoRALinear, linear()),
    "dora": lambda: (DoRALinear, linear()),
    "lora, codes": lambda: (LoRALinear, CODED["mlx.nn"]()),
    "dora, codes": lambda: (DoRALinear, CODED["affine"]()),
    "experts": lambda: (LoRAExpertLinear, experts()),
    "experts, codes": lambda: (LoRAExpertLinear, FakeQuantExpertLinear(experts(), AFFINE).to_coded()),
    "table": lambda: (LoRAEmbedding, table()),
    "table, dora": lambda: (DoRAEmbedding, table()),
    "table, codes": lambda: (DoRAEmbedding, FakeQuantEmbedding(table(), AFFINE).to_coded()),
}


def outputs(layer, dtype=mx.float32):
    x = mx.array(X, dtype)
    if layer.kind == "experts" if hasattr(layer, "kind") else "Expert" in type(layer).__name__:
        return [layer(mx.array(X[0, :4, None], dtype), mx.array(EXPERTS))]
    return [layer(mx.array(IDS)), layer.as_linear(x)] if hasattr(layer, "as_linear") else [layer(x)]


STARTS = [(name, mx.float32) for name in ALL]
STARTS += [(name, dtype) for name in ALL if "codes" not in name for dtype in (mx.float16, mx.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), STARTS, ids=str)
def test_it_starts_as_the_layer_under_it_to_the_bit(name, dtype):
    method, base = ALL[name]()
    if name == "dora":
        # It adds the bias behind the magnitudes, where the layer under it rounds once: the same in float32 alone.
        base = linear(bias=dtype == mx.float32)
    base.set_dtype(dtype)
    before = outputs(base, dtype)
    layer = method(base, OPTIONS, key=KEY)
    assert all(each.dtype == dtype for each in outputs(layer, dtype))
    assert all(map(mx.array_equal, outputs(layer, dtype), before))
    started(layer)
    assert not any(map(mx.array_equal, outputs(layer, dtype), before))
    layer.active = False
    assert all(map(mx.array_equal, outputs(layer, dtype), before))


@pytest.mark.parametrize("name", ALL)
def test_only_adapters_are_trainable_and_they_have_mlx_lm_s_shapes(name):
    method, base = ALL[name]()
    layer = method(base, OPTIONS, key=KEY)
    shapes = {
        "linear": ((IN, RANK), (RANK, OUT)),
        "experts": ((4, RANK, IN), (4, OUT, RANK)),
        "embedding": ((OUT, RANK), (RANK, IN)),
    }[layer.kind]
    wanted = dict(zip(("lora_a", "lora_b"), shapes, strict=True)) | ({"m": (OUT,)} if "m" in layer else {})
    assert {n: a.shape for n, a in of_adapter(layer.trainable_parameters()).items()} == wanted
    bound = 1 / np.sqrt(OUT if layer.kind == "embedding" else IN)
    assert 0.8 * bound < mx.abs(layer.lora_a).max().item() <= bound
    layer.unfreeze()
    again = method(ALL[name]()[1], OPTIONS, key=KEY)
    assert mx.array_equal(again.lora_a, layer.lora_a)


@pytest.mark.parametrize("name", ALL)
def test_merged_it_computes_the_same_and_codes_are_of_the_adapted_weight(name):
    method, base = ALL[name]()
    before = base.weight
    layer = started(method(base, OPTIONS, key=KEY))
    merged = layer.merged(dequantize=True)
    for got, want in zip(outputs(merged), outputs(layer), strict=True):
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=0, atol=3e-6 * np.abs(np.array(want)).max())
    again = layer.merged()
    assert type(again) is type(base)
    if "codes" in name:
        want = fake_quant(layer.effective_weight(), "affine", bits=4, group_size=32)
        assert mx.array_equal(float_weight(again), want)
    else:
        assert mx.array_equal(again.weight, merged.weight)
    assert base.weight is before


@pytest.mark.parametrize("name", ["lora", "dora", "experts", "table"])
def test_dropout_is_the_formula_s_in_training_and_nothing_else(name):
    method, base = ALL[name]()
    layer = started(method(base, AdapterOptions(RANK, SCALE, 0.5), key=KEY))
    plain = started(method(ALL[name]()[1], OPTIONS, key=KEY))
    layer.eval()
    assert all(map(mx.array_equal, outputs(layer), outputs(plain)))
    layer.train()
    assert not any(map(mx.array_equal, outputs(layer), outputs(plain)))
    mx.random.seed(1)
    first = outputs(layer)
    assert not any(map(mx.array_equal, outputs(layer), first))
    mx.random.seed(1)
    assert all(map(mx.array_equal, outputs(layer), first))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_the_gradients_of_dropout_are_those_of_the_mask_that_was_drawn(compiled):
    layer = started(LoRALinear(linear(), AdapterOptions(RANK, SCALE, 0.25), key=KEY))
    x = mx.array(X, mx.float32)
    held = layer.trainable_parameters()

    def loss(parameters, x):
        layer.update(parameters)
        out = layer(x)
        return (mx.array(DY, mx.float32) * out).sum(), out

    function = mx.value_and_grad(loss, argnums=(0, 1))
    if compiled:
        function = mx.compile(function, inputs=mx.random.state, outputs=mx.random.state)
    mx.random.seed(9)
    (_, out), (found, of_x) = function(held, x)
    layer.update(held)
    mx.random.seed(9)
    mask = mx.where(nn.Dropout(0.25)(mx.ones(x.shape)) == 0, 0, 1 / 0.75)

    def formula(weight, a, b, x):
        bias = double(layer.base.bias)
        return x @ weight.T + bias + SCALE * (x * double(mask)) @ a @ b, torch.tensor(DY)

    assert 0.1 < (mask == 0).mean().item() < 0.4
    assert_alike({"out": out, **of_adapter(found), "x": of_x}, torch_gradients(formula, layer, X))


FAKE = {
    "linear": (FakeQuantLoRALinear, linear, FakeQuantLinear),
    "dora": (FakeQuantDoRALinear, linear, FakeQuantLinear),
    "experts": (FakeQuantLoRAExpertLinear, experts, FakeQuantExpertLinear),
    "table": (FakeQuantLoRAEmbedding, table, FakeQuantEmbedding),
}


@pytest.mark.parametrize("of_codes", [False, True], ids=["float base", "base of codes"])
@pytest.mark.parametrize("name", FAKE)
def test_quantised_behind_the_adapter_it_is_the_layer_that_trains_the_adapted_weight(name, of_codes):
    method, make, plain = FAKE[name]
    base = plain(make(), AFFINE).to_coded() if of_codes else make()
    layer = started(method(base, OPTIONS, key=KEY, options=AFFINE))
    trained = layer.fake_quantized()
    assert type(trained) is plain
    assert all(map(mx.array_equal, outputs(layer), outputs(trained)))
    assert mx.array_equal(layer.effective_weight(), fake_quant(trained.weight, "affine", bits=4, group_size=32))
    coded = layer.merged()
    assert mx.array_equal(float_weight(coded), layer.effective_weight())
    layer.enabled = False
    assert mx.array_equal(layer.effective_weight(), trained.weight)


@pytest.mark.parametrize("ste", ["identity", "clip"])
@pytest.mark.parametrize("of_codes", [False, True], ids=["float base", "base of codes"])
def test_the_gradient_passes_the_rounding_by(of_codes, ste):
    ternary = checked_options("test", "ternary", None, None, None)
    base = FakeQuantLinear(linear(), AFFINE).to_coded() if of_codes else linear()
    layer = started(FakeQuantLoRALinear(base, OPTIONS, key=KEY, options=ternary, ste=ste))
    adapted = np.array(layer.fake_quantized().weight, dtype=np.float64)
    kept = np.abs(adapted / np.abs(adapted).mean()) < 1.5 if ste == "clip" else np.ones_like(adapted)
    quantised = double(layer.effective_weight())

    def formula(weight, a, b, x):
        moved = (weight + SCALE * (a @ b).T) * torch.tensor(kept)
        return x @ (quantised + moved - moved.detach()).T + double(base.bias), torch.tensor(DY)

    assert_alike(our_gradients(layer, mx.array(X, mx.float32), DY), torch_gradients(formula, layer, X), 5e-6)


def test_what_a_layer_cannot_be_is_an_error():
    with pytest.raises(ValueError, match=r"\[LoRALinear\] base must be a layer of the kind linear but got a Embedding"):
        LoRALinear(table(), OPTIONS, key=KEY)
    with pytest.raises(ValueError, match="rank must be 1 or more but got 0"):
        LoRALinear(linear(), AdapterOptions(0, 1.0), key=KEY)
    with pytest.raises(ValueError, match="dropout must be 0 where the adapted weight is quantised as one"):
        FakeQuantLoRALinear(linear(), AdapterOptions(2, 1.0, 0.1), key=KEY, options=AFFINE)


def test_a_row_without_direction_stays_finite():
    base = linear()
    base.weight[3] = 0
    layer = DoRALinear(base, OPTIONS, key=KEY)
    assert mx.isfinite(our_gradients(layer, mx.array(X, mx.float32), DY)["m"]).all()
    assert mx.array_equal(layer(mx.array(X, mx.float32)), base(mx.array(X, mx.float32)))


def test_no_rows_are_no_rows():
    for name in ("lora", "dora", "lora, codes"):
        method, base = ALL[name]()
        assert method(base, OPTIONS, key=KEY)(mx.zeros((0, IN))).shape == (0, OUT)
