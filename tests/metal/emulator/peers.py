"""Other people's packages on the emulator: importing them, and comparing what their kernels give."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
import importlib
import sys
from types import ModuleType
import warnings

from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np

# Relative to the largest value: what rounding to the type costs in a chain of a few operations.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2**-9, mx.bfloat16: 2**-6}


@contextmanager
def imported_under_emulator(package: str, modules: Iterable[str]) -> Iterator[dict[str, ModuleType]]:
    """Import modules that build their kernels at import while the emulator takes `mx.fast.metal_kernel`'s place.

    Yields:
        name below the package -> module. The emulator stays in place for the block; afterwards the package is
        forgotten, so that no other test meets kernels that were built here.
    """
    importing = {name: f"{package}.{name}" for name in modules}
    try:
        with warnings.catch_warnings():
            # What the packages' own dependencies warn of.
            warnings.simplefilter("ignore")
            importlib.import_module(package)
            with emulator.patch():
                # Built without the emulator where the package's own import has loaded it.
                found = {
                    name: importlib.reload(sys.modules[full]) if full in sys.modules else importlib.import_module(full)
                    for name, full in importing.items()
                }
        with emulator.patch():
            yield found
    finally:
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32, scale: float = 1.0) -> mx.array:
    """Standard normal numbers, the same for the same seed."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return mx.array(values.astype(np.float32)).astype(dtype)


def assert_close(got: mx.array, want: mx.array, dtype: mx.Dtype | None = None) -> None:
    """`max|got - want| <= tolerance * max|want|`, the tolerance that of `dtype` (default: of `want`)."""
    assert got.shape == want.shape
    tolerance = TOLERANCE[dtype or want.dtype]
    ours, plain = (np.array(array.astype(mx.float32)) for array in (got, want))
    assert np.isfinite(plain).all()
    assert np.abs(ours - plain).max() <= tolerance * np.abs(plain).max()
