"""quantize's kernels on the emulator and on a GPU: against NumPy and the reference, what they move, broken sources."""

from dataclasses import replace

from forge_mlx.kernels._common.rows import Sharing
from forge_mlx.kernels.quantize import exact, launch, reference
from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest
from quantize_proofs import LAYOUTS, NAMES, SIZES, VARIANTS, QuantizeCase, bits_of, chosen, findings, launches
from room_proofs import broken, gpu_engine, mostly_slow, poison

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
# One case for each way through the kernels: groups, groups with a byte for a scale, narrow rows, rows of a threadgroup,
# long rows, matrices.
AFFINE, BLOCKS = QuantizeCase("affine", BF16, 3, 32), QuantizeCase("nvfp4")
NARROW, WIDE = QuantizeCase("int4", columns=72), QuantizeCase("ternary", granularity="row", columns=272)
LONG = QuantizeCase("int8", rows=2, columns=4108, kinds=("normal",))
MATRIX = QuantizeCase("ternary", BF16, rows=5, columns=48)
PATHS = [AFFINE, BLOCKS, NARROW, WIDE, LONG, MATRIX]


def wrong(case, engine):
    """Names of the results that are not those of NumPy, or of the reference, bit for bit; the mean within 2 ulp."""
    w, options = case.weights(), case.options
    results = launch.quantize(engine, w, options)
    codes, scales, biases = (None if each is None else bits_of(each) for each in results)
    mean = np.array(results[1]) if options.mode == "ternary" else None
    expected = case.oracle(mean)
    found = {} if np.array_equal(codes, exact.pack(expected.codes, options.bits)) else {"codes": codes}
    if mean is not None:
        truth = case.oracle().scales
        if not np.all((np.abs(mean - truth) <= 2 * np.spacing(truth)) | (np.isnan(mean) & np.isnan(truth))):
            found["scales"] = scales
    elif not np.array_equal(scales, bits_of(expected.scales)):
        found["scales"] = scales
    if (biases is None) != (expected.biases is None) or not (
        biases is None or np.array_equal(biases, bits_of(expected.biases))
    ):
        found["biases"] = biases
    by_reference = reference.quantize(w, options)
    assert [None if each is None else (each.shape, each.dtype) for each in results] == [
        None if each is None else (each.shape, each.dtype) for each in by_reference
    ]
    if mean is None:
        for name, ours, theirs in zip(
            ("codes", "scales", "biases"), (codes, scales, biases), by_reference, strict=True
        ):
            if theirs is not None and not np.array_equal(ours, bits_of(theirs)):
                found[f"the reference's {name}"] = ours
    return list(found)


FAST = [("affine", F32), ("mxfp4", F16), ("int8", BF16)]


@pytest.mark.parametrize("case", chosen(VARIANTS, FAST), **NAMES)
def test_codes_scales_and_biases_are_those_of_numpy_and_of_the_reference(case):
    with emulator.settings(schedules=3):
        assert wrong(case, "emulator") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SIZES, *LAYOUTS], **NAMES)
def test_any_size_and_layout_gives_the_codes(case):
    with emulator.settings(schedules=3):
        assert wrong(case, "emulator") == []


@pytest.mark.parametrize(
    "case", [NARROW, *(pytest.param(case, marks=pytest.mark.slow) for case in PATHS if case != NARROW)], **NAMES
)
def test_kernels_overwrite_what_the_outputs_held(case, monkeypatch):
    poison(monkeypatch)
    assert wrong(case, "emulator") == []


@pytest.mark.parametrize("case", [*VARIANTS, *SIZES, *LAYOUTS], **NAMES)
def test_kernels_agree_on_a_gpu(case, monkeypatch):
    engine = gpu_engine()
    poison(monkeypatch)
    # A GPU takes subnormal float32 numbers for 0.
    assert wrong(replace(case, kinds=tuple(kind for kind in case.kinds if kind != "subnormal")), engine) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [WIDE, MATRIX], **NAMES)
