"""What attention is proved, timed and counted on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels.attention.covering import covering
from forge_mlx.kernels.attention.flash_case import AttentionCase, FlashBackwardCase, FlashCase
import mlx.core as mx

# Every value of each meets every value of all the others. Lengths and the head size of v follow from "length" and "v".
FEATURES: Final[dict[str, tuple[Any, ...]]] = {
    "head_dim": (8, 16, 24, 40, 64, 72, 80, 96, 128, 136, 192, 256),
    "segments": (None, "sorted", "unsorted", "padding", "all padding", "one token", "documents-9", "pair"),
    "layout": ("contiguous", "heads", "transposed", "sliced", "broadcast", "shifted"),
    "mask": ("causal", "full", "window-1", "window-7", "window-40"),
    "dtype": FLOATS,
    "heads": ((2, 2), (4, 2), (3, 1)),
    "length": ("T = S", "T < S", "T > S"),
    "values": ("normal", "ties", "4"),
    "v": ("same", "other"),
    "softcap": (None, 8.0),
    "scale": ("usual", "other"),
    "sinks": (False, True),
    "with_lse": (False, True),
    "variant": ("mma", "scalar"),
}
_LENGTHS: Final = {
    "T = S": tuple((size, size) for size in (33, 65, 31, 100, 9, 129, 63, 32, 8, 7)),
    "T < S": ((31, 65), (1, 33), (63, 100), (8, 9), (32, 129), (7, 63), (33, 100)),
    "T > S": ((65, 32), (33, 9), (100, 63), (9, 7), (129, 31), (63, 8), (100, 65)),
}
_OTHER_V: Final = {8: 24, 16: 8, 24: 256, 40: 16, 64: 32, 72: 96, 80: 24, 96: 136, 128: 64, 136: 72, 192: 128, 256: 8}


def has_gradients(chosen: Mapping[str, Any]) -> bool:
    """Whether dq and dk are more than the rounding of 0, which they are where a query sees one key, or equal ones.

    There dP - D is 0 without an lse or a sink.

    Args:
        chosen: A value for some of the features.
    """
    sees_one = (
        chosen.get("mask") == "window-1" or chosen.get("segments") == "one token" or chosen.get("values") == "ties"
    )
    return not sees_one or chosen.get("with_lse", True) or chosen.get("sinks", True)


def _covering_cases() -> list[FlashCase]:
    cases = []
    lengths = dict.fromkeys(_LENGTHS, 0)
    for index, chosen in enumerate(covering(FEATURES, has_gradients)):
        values: dict[str, Any] = dict(chosen)
        length, mask = values.pop("length"), values.pop("mask")
        values["queries"], values["keys"] = _LENGTHS[length][lengths[length] % len(_LENGTHS[length])]
        lengths[length] += 1
        values["heads"], values["kv_heads"] = values["heads"]
        values["v_head_dim"] = _OTHER_V[values["head_dim"]] if values.pop("v") == "other" else None
        values["scale"] = round(1.7 * values["head_dim"] ** -0.5, 3) if values["scale"] == "other" else None
        values["causal"] = mask != "full"
        values["window"] = int(mask.removeprefix("window-")) if mask.startswith("window-") else None
        # A row of the batch is repeated where there are several.
        values["batch"] = 2 if values["layout"] == "broadcast" else 1 + index % 2
        cases.append(FlashCase(**values))
    return cases


def _edge_cases() -> list[FlashCase]:
    usual = FlashCase(kv_heads=1)
    every = FlashCase(2, 4, 2, 40, 70, 16, 24, window=9, softcap=5.0, segments="padding", sinks=True, with_lse=True)
    cases = [
        # Sizes around those of fragments and blocks, in both variants.
        *(
            replace(usual, queries=size, keys=size, variant=variant, with_lse=size == 1)
            for size in (1, 7, 8, 9, 31, 32, 33, 63, 65, 100, 129)
            for variant in ("mma", "scalar")
        ),
        # Both variants, whole and strided, of every option at once.
        *(replace(every, variant=variant, dtype=dtype) for variant in ("mma", "scalar") for dtype in FLOATS),
        replace(every, layout="heads", dtype=mx.bfloat16),
        replace(every, queries=70, keys=40),
        # Nothing to see, for all or for some.
        replace(usual, batch=2, segments="all padding", with_lse=True),
        replace(usual, segments="all padding", with_lse=True, sinks=True),
        replace(usual, queries=65, keys=9, with_lse=True),
        replace(usual, queries=65, keys=9, with_lse=True, variant="scalar"),
        # Documents and windows that are longer, shorter and as long as blocks.
        *(replace(usual, queries=129, keys=129, segments=f"documents-{size}") for size in (8, 20, 32, 50, 200)),
        *(replace(usual, queries=129, keys=129, window=size) for size in (2, 31, 32, 33, 64, 129, 2**31)),
        replace(usual, queries=129, keys=129, segments="one token", with_lse=True),
        replace(usual, queries=129, keys=129, window=1, with_lse=True),
        replace(usual, queries=33, keys=1, with_lse=True),
        replace(usual, queries=129, keys=129, segments="unsorted", causal=False),
        replace(usual, queries=40, keys=129, segments="unsorted", window=50),
        # Numbers.
        *(replace(usual, values=values) for values in ("zeros", "1e-30", "1e-3", "10")),
        replace(usual, values="10", sinks=True, with_lse=True, dtype=mx.float16),
        replace(usual, scale=-0.5),
        replace(usual, scale=1e-6),
        *(
            replace(
                usual, queries=65, keys=65, head_dim=64, values="capped", softcap=50.0, dtype=mx.bfloat16, variant=each
            )
            for each in ("mma", "scalar")
        ),
        replace(usual, batch=2, segments="sorted", values="capped", softcap=30.0, dtype=mx.float16, sinks=True),
        # Nothing at all.
        replace(usual, batch=0),
        replace(usual, heads=0, kv_heads=0),
        replace(usual, queries=0, with_lse=True),
        *(replace(usual, keys=0, sinks=sinks, with_lse=True) for sinks in (False, True)),
        replace(usual, batch=2, queries=0, keys=0, segments="sorted", sinks=True),
    ]
    for size in (8, 64, 72, 128, 136, 256):
        whole = replace(usual, head_dim=size, queries=65, keys=65)
        cases += [replace(whole, dtype=dtype, variant=each) for dtype in FLOATS for each in ("mma", "scalar")]
    return cases


def _backward_cases() -> list[FlashBackwardCase]:
    """Both ways to give the normaliser, with what changes it; and flashback's own heads, of fewer tokens."""
    usual = FlashBackwardCase(kv_heads=1, queries=40, keys=40)
    some = [
        usual,
        replace(usual, dtype=mx.float16, window=9, sinks=True, with_lse=True),
        replace(usual, dtype=mx.bfloat16, segments="padding", softcap=5.0, sinks=True),
        replace(usual, batch=2, segments="all padding", queries=31, layout="heads", variant="scalar"),
        replace(usual, causal=False, head_dim=24, v_head_dim=8, scale=0.3),
        FlashBackwardCase(1, 2, 2, 128, 128, 8, dtype=mx.float32),
    ]
    return [replace(each, from_maximum=given) for each in some for given in (False, True)]


