"""No kernel takes the process down: signals, budgets, division; and nothing of that stays behind after a launch."""

import ctypes
import faulthandler
import re
import signal
import subprocess
import sys
import threading

from forge_mlx.metal.emulator.errors import (
    BoundsError,
    DivisionError,
    MetalError,
    StackError,
    StepBudgetError,
)
import numpy as np
import pytest
from runtime_launch import ALL, result, start

X = np.arange(64, dtype=np.float32)
INDEX = "uint i = thread_position_in_threadgroup.x;\n"
BOTH_WAYS = pytest.mark.parametrize("checks", [ALL - {"language"}, frozenset()], ids=["checked", "unchecked"])
RECURSION = """
__attribute__((noinline)) float down(uint depth, const device float* x) {
    volatile float a[16];
    for (uint k = 0; k < 16; k++) a[k] = x[k];
    float below = depth == 0xffffffffu ? 0.0f : down(depth + 1, x);
    return below + a[depth % 16];
}
"""


def handlers() -> list[int | None]:
    """The functions that the C library calls for the signals that the runtime handles."""
    found = []
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP):
        # A struct sigaction, which begins with the function and is shorter than this everywhere.
        action = (ctypes.c_void_p * 32)()
        assert ctypes.CDLL(None).sigaction(int(number), None, action) == 0
        found.append(action[0])
    return found


@BOTH_WAYS
def test_a_null_pointer(checks: frozenset[str]):
    with pytest.raises(BoundsError) as info:
        start(INDEX + "out[i] =\n*(const device float*)0x10ul;", checks=checks)
    assert info.value.locations[0].line == 3
    assert "0x10" in str(info.value)


def test_memory_that_belongs_to_the_process():
    with pytest.raises(BoundsError, match="no buffer and no array"):
        start(INDEX + f"out[i] = *(const device float*){X.ctypes.data}ul;")


@BOTH_WAYS
def test_endless_recursion(checks: frozenset[str]):
    with pytest.raises(StackError) as info:
        start(INDEX + "out[i] = down(i, x);", {"x": X}, header=RECURSION, checks=checks)
    assert str(info.value.locations[0]).startswith("k header:")
    assert [thread.index for thread in info.value.threads] == [0]


@BOTH_WAYS
@pytest.mark.parametrize("elements", [70_000, 100_000, 2_000_000])
def test_a_private_array_larger_than_the_stack(elements: int, checks: frozenset[str]):
    # The second would lie in the stack of thread 0, which waits; the third beyond all stacks.
    header = f"""
    __attribute__((noinline)) float big(const device float* x) {{
        volatile float a[{elements}];
        for (uint k = 0; k < {elements}; k += 1000) a[k] = x[k % 64];
        return a[int(x[5])];
    }}
    """
    body = INDEX + "float v = i == 1 ? big(x) : 1.0f;\nout[i] = simd_sum(v);"
    with pytest.raises(StackError) as info:
        start(body, {"x": X}, header=header, checks=checks)
    assert [thread.index for thread in info.value.threads] == [1]


def test_more_private_memory_by_the_setting():
    body = "float a[100000];\nfor (uint k = 0; k < 100000; k++) a[k] = x[k % 64] + k;\nout[0] = a[int(x[5]) * 19999];"
    outputs = {"out": np.zeros(1, np.float32)}
    with pytest.raises(StackError):
        start(body, {"x": X}, outputs, grid=1)
    assert result(start(body, {"x": X}, outputs, grid=1, stack_bytes=500_000))[0] == X[99995 % 64] + 99995


@BOTH_WAYS
@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("7 / a", "7 is divided by 0"),
        ("7 % a", "7 is divided by 0"),
        ("(-2147483647 - 1 + a) / (a - 1)", "least integer"),
    ],
)
def test_integer_division(expression: str, says: str, checks: frozenset[str]):
    with pytest.raises(DivisionError, match=says) as info:
        start(INDEX + f"int a = int(x[0]);\nout[i] =\n{expression};", {"x": X}, checks=checks)
    assert info.value.locations[0].line == 4


@BOTH_WAYS
def test_division_of_unsigned_and_long(checks: frozenset[str]):
    for kind in ("uint", "ulong", "long", "ushort", "uchar"):
        with pytest.raises(DivisionError, match="by 0"):
            start(INDEX + f"{kind} a = {kind}(x[0]);\nout[i] = {kind}(9) / a;", {"x": X}, checks=checks)


@BOTH_WAYS
def test_an_endless_loop(checks: frozenset[str]):
    body = INDEX + "uint n = i;\nwhile (n != 1234567) n = n * 2 + 4;\nout[i] = n;"
    with pytest.raises(StepBudgetError, match="20000 steps") as info:
        start(body, max_steps=20_000, checks=checks)
    assert info.value.locations[0].line == 3


