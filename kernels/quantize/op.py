"""quantize, dequantize and fake_quant: checks, engines, and the gradient that passes the rounding by."""

from functools import cache
from typing import NoReturn, cast

from forge_mlx.kernels._common.checks import FLOATS, check_arrays, check_axes, check_shape, given
from forge_mlx.kernels._common.differentiable import differentiable
from forge_mlx.kernels._common.folding import Arrays, Function, map_elements
from forge_mlx.kernels.quantize import launch, reference
from forge_mlx.kernels.quantize.options import Options, Ste, check_ste, check_weights, checked_options
from forge_mlx.metal.dtypes import dtype_name
from forge_mlx.metal.engine import EngineName, resolve
import mlx.core as mx


def quantize(
    w: mx.array,
    mode: str,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    granularity: str | None = None,
    impl: str | None = None,
) -> reference.Quantized:
    """code = round((w - bias) / scale), halves to even, packed as `mx.quantize` packs; by one formula on every engine.

    All is computed in float32. m is the largest magnitude of a group, row or matrix:

    | mode | scales | a code stands for |
    |---|---|---|
    | affine | as `mx.quantize` on the CPU, in the dtype of w, with biases | 0 to 2^bits - 1 |
    | mxfp4, mxfp8 | uint8 e + 127: the smallest 2^e of m / 6, m / 448 or more; 127 where all is 0 | e2m1, e4m3 |
    | nvfp4 | uint8: m / 6 to the nearest e4m3, 448 at most | e2m1, 6 at most |
    | int8, int4 | float32: m / 127, m / 7, of a row | -127 to 127, plus 128; -7 to 7, plus 8 |
    | ternary | float32: mean(abs(w)), within 2 ulp | -1, 0, 1, plus 1 |
    | fp8_e4m3 | float32: m / 448 | e4m3 |

    affine equals `mx.quantize` on the CPU bit for bit, the MX and NV modes off ties, but where MLX's CPU code goes
    wrong: scales below 2^-127 in mxfp4 and mxfp8, numbers from about 1e10 on in nvfp4 (BitNet b1.58: Ma et al. 2024;
    MX: OCP Microscaling Formats 1.0). Zeros stay zeros (in affine up to the last
    bit of the bias); a row whose scale is 0 is all zeros. A group, row or matrix
    that holds NaN or an infinity has the codes of 0 and a scale (and bias) that stands for NaN: NaN itself, 255 in
    mxfp4 and mxfp8, 0x7F in nvfp4; `dequantize` and `mx.dequantize` make all of it NaN. So do they of an affine group
    whose range is infinite in float32. A GPU may take subnormal float32 numbers (below 1.2e-38) for 0.

    Args:
        w: `[..., K]` with two or more axes, float32, float16 or bfloat16. K is a multiple of group_size, or without
            groups of 32 / bits.
        mode: A name of the table.
        bits: affine: 2, 3, 4 (the default), 5, 6 or 8; mxfp4 and nvfp4: 4; mxfp8: 8. No option of the others.
        group_size: affine: 32, 64 (the default) or 128; mxfp4 and mxfp8: 32; nvfp4: 16. No option of the others.
        granularity: What shares a scale. ternary: "tensor" (the default), the last two axes, or "row"; fp8_e4m3: "row"
            (the default) or "tensor"; int8 and int4: "row". No option of the others.
        impl: "metal", "cuda", "emulator" or "reference"; None for the engine that `use_engine`, FORGE_MLX_ENGINE or
            the device decides.

    Returns:
        Codes `[..., K * bits / 32]`, uint32, element i of a row in the bits from i * bits on; scales
        `[..., K / group_size]`, `[..., 1]` of rows or `[..., 1, 1]` of matrices; biases as the scales, None but for
        affine.

    Raises:
        ValueError: w of another dtype or with fewer axes, a K that does not fit, an option that the mode does not
            have, an unknown engine; when it is differentiated.
        RuntimeError: The engine that was asked for cannot run here.
    """
    options = checked_options("quantize", mode, bits, group_size, granularity)
    check_weights("quantize", w, options)
    engine = resolve("quantize", impl).name
    if w.size == 0:
        return reference.quantize(w, options)
    codes, scales, *biases = _quantize(engine, options)(w)
    return codes, scales, biases[0] if biases else None