def _unfused_cases() -> list[AttentionCase]:
    every = AttentionCase(2, 4, 2, 9, 14, 16, 24, window=6, softcap=5.0, segments="padding", sinks=True, with_lse=True)
    usual = AttentionCase(kv_heads=1)
    cases = [case for each in (every, usual) for case in (replace(each, dtype=dtype) for dtype in FLOATS)]
    return [
        *cases,
        *(replace(case, with_probs=False) for case in cases),
        replace(usual, queries=9, with_lse=True),
        replace(usual, queries=33, keys=9, with_lse=True),
        replace(usual, batch=2, segments="all padding", with_lse=True, causal=False),
    ]


_ALL: Final = (*_covering_cases(), *_edge_cases(), *_backward_cases(), *_unfused_cases())

CASES: Final = tuple({case.name: case for case in _ALL}.values())

_LONG: Final = FlashCase(1, 8, 2, 1024, 1024, 64)

TIMED: Final = tuple(
    replace(case, dtype=dtype)
    for dtype in (mx.float32, mx.bfloat16)
    for case in (
        _LONG,
        replace(_LONG, segments="documents-256"),
        replace(_LONG, window=128),
        replace(_LONG, softcap=50.0, sinks=True),
        FlashBackwardCase(1, 8, 2, 1024, 1024, 64, segments="documents-256"),
        AttentionCase(1, 4, 2, 128, 128, 64),
    )
)

_COUNTED: Final = FlashCase(1, 2, 1, 256, 256, 64, dtype=mx.bfloat16)

TRAFFIC: Final = (
    _COUNTED,
    replace(_COUNTED, segments="documents-64"),
    replace(_COUNTED, window=64, sinks=True, softcap=50.0),
    replace(_COUNTED, dtype=mx.float32, segments="documents-64"),
    replace(_COUNTED, head_dim=128, window=64),
    replace(_COUNTED, queries=128, keys=128, head_dim=256, segments="documents-64"),
    FlashBackwardCase(1, 2, 1, 256, 256, 64, dtype=mx.bfloat16, segments="documents-64"),
)
