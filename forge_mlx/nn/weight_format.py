"""How a weight is held in codes and scales, and what becomes of the input of a layer that holds one."""

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple

from forge_mlx.kernels.quantize import dequantize, fake_quant
from forge_mlx.kernels.quantize.options import Options
import mlx.core as mx

Activations = Literal["int8"]

MLX_MODES: Final = ("affine", "mxfp4", "mxfp8", "nvfp4")
"""Formats that MLX's quantised products read."""


def option_arguments(options: Options) -> dict[str, Any]:
    """Options as `quantize`, `dequantize` and `fake_quant` take them.

    Args:
        options: The mode with all of its options.
    """
    return {
        "mode": options.mode,
        # A mode without groups has its bits in its name and takes none.
        "bits": options.bits if options.group_size else None,
        "group_size": options.group_size,
        "granularity": options.granularity,
    }


def quantized_input(x: mx.array, activations: Activations | None) -> mx.array:
    """q s for each token: s = max|x| / 127 in float32, q = clip(rint(x / s), -127, 127); its gradient is that of x.

    Args:
        x: `[..., K]`.
        activations: "int8"; None: x as it is.
    """
    if activations is None or x.size == 0:
        return x
    return fake_quant(x.reshape(-1, x.shape[-1]), "int8").reshape(x.shape)


def describe_options(options: Options, activations: Activations | None) -> str:
    """Options as the text of a layer shows them: `mode=affine, bits=4, group_size=64`.

    Args:
        options: The mode with all of its options.
        activations: What becomes of the layer's input.
    """
    shown = asdict(options) | {"activations": activations}
    return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


class Packed(NamedTuple):
    """What `quantize` gives of one weight.

    Attributes:
        codes: uint32 `[..., K bits / 32]`.
        scales: As `quantize` gives them.
        biases: `[..., K / group_size]` in the mode affine, else None.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None

    def scaled_for(self, dtype: mx.Dtype) -> "Packed":
        """The same with scales, and biases, in which values of a dtype are computed: their own, else float32.

        Args:
            dtype: Of the values; scales of a byte have none.
        """
        if self.scales.dtype == dtype or not mx.issubdtype(self.scales.dtype, mx.floating):
            return self
        biases = None if self.biases is None else self.biases.astype(mx.float32)
        return Packed(self.codes, self.scales.astype(mx.float32), biases)


@dataclass(frozen=True)
class WeightFormat:
    """How the weight of a layer is held, and what becomes of the layer's input.

    Attributes:
        options: The mode with all of its options.
        dtype: Of the weight that the codes stand for.
        activations: "int8": the layer's input is quantised, symmetric per token.
    """

    options: Options
    dtype: mx.Dtype
    activations: Activations | None = None

    def empty(self, shape: tuple[int, ...]) -> Packed:
        """Arrays of zeros for a weight of some shape.

        Args:
            shape: `[..., K]`.
        """
        options = self.options
        scales = mx.zeros(options.scales_shape(shape), options.scale_dtype(self.dtype))
        biases = mx.zeros_like(scales) if options.has_biases else None
        return Packed(mx.zeros(options.codes_shape(shape), mx.uint32), scales, biases)

    def values(self, packed: Packed) -> mx.array:
        """The weight that codes stand for, `[..., K]`.

        Args:
            packed: Codes and scales of this format.
        """
        return dequantize(*packed, dtype=self.dtype, **option_arguments(self.options))