def dequantize(
    codes: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    mode: str,
    bits: int | None = None,
    group_size: int | None = None,
    granularity: str | None = None,
    dtype: mx.Dtype,
    impl: str | None = None,
) -> mx.array:
    """code * scale, rounded to the dtype: the weights that codes of `quantize` stand for.

    In the mode affine: code * scale, rounded to the dtype of the scales, + bias, rounded again, as `mx.dequantize` on
    the CPU. Plain MLX operations on every engine. A product beyond the dtype's range is infinite.

    Args:
        codes: `[..., K * bits / 32]`, uint32.
        scales: As `quantize` gives them.
        biases: The same; for the mode affine alone.
        mode: As `quantize` takes it.
        bits: As `quantize` takes it.
        group_size: As `quantize` takes it.
        granularity: As `quantize` takes it.
        dtype: Of the result: float32, float16 or bfloat16.
        impl: As `quantize` takes it.

    Returns:
        `[..., K]`.

    Raises:
        ValueError: As `quantize`, and for codes, scales or biases of other dtypes or shapes, another dtype.
        RuntimeError: As `quantize`.
    """
    options = checked_options("dequantize", mode, bits, group_size, granularity)
    _check_quantized(codes, scales, biases, options)
    if dtype not in FLOATS:
        raise ValueError(f"[dequantize] dtype must be float32, float16 or bfloat16 but got {dtype}.")
    resolve("dequantize", impl)
    arrays = (codes, scales) if biases is None else (codes, scales, biases)
    return _dequantize(options, dtype)(*arrays)[0]


def fake_quant(
    w: mx.array,
    mode: str,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    granularity: str | None = None,
    ste: str = "identity",
    impl: str | None = None,
) -> mx.array:
    """dequantize(quantize(w)) in the dtype of w, bit for bit, in one pass and without codes in memory.

    The gradient is dw = dout: the rounding is passed by, and the scales follow the weights (Bengio et al. 2013). With
    `ste="clip"` dw is 0 where the code was clipped, that is, where the nearest number of the codes' grid lies outside
    of it: affine where (w - bias) / scale is 2^bits - 1/2 or more; ternary where abs(w / scale) is 3/2 or more, int4
    7.5, int8 127.5, nvfp4 7, fp8_e4m3 more than 464. But for affine, ternary, and nvfp4 of weights above 3000, only a
    scale that is subnormal leaves a weight outside; in mxfp4 and mxfp8 none is. Second derivatives follow: of dw by
    dout the same, by w none.

    Args:
        w: As `quantize` takes it.
        mode: As `quantize` takes it.
        bits: As `quantize` takes it.
        group_size: As `quantize` takes it.
        granularity: As `quantize` takes it.
        ste: The gradient of the rounding, "identity" or "clip".
        impl: As `quantize` takes it.

    Returns:
        `[..., K]` in the dtype of w.

    Raises:
        ValueError: As `quantize`, but that it can be differentiated, and for another `ste`.
        RuntimeError: As `quantize`.
    """
    options = checked_options("fake_quant", mode, bits, group_size, granularity)
    check_weights("fake_quant", w, options)
    gradient = check_ste("fake_quant", ste)
    engine = resolve("fake_quant", impl).name
    return w if w.size == 0 else _fake_quant(engine, options, gradient)(w)[0]


@cache
def _fake_quant(engine: EngineName, options: Options, ste: Ste) -> Function:
    """The differentiable function w `[..., K]` -> the same."""

    def forward(w: mx.array) -> Arrays:
        if engine == "reference":
            return (reference.fake_quant(w, options),)
        return (launch.fake_quant(engine, w, options),)

    def formula(w: mx.array, dout: mx.array) -> Arrays:
        return (dout if ste == "identity" else reference.clip_backward(mx.stop_gradient(w), dout, options),)

    def backward(w: mx.array, dout: mx.array) -> Arrays:
        if engine == "reference" or ste == "identity":
            return formula(w, dout)
        return (launch.clip_backward(engine, w, dout, options),)

    # The gradient is an elementwise factor, and so its own transpose.
    return differentiable(_with_tangent(forward, formula), backward, formula, vmap=map_elements)


