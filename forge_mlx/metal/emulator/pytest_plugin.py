"""`pytest --metal-emulator`: the tests of any library, with the emulator in the place of Metal.

Under pytest-xdist every process has an emulator of its own and tells its counts when it ends; the process that prints
the summary adds them up and fails a run in which all of them together launched nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

_stack = pytest.StashKey[ExitStack]()
_before = pytest.StashKey[tuple[int, int]]()
_OUTPUT = "metal_emulator"


@dataclass
class _Processes:
    """What pytest-xdist's processes have told.

    Attributes:
        started: how many there are.
        told: how many of them have come to their end and told their counts.
        launches: of all that have told.
        warnings: of all that have told.
    """

    started: int = 0
    told: int = 0
    launches: int = 0
    warnings: int = 0


_processes = pytest.StashKey[_Processes]()


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


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A process of pytest-xdist begins.

    Args:
        node: the controller's side of it.
    """
    node.config.stash.setdefault(_processes, _Processes()).started += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """A process of pytest-xdist has ended: take its counts.

    Args:
        node: the controller's side of it.
        error: what ended it, if it did not end by itself.
    """
    counts = getattr(node, "workeroutput", {}).get(_OUTPUT)
    if error is not None or counts is None:
        return
    processes = node.config.stash[_processes]
    processes.told += 1
    processes.launches += counts[0]
    processes.warnings += counts[1]


def _counted(config: pytest.Config) -> tuple[int, int]:
    """Launches and warnings of this run, in the processes that ran its tests."""
    if (processes := config.stash.get(_processes, None)) is not None:
        return processes.launches, processes.warnings
    from forge_mlx.metal.emulator.report import totals

    launches, warnings = totals()
    return launches - config.stash[_before][0], warnings - config.stash[_before][1]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run without a launch has tested nothing."""
    config = session.config
    if _stack not in config.stash or config.option.collectonly:
        return
    if hasattr(config, "workeroutput"):
        # One process of several: the others may have launched something.
        config.workeroutput[_OUTPUT] = _counted(config)
        return
    if exitstatus == pytest.ExitCode.OK and not _counted(config)[0]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many launches there were."""
    if _stack not in config.stash or config.option.collectonly:
        return
    launches, warnings = _counted(config)
    processes = config.stash.get(_processes, _Processes())
    silent = processes.started - processes.told
    terminalreporter.section("Metal emulator")
    text = f"{launches:,} launches, {warnings:,} warnings"
    if processes.started:
        text += f" in {processes.told} processes"
    if silent:
        text += f"; {silent} more ended before they could tell"
    terminalreporter.line(text)
    if not launches and not silent:
        terminalreporter.line(
            "FAILED: no kernel ran. Nothing called one, or the kernels were built before the emulator was in place.",
            red=True,
        )
