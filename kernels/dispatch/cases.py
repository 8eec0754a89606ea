"""What the ops of this room are proved, counted and timed on."""

from typing import Final

from forge_mlx.kernels._common.checks import FLOATS
from forge_mlx.kernels.dispatch.moe_case import CombineCase, DispatchCase
from forge_mlx.kernels.dispatch.row_scale_case import RowScaleAccumulateCase, RowScaleCase, TokenCase
import mlx.core as mx

# Around a vector, the lanes that share a token, a simdgroup, and a threadgroup with a part of a simdgroup.
COLUMNS: Final = (1, 3, 64, 65, 257, 1100)


def _row_scale_cases() -> list[TokenCase]:
    cases: list[TokenCase] = []
    for kind in (RowScaleCase, RowScaleAccumulateCase):
        for dtype in FLOATS:
            cases += [kind((33, columns), 5, dtype) for columns in COLUMNS]
            cases += [
                kind((2, 3, 24), 4, dtype, dtype),
                kind((24,), 1, dtype),
                kind((3, 8201), 70, dtype),
                kind((7, 40), 1024, dtype),
                kind((0, 8), 3, dtype),
                kind((5, 0), 3, dtype),
                *(kind((9, 40), 3, dtype, values=values) for values in ("zeros", "ties", "spike", "ranges")),
                *(
                    kind((9, 40), 8, dtype, layout=layout)
                    for layout in ("transposed", "sliced", "broadcast", "shifted")
                ),
            ]
        cases += [kind((9, 40), 3, dtype, values="1e30") for dtype in (mx.float32, mx.bfloat16)]
        cases += [kind((9, 40), 3, mx.float32, mx.bfloat16), kind((9, 40), 3, mx.float16, mx.bfloat16)]
    cases += [
        RowScaleAccumulateCase((9, 40), 3, dtype, dst=dst)
        for dtype, dst in ((mx.bfloat16, mx.float32), (mx.float32, mx.float16), (mx.float16, mx.bfloat16))
    ]
    return cases


def _moe_cases() -> list[TokenCase]:
    cases: list[TokenCase] = []
    for kind in (DispatchCase, CombineCase):
        for dtype in FLOATS:
            cases += [kind((33, columns), 6, dtype) for columns in COLUMNS]
            cases += [
                kind((1, 3, 24), 1, dtype, k=1),
                kind((24,), 9, dtype, k=8),
                kind((2, 4, 24), 7, dtype, k=7),
                kind((5, 8), 64, dtype, k=64),
                kind((3, 264), 1024, dtype, k=40, routes="repeated"),
                kind((3, 8201), 70, dtype, k=3),
                kind((0, 8), 3, dtype),
                kind((5, 0), 3, dtype),
                *(kind((33, 40), 4, dtype, k=3, routes=each) for each in ("one", "repeated", "outside", "none")),
                *(kind((9, 264), 4, dtype, k=3, routes=each) for each in ("one", "outside")),
                *(kind((9, 40), 3, dtype, values=values) for values in ("zeros", "ties", "spike", "ranges")),
                *(
                    kind((9, 40), 8, dtype, layout=layout)
                    for layout in ("transposed", "sliced", "broadcast", "shifted")
                ),
            ]
        cases += [kind((9, 40), 3, dtype, values="1e30") for dtype in (mx.float32, mx.bfloat16)]
    cases += [
        CombineCase((9, 40), 3, dtype, gates, k=3, routes="repeated")
        for dtype, gates in ((mx.bfloat16, mx.bfloat16), (mx.float16, mx.float16), (mx.float32, mx.bfloat16))
    ]
    return cases


CASES: Final[tuple[TokenCase, ...]] = tuple(_row_scale_cases() + _moe_cases())

TIMED: Final[tuple[TokenCase, ...]] = tuple(
    case
    for dtype in (mx.float32, mx.bfloat16)
    for case in (
        RowScaleCase((4, 1024, 512), 8, dtype),
        RowScaleAccumulateCase((4, 1024, 512), 8, dtype),
        DispatchCase((4, 1024, 512), 8, dtype),
        CombineCase((4, 1024, 512), 8, dtype),
        DispatchCase((4096, 1024), 64, dtype, k=8),
        CombineCase((4096, 1024), 64, dtype, k=8),
    )
)

TRAFFIC: Final[tuple[TokenCase, ...]] = (
    RowScaleCase((512, 512), 8, mx.bfloat16),
    RowScaleCase((64, 4096), 8),
    RowScaleAccumulateCase((512, 512), 8, mx.bfloat16, dst=mx.float32),
    DispatchCase((512, 512), 8),
    DispatchCase((256, 256), 64, mx.bfloat16, k=8),
    CombineCase((512, 512), 8),
    CombineCase((256, 256), 64, mx.bfloat16, k=8),
    CombineCase((32, 4096), 8, mx.bfloat16),
    CombineCase((4, 16384), 8, k=4),
)
