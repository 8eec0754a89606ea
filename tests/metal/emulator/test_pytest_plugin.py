"""`pytest --metal-emulator`, as somebody else's test run sees it."""

from pathlib import Path
import subprocess
import sys

import mlx.core as mx
import pytest

LIBRARY = """\
import mlx.core as mx

KERNEL = mx.fast.metal_kernel("f", ["x"], ["out"], "out[0] = x[0]; if (thread_position_in_grid.x == 0) { BODY }")


def call(threads=1):
    return KERNEL(
        inputs=[mx.ones((8,))], output_shapes=[(1,)], output_dtypes=[mx.float32], grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )[0].item()
"""
TESTS = """\
import mlx.core as mx
import a_library


def test_call():
    assert mx.metal.is_available()
    assert mx.default_device() == mx.gpu
    assert a_library.call() == 1
    assert a_library.call() == 1


def test_nothing():
    pass
"""


@pytest.fixture
def project(tmp_path):
    """A library whose conftest imports it, so that its kernel is built before any test is collected."""
    (tmp_path / "a_library.py").write_text(LIBRARY.replace("BODY", ""))
    (tmp_path / "conftest.py").write_text("import a_library\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return tmp_path


def run(project: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_runs_on_the_emulator_and_says_how_often(project):
    status, text = run(project, "--metal-emulator")
    assert status == 0, text
    assert "2 passed" in text
    (index,) = [i for i, line in enumerate(text.splitlines()) if "= Metal emulator =" in line]
    assert text.splitlines()[index + 1] == "2 launches, 0 warnings"


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal, MLX's own kernels run")
def test_without_the_option_nothing_changes(project):
    status, text = run(project)
    assert status == 1
    assert "1 failed, 1 passed" in text
    assert "Metal emulator" not in text


def test_a_run_without_a_launch_fails(project):
    status, text = run(project, "--metal-emulator", "-k", "nothing")
    assert "1 passed" in text
    assert "0 launches, 0 warnings" in text
    assert "FAILED: no kernel ran" in text
    assert status == 1


@pytest.mark.parametrize(
    ("options", "status"), [(["-k", "none"], 5), (["--collect-only"], 0)], ids=["nothing chosen", "collect only"]
)
def test_a_run_without_tests_keeps_its_status(project, options, status):
    assert run(project, "--metal-emulator", *options)[0] == status


def test_findings_fail_the_test(project):
    (project / "a_library.py").write_text(LIBRARY.replace("BODY", "out[1] = 2;"))
    status, text = run(project, "--metal-emulator")
    assert status == 1
    assert "BoundsError: [f] " in text
    assert "1 launches, 0 warnings" in text


def test_warnings_are_counted(project):
    library = LIBRARY.replace("out[0] = x[0]; ", "").replace("BODY", "out[0] = simd_sum(x[0]);")
    (project / "a_library.py").write_text(library.replace("threads=1", "threads=32"))
    status, text = run(project, "--metal-emulator", "-W", "default")
    assert status == 0, text
    assert "2 launches, 2 warnings" in text


@pytest.mark.parametrize(
    "processes", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)], ids=["one process", "two processes"]
)
def test_schedules(project, processes):
    """The last of two threads decides what is in out: with races unchecked that shows only in another order."""
    library = LIBRARY.replace("if (thread_position_in_grid.x == 0) { BODY }", "out[0] = thread_position_in_grid.x;")
    (project / "a_library.py").write_text(library.replace("threads=1", "threads=2"))
    (project / "test_it.py").write_text(
        "import a_library\nfrom forge_mlx.metal.emulator import settings\n\n\ndef test_order():\n"
        "    with settings(checks=[]):\n        a_library.call()\n"
    )
    assert run(project, "--metal-emulator", *processes)[0] == 0
    status, text = run(project, "--metal-emulator", "--metal-emulator-schedules", "2", *processes)
    assert status == 1
    assert "ScheduleError: [f] " in text


WRONG = {
    "schedules alone": (["--metal-emulator-schedules", "2"], "--metal-emulator-schedules needs --metal-emulator"),
    "no schedule": (
        ["--metal-emulator", "--metal-emulator-schedules", "0"],
        "--metal-emulator-schedules must be at least 1 but got 0",
    ),
    "no number": (["--metal-emulator", "--metal-emulator-schedules", "two"], "invalid int value: 'two'"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options(project, options, message):
    status, text = run(project, *options)
    assert status == 4
    assert message in text


TESTS_OF_TWO_PROCESSES = """\
import os
import time

import a_library
import pytest


@pytest.mark.parametrize("number", range(4))
def test_call(number):
    assert a_library.call() == 1
    # So that neither process is through before the other begins.
    time.sleep(0.3)


def test_in_one():
    assert a_library.call() == 1


def test_nothing_in_the_other():
    time.sleep(0.3)


def test_crash():
    os._exit(3)
"""


@pytest.fixture
def two_processes(project):
    """Runs some of the tests in two processes of pytest-xdist."""
    (project / "test_it.py").write_text(TESTS_OF_TWO_PROCESSES)

    def call(chosen, *options):
        return run(project, "--metal-emulator", "-n", "2", "-v", "-k", chosen, *options)

    return call


def test_two_processes_add_their_launches(two_processes):
    status, text = two_processes("call")
    assert status == 0, text
    assert "4 passed" in text
    assert "[gw0]" in text
    assert "[gw1]" in text
    assert "\n4 launches, 0 warnings in 2 processes\n" in text


def test_a_process_without_a_launch_beside_one_with_some(two_processes):
    status, text = two_processes("test_in_one or nothing_in_the_other")
    assert status == 0, text
    assert "2 passed" in text
    assert "\n1 launches, 0 warnings in 2 processes\n" in text


def test_two_processes_without_a_launch_fail(two_processes):
    status, text = two_processes("nothing")
    assert status == 1
    assert "1 passed" in text
    assert "\n0 launches, 0 warnings in 2 processes\n" in text
    assert "FAILED: no kernel ran" in text


def test_a_process_that_ends_early_is_named(two_processes):
    status, text = two_processes("crash or test_in_one", "--max-worker-restart", "0")
    assert status == 1
    assert "\n1 launches, 0 warnings in 1 processes; 1 more ended before they could tell\n" in text
    assert "FAILED: no kernel ran" not in text


def test_zero_processes_is_this_one(project):
    status, text = run(project, "--metal-emulator", "-n", "0")
    assert status == 0
    assert "\n2 launches, 0 warnings\n" in text


def test_help_names_the_options(project):
    status, text = run(project, "--help")
    assert status == 0
    assert "metal emulator:" in text
    assert "--metal-emulator-schedules" in text
