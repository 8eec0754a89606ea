"""What the tests of every room share: the GPU, broken sources, and how two training runs are compared."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
import os
from pathlib import Path

from forge_mlx.kernels._common.proof import Case, disagreements
from forge_mlx.metal.emulator import MetalError, MetalWarning
from forge_mlx.metal.kernel import MetalKernel
from forge_mlx.metal.source import KernelSource, load
import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[2]


@cache
def resource(name: str) -> MetalKernel:
    """The kernel of a file for tests, which includes what rooms include."""
    file = ROOT / "tests" / "resources" / "kernels" / f"{name}.metal"
    return MetalKernel(load(file, [ROOT / "kernels" / "_common"]))


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


def findings(cases: Iterable[Case], impl: str) -> list[str]:
    """What is wrong with the results of some cases, or the name of what they raised. Warnings are errors in tests."""
    lines = []
    for case in cases:
        try:
            lines += disagreements(case, impl)
        except (MetalError, MetalWarning) as error:
            lines.append(type(error).__name__)
    return lines
