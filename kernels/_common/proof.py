"""What a room's `cases.py` offers and how an engine's results are judged: one way for tests, benchmark and check."""

from collections.abc import Mapping
from typing import Final, Protocol

import mlx.core as mx
import numpy as np

Arrays = Mapping[str, mx.array]

RTOL: Final = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 1e-2}
"""What may be off beside the error that the dtype itself costs, as a part of the largest result."""


class Case(Protocol):
    """One call of an op with its gradients. `cases.py` of each room has a tuple `CASES` of them."""

    @property
    def name(self) -> str:
        """A readable id, unique in the room."""

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype whose rtol holds for every result."""

    def run(self, impl: str) -> Arrays:
        """Results and gradients by name; "formula" as impl stands for the room's reference.py."""

    def expected(self) -> Mapping[str, np.ndarray]:
        """The same in float64, not computed by MLX."""


def to_float64(array: mx.array) -> np.ndarray:
    """An array of any floating dtype for NumPy."""
    return np.array(array.astype(mx.float32), dtype=np.float64)


def disagreements(case: Case, impl: str) -> list[str]:
    """Judge an engine: max|out - gt| <= 2 max|ref - gt| + rtol max|gt| for every result.

    gt is the float64 result and ref the formula's in the case's own dtype, so that a kernel may lose what the dtype
    loses and no more, and zeros for small gradients are found.

    Args:
        case: What to compute.
        impl: The engine.

    Returns:
        One line for each result that is off, has another shape or is not finite where it should be; none if all is
        well.
    """
    return compare(case, case.run(impl))


def compare(case: Case, results: Arrays) -> list[str]:
    """Judge results that are there already, as `disagreements` does.

    Args:
        case: What was computed.
        results: What `case.run` returned.

    Returns:
        One line for each result that is off.
    """
    formula, expected = case.run("formula"), case.expected()
    if results.keys() != expected.keys():
        return [f"{case.name}: results must be {', '.join(expected)} but got {', '.join(results)}"]
    lines = []
    for name, truth in expected.items():
        out, ref = results[name], formula[name]
        if out.shape != truth.shape or out.dtype != ref.dtype:
            lines.append(f"{case.name}: {name} must be {ref.dtype} {truth.shape} but got {out.dtype} {out.shape}")
            continue
        if out.size == 0:
            continue
        error, allowed = _error(out, truth), 2 * _error(ref, truth) + RTOL[case.dtype] * np.abs(truth).max()
        # Written so that NaN is off, and so is everything where the formula itself is infinite.
        if not error <= allowed < np.inf:
            lines.append(f"{case.name}: {name} must be within {allowed:.3g} but is off by {error:.3g}")
    return lines


def _error(array: mx.array, truth: np.ndarray) -> float:
    return float(np.abs(to_float64(array) - truth).max())
