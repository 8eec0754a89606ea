"""quantize, dequantize and fake_quant in plain MLX operations: the formulas that every engine follows."""

from forge_mlx.kernels.quantize import elements, packing
from forge_mlx.kernels.quantize.options import Options
from forge_mlx.kernels.quantize.scales import e8m0_value, scaled
import mlx.core as mx

Quantized = tuple[mx.array, mx.array, mx.array | None]


def quantize(w: mx.array, options: Options) -> Quantized:
    """codes = rounded((w - bias) / scale), packed, with the scales and, in the mode affine, the biases.

    Args:
        w: `[..., K]`, as `check_weights` lets it pass.
        options: The mode.

    Returns:
        Codes `[..., K * bits / 32]` in uint32, scales of the shape `options.scales_shape`, biases of the same or None.
    """
    scales_shape = options.scales_shape(w.shape)
    if w.size == 0:
        empty = mx.zeros(scales_shape, options.scale_dtype(w.dtype))
        codes = mx.zeros(options.codes_shape(w.shape), mx.uint32)
        return codes, empty, empty if options.has_biases else None
    found = scaled(w, options)
    numbers = mx.where(mx.isnan(found.factor), 0.0, elements.rounded(found.x, options))
    codes = packing.pack(elements.codes_of(numbers, options).reshape(w.shape), options.bits)
    biases = None if found.bias is None else found.bias.reshape(scales_shape)
    return codes, found.scale.reshape(scales_shape), biases


def dequantize(
    codes: mx.array, scales: mx.array, biases: mx.array | None, options: Options, dtype: mx.Dtype
) -> mx.array:
    """code * scale, rounded to the dtype; in the mode affine code * scale rounded to that of the scales, + bias.

    Args:
        codes: `[..., K * bits / 32]`, as `quantize` gives them.
        scales: The same.
        biases: The same.
        options: The mode.
        dtype: Of the result.

    Returns:
        `[..., K]`.
    """
    shape = (*codes.shape[:-1], codes.shape[-1] * 32 // options.bits)
    if not codes.size:
        return mx.zeros(shape, dtype)
    numbers = elements.numbers_of(packing.unpack(codes, options.bits), options)
    numbers = numbers.reshape(*shape[:-1], -1, options.group_size or shape[-1])
    factor, bias = _factor(scales[..., None], options), None if biases is None else biases[..., None]
    return _value(numbers, factor, bias, dtype if bias is None else bias.dtype).reshape(shape).astype(dtype)


def fake_quant(w: mx.array, options: Options) -> mx.array:
    """dequantize(quantize(w)) in the dtype of w, bit for bit, without codes in between.

    Args:
        w: `[..., K]`, as `check_weights` lets it pass.
        options: The mode.
    """
    if w.size == 0:
        return w
    found = scaled(w, options)
    return _value(elements.rounded(found.x, options), found.factor, found.bias, w.dtype).reshape(w.shape)


def clip_backward(w: mx.array, dout: mx.array, options: Options) -> mx.array:
    """dw = dout, and 0 where w has no code near it: the gradient of fake_quant with ste="clip".

    Args:
        w: `[..., K]`.
        dout: Cotangent of fake_quant(w).
        options: The mode.
    """
    if w.size == 0:
        return dout
    clipped = elements.is_clipped(scaled(w, options).x, options)
    return dout if clipped is None else mx.where(clipped.reshape(w.shape), mx.zeros_like(dout), dout)


def _factor(scales: mx.array, options: Options) -> mx.array:
    if options.mode in ("mxfp4", "mxfp8"):
        return e8m0_value(scales)
    return elements.e4m3_numbers(scales) if options.mode == "nvfp4" else scales.astype(mx.float32)


def _value(numbers: mx.array, factor: mx.array, bias: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """numbers * factor, rounded, + bias, rounded."""
    product = numbers * factor
    if bias is None:
        return product.astype(dtype)
    if dtype == mx.float32:
        # A view is where mx.compile ends what it makes one function of: it would leave out the rounding in between.
        return mx.view(mx.view(product, mx.uint32), mx.float32) + bias
    return (product.astype(dtype).astype(mx.float32) + bias.astype(mx.float32)).astype(dtype)
