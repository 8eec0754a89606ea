"""The emulator's tests notice when it is broken: a copy of it with one line changed, and the test that must fail.

Each copy is run in a process of its own, from a folder that holds the package and the tests.
"""

from dataclasses import dataclass
import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)
SOURCES = Path("forge_mlx/metal/emulator")


@dataclass(frozen=True)
class Mutation:
    """One change to the emulator.

    Attributes:
        name: the test's id.
        file: of the emulator.
        old: what stands there once.
        new: what takes its place.
        tests: the file of tests that must notice.
        select: the names of the tests that must notice, as pytest's -k takes them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str


MUTATIONS = [
    Mutation(
        "a barrier lets threads pass",
        "runtime/together.c",
        "  wait_here(scope ? FIBRE_SIMDGROUP_BARRIER : FIBRE_THREADGROUP_BARRIER, flags, "
        "(uintptr_t)__builtin_frame_address(0));\n",
        "",
        "test_bug_patterns.py",
        "test_corrected_kernel_passes and loop",
    ),
    Mutation(
        "a barrier does not move the race clock",
        "runtime/together.c",
        "emu_now.epoch[0] += (flags & EMU_MEM_THREADGROUP) != 0;",
        "",
        "test_bug_patterns.py",
        "test_corrected_kernel_passes and overwritten",
    ),
    Mutation(
        "a barrier with mem_none moves the race clock",
        "runtime/together.c",
        "emu_now.epoch[0] += (flags & EMU_MEM_THREADGROUP) != 0;",
        "emu_now.epoch[0] += 1;",
        "test_bug_patterns.py",
        "test_bug_is_found and mem_none",
    ),
    Mutation(
        "a barrier for threadgroup memory moves the clock of device memory",
        "runtime/together.c",
        "emu_now.epoch[1] += (flags & EMU_MEM_DEVICE) != 0;",
        "emu_now.epoch[1] += 1;",
        "test_bug_patterns.py",
        "test_bug_is_found and guards and device",
    ),
    Mutation(
        "threads of one epoch never conflict",
        "runtime/access.h",
        "return (record->who ^ emu_now.who[device]) & WHO_THREAD;",
        "return 0;",
        "test_bug_patterns.py",
        "test_bug_is_found and overwritten",
    ),
    Mutation(
        "threadgroups never conflict",
        "runtime/access.h",
        "return record->epoch - 1 < emu_now.foreign[device] - 1;",
        "return 0;",
        "test_bug_patterns.py",
        "test_bug_is_found and threadgroups and add",
    ),
    Mutation(
        "matrices lie in another order of lanes",
        "msl/matrix.h",
        "return (lane >> 2 & 4) + (lane >> 1 & 3);",
        "return (lane >> 2 & 4) + (3 - (lane >> 1 & 3));",
        "test_numbers.py",
        "apples_lane_order",
    ),
    Mutation(
        "a float4 of a matrix product comes from another lane",
        "msl/matrix.h",
        "return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1;",
        "return (row & 4) << 2 | (column & 4) << 1 | (3 - (row & 3)) << 1 | (column & 2) >> 1;",
        "test_numbers.py",
        "matrix_product",
    ),
    Mutation(
        "float to bfloat cuts the digits off",
        "runtime/numbers.c",
        "return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);",
        "return (uint16_t)(bits >> 16);",
        "test_numbers.py",
        "float_to_bfloat",
    ),
    Mutation(
        "float to bfloat rounds ties up",
        "runtime/numbers.c",
        "return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);",
        "return (uint16_t)((bits + 0x8000) >> 16);",
        "test_numbers.py",
        "float_to_bfloat",
    ),
]


@pytest.fixture
def copy(tmp_path) -> Path:
    """The package and the tests of the emulator."""
    for name in ("forge_mlx", "kernels", "models"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / HERE, tmp_path / HERE, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run_tests(folder: Path, tests: str, select: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder, on the package that lies there and not on the installed one."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        str(HERE / tests),
        "-k",
        select,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_tests_pass_on_an_unchanged_copy(copy):
    for tests in dict.fromkeys(mutation.tests for mutation in MUTATIONS):
        select = " or ".join(f"({mutation.select})" for mutation in MUTATIONS if mutation.tests == tests)
        done = run_tests(copy, tests, select)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [pytest.param(mutation, id=mutation.name) for mutation in MUTATIONS])
def test_broken_emulator_is_noticed(copy, mutation):
    file = copy / SOURCES / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    done = run_tests(copy, mutation.tests, mutation.select)
    # 1: tests ran and some failed. Any other status would say nothing about the emulator.
    assert done.returncode == 1, done.stdout
    assert "headers do not compile" not in done.stdout
    assert "runtime does not compile" not in done.stdout
