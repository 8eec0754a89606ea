"""What callers of quantize, dequantize and fake_quant see: errors, gradients, engines, vmap, compiled functions."""

from functools import partial
import os
from pathlib import Path
import shutil
import subprocess
import sys

from forge_mlx.kernels import dequantize, fake_quant, quantize
from forge_mlx.kernels.quantize import launch, op, reference
from forge_mlx.kernels.quantize.options import MODES, checked_options
from forge_mlx.metal.engine import use_engine
import mlx.core as mx
import numpy as np
import pytest
from room_proofs import ROOT, assert_close, random

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
W = mx.ones((2, 64))
OPTIONS = {mode: checked_options("test", mode, None, None, None) for mode in MODES}

# Mistake: keyword arguments beside w, message behind the op's name.
MISTAKES = {
    "unknown mode": ({"mode": "int3"}, r"mode must be among affine, .*, fp8_e4m3 but got 'int3'\."),
    "mode is None": ({"mode": None}, r"mode must be among .* but got None\."),
    "bits of affine": (
        {"mode": "affine", "bits": 7},
        r"bits must be 4, 2, 3, 5, 6 or 8 in the mode 'affine' but got 7\.",
    ),
    "bits are true": ({"mode": "affine", "bits": True}, r"bits must be .* but got True\."),
    "bits are no integer": ({"mode": "affine", "bits": 4.0}, r"bits must be .* but got 4\.0\."),
    "bits of mxfp4": ({"mode": "mxfp4", "bits": 8}, r"bits must be 4 in the mode 'mxfp4' but got 8\."),
    "bits of ternary": ({"mode": "ternary", "bits": 2}, r"mode 'ternary' takes no bits but got 2\. Leave it out\."),
    "bits of int8": ({"mode": "int8", "bits": 8}, r"mode 'int8' takes no bits but got 8\."),
    "group of affine": ({"mode": "affine", "group_size": 16}, r"group_size must be 64, 32 or 128 .* but got 16\."),
    "group of nvfp4": ({"mode": "nvfp4", "group_size": 32}, r"group_size must be 16 in the mode 'nvfp4' but got 32\."),
    "group of int4": ({"mode": "int4", "group_size": 64}, r"mode 'int4' takes no group_size but got 64\."),
    "granularity of affine": (
        {"mode": "affine", "granularity": "row"},
        r"mode 'affine' takes no granularity .*'row'\.",
    ),
    "granularity of int8": ({"mode": "int8", "granularity": "tensor"}, r"granularity must be 'row' .* got 'tensor'\."),
    "granularity of ternary": (
        {"mode": "ternary", "granularity": "group"},
        r"granularity must be 'tensor' or 'row' in the mode 'ternary' but got 'group'\.",
    ),
}
WRONG_WEIGHTS = {
    "integers": (mx.ones((2, 64), mx.int32), "affine", r"w must be float32, float16 or bfloat16 but got int32\."),
    "one axis": (mx.ones((64,)), "affine", r"w must have 2 or more axes but got the shape \(64,\)\."),
    "no whole groups": (
        mx.ones((2, 96)),
        "affine",
        r"last axis of w must be a multiple of 64 \(group_size\) in the mode 'affine' but got the shape \(2, 96\)\.",
    ),
    "no whole words": (
        mx.ones((2, 24)),
        "ternary",
        r"must be a multiple of 16 \(codes of 2 bits to a uint32\) in the mode 'ternary' but got the shape \(2, 24\)\.",
    ),
}


@pytest.mark.parametrize("function", [quantize, fake_quant], ids=lambda each: each.__name__)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_options_that_a_mode_does_not_have_raise(mistake, function):
    options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=rf"^\[{function.__name__}\] {message}"):
        function(W, **options)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_dequantize_raises_the_same(mistake):
    options, message = MISTAKES[mistake]
    codes, scales, biases = quantize(W, "affine")
    with pytest.raises(ValueError, match=rf"^\[dequantize\] {message}"):
        dequantize(codes, scales, biases, **options, dtype=mx.float32)


