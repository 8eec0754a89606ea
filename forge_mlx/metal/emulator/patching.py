"""Puts the emulator in the place of MLX's Metal back end, for libraries that know nothing of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from forge_mlx.metal.emulator.kernel_api import metal_kernel
from forge_mlx.metal.emulator.settings import process_settings
import mlx.core as mx


def _is_available() -> bool:
    return True


def _default_device() -> mx.Device:
    return mx.Device(mx.gpu)


@contextmanager
def patch(**changes: Any) -> Iterator[None]:
    """Run every `mx.fast.metal_kernel` of any library on the emulator inside a `with` block.

    Inside, `mx.fast.metal_kernel` is `emulator.metal_kernel`, `mx.metal.is_available()` is true and
    `mx.default_device()` is a GPU. All else stays: MLX's own operations run where they did, and
    `mx.device_info()` still describes this machine. Blocks may be nested; each undoes its own changes.

    Libraries often build their kernels when they are imported, or keep them (`functools.cache`), and ask for Metal
    once: import them, or call them for the first time, inside the block. A kernel that was built inside stays an
    emulated one after it; one that was built before stays MLX's own and finds no Metal.

    A kernel inside `mx.compile` raises, because it has no values there: call `mx.disable_compile()` first.

    Args:
        **changes: fields of `Settings`, for example `schedules=3`, for every thread that does not set them itself.

    Raises:
        TypeError: an unknown setting, or a count that is no int.
        ValueError: an unknown check, or a count out of its range.
    """
    with ExitStack() as stack:
        stack.enter_context(process_settings(**changes))
        for owner, name, substitute in (
            (mx.fast, "metal_kernel", metal_kernel),
            (mx.metal, "is_available", _is_available),
            (mx, "default_device", _default_device),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, substitute)
        yield
