"""What quantize, dequantize and fake_quant are proved, counted and timed on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forge_mlx.kernels._common.cases import LAYOUTS, OpCase, laid_out, random_values
from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels._common.proof import to_float64
from forge_mlx.kernels.quantize import exact, packing, reference
from forge_mlx.kernels.quantize.op import dequantize, fake_quant, quantize
from forge_mlx.kernels.quantize.options import MODES, Options, checked_options
from forge_mlx.metal.dtypes import dtype_name
import mlx.core as mx
import numpy as np

_OF_MLX: Final = ("affine", "mxfp4", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class WeightCase(OpCase):
    """A weight and a mode.

    Attributes:
        shape: Of w.
        mode: The mode.
        dtype: Of w.
        bits: As `quantize` takes it.
        group_size: As `quantize` takes it.
        granularity: As `quantize` takes it.
        values: What w holds, as `random_values` takes it; or "positive", "negative": normal numbers moved by 4, -4.
        layout: How it lies in memory, as `laid_out` takes it.
    """

    shape: tuple[int, ...]
    mode: str
    dtype: mx.Dtype = mx.float32
    bits: int | None = None
    group_size: int | None = None
    granularity: str | None = None
    values: str = "normal"
    layout: str = "contiguous"

    @property
    def name(self) -> str:
        """A readable id."""
        parts = [self.op, self.mode, self.bits, self.group_size, self.granularity]
        parts += ["x".join(map(str, self.shape)), dtype_name(self.dtype)]
        parts += [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        return "-".join(str(part) for part in parts if part is not None)

    @property
    def options(self) -> Options:
        """The mode with its defaults."""
        return checked_options(self.op, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments beside arrays."""
        return {
            **{"mode": self.mode, "bits": self.bits, "group_size": self.group_size},
            **{"granularity": self.granularity},
        }

    def weight(self) -> mx.array:
        """w."""
        shifts = {"positive": 4, "negative": -4}
        kind = "normal" if self.values in shifts else self.values
        w = random_values(self.shape, kind, np.random.default_rng(len(self.name))) + shifts.get(self.values, 0)
        return laid_out(mx.array(w.astype(np.float32)).astype(self.dtype), self.layout)

    def exact(self) -> exact.Exact:
        """What NumPy makes of it, of the numbers as the dtype has rounded them."""
        return exact.quantize(np.array(self.weight().astype(mx.float32)), self.options)

    def inputs(self) -> dict[str, mx.array]:
        """w."""
        return {"w": self.weight()}


