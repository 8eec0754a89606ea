"""Private arrays that a pointer leaves, and kernels that overwrite their own stack: a finding, and Python lives on."""

from pathlib import Path
import subprocess
import sys

from forge_mlx.metal.emulator.errors import BoundsError
import numpy as np
import pytest
from runtime_launch import ALL, result, start

X = np.arange(64, dtype=np.float32)
INDEX = "uint i = thread_position_in_threadgroup.x;\n"
BOTH_WAYS = pytest.mark.parametrize("checks", [ALL - {"language"}, frozenset()], ids=["checked", "unchecked"])

FILL = """
inline void fill(thread float* p, int n, float v) {
    for (int k = 0; k < n; k++) p[k] = v + k;
}
"""
FILL_FAR = FILL.replace("inline", "__attribute__((noinline))")
# Of the words p[from] and on: what a thread's own stack holds above an array of four.
SMASH = """
__attribute__((noinline)) void smash(thread ulong* p, int from, int to, ulong v) {
    for (int k = from; k < to; k++) p[k] = v;
}
__attribute__((noinline)) float victim(int from, int to, ulong v) {
    ulong a[4] = {1, 2, 3, 4};
    smash(a, from, to, v);
    return float(a[int(v) & 3]);
}
"""


@BOTH_WAYS
def test_an_access_through_a_pointer_that_the_compiler_follows(checks: frozenset[str]):
    body = INDEX + "float a[4];\nfill(a, int(x[8]), x[i]);\nout[i] = a[int(x[i]) % 4];"
    with pytest.raises(BoundsError, match="a pointer leaves its array") as info:
        start(body, {"x": X}, header=FILL, checks=checks)
    assert str(info.value.locations[0]) == "k header:3"
    assert info.value.index is None
    expected = start(body.replace("a[4]", "a[8]"), {"x": X}, header=FILL, checks=checks)
    np.testing.assert_array_equal(result(expected), X + X % 4)


@BOTH_WAYS
def test_a_read_through_a_pointer(checks: frozenset[str]):
    body = INDEX + "float a[4] = {1.0f, 2.0f, 3.0f, 4.0f};\nthread float* p = a;\nout[i] =\np[int(x[i])];"
    with pytest.raises(BoundsError, match="a pointer leaves its array") as info:
        start(body, {"x": X}, checks=checks)
    assert [thread.index for thread in info.value.threads] == [4]
    assert info.value.locations[0].line == 5


@BOTH_WAYS
def test_a_table_through_a_pointer(checks: frozenset[str]):
    header = "constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};\n"
    header += "inline float at(constant float* t, uint i) { return t[i]; }"
    np.testing.assert_array_equal(result(start(INDEX + "out[i] = at(table, i);", grid=4, header=header)), [1, 2, 3, 4])
    with pytest.raises(BoundsError, match="constant of the program"):
        start(INDEX + "out[i] = at(table, i);", grid=5, header=header, checks=checks)


@BOTH_WAYS
@pytest.mark.parametrize("count", [5, 6, 8])
def test_a_write_in_a_function_that_stays_a_call(count: int, checks: frozenset[str]):
    # Found when the function with the array returns.
    body = INDEX + "float a[4];\nfill(a, int(x[{}]), x[i]);\nout[i] = a[int(x[i]) % 4];"
    with pytest.raises(BoundsError, match="beside a private array is overwritten") as info:
        start(body.format(count), {"x": X}, header=FILL_FAR, checks=checks)
    assert [thread.index for thread in info.value.threads] == [0]
    np.testing.assert_array_equal(result(start(body.format(4), {"x": X}, header=FILL_FAR, checks=checks)), X + X % 4)


# The frame of `inner` begins where its saved frame pointer is kept; the words above p are the caller's.
FRAMES = """
__attribute__((noinline)) float inner(ulong v, float f) {
    thread ulong* saved = (thread ulong*)ulong(__builtin_frame_address(0));
    saved[0] = v == 1 ? ulong(saved) : v;
    return simd_sum(f);
}
"""


