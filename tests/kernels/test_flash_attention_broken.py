"""Faults put into the kernels of flash_attention on purpose: each is found."""

from dataclasses import replace

from forge_mlx.kernels.attention import delta, launch
from forge_mlx.kernels.attention.flash_case import FlashCase
import mlx.core as mx
import pytest
from room_proofs import broken, findings

# Every option at once; plain causal order; heads that two simdgroups share in every kernel.
EVERY = FlashCase(2, 4, 2, 40, 70, 16, 24, window=9, softcap=5.0, segments="padding", sinks=True, with_lse=True)
PLAIN = FlashCase(1, 2, 1, 65, 65, 40)
FULL = replace(PLAIN, causal=False)
SPLIT = FlashCase(1, 2, 1, 65, 65, 136)
HEADS = replace(PLAIN, layout="heads")
ALL = replace(EVERY, variant="scalar")

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
RACE = "RaceError"
# What is wrong in matrix kernels of any kind: text, what takes its place.
EDGE = ("key <= own_key(query)", "key < own_key(query)")
LATE_EDGE = ("key <= own_key(query)", "key <= own_key(query) + 1")
WINDOW = ("(!WINDOW | (key > own_key(query) - window))", "true")
WIDE_WINDOW = ("key > own_key(query) - window)", "key >= own_key(query) - window)")
LOG_2_TWICE = ("lse[at] * LOG2_E", "lse[at] * LOG2_E * LOG2_E")
SLOPE = ("return 1.0f - part * part;", "return 1.0f;")
NO_CAP = ("softcap * LOG2_E * metal::precise::tanh(product * (scale / softcap))", "product * scale * LOG2_E")
CAP_FIRST = ("tanh(product * (scale / softcap))", "tanh(product / softcap)")
SCALE = ("return product * (scale * LOG2_E);", "return product * LOG2_E;")
NATURAL = ("return product * (scale * LOG2_E);", "return product * scale;")
LAST_BLOCK = (".end + STEP - 1) / STEP};", ".end) / STEP};")
RANGE = ("ranges[2 * block + 1] >= own.least", "ranges[2 * block + 1] > own.least")
OWN_RANGE = ("id >= least && id <= largest", "id > least && id <= largest")
ONE_PART = ("other < SPLIT; other++", "other < 1; other++")
SAME_PART = ("scratch + ((group * SPLIT + part) * COUNT + index)", "scratch + (group * SPLIT * COUNT + index)")
NO_EXCHANGE = ("    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n    load_parts", "    load_parts")
STAGED = f"      {BARRIER}\n      // A bit for each key", "      // A bit for each key"
TAIL = ("row < rows ? source[row * down + column * across] : T(0)", "source[row * down + column * across]")
VECTOR_TAIL = ("      if (row < rows) {\n        elements = *", "      {\n        elements = *")
ADDRESS = (" && is_aligned(source, 16)", "")

