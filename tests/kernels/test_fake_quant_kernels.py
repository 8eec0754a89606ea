"""fake_quant's kernels and those of its clipped gradient, on the emulator and on a GPU: as test_quantize_kernels.py."""

from dataclasses import replace

from forge_mlx.kernels._common.rows import Sharing
from forge_mlx.kernels.quantize import fake_quant, launch, reference
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from quantize_proofs import LAYOUTS, NAMES, SIZES, VARIANTS, QuantizeCase, bits_of, chosen, findings, launches
from room_proofs import broken, gpu_engine, mostly_slow, poison

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
AFFINE, BLOCKS = QuantizeCase("affine", BF16), QuantizeCase("nvfp4")
NARROW, WIDE = QuantizeCase("int4", columns=72), QuantizeCase("ternary", granularity="row", columns=272)
LONG = QuantizeCase("int8", rows=2, columns=4108, kinds=("normal",))
MATRIX = QuantizeCase("ternary", BF16, rows=5, columns=48)
PATHS = [AFFINE, BLOCKS, NARROW, WIDE, LONG, MATRIX]


def wrong(case, engine):
    """Which of the values and the clipped gradient are not those of NumPy, or of the reference, bit for bit."""
    w, dout, options = case.weights(), case.cotangent(), case.options
    # The mean may differ by 2 ulp: NumPy takes the engine's, and the reference has its own.
    is_mean = options.mode == "ternary"
    expected = case.oracle(np.array(launch.quantize(engine, w, options)[1]) if is_mean else None)
    values, dw = launch.fake_quant(engine, w, options), launch.clip_backward(engine, w, dout, options)
    assert (values.shape, values.dtype, dw.shape, dw.dtype) == (w.shape, w.dtype, w.shape, w.dtype)
    wanted_dw = np.where(expected.is_clipped, np.float32(0), np.array(dout.astype(F32)))
    found = []
    if not np.array_equal(bits_of(values), bits_of(expected.values)):
        found.append("values")
    if not np.array_equal(bits_of(dw), bits_of(wanted_dw)):
        found.append("dw")
    if not is_mean and not np.array_equal(bits_of(values), bits_of(reference.fake_quant(w, options))):
        found.append("the reference's values")
    if not is_mean and not np.array_equal(bits_of(dw), bits_of(reference.clip_backward(w, dout, options))):
        found.append("the reference's dw")
    return found


FAST = [("affine", BF16), ("nvfp4", F32), ("ternary", F32)]


@pytest.mark.parametrize("case", chosen(VARIANTS, FAST), **NAMES)
def test_values_and_clipped_gradient_are_those_of_numpy_and_of_the_reference(case):
    with emulator.settings(schedules=3):
        assert wrong(case, "emulator") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SIZES, *LAYOUTS], **NAMES)
def test_any_size_and_layout_gives_the_values(case):
    with emulator.settings(schedules=3):
        assert wrong(case, "emulator") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert wrong(case, "emulator") == []


@pytest.mark.parametrize("case", [*VARIANTS, *SIZES, *LAYOUTS], **NAMES)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    # A GPU takes subnormal float32 numbers for 0.
    assert wrong(replace(case, kinds=tuple(kind for kind in case.kinds if kind != "subnormal")), engine) == []


@pytest.mark.parametrize("case", VARIANTS, **NAMES)
def test_the_cases_have_what_they_are_for(case):
    expected = case.oracle()
    clipped = dict(zip(case.kinds, expected.is_clipped, strict=True))
    values = dict(zip(case.kinds, expected.values, strict=True))
    assert np.isnan(values["not finite"]).any()
    if case.mode in ("affine", "ternary", "nvfp4"):
        assert 0 < expected.is_clipped.mean() < 0.5
    assert not clipped["not finite"][np.isnan(values["not finite"])].any()
    assert not values["zeros"].any()


