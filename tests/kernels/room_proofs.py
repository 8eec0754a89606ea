"""What the tests of every room share: the GPU, broken sources, and how two training runs are compared."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
import os
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from forge_mlx.kernels._common.proof import RTOL, Case, disagreements, to_float64
from forge_mlx.metal.emulator import MetalError, MetalWarning
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.source import KernelSource, load
import mlx.core as mx
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
C = TypeVar("C", bound=Case)


@cache
def resource(name: str) -> MetalKernel:
    """The kernel of a file for tests, which includes what rooms include."""
    file = ROOT / "tests" / "resources" / "kernels" / f"{name}.metal"
    return MetalKernel(load(file, [ROOT / "kernels" / "_common"]))


def random(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Normal numbers that follow from the seed."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def assert_close(got: mx.array, want: mx.array, rtol: float = 1e-5) -> None:
    """Raise unless two arrays have one shape and differ by at most a part of the largest element."""
    got, want = np.array(got, np.float64), np.array(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def gpu_engine() -> str:
    """The engine of this machine's GPU. Without a GPU the test is skipped, or fails under FORGE_REQUIRE_METAL=1."""
    if mx.metal.is_available():
        return "metal"
    if os.environ.get("FORGE_REQUIRE_METAL", "0") not in ("", "0"):
        pytest.fail("FORGE_REQUIRE_METAL is set and MLX finds no Metal device")
    pytest.skip("needs a Mac with Apple silicon; FORGE_REQUIRE_METAL=1 makes this a failure")


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the outputs of every launch with NaN first."""
    call = MetalKernel.__call__

    def poisoned(self, *args, **options):
        return call(self, *args, **{"init_value": float("nan"), **options})

    monkeypatch.setattr(MetalKernel, "__call__", poisoned)


def broken(kernel: MetalKernel, old: str, new: str) -> MetalKernel:
    """The kernel with one text of its source replaced, wherever it stands; itself if it stands nowhere."""
    source: KernelSource = kernel.source
    return MetalKernel(
        replace(source, header=source.header.replace(old, new), body=source.body.replace(old, new)),
        ensure_row_contiguous=kernel.ensure_row_contiguous,
        math_mode=kernel.math_mode,
    )


def assert_formula_agrees(
    case: Case, inherent: float = 0.0, differences: Mapping[str, str] = MappingProxyType({})
) -> None:
    """The room's reference.py against float64. `disagreements` measures by the formula itself and would not notice.

    Args:
        case: What is computed.
        inherent: What float32 loses of it in any form, as a part of the largest result.
        differences: By the names of results that are differences of large float32 numbers, whose these are.
    """
    expected, formula = case.expected(), case.run("formula")
    assert formula.keys() == expected.keys()
    for name, truth in expected.items():
        result = formula[name]
        assert result.shape == truth.shape, name
        error = np.abs(to_float64(result) - truth).max(initial=0)
        # The smallest step of the dtype, which is all that is left of the smallest numbers.
        smallest = 2.0**-24 if result.dtype == mx.float16 else np.finfo(np.float32).tiny
        if name in differences:
            smallest += 1e-6 * np.abs(expected[differences[name]]).max(initial=0)
        assert error <= (RTOL[result.dtype] + inherent) * np.abs(truth).max(initial=0) + smallest, name


def thinned(cases: Iterable[C], is_fast: Callable[[C], bool], every: int = 1) -> list[object]:
    """Cases for `parametrize`, slow ones marked. A fast test has every dtype, but not with all that it does not touch.

    Most of what a case costs is compiling its variant of the kernels: MLX writes another one for each value of a
    template parameter, and where an input has fewer than 8 elements.

    Args:
        cases: All cases of a room.
        is_fast: Whether a case may belong to the fast tests.
        every: Of those that may, one in so many does, of each dtype the first among them.
    """
    found: list[object] = []
    seen: dict[mx.Dtype, int] = {}
    for case in cases:
        fast = is_fast(case)
        if fast:
            seen[case.dtype] = seen.get(case.dtype, -1) + 1
            fast = seen[case.dtype] % every == 0
        found.append(case if fast else pytest.param(case, marks=pytest.mark.slow))
    return found


def mostly_slow(faults: Iterable[str], *, every: int = 5) -> list[object]:
    """Names of faults for `parametrize`: each compiles a kernel of its own, so all but one in `every` are slow."""
    return [
        fault if index % every == 0 else pytest.param(fault, marks=pytest.mark.slow)
        for index, fault in enumerate(faults)
    ]


def findings(cases: Iterable[Case], impl: str) -> list[str]:
    """What is wrong with the results of some cases, or the name of what they raised. Warnings are errors in tests."""
    lines = []
    for case in cases:
        try:
            lines += disagreements(case, impl)
        except (MetalError, MetalWarning) as error:
            lines.append(type(error).__name__)
    return lines
