"""What settings may be, and for how long they hold."""

from forge_mlx.metal import emulator
from forge_mlx.metal.emulator.settings import CHECKS, current_settings
import mlx.core as mx
import pytest

WRONG = {
    "unknown setting": ({"schedule": 2}, TypeError, "schedule"),
    "unknown check": ({"checks": ["bound"]}, ValueError, "checks must be among .* but got bound"),
    "no schedule": ({"schedules": 0}, ValueError, "schedules must be at least 1 but got 0"),
    "half a schedule": ({"schedules": 2.5}, TypeError, r"schedules must be an int but got 2\.5"),
    "schedules": ({"schedules": 2**16 + 1}, ValueError, "schedules must be at most 65536 but got 65537"),
    "negative seed": ({"seed": -1}, ValueError, "seed must be at least 0 but got -1"),
    "seed": ({"seed": 2**64}, ValueError, "seed must be at most"),
    "no step": ({"max_steps": 0}, ValueError, "max_steps must be at least 1"),
    "steps that wrap": ({"max_steps": 2**64}, ValueError, "max_steps must be at most"),
    "no stack": ({"stack_bytes": 0}, ValueError, "stack_bytes must be at least 1"),
    "stack that wraps": (
        {"stack_bytes": 2**32},
        ValueError,
        "stack_bytes must be at most 1073741824 but got 4294967296",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_raise_and_change_nothing(changes, error, message):
    with pytest.raises(error, match=message), emulator.settings(**changes):
        pass
    assert current_settings() == emulator.Settings()


def test_the_largest_settings_run():
    kernel = emulator.metal_kernel("f", [], ["out"], "out[thread_position_in_grid.x] = 1;")
    with emulator.settings(stack_bytes=2**30, max_steps=2**63, seed=2**63, schedules=4):
        (out,) = kernel(
            inputs=[], output_shapes=[(64,)], output_dtypes=[mx.float32], grid=(64, 1, 1), threadgroup=(64, 1, 1)
        )
    assert out.tolist() == [1.0] * 64


def test_blocks_undo_what_they_changed():
    with emulator.settings(schedules=2, checks=iter(["races"])) as outer:
        assert (outer.schedules, outer.checks) == (2, {"races"})
        with emulator.settings(seed=3) as inner:
            assert (inner.schedules, inner.seed) == (2, 3)
        assert current_settings() == outer
        with pytest.raises(KeyError), emulator.settings(seed=3):
            raise KeyError
        assert current_settings() == outer
    assert current_settings() == emulator.Settings()


OF_ACCESSES = {"bounds", "races", "uninitialised", "alignment", "lockstep"}


@pytest.mark.parametrize("check", CHECKS)
def test_checks_that_hook_accesses(check):
    assert emulator.Settings(checks=frozenset({check})).instrumented == (check in OF_ACCESSES)
