"""`pytest --metal-emulator`: the tests of any library, with the emulator in the place of Metal."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

_stack = pytest.StashKey[ExitStack]()
_before = pytest.StashKey[tuple[int, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("metal emulator")
    group.addoption(
        "--metal-emulator",
        action="store_true",
        help="run every mx.fast.metal_kernel on the emulator of forge-mlx; a run without any launch fails",
    )
    group.addoption(
        "--metal-emulator-schedules",
        type=int,
        metavar="N",
        help="thread orders to run and compare in each launch (default: 1)",
    )


# Before the conftest files: they may import libraries that build their kernels on import.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Put the emulator in place for the whole run."""
    options = early_config.known_args_namespace
    schedules = options.metal_emulator_schedules
    if not options.metal_emulator:
        if schedules is not None:
            raise pytest.UsageError("--metal-emulator-schedules needs --metal-emulator")
        return
    if schedules is not None and schedules < 1:
        raise pytest.UsageError(f"--metal-emulator-schedules must be at least 1 but got {schedules}")
    # Loaded only where it is asked for: this module is part of every pytest run.
    from forge_mlx.metal.emulator import patch
    from forge_mlx.metal.emulator.report import totals

    stack = ExitStack()
    stack.enter_context(patch(**({} if schedules is None else {"schedules": schedules})))
    early_config.stash[_stack] = stack
    early_config.stash[_before] = totals()
    early_config.add_cleanup(stack.close)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would count in other processes."""
    if _stack in config.stash and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--metal-emulator counts the launches of one process: run without -n")


def _counted(config: pytest.Config) -> tuple[int, int]:
    """Launches and warnings of this run."""
    from forge_mlx.metal.emulator.report import totals

    launches, warnings = totals()
    return launches - config.stash[_before][0], warnings - config.stash[_before][1]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run without a launch has tested nothing."""
    if _stack not in session.config.stash or session.config.option.collectonly:
        return
    if exitstatus == pytest.ExitCode.OK and not _counted(session.config)[0]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many launches there were."""
    if _stack not in config.stash or config.option.collectonly:
        return
    launches, warnings = _counted(config)
    terminalreporter.section("Metal emulator")
    terminalreporter.line(f"{launches:,} launches, {warnings:,} warnings")
    if not launches:
        terminalreporter.line(
            "FAILED: no kernel ran. Nothing called one, or the kernels were built before the emulator was in place.",
            red=True,
        )
