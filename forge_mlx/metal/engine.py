"""Which engine runs an op, and why.

The order: the call's `impl=`, then `use_engine(...)`, then the variable `FORGE_MLX_ENGINE`, then automatic: Metal where
there is an Apple GPU, else CUDA, else plain MLX operations. An engine that is asked for and cannot run raises: nothing
falls back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
import difflib
from importlib.util import find_spec
import os
from typing import Literal, get_args

import mlx.core as mx

EngineName = Literal["metal", "cuda", "emulator", "reference"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
VARIABLE = "FORGE_MLX_ENGINE"

_chosen: ContextVar[EngineName | None] = ContextVar("forge_mlx_engine", default=None)


@dataclass(frozen=True)
class Engine:
    """What an op runs on.

    Attributes:
        name: "metal" (Apple GPU), "cuda" (NVIDIA GPU), "emulator" (the Metal source on the CPU, for tests) or
            "reference" (plain MLX operations on any device).
        reason: why this one, for a person to read.
    """

    name: EngineName
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def checked(name: str, where: str) -> EngineName:
    """The name, if it is an engine's.

    Args:
        name: what was asked for; "" is no name.
        where: who asks, for the message.

    Returns:
        The same name.

    Raises:
        ValueError: there is no such engine.
    """
    for known in ENGINES:
        if name == known:
            return known
    near = difflib.get_close_matches(name, ENGINES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"[engine] {where} must be among {', '.join(ENGINES)} but got {name!r}.{hint}")


@contextmanager
def use_engine(name: EngineName) -> Iterator[None]:
    """Run the ops called in a `with` block on one engine, unless a call names another.

    The choice belongs to the thread or task that makes it. Inside, an op that this engine cannot run raises.

    Args:
        name: "metal", "cuda", "emulator" or "reference".

    Raises:
        ValueError: there is no such engine.
        RuntimeError: this machine cannot run it.
    """
    engine = checked(name, "use_engine")
    _require(engine, "engine")
    token = _chosen.set(engine)
    try:
        yield
    finally:
        _chosen.reset(token)


def missing(name: EngineName) -> str | None:
    """What an engine lacks on this machine and how to get it; None if it can run."""
    if name == "metal" and not mx.metal.is_available():
        return "MLX finds no Metal device here: it needs a Mac with Apple silicon"
    if name == "cuda":
        return "it is not built yet: use metal, emulator or reference"
    if name == "emulator":
        packages = {"ziglang": "ziglang", "pyelftools": "elftools"}
        absent = [package for package, module in packages.items() if find_spec(module) is None]
        if absent:
            return f'it needs {" and ".join(absent)}: pip install "forge-mlx[emulator]"'
    return None


def resolve(op: str, impl: str | None = None, *, prefer_mlx: str | None = None) -> Engine:
    """Which engine runs this call.

    Args:
        op: the op's name, for messages.
        impl: the call's own `impl=`.
        prefer_mlx: why MLX's own operation is the better one for this case, if it is: automatic then takes the
            reference.

    Returns:
        The engine and the reason.

    Raises:
        ValueError: there is no engine of that name.
        RuntimeError: the engine that was asked for cannot run here.
    """
    variable = os.environ.get(VARIABLE, "")
    if impl is not None:
        asked = Engine(checked(impl, "impl"), "the call's impl=")
    elif (chosen := _chosen.get()) is not None:
        asked = Engine(chosen, "use_engine")
    elif variable:
        asked = Engine(checked(variable, VARIABLE), f"{VARIABLE} is set")
    else:
        return _automatic(prefer_mlx)
    _require(asked.name, op)
    return asked


def _require(name: EngineName, op: str) -> None:
    if lack := missing(name):
        raise RuntimeError(f"[{op}] engine {name} cannot run: {lack}.")


def _automatic(prefer_mlx: str | None) -> Engine:
    if prefer_mlx is not None:
        return Engine("reference", prefer_mlx)
    if mx.default_device().type != mx.DeviceType.gpu:
        return Engine("reference", "the default device is a CPU")
    for name in ("metal", "cuda"):
        if missing(name) is None:
            return Engine(name, "the default device is a GPU")
    return Engine("reference", "no engine for kernels runs on this GPU")