@cache
def _quantize(engine: EngineName, options: Options) -> Function:
    """The function w -> codes, scales and, in the mode affine, biases."""

    def function(w: mx.array) -> Arrays:
        found = reference.quantize(w, options) if engine == "reference" else launch.quantize(engine, w, options)
        return tuple(each for each in found if each is not None)

    return _refusing("quantize", function)


@cache
def _dequantize(options: Options, dtype: mx.Dtype) -> Function:
    """The function codes, scales and, in the mode affine, biases -> w."""

    def function(codes: mx.array, scales: mx.array, *biases: mx.array) -> Arrays:
        return (reference.dequantize(codes, scales, biases[0] if biases else None, options, dtype),)

    return _refusing("dequantize", function)


def _refusing(op: str, function: Function) -> Function:
    """A function that raises when it is differentiated."""

    def refuse(*_arrays: mx.array) -> NoReturn:
        raise ValueError(
            f"[{op}] has no gradient: codes are steps. Differentiate fake_quant, or wrap the arguments of {op} in "
            "mx.stop_gradient."
        )

    return differentiable(_with_tangent(function, refuse), refuse, refuse, vmap=map_elements)


def _with_tangent(function: Function, tangent: Function) -> Function:
    """A function with a rule for mx.jvp, which would differentiate the rounding itself and give zeros.

    Args:
        function: Takes arrays and returns a tuple.
        tangent: Takes the arrays and their tangents and returns those of the results.
    """

    @mx.custom_function
    def custom(*inputs: mx.array) -> Arrays:
        # Or mx.jvp would go into the function too, and not every operation has a rule.
        return function(*map(mx.stop_gradient, inputs))

    @custom.jvp
    def jvp(primals: Arrays | mx.array, tangents: Arrays | mx.array) -> Arrays:
        both = [(each,) if isinstance(each, mx.array) else each for each in (primals, tangents)]
        return tangent(*both[0], *both[1])

    return cast(Function, custom)


def _check_quantized(codes: mx.array, scales: mx.array, biases: mx.array | None, options: Options) -> None:
    """Raise unless the arrays are what `quantize` gives in a mode."""
    check_arrays("dequantize", codes=codes, scales=scales, **given(biases=biases))
    check_axes("dequantize", 2, codes=codes)
    if biases is None and options.has_biases:
        raise ValueError(f"[dequantize] biases must be an mx.array but got None. The mode {options.mode!r} has them.")
    if biases is not None and not options.has_biases:
        raise ValueError(f"[dequantize] biases must be None in the mode {options.mode!r} but got {biases.shape}.")
    if codes.dtype != mx.uint32:
        raise ValueError(f"[dequantize] codes must be uint32 but got {dtype_name(codes.dtype)}.")
    dtype = scales.dtype if options.mode == "affine" and scales.dtype in FLOATS else options.scale_dtype(mx.float32)
    columns = codes.shape[-1] * 32 // options.bits
    if codes.shape[-1] * 32 % options.bits or columns % options.columns_multiple:
        raise ValueError(
            f"[dequantize] the last axis of codes must be whole groups of {options.columns_multiple} codes of "
            f"{options.bits} bits but got the shape {codes.shape}."
        )
    shape = options.scales_shape((*codes.shape[:-1], columns))
    for name, array in given(scales=scales, biases=biases).items():
        if array.dtype != dtype:
            raise ValueError(
                f"[dequantize] {name} must be {dtype_name(dtype)} in the mode {options.mode!r} but got "
                f"{dtype_name(array.dtype)}."
            )
        check_shape("dequantize", name, array, shape, f"of codes {codes.shape}")
