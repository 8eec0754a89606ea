"""What every op says to something that is no array where it takes one."""

from functools import partial
import inspect
import re

from forge_mlx import kernels
import mlx.core as mx
import numpy as np
import pytest

X, W, IDS = mx.ones((2, 4)), mx.ones((4,)), mx.array([1, 2])
HEADS = mx.ones((1, 1, 2, 4))
QUERIES, ROWS = mx.ones((1, 1, 2, 8)), mx.ones((1, 1, 2))
CHOSEN = mx.array([[1, 0], [1, 3]])
_, PLAN = kernels.moe_dispatch(X, CHOSEN)
WEIGHT = mx.ones((2, 64))
CODES = kernels.quantize(WEIGHT, "affine")
SEEN = {"segment_ids": IDS[None], "sinks": mx.ones((1,))}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}

# Op: its arrays by name, those that may be None, and the other arguments that it needs.
OPS = {
    "accumulate": ({"dst": X, "src": X}, {}, {}),
    "adamw_step": ({"w": X, "g": X, "m": X, "v": X}, {"master": X}, ADAMW),
    "add": ({"x": X, "y": X}, {}, {}),
    "add_bias": ({"x": X, "b": W}, {}, {}),
    "add_rms_norm": ({"x": X, "residual": X}, {"w": W}, {}),
    "attention": ({"q": QUERIES, "k": QUERIES, "v": QUERIES}, SEEN, {}),
    "axpy": ({"dst": X, "src": X}, {}, {"s": 0.5}),
    "cross_entropy": ({"logits": X, "targets": IDS}, {"weights": mx.ones((2,))}, {}),
    "dequantize": (
        dict(zip(("codes", "scales", "biases"), CODES, strict=True)),
        {},
        {"mode": "affine", "dtype": mx.float32},
    ),
    "embedding": ({"weight": X, "ids": IDS}, {}, {}),
    "expert_counts": ({"indices": IDS}, {}, {"num_experts": 4}),
    "fake_quant": ({"w": WEIGHT}, {}, {"mode": "affine"}),
    "flash_attention": ({"q": QUERIES, "k": QUERIES, "v": QUERIES}, SEEN, {}),
    "flash_attention_backward": (
        {"q": QUERIES, "k": QUERIES, "v": QUERIES, "out": QUERIES, "dout": QUERIES},
        {**SEEN, "row_max": ROWS, "row_sum": ROWS, "dlse": ROWS},
        {"lse": ROWS},
    ),
    "geglu": ({"gate": X, "up": X}, {}, {}),
    "gelu": ({"x": X}, {}, {}),
    "layer_norm": ({"x": X}, {"w": W, "b": W}, {}),
    "linear_cross_entropy": ({"hidden": X, "weight": X, "targets": IDS}, {"bias": mx.ones((2,)), "weights": IDS}, {}),
    "matmul": ({"a": X, "b": X.T}, {"accumulate": X[:, :2]}, {}),
    "moe_combine": ({"y": mx.ones((4, 4)), "gates": X}, {}, {"plan": PLAN}),
    "moe_dispatch": ({"x": X, "indices": CHOSEN}, {}, {}),
    "mul": ({"x": X, "y": X}, {}, {}),
    "quantize": ({"w": WEIGHT}, {}, {"mode": "affine"}),
    "relu2": ({"x": X}, {}, {}),
    "rms_norm": ({"x": X}, {"w": W}, {}),
    "rope": ({"x": HEADS}, {"freqs": mx.ones((2,)), "positions": IDS[None]}, {}),
    "row_scale": ({"x": X, "gates": X}, {}, {"e": 1}),
    "row_scale_accumulate": ({"dst": X, "x": X, "gates": X}, {}, {"e": 1}),
    "scale": ({"x": X}, {}, {"s": 0.5}),
    "sigmoid": ({"x": X}, {}, {}),
    "silu": ({"x": X}, {}, {}),
    "softcap": ({"x": X}, {}, {"cap": 30.0}),
    "softmax": ({"x": X}, {}, {}),
    "sum": ({"x": X}, {}, {}),
    "sum_squares": ({"x": X}, {}, {}),
    "swiglu": ({"gate": X, "up": X}, {}, {}),
    "topk_renorm": ({"p": X}, {"bias": W}, {"k": 2}),
}
WRONG = {
    "numpy": lambda array: np.array(array),
    "list": lambda array: array.tolist(),
    "None": lambda _array: None,
    "a number": lambda _array: 1.0,
}
NAMED = {"numpy": "numpy.ndarray", "list": "list", "None": "None", "a number": "float"}
CASES = [
    pytest.param(op, name, kind, id=f"{op}-{name}-{kind}")
    for op, (needed, optional, _) in OPS.items()
    for name in (*needed, *optional)
    for kind in WRONG
    if not (kind == "None" and name in optional)
]


def test_every_op_and_every_array_is_here():
    assert sorted([*OPS, "DispatchPlan", "flash_supported"]) == sorted(kernels.__all__)
    for op, (needed, optional, _) in OPS.items():
        hints = inspect.get_annotations(getattr(kernels, op), eval_str=True)
        arrays = {name for name, hint in hints.items() if name != "return" and "array" in str(hint)}
        # A number too may be an array, and one array may stand for two; the ops' own tests have those.
        assert arrays - {"s", "mul", "lr", "step", "grad_scale", "offset", "lse"} == {*needed, *optional}, op


@pytest.mark.parametrize(("op", "name", "kind"), CASES)
def test_what_is_no_array_is_named_together_with_the_op_and_the_argument(op, name, kind):
    needed, optional, others = OPS[op]
    call = partial(getattr(kernels, op), **needed, **dict.fromkeys(optional), **others)
    mx.eval(call())
    wrong = WRONG[kind]((needed | optional)[name])
    argument = rf"{name}\[0\]" if op.startswith("sum") and kind == "list" else name
    type_name = "list" if argument != name else NAMED[kind]
    message = rf"^\[{op}\] {argument} must be an mx\.array but got {re.escape(type_name)}\."
    with pytest.raises(ValueError, match=message):
        call(**{name: wrong})


def test_the_message_says_how_to_convert_what_can_be_converted():
    with pytest.raises(ValueError, match=r"numpy\.ndarray\. Convert it: mx\.array\(x\)\.$"):
        kernels.softmax(np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"got None\.$"):
        kernels.softmax(None)