@pytest.mark.parametrize("function", [quantize, fake_quant], ids=lambda each: each.__name__)
@pytest.mark.parametrize("mistake", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_raise(mistake, function):
    w, mode, message = WRONG_WEIGHTS[mistake]
    with pytest.raises(ValueError, match=rf"^\[{function.__name__}\] .*{message}"):
        function(w, mode)


@pytest.mark.parametrize("ste", ["none", None, True])
def test_unknown_gradient_raises(ste):
    with pytest.raises(ValueError, match=rf"^\[fake_quant\] ste must be 'identity' or 'clip' but got {ste!r}\."):
        fake_quant(W, "affine", ste=ste)


@pytest.mark.parametrize("call", [partial(quantize, W, "int8"), partial(fake_quant, W, "int8")])
def test_unknown_engine_raises(call):
    with pytest.raises(ValueError, match="impl must be among metal, cuda, emulator, reference but got 'emulater'"):
        call(impl="emulater")


CODES, SCALES, BIASES = quantize(W, "affine")
BYTES = quantize(W, "mxfp4")[1]
# Mistake: codes, scales, biases, mode, message.
WRONG_CODES = {
    "no biases": (CODES, SCALES, None, "affine", r"biases must be an mx\.array but got None\. The mode 'affine' has"),
    "biases": (CODES, BYTES, BIASES, "mxfp4", r"biases must be None in the mode 'mxfp4' but got \(2, 1\)\."),
    "signed codes": (CODES.astype(mx.int32), SCALES, BIASES, "affine", r"codes must be uint32 but got int32\."),
    "codes of one axis": (CODES[0], SCALES, BIASES, "affine", r"codes must have 2 or more axes"),
    "part of a group": (CODES[:, :5], SCALES, BIASES, "affine", r"whole groups of 64 codes .* got the shape \(2, 5\)"),
    "float scales": (CODES, SCALES, None, "mxfp4", r"scales must be uint8 in the mode 'mxfp4' but got float32\."),
    "integer scales": (CODES, BYTES, BIASES, "affine", r"scales must be float32 in the mode 'affine' but got uint8\."),
    "another dtype": (
        CODES,
        SCALES.astype(mx.float16),
        BIASES,
        "affine",
        r"biases must be float16 in the mode 'affine' but got float32\.",
    ),
    "other scales": (CODES, SCALES, None, "int4", r"scales must have the shape \(2, 1\)"),
}


@pytest.mark.parametrize("mistake", WRONG_CODES)
def test_codes_that_quantize_does_not_give_raise(mistake):
    codes, scales, biases, mode, message = WRONG_CODES[mistake]
    if mistake == "other scales":
        scales = mx.ones((2, 8))
    with pytest.raises(ValueError, match=rf"^\[dequantize\] .*{message}"):
        dequantize(codes, scales, biases, mode=mode, dtype=mx.float32)


def test_dequantize_to_no_float_raises():
    with pytest.raises(ValueError, match=r"^\[dequantize\] dtype must be float32, float16 or bfloat16 but got .*int32"):
        dequantize(CODES, SCALES, BIASES, mode="affine", dtype=mx.int32)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_empty_weights(mode, shape):
    w, options = mx.zeros(shape, mx.bfloat16), OPTIONS[mode]
    codes, scales, biases = quantize(w, mode)
    assert (codes.shape, codes.dtype) == (options.codes_shape(shape), mx.uint32)
    assert (scales.shape, scales.dtype) == (options.scales_shape(shape), options.scale_dtype(mx.bfloat16))
    values = dequantize(codes, scales, biases, mode=mode, dtype=mx.bfloat16)
    (out,), (dw,) = mx.vjp(lambda w: fake_quant(w, mode, ste="clip"), [w], [w])
    for each in (values, out, dw):
        assert (each.shape, each.dtype) == (shape, mx.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_gradient_passes_the_rounding_by(mode, dtype):
    w, dout = random((3, 4, 64), 0, dtype), random((3, 4, 64), 1, dtype)
    (out,), (dw,) = mx.vjp(lambda w: fake_quant(w, mode), [w], [dout])
    assert out.dtype == dw.dtype == dtype
    assert mx.array_equal(dw, dout)


CLIPPED = {"affine": {"bits": 2}, "ternary": {}, "nvfp4": {}}


@pytest.mark.parametrize("mode", CLIPPED)
def test_clipped_gradient_is_0_outside_of_the_codes_alone(mode):
    w, dout = random((4, 64), 0) * (1500 if mode == "nvfp4" else 1), random((4, 64), 1)
    call = partial(fake_quant, mode=mode, **CLIPPED[mode])
    dw = mx.vjp(lambda w: call(w, ste="clip"), [w], [dout])[1][0]
    # By the stored scales: in float32 they are the ones that the codes are made with.
    _, scales, biases = quantize(w, mode, **CLIPPED[mode])
    x = np.array(w, np.float64)
    if mode == "affine":
        x = (x - np.array(biases).repeat(64, axis=-1)) / np.array(scales).repeat(64, axis=-1)
        outside = np.rint(x) > 3
    elif mode == "ternary":
        outside = np.abs(np.rint(x / np.array(scales))) > 1
    else:
        outside = np.abs(x) / np.array(mx.from_fp8(scales, mx.float32)).repeat(16, axis=-1) >= 7
    assert 0 < outside.sum() < outside.size
    assert np.array_equal(np.array(dw), np.where(outside, 0, np.array(dout)))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "int8", "int4", "fp8_e4m3"])