@BOTH_WAYS
@pytest.mark.parametrize("saved", [1, 8, 12, 1 << 62], ids=["itself", "low", "odd", "high"])
def test_a_chain_of_frames_that_does_not_end(saved: int, checks: frozenset[str]):
    body = INDEX + "out[i] =\ninner(ulong(n[i]), x[i]) + 1.0f;"
    inputs = {"x": X, "n": np.full(64, saved, np.int64)}
    with pytest.raises(BoundsError, match="beside a private array is overwritten") as info:
        start(body, inputs, header=FRAMES, checks=checks)
    assert str(info.value.locations[0]) == "k header:5"


@BOTH_WAYS
def test_a_return_address_that_is_gone(checks: frozenset[str]):
    header = FRAMES.replace("saved[0] = v == 1 ? ulong(saved) : v;", "saved[1] = v;")
    with pytest.raises(BoundsError, match="beside a private array is overwritten"):
        start(INDEX + "out[i] = inner(7ul, x[i]);", {"x": X}, header=header, checks=checks)


@BOTH_WAYS
def test_what_a_simdgroup_function_is_given_is_not_on_the_stack(checks: frozenset[str]):
    header = """
    __attribute__((noinline)) uint give(ulong mine, thread float* all) {
        return emu_exchange(EMU_SHUFFLE, (const thread void*)mine, 4, all);
    }
    """
    body = INDEX + "float all[32];\nout[i] = give(n[0], all) + all[int(x[1])];"
    with pytest.raises(BoundsError, match="beside a private array is overwritten"):
        start(body, {"x": X, "n": np.full(1, 16, np.int64)}, header=header, checks=checks)


CORRUPT = """
import sys
sys.path[:0] = {path!r}
import numpy as np
from runtime_launch import ALL, start
header = '''
__attribute__((noinline)) void put(thread ulong* p, int k, ulong v, int way) {{
    p[k] = way == 0 ? v : way == 1 ? ulong(p + int(v)) : p[k] + v;
}}
__attribute__((noinline)) float victim(int k, ulong v, int way) {{
    ulong a[4] = {{1, 2, 3, 4}};
    put(a, k, v, way);
    return {last};
}}
'''
body = "uint i = thread_position_in_threadgroup.x;\\nout[i] = simd_sum(victim(n[0], ulong(n[1]), n[2]));"
values = [(0, 0), (0, -1), (0, 0x1234560000000000), (1, 0), (1, -3), (1, 64), (2, 1), (2, 8), (2, 64), (2, -16)]
ends = {{}}
for checks in (ALL - {{"language"}}, frozenset()):
    for word in [*range(-16, 0), *range(4, 24)]:
        for way, value in values:
            n = np.array([word, value, way])
            try:
                start(body, {{"n": n}}, header=header, checks=checks, max_steps=10**6)
            except Exception as error:
                ends[type(error).__module__] = ends.get(type(error).__module__, 0) + 1
print(ends)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "last",
    ["float(a[int(v) & 3])", "simd_sum(float(a[0]))", "(threadgroup_barrier(mem_flags::mem_none), float(a[1]))"],
    ids=["returns", "simdgroup function", "barrier"],
)
def test_python_survives_each_word_of_a_stack_overwritten(last: str):
    # Saved registers, frame pointers and return addresses, with zeros, ones, addresses of the stack and of code.
    text = CORRUPT.format(path=[folder for folder in sys.path if folder], last=last)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (module,), (count,) = zip(*eval(done.stdout).items(), strict=True)
    assert Path(module).suffix == ".errors"
    assert count > 100


@BOTH_WAYS
@pytest.mark.parametrize("words", [(4, 400), (4, 40_000), (-40_000, 0)], ids=["to the top", "up", "down"])
def test_words_far_beyond_a_frame(words: tuple[int, int], checks: frozenset[str]):
    start(INDEX + "out[i] = victim(0, 4, 0ul);", header=SMASH, checks=checks)
    with pytest.raises(Exception, match=r"private|no buffer") as info:
        start(INDEX + f"out[i] = victim({words[0]}, {words[1]}, 0ul);", header=SMASH, checks=checks)
    assert str(info.value.locations[0]) == "k header:3"