# Fault: kernel, text, what takes its place, a case, what must be found.
FORWARD = {
    "no barrier before keys": (
        "forward",
        f"{BARRIER}      forge::stage_rows<T, STEP, D",
        "forge::stage_rows<T, STEP, D",
        EVERY,
        RACE,
    ),
    "no barrier behind keys": ("forward", *STAGED, EVERY, RACE),
    "no barrier before values": ("forward", "if constexpr (SPLIT == 1) {", "if constexpr (SPLIT == 0) {", EVERY, RACE),
    "no barrier behind values": (
        *(
            "forward",
            f"{BARRIER}      if (seen != 0) {{\n        const auto weights",
            "if (seen != 0) {\n        const auto weights",
        ),
        *(EVERY, RACE),
    ),
    "no scale": ("forward", *SCALE, PLAIN, "out must be"),
    "exp for exp2": ("forward", *NATURAL, PLAIN, "out must be"),
    "no scale in the cap": ("forward", *CAP_FIRST, EVERY, "out must be"),
    "no cap": ("forward", *NO_CAP, EVERY, "out must be"),
    "causal edge early": ("forward", *EDGE, EVERY, "out must be"),
    "causal edge late": ("forward", *LATE_EDGE, PLAIN, "out must be"),
    "no window": ("forward", *WINDOW, EVERY, "out must be"),
    "window too wide": ("forward", *WIDE_WINDOW, EVERY, "out must be"),
    "upper left": ("forward", "return query + keys - queries;", "return query;", EVERY, "out must be"),
    "no last block": ("forward", *LAST_BLOCK, PLAIN, "out must be"),
    "visible keys left out": ("forward", "own_key(of.end - 1) + 1);", "own_key(of.end - 1));", PLAIN, "out must be"),
    "visible columns left out": ("forward", "(seen >> j & 0xFF) != 0", "(seen >> j & 0xFE) != 0", PLAIN, "out must be"),
    "block of one id left out": ("forward", *RANGE, EVERY, "out must be"),
    "simdgroup of one id left out": ("forward", *OWN_RANGE, EVERY, "out must be"),
    "ids do not count": ("forward", " & (id == k_ids[column])", "", EVERY, "out must be"),
    "padding sees padding": ("forward", " & (id >= 0)", "", EVERY, "out must be"),
    "no end of keys": ("forward", "(column < keys_left) & ", "", FULL, "out must be"),
    "all of it seen": ("forward", "!CAUSAL || other.end - 1 <= own_key(of.first)", "true", PLAIN, "out must be"),
    "sums are not scaled again": ("forward", "sums.fragment(i, c) *= factor;", "", PLAIN, "out must be"),
    "total is not scaled again": ("forward", "total[i] *= factor;", "", PLAIN, "out must be"),
    "no finite start": ("forward", "largest[i] = -FLT_MAX;", "largest[i] = -INFINITY;", EVERY, "out must be"),
    "lanes are not joined": ("forward", "totals.row_sum(total);", "", PLAIN, "out must be"),
    "no sink": ("forward", " + fast::exp2(sink - with_sink)", "", EVERY, "out must be"),
    "sink of another head": ("forward", "sinks[plane]", "sinks[batch]", EVERY, "out must be"),
    "sink in natural units": ("forward", "sinks[plane] * forge::LOG2_E", "sinks[plane]", EVERY, "out must be"),
    "lse in units of log2": ("forward", "largest[i] * forge::LN_2 +", "largest[i] +", EVERY, "lse must be"),
    "head of another group": ("forward", "head / (q_shape[1] / k_shape[1])", "head % k_shape[1]", EVERY, "out must be"),
    "rows as in row order": ("forward", "own_query * q_strides[2]", "own_query * D", HEADS, "out must be"),
    "rows past the end": ("forward", *VECTOR_TAIL, PLAIN, "BoundsError"),
    "elements past the end": ("forward", *TAIL, replace(PLAIN, layout="transposed"), "BoundsError"),
    "no look at the address": ("forward", *ADDRESS, replace(PLAIN, layout="shifted"), "AlignmentError"),
    "one part of the head": ("forward", *ONE_PART, SPLIT, "out must be"),
    "parts in one place": ("forward", *SAME_PART, SPLIT, "Error"),
    "no barrier between parts": ("forward", *NO_EXCHANGE, SPLIT, RACE),
}
DQ = {
    "no barrier before keys": (
        "dq",
        f"{BARRIER}      forge::stage_rows<T, STEP, D,",
        "forge::stage_rows<T, STEP, D,",
        EVERY,
        RACE,
    ),
    "no barrier behind keys": ("dq", *STAGED, EVERY, "UninitialisedError"),
    "no scale": ("dq", "sums.fragments[f] *= scale;", "", EVERY, "dq must be"),
    "no scale of scores": ("dq", *SCALE, PLAIN, "dq must be"),
    "causal edge early": ("dq", *EDGE, EVERY, "dq must be"),
    "no window": ("dq", *WINDOW, EVERY, "dq must be"),
    "ln 2 twice": ("dq", *LOG_2_TWICE, EVERY, "dq must be"),
    "no softcap derivative": ("dq", *SLOPE, EVERY, "dq must be"),
    "no delta": ("dq", " - of_row[1])", ")", EVERY, "dq must be"),
    "no last block": ("dq", *LAST_BLOCK, PLAIN, "dq must be"),
    "block of one id left out": ("dq", *RANGE, EVERY, "dq must be"),
    "ids do not count": ("dq", " & (id == k_ids[column])", "", EVERY, "dq must be"),
    "head of another group": ("dq", "head / (q_shape[1] / k_shape[1])", "head % k_shape[1]", EVERY, "dq must be"),
    "rows of dout in row order": ("dq", "own_query * dout_strides[2]", "own_query * DV", HEADS, "dq must be"),
    "one part of the head": ("dq", *ONE_PART, SPLIT, "dq must be"),
    "no barrier between parts": ("dq", *NO_EXCHANGE, SPLIT, RACE),
}
STAGED_QUERIES = f"        {BARRIER}\n        // A bit for each query", "        // A bit for each query"
DKV = {
    "no barrier before queries": (
        *("dkv", f"{BARRIER}        forge::stage_rows<T, STEP, D,", "forge::stage_rows<T, STEP, D,"),
        *(EVERY, RACE),
    ),
    "no barrier behind queries": ("dkv", *STAGED_QUERIES, EVERY, RACE),
    "no scale": ("dkv", "k_sums.fragments[f] *= scale;", "", EVERY, "dk must be"),
    "no scale of scores": ("dkv", *SCALE, PLAIN, "dv must be"),
    "causal edge early": ("dkv", *EDGE, EVERY, "dk must be"),
    "no window": ("dkv", *WINDOW, EVERY, "dk must be"),
    "queries at the window's end left out": (
        "dkv",
        "of.end - 1 + window -",
        "of.end - 2 + window -",
        replace(PLAIN, window=10),
        "dk must be",
    ),
    "ln 2 twice": ("dkv", *LOG_2_TWICE, EVERY, "dv must be"),
    "one head too few": (
        "dkv",
        "head < (kv_head + 1) * sharing",
        "head < (kv_head + 1) * sharing - 1",
        EVERY,
        "dk must be",
    ),
    "no softcap derivative": ("dkv", *SLOPE, EVERY, "dk must be"),
    "no delta": ("dkv", " - of_query[1])", ")", EVERY, "dk must be"),
    "delta of another head": ("dkv", "delta + first_row", "delta + first_query", EVERY, "dk must be"),
    "first visible queries left out": (
        "dkv",
        "of.first - keys + queries);",
        "of.first - keys + queries + 1);",
        PLAIN,
        "dk must be",
    ),
    "block of one id left out": ("dkv", *RANGE, EVERY, "dk must be"),
    "ids do not count": ("dkv", " & (id == q_ids[column])", "", EVERY, "dk must be"),
    "blocks of the first head alone": (
        "dkv",
        "uint to_visit = visited;",
        "thread uint& to_visit = visited;",
        EVERY,
        "dk must be",
    ),
    "one part of the head": ("dkv", *ONE_PART, SPLIT, "dk must be"),
    "no barrier between parts": ("dkv", *NO_EXCHANGE, SPLIT, RACE),
}
DELTA = {
    "no dlse": ("delta", "sum - dlse[own_row]", "sum", ALL, "dq must be"),
    "plus dlse": ("delta", "sum - dlse[own_row]", "sum + dlse[own_row]", ALL, "dq must be"),
    "half the lanes": (
        "delta",
        "over_lanes<forge::Sum>(sum, LANES)",
        "over_lanes<forge::Sum>(sum, LANES / 2)",
        ALL,
        "dq must be",
    ),
    "rows in row order": ("delta", "row * dout_strides[2]", "row * DV", replace(HEADS, variant="scalar"), "dq must be"),
    "rows past the end": ("delta", "row < rows && column < DV", "column < DV", ALL, "BoundsError"),
}
SCALAR_LOG_2 = ("* forge::LOG2_E", "* forge::LOG2_E * forge::LOG2_E")
SCALAR_IDS = (" == id, lane)", " == query_id, lane)")
SCALAR = {
    "forward: no scale in the cap": ("forward_scalar", *CAP_FIRST, ALL, "out must be"),
    "dkv: no window": (
        "dkv_scalar",
        "seeing.end = metal::min(queries",
        "seeing.end = queries; metal::min(queries",
        ALL,
        "dk must be",
    ),
    "dkv: one head too few": (
        "dkv_scalar",
        "(kv_head + 1) * heads_of_group;",
        "(kv_head + 1) * heads_of_group - 1;",
        ALL,
        "dk must be",
    ),
    "dq: ln 2 twice": ("dq_scalar", *SCALAR_LOG_2, ALL, "dq must be"),
    "dkv: ln 2 twice": ("dkv_scalar", *SCALAR_LOG_2, ALL, "dv must be"),
    "forward: causal edge late": (
        "forward_scalar",
        "own_key(of.end - 1) + 1);",
        "own_key(of.end - 1) + 2);",
        ALL,
        "out must be",
    ),
    "dq: no softcap derivative": ("dq_scalar", *SLOPE, ALL, "dq must be"),
    "dkv: no softcap derivative": ("dkv_scalar", *SLOPE, ALL, "dk must be"),
    "dkv: no scale": ("dkv_scalar", "scores_of.slope(score) * scale", "scores_of.slope(score)", ALL, "dk must be"),
    "dq: no scale": ("dq_scalar", "scores_of.slope(score) * scale", "scores_of.slope(score)", ALL, "dq must be"),
    "dq: no delta": ("dq_scalar", " - own_delta;", ";", ALL, "dq must be"),
    "dkv: causal edge early": (
        "dkv_scalar",
        "of.first - keys + queries)",
        "of.first - keys + queries + 1)",
        ALL,
        "dk must be",
    ),
    "forward: no sink": ("forward_scalar", " + fast::exp2(sink - with_sink)", "", ALL, "out must be"),
    "forward: window too wide": (
        "forward_scalar",
        "own_key(of.first) - window + 1",
        "own_key(of.first) - window",
        ALL,
        "out must be",
    ),
    "forward: ids do not count": ("forward_scalar", "key_id >= 0 && key_id == id", "key_id >= 0", ALL, "out must be"),
    "forward: padding sees padding": (
        "forward_scalar",
        "key_id >= 0 && key_id == id",
        "is_key && key_id == id",
        ALL,
        "out must be",
    ),
    "forward: no finite start": ("forward_scalar", "largest = -FLT_MAX;", "largest = -INFINITY;", ALL, "out must be"),
    "forward: sums are not scaled again": (
        "forward_scalar",
        "sums.multiply(factor);",
        "",
        replace(PLAIN, variant="scalar"),
        "out must be",
    ),
    "forward: lanes are not joined": ("forward_scalar", "total = simd_sum(total);", "", ALL, "out must be"),
    "forward: rows past the end": (
        "forward_scalar",
        "if (query >= queries) {\n    return;\n  }",
        "",
        replace(PLAIN, variant="scalar"),
        "Error",
    ),
    "forward: columns past the end": ("forward_scalar", "lane + 32 * i < SIZE", "true", ALL, "Error"),
    "forward: head of another group": (
        "forward_scalar",
        "head / (q_shape[1] / k_shape[1])",
        "head % k_shape[1]",
        ALL,
        "out must be",
    ),
    "forward: strides do not count": (
        "forward_scalar",
        "row[(lane + 32 * i) * across]",
        "row[lane + 32 * i]",
        replace(PLAIN, variant="scalar", layout="sliced"),
        "out must be",
    ),
}
KINDS = {"forward": FORWARD, "dq": DQ, "dkv": DKV, "delta": DELTA, "scalar": SCALAR}
BREAKS = {f"{kind}: {fault}": each for kind, faults in KINDS.items() for fault, each in faults.items()}
# What the issue lists, one kernel each; of the others the cheap ones to compile.
FAST = ["dkv: one head too few", *[name for name in BREAKS if name.startswith(("scalar", "delta"))][::3]]