def test_modes_whose_scale_holds_the_largest_weight_clip_none(mode):
    w, dout = random((4, 64), 0), random((4, 64), 1)
    assert mx.array_equal(mx.vjp(lambda w: fake_quant(w, mode, ste="clip"), [w], [dout])[1][0], dout)


@pytest.mark.parametrize("ste", ["identity", "clip"])
@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_and_second_derivative_follow_the_gradient(mode, ste):
    w, direction = random((4, 64), 0), random((4, 64), 1)

    def function(w):
        return fake_quant(w, mode, ste=ste)

    slope = mx.vjp(function, [w], [mx.ones_like(w)])[1][0]
    assert mx.array_equal(mx.jvp(function, [w], [direction])[1][0], slope * direction)
    second = mx.grad(lambda w: (mx.grad(lambda w: (function(w) ** 3).sum())(w) * direction).sum())(w)
    assert_close(second, 6 * function(w) * slope * direction)


@pytest.mark.parametrize("transform", [mx.grad, lambda f: lambda x: mx.jvp(f, [x], [x])], ids=["grad", "jvp"])
def test_codes_have_no_gradient(transform):
    w = random((2, 64), 0)
    codes, scales, _ = quantize(w, "int8")
    with pytest.raises(ValueError, match=r"^\[quantize\] has no gradient: .*Differentiate fake_quant"):
        mx.eval(transform(lambda w: quantize(w, "int8")[1].sum())(w))
    with pytest.raises(ValueError, match=r"^\[dequantize\] has no gradient: "):
        mx.eval(transform(lambda s: dequantize(codes, s, mode="int8", dtype=mx.float32).sum())(scales))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_vmap_its_gradient_and_vmap_of_the_gradient(mode, axis):
    w = random((3, 4, 64), 0)
    moved = mx.moveaxis(w, 0, axis)

    def loss(w):
        return (fake_quant(w, mode, ste="clip") ** 2).sum()

    mapped = mx.vmap(lambda w: fake_quant(w, mode, ste="clip"), in_axes=axis)
    assert mx.array_equal(mapped(moved), fake_quant(w, mode))
    assert mx.array_equal(mx.vmap(mx.grad(loss), in_axes=axis)(moved), mx.grad(loss)(w))
    assert mx.array_equal(mx.grad(lambda w: (mapped(w) ** 2).sum())(moved), mx.moveaxis(mx.grad(loss)(w), 0, axis))
    arrays = [each for each in quantize(w, mode) if each is not None]
    coded = mx.vmap(lambda w: [each for each in quantize(w, mode) if each is not None], in_axes=axis)(moved)
    assert all(mx.array_equal(mine, other) for mine, other in zip(coded, arrays, strict=True))
    values = mx.vmap(lambda *arrays: dequantize(*arrays, mode=mode, dtype=mx.float32))(*arrays)
    assert mx.array_equal(values, fake_quant(w, mode))


def test_in_a_checkpoint():
    w = random((4, 64), 0)

    def loss(w):
        return (fake_quant(w, "ternary", ste="clip") ** 2).sum()

    assert mx.array_equal(mx.grad(mx.checkpoint(loss))(w), mx.grad(loss)(w))


