"""How the emulator runs launches: which checks, how many schedules, which budget."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

CHECKS = ("bounds", "races", "uninitialised", "barriers", "alignment", "limits", "language", "lockstep")
_OF_ACCESSES = frozenset({"bounds", "races", "uninitialised", "alignment", "lockstep"})
# What each number may be. The runtime counts steps and seeds in 64 bits; 1024 stacks of 1 GiB still fit into addresses.
_RANGES = {
    "schedules": (1, 2**16),
    "seed": (0, 2**63),
    "max_steps": (1, 2**63),
    "stack_bytes": (1, 2**30),
}


@dataclass(frozen=True)
class Settings:
    """How a launch runs; `settings(...)` changes them for a block.

    Attributes:
        checks: names out of `CHECKS`. Without `bounds`, `races`, `uninitialised`, `alignment` and `lockstep` the
            memory accesses are not instrumented at all, which is several times faster; counts of bytes are then absent.
        schedules: number of thread orders to run and compare: forward, reverse, then random ones; up to 65,536.
        seed: seed of the random orders, from 0 to 2**63.
        max_steps: branches that one thread may take in a launch, up to 2**63.
        stack_bytes: private memory of one thread, up to 1 GiB.
        defines: preprocessor definitions, `(name, value)`.
        mlx_preamble: the source sees MLX's own header, as `mx.fast.metal_kernel` gives it. False shows what
            plain Metal lacks.
    """

    checks: frozenset[str] = frozenset(CHECKS)
    schedules: int = 1
    seed: int = 0
    max_steps: int = 100_000_000
    stack_bytes: int = 256 * 1024
    defines: tuple[tuple[str, str], ...] = ()
    mlx_preamble: bool = True

    def __post_init__(self) -> None:
        unknown = sorted(self.checks - set(CHECKS))
        if unknown:
            raise ValueError(f"[emulator] checks must be among {', '.join(CHECKS)} but got {', '.join(unknown)}.")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int):
                raise TypeError(f"[emulator] {name} must be an int but got {value!r}.")
            if value < least:
                raise ValueError(f"[emulator] {name} must be at least {least} but got {value}.")
            if value > most:
                raise ValueError(f"[emulator] {name} must be at most {most} but got {value}.")

    @property
    def instrumented(self) -> bool:
        """Whether memory accesses are hooked."""
        return bool(self.checks & _OF_ACCESSES)


# Of the whole process: what `process_settings` made of them. A new thread begins with these.
_process = Settings()
# Of a thread or task: fields that `settings` changes.
_changes: ContextVar[Mapping[str, Any]] = ContextVar("forge_mlx_emulator_settings", default=MappingProxyType({}))


def current_settings() -> Settings:
    """The settings that a launch made now would use."""
    return replace(_process, **_changes.get())


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Change settings for the launches that this thread or task makes in a `with` block.

    Args:
        **changes: fields of `Settings` by name, for example `schedules=3`; `checks` may be any iterable of names.

    Yields:
        The settings in force.

    Raises:
        TypeError: an unknown setting, or a count that is no int.
        ValueError: an unknown check, or a count out of its range.
    """
    merged = {**_changes.get(), **_fields(changes)}
    # Raises before anything has changed.
    replace(_process, **merged)
    token = _changes.set(merged)
    try:
        yield current_settings()
    finally:
        _changes.reset(token)


@contextmanager
def process_settings(**changes: Any) -> Iterator[Settings]:
    """Change settings for the launches of every thread in a `with` block, except for what a thread has set itself.

    Args:
        **changes: as for `settings`.

    Yields:
        The settings in force in this thread.

    Raises:
        TypeError: an unknown setting, or a count that is no int.
        ValueError: an unknown check, or a count out of its range.
    """
    global _process
    before = _process
    _process = replace(before, **_fields(changes))
    try:
        # In this thread the inner block decides, also where an outer one has set the same field.
        with settings(**changes) as current:
            yield current
    finally:
        _process = before


def _fields(changes: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(changes)
    if "checks" in fields:
        fields["checks"] = frozenset(fields["checks"])
    return fields