@pytest.mark.parametrize(
    "fault", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in BREAKS]
)
def test_broken_source_is_found(fault, monkeypatch):
    kernel, old, new, case, sign = BREAKS[fault]
    whole, of_delta = launch._kernel, delta._kernel
    changed = broken(of_delta() if kernel == "delta" else whole(kernel), old, new)
    assert changed.source != (of_delta() if kernel == "delta" else whole(kernel)).source, "the text is not there"
    assert findings([case], "emulator") == []
    if kernel == "delta":
        monkeypatch.setattr(delta, "_kernel", lambda: changed)
    else:
        monkeypatch.setattr(launch, "_kernel", lambda name: changed if name == kernel else whole(name))
    found = findings([case], "emulator")
    assert any(sign in line for line in found), found


def test_all_texts_are_there():
    for fault, (kernel, old, new, *_) in BREAKS.items():
        whole = delta._kernel() if kernel == "delta" else launch._kernel(kernel)
        assert broken(whole, old, new).source != whole.source, fault


# Fault in launch.py: what takes the place of the ranges, and what must be found.
RANGES = {
    "ranges of the block before": lambda found: mx.concatenate([found[:, :1], found[:, :-1]], axis=1),
    "largest is least": lambda found: mx.stack([found[..., 0], found[..., 0]], axis=-1),
    "largest and least the other way round": lambda found: mx.contiguous(found[..., ::-1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", RANGES)
def test_wrong_ranges_are_found(fault, monkeypatch):
    ranges = launch.segment_ranges
    monkeypatch.setattr(launch, "segment_ranges", lambda *args: RANGES[fault](ranges(*args)))
    # Several blocks of queries, with documents of their own.
    case = replace(PLAIN, queries=129, keys=129, segments="documents-20")
    assert any("out must be" in line for line in findings([case], "emulator"))