@pytest.mark.parametrize("case", [AFFINE, *(pytest.param(case, marks=pytest.mark.slow) for case in PATHS[1:])], **NAMES)
def test_fake_quant_is_what_the_codes_stand_for(case):
    w, options = case.weights(), case.options
    codes, scales, biases = launch.quantize("emulator", w, options)
    values = reference.dequantize(codes, scales, biases, options, w.dtype)
    assert np.array_equal(bits_of(launch.fake_quant("emulator", w, options)), bits_of(values))


def test_the_op_reaches_the_kernels():
    case = replace(AFFINE, kinds=("normal",))
    w, dout = case.weights(), case.cotangent()
    for ste in ("identity", "clip"):
        emulator.reset()
        (values,), (dw,) = mx.vjp(lambda w, ste=ste: fake_quant(w, "affine", ste=ste, impl="emulator"), [w], [dout])
        expected = case.oracle()
        assert np.array_equal(bits_of(values), bits_of(expected.values))
        wanted = np.where(expected.is_clipped & (ste == "clip"), np.float32(0), np.array(dout.astype(F32)))
        assert np.array_equal(bits_of(dw), bits_of(wanted))
        names = [each.name for each in emulator.report().launches]
        assert names == ["fake_quant_groups", "clip_groups"][: 1 + (ste == "clip")]


COUNTED = [AFFINE, QuantizeCase("int4", columns=512), QuantizeCase("mxfp4")]
TWICE = [QuantizeCase("fp8_e4m3", granularity="tensor", columns=512), replace(LONG, columns=4352)]