COMPILED = """
import forge_mlx
from forge_mlx.kernels import dequantize, fake_quant, quantize
from forge_mlx.kernels.quantize.options import MODES
import mlx.core as mx

a, b, c = (mx.random.normal((1000,)) for _ in range(3))
print("contracts" if not mx.array_equal(mx.compile(lambda a, b, c: a * b + c)(a, b, c), a * b + c) else "does not")
variants = [(mode, {}, mx.float32) for mode in MODES] + [("affine", {"bits": 8}, mx.float32)]
variants += [(mode, {}, dtype) for mode in ("affine", "ternary") for dtype in (mx.float16, mx.bfloat16)]
for mode, options, dtype in variants:
    w = mx.random.normal((8, 256)).astype(dtype)
    arrays = [each for each in quantize(w, mode, **options) if each is not None]
    for name, function, inputs in (
        ("fake_quant", lambda w: [fake_quant(w, mode, **options)], [w]),
        ("gradient", lambda w: [mx.grad(lambda w: fake_quant(w, mode, ste="clip", **options).sum())(w)], [w]),
        ("quantize", lambda w: [each for each in quantize(w, mode, **options) if each is not None], [w]),
        ("dequantize", lambda *arrays: [dequantize(*arrays, mode=mode, dtype=dtype, **options)], arrays),
    ):
        for mine, other in zip(mx.compile(function)(*inputs), function(*inputs), strict=True):
            if not mx.array_equal(mine, other):
                print(name, mode, options, dtype)
"""


def run_compiled(tmp_path, contracts):
    """What differs when it is compiled by a compiler that contracts a * b + c to one rounding, or by the usual one."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    if contracts:
        compiler = tmp_path / "bin" / "g++"
        compiler.parent.mkdir()
        compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -mfma -ffp-contract=fast\n')
        compiler.chmod(0o755)
        environment["PATH"] = f"{compiler.parent}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


def has_fma():
    info = Path("/proc/cpuinfo")
    return mx.default_device() == mx.cpu and info.exists() and " fma " in info.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "contracts", [False, pytest.param(True, marks=pytest.mark.skipif(not has_fma(), reason="no FMA"))]
)
def test_bits_are_the_same_compiled(contracts, tmp_path):
    first, *differences = run_compiled(tmp_path, contracts)
    if contracts:
        assert first == "contracts"
    assert differences == [""]


def test_compiled_function():
    w = random((4, 128), 0)
    assert mx.array_equal(mx.compile(lambda w: fake_quant(w, "affine"))(w), fake_quant(w, "affine"))


@pytest.fixture
def lazy_kernels(monkeypatch):
    """An engine whose launches are lazy, as those of a GPU: the formulas. Yields the names of what was launched."""
    launched = []

    def recorded(name):
        def call(engine, *arrays):
            assert engine == "metal"
            launched.append(name)
            return getattr(reference, name)(*arrays)

        return call

    for cached in (op._fake_quant, op._quantize):
        cached.cache_clear()
    for name in ("fake_quant", "clip_backward", "quantize"):
        monkeypatch.setattr(launch, name, recorded(name))
    monkeypatch.setattr("forge_mlx.metal.engine.missing", lambda _: None)
    yield launched
    for cached in (op._fake_quant, op._quantize):
        cached.cache_clear()


@pytest.mark.parametrize("ste", ["identity", "clip"])
def test_every_launch_is_on_the_engine_that_was_asked_for(ste, lazy_kernels):
    w = random((4, 64), 0)
    out, dw = mx.vjp(lambda w: fake_quant(w, "ternary", ste=ste, impl="metal"), [w], [w])
    expected = mx.vjp(lambda w: fake_quant(w, "ternary", ste=ste, impl="reference"), [w], [w])
    assert mx.array_equal(out[0], expected[0][0])
    assert mx.array_equal(dw[0], expected[1][0])
    assert lazy_kernels == ["fake_quant", *(["clip_backward"] if ste == "clip" else [])]


def test_use_engine_reaches_the_kernels(lazy_kernels):
    w = random((4, 64), 0)
    with use_engine("metal"):
        codes, scales, biases = quantize(w, "affine")
        values = dequantize(codes, scales, biases, mode="affine", dtype=mx.float32)
    assert lazy_kernels == ["quantize"]
    assert mx.array_equal(values, fake_quant(w, "affine", impl="reference"))


def test_vmap_and_second_derivative_of_kernels(lazy_kernels):
    w = random((3, 4, 64), 0)

    def second(impl):
        def gradient(w):
            return mx.grad(lambda w: (fake_quant(w, "affine", ste="clip", impl=impl) ** 3).sum())(w)

        return mx.vmap(gradient)(w), mx.grad(lambda w: (gradient(w) ** 2).sum())(w)

    for mine, other in zip(second("metal"), second("reference"), strict=True):
        assert_close(mine, other)
    assert "clip_backward" in lazy_kernels