def test_the_budget_is_for_each_thread_and_launch():
    body = INDEX + "for (uint k = 0; k < 300; k++) { threadgroup_barrier(mem_flags::mem_none); }\nout[i] = 0.0f;"
    steps = start(body).counts.steps // 64
    assert 300 <= steps < 1000
    start(body, max_steps=steps + 1, schedules=3)
    with pytest.raises(StepBudgetError):
        start(body, max_steps=steps // 2)


def test_code_that_cannot_be_reached():
    with pytest.raises(MetalError, match="unreachable"):
        start(INDEX + "__builtin_trap();\nout[i] = 0.0f;")


def test_a_launch_after_a_fault_is_as_good_as_new():
    for _ in range(3):
        with pytest.raises(StackError):
            start(INDEX + "out[i] = down(i, x);", {"x": X}, header=RECURSION, checks=frozenset())
        np.testing.assert_array_equal(result(start(INDEX + "out[i] = simd_sum(x[i]);", {"x": X}, grid=32)), [496] * 32)


def test_signal_handlers_are_put_back():
    assert faulthandler.is_enabled()
    before = handlers()
    start(INDEX + "out[i] = 0.0f;")
    assert handlers() == before
    with pytest.raises(BoundsError):
        start(INDEX + "out[i] = *(const device float*)0x10ul;", checks=frozenset())
    assert handlers() == before


FOREIGN = """
import ctypes, faulthandler, sys, threading, time
sys.path[:0] = {path!r}
import numpy as np
faulthandler.enable()
from runtime_launch import start
def crash():
    time.sleep(0.1)
    ctypes.string_at(8)
body = "uint n = 1; for (uint k = 0; k < rounds[0]; k++) n = n * 5 + (n >> 3); out[0] = n % 2;"
for rounds in (1, 2**31):
    if rounds > 1:
        threading.Thread(target=crash).start()
    start(body, {{"rounds": np.array([rounds])}}, {{"out": np.zeros(1, np.float32)}}, grid=1, max_steps=10**12)
"""


def test_a_fault_of_another_thread_is_passed_on():
    # To faulthandler, which prints and dies: the emulator must neither swallow nor misattribute it.
    path = [folder for folder in sys.path if folder]
    done = subprocess.run([sys.executable, "-c", FOREIGN.format(path=path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert re.search(r"Current thread .*\n.*in string_at\n.*in crash\n", done.stderr), done.stderr
    # The launch was running.
    assert "in once" in done.stderr


SENT = """
import signal, sys, threading, time
sys.path[:0] = {path!r}
import numpy as np
from runtime_launch import result, start
seen = []
signal.signal(signal.SIGSEGV, lambda number, frame: seen.append(number))
running = threading.get_ident()
def send():
    time.sleep(0.05)
    signal.pthread_kill({receiver}, signal.SIGSEGV)
body = "uint n = 1; for (uint k = 0; k < rounds[0]; k++) n = n * 5 + (n >> 3); out[0] = n % 2;"
for rounds in (1, 60_000_000):
    begin = time.monotonic()
    if rounds > 1:
        threading.Thread(target=send).start()
    start(body, {{"rounds": np.array([rounds])}}, {{"out": np.zeros(1, np.float32)}}, grid=1, max_steps=10**12)
print(seen, time.monotonic() - begin > 0.05)
"""


@pytest.mark.parametrize("receiver", ["running", "threading.get_ident()"], ids=["this thread", "another thread"])
def test_a_signal_that_is_no_fault_of_the_kernel_is_passed_on(receiver: str):
    path = [folder for folder in sys.path if folder]
    text = SENT.format(path=path, receiver=receiver)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"[{int(signal.SIGSEGV)}] True\n", done.stderr


def test_launches_from_several_threads_wait_for_each_other():
    wrong: list[object] = []

    def work(value: float) -> None:
        for _ in range(20):
            body = (
                INDEX
                + "threadgroup float a[64];\na[i] = x[i];\n"
                + "threadgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = a[63 - i];"
            )
            got = result(start(body, {"x": X + value}))
            if not np.array_equal(got, X[::-1] + value):
                wrong.append((value, got))

    threads = [threading.Thread(target=work, args=(value,)) for value in (0.0, 100.0, 1000.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


INTERRUPTED = """
import os, signal, sys, threading, time
sys.path[:0] = {path!r}
import numpy as np
from runtime_launch import start
body = "float s = 0.0f; for (uint k = 0; k < 20000u; k++) s += x[k % 64]; out[thread_position_in_grid.x] = s;"
x, outputs = np.zeros(64, np.float32), {{"out": np.zeros(1 << 20, np.float32)}}
start(body, {{"x": x}}, {{"out": np.zeros(64, np.float32)}}, grid=64)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    start(body, {{"x": x}}, outputs, grid=1 << 20, threadgroup=1024)
except KeyboardInterrupt:
    start(body, {{"x": x}}, {{"out": np.zeros(64, np.float32)}}, grid=64)
    print("interrupted", time.monotonic() - begin < 10)
"""


def test_control_c():
    path = [folder for folder in sys.path if folder]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(path=path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "interrupted True\n", done.stderr