class FakeQuantCase(WeightCase):
    """fake_quant of a weight, and its clipped gradient: the one that has a kernel."""

    op = "fake_quant"

    def cotangents(self) -> dict[str, mx.array]:
        """dout."""
        random = np.random.default_rng(1000 + len(self.name))
        return {"out": mx.array(random.normal(size=self.shape).astype(np.float32)).astype(self.dtype)}

    def function(self, impl: str) -> Callable[..., mx.array]:
        """fake_quant of w on an engine; "mlx": mx.dequantize of mx.quantize, with a gradient that passes it by."""

        def call(w: mx.array) -> mx.array:
            if impl != "mlx":
                return fake_quant(w, **self.settings, ste="clip", impl=impl)
            return w + mx.stop_gradient(_by_mlx(mx.stop_gradient(w), self.options) - w)

        return call

    def formula(self, inputs: Mapping[str, mx.array], cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The result and dw by reference.py."""
        w = inputs["w"]
        dw = reference.clip_backward(w, cotangents["out"], self.options)
        return {"out": reference.fake_quant(w, self.options), "dw": dw}

    def expected(self) -> Mapping[str, np.ndarray]:
        """The result and dw in float64."""
        found = self.exact()
        return {"out": found.values, "dw": np.where(found.is_clipped, 0, to_float64(self.cotangents()["out"]))}


class TwoPassCase(FakeQuantCase):
    """The same where more elements share a scale than a threadgroup holds."""

    max_ratio = 1.55
    max_ratio_reason = (
        "a matrix, or a row of more than 16 KiB, whose elements share a scale is read once for it and once more for "
        "the codes: 3 arrays for 2 forward, 4 for 3 backward"
    )


class QuantizeCase(WeightCase):
    """quantize of a weight. It has no gradient."""

    op = "quantize"

    def cotangents(self) -> dict[str, mx.array]:
        """None: there is no gradient."""
        return {}

    def function(self, impl: str) -> Callable[..., tuple[mx.array, ...]]:
        """quantize of w on an engine; "mlx": mx.quantize."""

        def call(w: mx.array) -> tuple[mx.array, ...]:
            if impl != "mlx":
                found = quantize(w, **self.settings, impl=impl)
            else:
                found = mx.quantize(w, self.options.group_size, self.options.bits, self.mode)
            return tuple(each for each in found if each is not None)

        return call

    def formula(self, inputs: Mapping[str, mx.array], _cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Codes, one each, scales and biases by reference.py."""
        return self._named(*reference.quantize(inputs["w"], self.options))

    def run(self, impl: str) -> dict[str, mx.array]:
        """Codes, one each, scales and biases by name on an engine; "formula": by reference.py."""
        inputs = self.inputs()
        return self.formula(inputs, {}) if impl == "formula" else self._named(*self.function(impl)(*inputs.values()))

    def expected(self) -> Mapping[str, np.ndarray]:
        """The same in float64."""
        found = self.exact()
        results = {"codes": found.codes.astype(np.float64), "scales": found.scales}
        return results if found.biases is None else results | {"biases": found.biases}

    def ideal_bytes(self) -> dict[str, int]:
        """The weight read, codes, scales and biases written once."""
        results = self.function("reference")(self.weight())
        return {"forward": self.weight().nbytes + sum(each.nbytes for each in results), "backward": 0}

    def _named(self, codes: mx.array, scales: mx.array, biases: mx.array | None = None) -> dict[str, mx.array]:
        # Packed words are larger than float32 counts.
        results = {"codes": packing.unpack(codes, self.options.bits), "scales": scales}
        return results if biases is None else results | {"biases": biases}


class DequantizeCase(QuantizeCase):
    """dequantize of what the formula makes of a weight."""

    op = "dequantize"

    def inputs(self) -> dict[str, mx.array]:
        """Codes, scales and biases."""
        found = reference.quantize(self.weight(), self.options)
        return {name: each for name, each in zip(("codes", "scales", "biases"), found, strict=True) if each is not None}

    def function(self, impl: str) -> Callable[..., tuple[mx.array, ...]]:
        """dequantize on an engine; "mlx": mx.dequantize."""

        def call(*arrays: mx.array) -> tuple[mx.array, ...]:
            if impl != "mlx":
                return (dequantize(*arrays, **self.settings, dtype=self.dtype, impl=impl),)
            return (_values_by_mlx(arrays, self.options, self.dtype),)

        return call

    def formula(self, inputs: Mapping[str, mx.array], _cotangents: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The weight by reference.py."""
        codes, scales, biases = inputs["codes"], inputs["scales"], inputs.get("biases")
        return {"w": reference.dequantize(codes, scales, biases, self.options, self.dtype)}

    def expected(self) -> Mapping[str, np.ndarray]:
        """The weight in float64."""
        return {"w": self.exact().values}

    def ideal_bytes(self) -> dict[str, int]:
        """Every array once."""
        read = sum(each.nbytes for each in self.inputs().values())
        return {"forward": read + self.weight().nbytes, "backward": 0}

    def _named(self, w: mx.array, *_rest: mx.array | None) -> dict[str, mx.array]:
        return {"w": w}


def _values_by_mlx(arrays: tuple[mx.array, ...], options: Options, dtype: mx.Dtype) -> mx.array:
    biases = arrays[2] if options.has_biases else None
    return mx.dequantize(arrays[0], arrays[1], biases, options.group_size, options.bits, options.mode, dtype=dtype)


def _by_mlx(w: mx.array, options: Options) -> mx.array:
    return _values_by_mlx(tuple(mx.quantize(w, options.group_size, options.bits, options.mode)), options, w.dtype)


def _variants() -> list[dict[str, Any]]:
    """Every mode with every option."""
    found: list[dict[str, Any]] = [{"mode": mode} for mode in MODES]
    found += [{"mode": "affine", "bits": bits, "group_size": 32} for bits in (2, 3, 5, 6, 8)]
    found += [{"mode": "affine", "group_size": 128}]
    return [*found, {"mode": "ternary", "granularity": "row"}, {"mode": "fp8_e4m3", "granularity": "tensor"}]


def _cases() -> list[WeightCase]:
    cases: list[WeightCase] = []
    for dtype in FLOATS:
        limit = 16384 // dtype.size
        for kind in (FakeQuantCase, QuantizeCase, DequantizeCase):
            cases += [kind((5, 256), dtype=dtype, **variant) for variant in _variants()]
        for kind in (FakeQuantCase, QuantizeCase):
            cases += [
                *(kind((2, 3, 128), mode, dtype) for mode in MODES),
                *(
                    kind((3, columns), mode, dtype)
                    for mode in ("int8", "ternary")
                    for columns in (16, 1040, limit + 16)
                ),
                *(kind((3, 128), "affine", dtype, values=each) for each in ("positive", "negative", "ranges")),
                *(kind((6, 64), mode, dtype, layout=each) for mode in ("affine", "int4") for each in LAYOUTS[1:]),
                *(kind((0, 64), mode, dtype) for mode in ("affine", "ternary")),
            ]
    for kind in (FakeQuantCase, QuantizeCase):
        cases += [kind((3, 128), mode, values=each) for mode in MODES for each in ("zeros", "ties", "spike")]
    return cases


CASES: Final = tuple(_cases())

TIMED: Final = tuple(
    kind((4096, 4096), mode, dtype)
    for kind in (FakeQuantCase, QuantizeCase, DequantizeCase)
    for mode in _OF_MLX
    for dtype in (mx.float32, mx.bfloat16)
)

TRAFFIC: Final = (
    FakeQuantCase((512, 1024), "affine"),
    FakeQuantCase((512, 1024), "nvfp4", mx.bfloat16),
    FakeQuantCase((512, 1024), "int8", mx.bfloat16),
    TwoPassCase((512, 1024), "ternary"),
    TwoPassCase((64, 16384), "int8"),
    QuantizeCase((512, 1024), "affine"),
    QuantizeCase((512, 1024), "mxfp8", mx.bfloat16),
    QuantizeCase((512, 1024), "int4"),
)