@pytest.mark.parametrize(
    "case", [*COUNTED[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in [COUNTED[2], *TWICE])], **NAMES
)
def test_weights_are_read_and_values_written_once_but_for_long_rows(case):
    w, dout = case.weights(), case.cotangent()
    once, reads = (w.nbytes, w.nbytes // 16), 1 if case in COUNTED else 2
    forward = launches(launch.fake_quant, "emulator", w, case.options)
    assert [each["w"] for _, each in forward if "w" in each] == [once] * reads
    assert forward[-1][1]["values"] == once
    assert len(forward) == (1 if reads == 1 else 3)
    if case.mode != "mxfp4":
        backward = launches(launch.clip_backward, "emulator", w, dout, case.options)
        assert [each["w"] for _, each in backward if "w" in each] == [once] * reads
        assert [backward[-1][1][name] for name in ("dout", "dw")] == [once] * 2


TIES4, LEVELS = QuantizeCase("mxfp4", kinds=("ties",)), QuantizeCase("mxfp8", kinds=("normal", "wide", "ties"))
SPREAD = QuantizeCase("affine", kinds=("normal", "positive", "negative", "ties"))
SUM = "rounded<T>(float(code) * rounded<T>(scale)) + rounded<T>(bias)"
# Fault: kernel, text, what takes its place, a case, what must be found.
BREAKS = {
    "one rounding for two": (
        "fake_quant_groups",
        SUM,
        "metal::fma(float(code), rounded<T>(scale), rounded<T>(bias))",
        SPREAD,
        "values",
    ),
    "a scale that was not rounded": ("fake_quant_groups", "rounded<T>(scale)", "scale", AFFINE, "values"),
    "a product that was not rounded": (
        "fake_quant_groups",
        "rounded<T>(float(code) * rounded<T>(scale))",
        "float(code) * rounded<T>(scale)",
        AFFINE,
        "values",
    ),
    "groups overlap": ("fake_quant_groups", "join_lanes(GROUP / N)", "join_lanes(32)", BLOCKS, "values"),
    "the tail is no group": (
        "fake_quant_groups",
        "at < size ? N : 0",
        "N",
        replace(BLOCKS, rows=1, columns=48, kinds=("normal",)),
        "BoundsError",
    ),
    "NaN in a group of bytes": (
        "fake_quant_groups",
        "byte == 127 ? NAN : ",
        "",
        replace(BLOCKS, kinds=("not finite",)),
        "values",
    ),
    "codes beyond the last": (
        "fake_quant_groups",
        "metal::clamp(steps(x), 0.0f, float((1 << BITS) - 1))",
        "metal::max(steps(x), 0.0f)",
        SPREAD,
        "values",
    ),
    "e2m1 without a limit": (
        "fake_quant_groups",
        "metal::min(metal::rint(0.5f * size) + 4.0f, 7.0f)",
        "metal::rint(0.5f * size) + 4.0f",
        replace(BLOCKS, kinds=("huge",)),
        "values",
    ),
    "e4m3 counts from 1": (
        "fake_quant_groups",
        "(place << 20) + (120u << 23)",
        "(place << 20) + (121u << 23)",
        LEVELS,
        "values",
    ),
    "e4m3 has no small values": ("fake_quant_groups", "float(place) * 0.001953125f", "0.0f", LEVELS, "values"),
    "the least power of two": (
        "fake_quant_groups",
        "byte == 0 ? 0x400000u : byte << 23",
        "byte << 23",
        QuantizeCase("mxfp4", kinds=("subnormal",)),
        "values",
    ),
    "nothing is clipped": ("clip_groups", "place > float((1 << BITS) - 1)", "false", SPREAD, "dw"),
    "the last code is clipped": (
        "clip_groups",
        "place > float((1 << BITS) - 1)",
        "place >= float((1 << BITS) - 1)",
        SPREAD,
        "dw",
    ),
    "NaN is clipped": (
        "clip_groups",
        "return is_usable && (place < 0.0f || place >",
        "return !(place >= 0.0f && place <=",
        AFFINE,
        "dw",
    ),
    "6 is clipped": ("clip_groups", "metal::fabs(x) >= 7.0f", "metal::fabs(x) > 6.0f", BLOCKS, "dw"),
    "the gradient is the weight": ("clip_groups", "load_floats(dout + at", "load_floats(w + at", AFFINE, "dw"),
    "the largest of each lane": ("fake_quant_rows", "found.join_lanes(row_threads)", "", NARROW, "values"),
    "the largest of a simdgroup": ("fake_quant_rows", "found.join_lanes(32);\n}", "}", WIDE, "values"),
    "a row's values are shifted": (
        "fake_quant_rows",
        "store_floats(values + at,",
        "store_floats(values + at + 1,",
        NARROW,
        "BoundsError",
    ),
    "halves are not clipped": (
        "clip_rows",
        "metal::fabs(metal::rint(x)) > float(LARGEST)",
        "metal::fabs(x) > float(LARGEST) + 0.5f",
        replace(WIDE, kinds=("ties",)),
        "dw",
    ),
    "the wrong row's scale": ("fake_quant_scaled", "scales[row]", "scales[0]", MATRIX, "values"),
    "the wrong row's scale in the gradient": ("clip_scaled", "scales[row]", "scales[0]", MATRIX, "dw"),
    "every group begins at the row's first column": (
        "fake_quant_scaled",
        "group * threads_per_threadgroup.x + ",
        "",
        replace(LONG, columns=4352),
        "values",
    ),
    "a group's row": (
        "fake_quant_scaled",
        "row * groups_per_row",
        "row",
        replace(LONG, columns=4352),
        "UninitialisedError",
    ),
    "a row's end": (
        "fake_quant_scaled",
        "min(columns - column, uint(N))",
        "N",
        QuantizeCase("fp8_e4m3", BF16, granularity="tensor", rows=1, columns=52, kinds=("normal",)),
        "BoundsError",
    ),
}


@pytest.mark.parametrize("fault", mostly_slow(BREAKS, every=15))
def test_broken_source_is_found(fault, monkeypatch):
    name, old, new, case, sign = BREAKS[fault]
    whole = launch.kernel
    changed = broken(whole(name), old, new)
    assert changed.source != whole(name).source, "the text to replace is not there"
    # Several rows for each threadgroup, so that loops go round.
    monkeypatch.setattr(launch, "FORWARD", Sharing(2, 1))
    assert findings(wrong, case, "emulator") == []
    monkeypatch.setattr(launch, "kernel", lambda each: changed if each == name else whole(each))
    found = findings(wrong, case, "emulator")
    assert any(sign in line for line in found), found