def test_two_runs_give_the_same_bits_in_any_order_of_threads(case):
    first = launch.quantize("emulator", case.weights(), case.options)
    for seed in (1, 2):
        with emulator.settings(schedules=3, seed=seed):
            again = launch.quantize("emulator", case.weights(), case.options)
        assert all(np.array_equal(bits_of(a), bits_of(b)) for a, b in zip(first[:2], again[:2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kinds", [("constant",), ("huge",)], ids=str)
def test_the_mean_of_many_is_exact_to_two_units(kinds, dtype, monkeypatch):
    # Of as many equal numbers a plain sum in float32 is off by more; of the huge ones it overflows.
    monkeypatch.setattr(launch, "PARTS", Sharing(1, 1))
    assert wrong(QuantizeCase("ternary", dtype, rows=40, columns=4096, kinds=kinds), "emulator") == []


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3], ids=str)
def test_any_sharing_of_a_matrix_gives_the_scale(parts, monkeypatch):
    monkeypatch.setattr(launch, "PARTS", Sharing(parts * len(MATRIX.kinds), 1))
    assert wrong(replace(MATRIX, rows=40, columns=1040), "emulator") == []


# With many rows for each threadgroup and with as many threadgroups as rows.
@pytest.mark.parametrize("sharing", [Sharing(1, 1), Sharing(1000, 1)], ids=str)
@pytest.mark.parametrize("case", [NARROW, pytest.param(WIDE, marks=pytest.mark.slow)], **NAMES)
def test_any_sharing_of_rows_gives_the_result(case, sharing, monkeypatch):
    monkeypatch.setattr(launch, "FORWARD", sharing)
    assert wrong(case, "emulator") == []


@pytest.mark.parametrize(
    "mode", ["nvfp4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("affine", "mxfp4", "mxfp8"))]
)
def test_mlx_reads_the_codes_as_we_do(mode):
    case = QuantizeCase(mode, kinds=("normal", "zeros", "positive", "ties", "not finite"))
    codes, scales, biases = launch.quantize("emulator", case.weights(), case.options)
    values = mx.dequantize(codes, scales, biases, mode=mode, dtype=F32)
    expected = case.oracle().values
    assert np.array_equal(bits_of(values), bits_of(expected))
    assert 0 < np.isnan(expected).sum() < expected.size // 5


def test_mlx_reads_ternary_codes_as_two_bits():
    case = QuantizeCase("ternary", granularity="row", kinds=("normal", "zeros"))
    codes, s, _ = launch.quantize("emulator", case.weights(), case.options)
    groups = mx.broadcast_to(s, (*s.shape[:-1], case.columns // 64))
    assert np.array_equal(mx.dequantize(codes, groups, -groups, bits=2, group_size=64), case.oracle(np.array(s)).values)


@pytest.mark.parametrize("case", PATHS, **NAMES)
def test_grids_have_one_axis(case, monkeypatch):
    """Of which CUDA has 2^31 - 1 threadgroups, of the others 65535."""
    found = []

    def kernel(name):
        def launched(_inputs, *, output_shapes, output_dtypes, grid, threadgroup, **_options):
            found.append((grid, threadgroup, name))
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launched

    monkeypatch.setattr(launch, "kernel", kernel)
    w = mx.zeros((70_000, 2, case.columns), case.dtype)
    for what in (launch.quantize, launch.fake_quant):
        what("emulator", w, case.options)
    launch.clip_backward("emulator", w, w, case.options)
    assert len(found) == (9 if case in (LONG, MATRIX) else 3)
    assert all(grid[1:] == threadgroup[1:] == (1, 1) for grid, threadgroup, _ in found), found


def test_empty_weights_launch_nothing():
    for shape in ((0, 64), (3, 0, 64), (3, 0)):
        for mode in ("affine", "int8", "ternary"):
            case = QuantizeCase(mode)
            codes, scales, _ = launch.quantize("emulator", mx.zeros(shape), case.options)
            assert codes.shape == case.options.codes_shape(shape)
            assert scales.shape == case.options.scales_shape(shape)


COUNTED = [QuantizeCase("affine", BF16), QuantizeCase("affine", F32, 3), QuantizeCase("int4", columns=512)]
TWICE = [QuantizeCase("fp8_e4m3", granularity="tensor", columns=512), replace(LONG, columns=4352)]


@pytest.mark.parametrize(
    "case", [*COUNTED[1:], *(pytest.param(case, marks=pytest.mark.slow) for case in [COUNTED[0], *TWICE])], **NAMES
)
def test_weights_are_read_and_codes_written_once_but_for_long_rows(case):
    w = case.weights()
    counted = launches(launch.quantize, "emulator", w, case.options)
    once = (w.nbytes, w.nbytes // 16)
    assert [each["w"] for _, each in counted if "w" in each] == [once] * (1 if case in COUNTED else 2)
    codes = w.size * case.options.bits // 8
    assert counted[-1][1]["codes"] == (codes, codes // 4)
    names = [name for name, _ in counted]
    assert len(names) == (1 if case in COUNTED else 3)


BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
TIES4, LEVELS = QuantizeCase("mxfp4", kinds=("ties",)), QuantizeCase("mxfp8", kinds=("normal", "wide", "ties"))
SPREAD = QuantizeCase("affine", kinds=("normal", "small", "positive", "negative", "zeros", "ties"))
# Fault: kernel, text, what takes its place, a case, what must be found.
BREAKS = {
    "the maximum begins at 0": ("quantize_affine", "high(INT_MIN)", "high(0)", SPREAD, "scales"),
    "NaN is dropped": ("quantize_affine", "is_finite(low) && is_finite(high)", "true", AFFINE, "biases"),
    "infinity is a number": ("quantize_blocks", "< 0x7f800000u", "<= 0x7f800000u", BLOCKS, "codes"),
    "half a group": ("quantize_affine", "join_lanes(GROUP / N)", "join_lanes(GROUP / N / 2)", SPREAD, "scales"),
    "the last extreme always": ("quantize_affine", "is_low ? low : high", "high", SPREAD, "scales"),
    "no least step": ("quantize_affine", "1e-7f", "1e-8f", SPREAD, "scales"),
    "halves away from 0": (
        "quantize_affine",
        "metal::rint(divide(x - bias",
        "metal::round(divide(x - bias",
        SPREAD,
        "codes",
    ),
    "a scale that was rounded": (
        "quantize_affine",
        "scale = divide(edge, count)",
        "scale = rounded<T>(divide(edge, count))",
        AFFINE,
        "codes",
    ),
    "a reciprocal": ("quantize_affine", "metal::precise::divide(a, b)", "a * (1.0f / b)", SPREAD, "scales"),
    "e2m1 has steps of one": (
        "quantize_blocks",
        "metal::rint(0.5f * size) + 4.0f",
        "metal::rint(size) + 2.0f",
        TIES4,
        "codes",
    ),
    "e2m1 keeps the sign of 0": ("quantize_blocks", "x < 0.0f && place > 0.0f", "x < 0.0f", BLOCKS, "codes"),
    "e4m3 halves go up": ("quantize_blocks", "0x7ffffu + ((size >> 20) & 1)", "0x80000u", LEVELS, "codes"),
    "e4m3 has no small numbers": ("quantize_blocks", "size < 121u << 23", "size < 1u", LEVELS, "codes"),
    "e8m0 is rounded down": ("quantize_blocks", "> MANTISSA", "> 0x7fffffu", QuantizeCase("mxfp4"), "scales"),
    "zeros have the least scale": (
        "quantize_blocks",
        "largest == 0 ? 127",
        "largest == 0 ? 0",
        QuantizeCase("mxfp8"),
        "scales",
    ),
    "codes of the next lane are lost": (
        "quantize_affine",
        "word |= metal::simd_shuffle_xor(word, step)",
        "word |= 0",
        AFFINE,
        "codes",
    ),
    "one word less": ("quantize_affine", "k < Pack::words", "k < Pack::words - 1", AFFINE, "UninitialisedError"),
    "no barrier": ("quantize_rows", BARRIER, "", WIDE, "RaceError"),
    "one scratch for all rows": ("quantize_rows", "scratch + turn * SCRATCH", "scratch", WIDE, "RaceError"),
    "rows past the end": (
        "quantize_rows",
        "row < count ? clamp(columns - column, 0, N) : 0",
        "clamp(columns - column, 0, N)",
        NARROW,
        "BoundsError",
    ),
    "columns past the end": ("quantize_rows", "clamp(columns - column, 0, N)", "N", NARROW, "RaceError"),
    "a scale of 0 divides": (
        "quantize_rows",
        "scale == 0.0f ? metal::copysign(0.0f, x)",
        "false ? 0.0f",
        NARROW,
        "codes",
    ),
    "no sign": ("quantize_rows", "+ OFFSET)", ")", NARROW, "codes"),
    "what additions lose": (
        "find_parts",
        "lost = (lost + x_lost) + error",
        "lost = 0.0f",
        QuantizeCase("ternary", rows=40, columns=4096, kinds=("constant",)),
        "scales",
    ),
    "huge numbers overflow": (
        "find_parts",
        "magnitude >= HUGE_UNIT",
        "false",
        QuantizeCase("ternary", kinds=("huge",), rows=40),
        "scales",
    ),
    "a part is left out": (
        "join_parts",
        "part = thread_position_in_threadgroup.x;",
        "part = thread_position_in_threadgroup.x + 1;",
        MATRIX,
        "scales",
    ),
    "the last vector is left out": ("find_parts", "left > 0", "left > N", MATRIX, "scales"),
    "the scale of the first matrix": (
        "quantize_scaled",
        "scales[row]",
        "scales[0]",
        MATRIX,
        "codes",
    ),
    "a matrix goes past its end": (
        "quantize_scaled",
        "min(columns - column, uint(N))",
        "N",
        replace(MATRIX, columns=52, mode="fp8_e4m3", granularity="tensor", rows=1),
        "codes",
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
    monkeypatch.setattr(launch, "PARTS", Sharing(1, 1))
    assert findings(wrong, case, "emulator") == []
    monkeypatch.setattr(launch, "kernel", lambda each: changed if each == name else whole(each))
    found = findings(wrong, case, "emulator")
    assert any(sign in line for line in found), found
