"""Bounds, values that nobody wrote, alignment, limits."""

from forge_mlx.metal.emulator.errors import AlignmentError, BoundsError, LimitError, MetalError, UninitialisedError
import numpy as np
import pytest
from runtime_launch import ALL, result, start

X = np.arange(64, dtype=np.float32)
INDEX = "uint i = thread_position_in_threadgroup.x;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def refused(error: type[MetalError], body: str, *arguments, **settings) -> MetalError:
    """The exception that a launch raises, which is of exactly this type."""
    with pytest.raises(error) as info:
        start(body, *arguments, **settings)
    assert type(info.value) is error
    return info.value


def lines(error: MetalError) -> list[int]:
    """Lines of the body that an exception names."""
    return [place.line for place in error.locations]


@pytest.mark.parametrize("shift", [1, 100, 16000])
def test_read_past_the_end(shift: int):
    error = refused(BoundsError, INDEX + f"out[i] =\nx[i + {shift}];", {"x": X})
    first = max(64 - shift, 0)
    assert (error.buffer, error.index) == ("x", first + shift)
    assert [thread.index for thread in error.threads] == [first]
    assert lines(error) == [3]
    assert "64 elements of 4 bytes" in str(error)


@pytest.mark.parametrize("shift", [1, 100, 16000])
def test_read_before_the_start(shift: int):
    error = refused(BoundsError, INDEX + f"out[i] = x[int(i) - {shift}];", {"x": X})
    assert (error.buffer, error.index) == ("x", -shift)
    assert f"{4 * shift} bytes before its start" in str(error)


@pytest.mark.parametrize(("write", "index"), [("out[i + 1] = 0.0f;", 64), ("out[int(i) - 1] = 0.0f;", -1)])
def test_write_outside(write: str, index: int):
    error = refused(BoundsError, INDEX + write)
    assert (error.buffer, error.index) == ("out", index)
    assert "writes outside output 'out'" in str(error)


def test_the_last_bytes_of_a_wide_access_count():
    x = np.arange(63, dtype=np.float32)
    body = "out[0] = ((const device float4*)x)[15].x;"
    error = refused(BoundsError, body, {"x": x}, {"out": np.zeros(1, np.float32)}, grid=1)
    assert error.index == 60
    assert "4 bytes past its end" in str(error)


@pytest.mark.parametrize("element", ["uchar", "ushort", "uint", "ulong"])
def test_an_access_that_only_begins_before_the_end(element: str):
    size = {"uchar": 1, "ushort": 2, "uint": 4, "ulong": 8}[element]
    x = np.zeros(40, np.uint8)
    legal = f"out[0] = float(*(const device {element}*)(x + {40 - size}));"
    start(legal, {"x": x}, {"out": np.zeros(1, np.float32)}, grid=1, checks=ALL - {"alignment"})
    wrong = f"out[0] = float(*(const device {element}*)(x + {41 - size}));"
    error = refused(BoundsError, wrong, {"x": x}, {"out": np.zeros(1, np.float32)}, grid=1, checks=ALL - {"alignment"})
    assert error.index == 41 - size


def test_the_nearest_of_two_buffers_is_named():
    two = {"x": X, "y": X}
    assert refused(BoundsError, INDEX + "out[i] = y[int(i) - 1];", two).buffer == "y"
    assert refused(BoundsError, INDEX + "out[i] = x[i + 1] + y[i];", two).buffer == "x"


def test_a_wild_address():
    error = refused(BoundsError, INDEX + "out[i] = *(const device float*)(ulong(i) * 4096ul + 8ul);")
    assert error.buffer is None
    assert "0x8" in str(error)
    error = refused(BoundsError, INDEX + "out[i] = x[i * 0x7fffffffu];", {"x": X})
    assert "no buffer and no array" in str(error)


def test_a_write_to_an_input():
    error = refused(BoundsError, INDEX + "((device float*)x)[i] = 1.0f;\nout[i] = 0.0f;", {"x": X})
    assert (error.buffer, error.index) == ("x", 0)
    assert "read-only" in str(error)


def test_a_threadgroup_array_by_pointer():
    body = INDEX + "threadgroup float a[8];\nthreadgroup float b[8];\nb[i] = 0.0f; a[i] = 0.0f;\n"
    error = refused(BoundsError, body + "threadgroup float* p = b;\nout[i] = p[i + 1];", grid=8)
    assert (error.buffer, error.index) == ("b", 8)
    error = refused(BoundsError, body + "threadgroup float* p = b;\nout[i] = p[int(i) - 1];", grid=8)
    assert (error.buffer, error.index) == ("b", -1)


def test_an_index_of_a_threadgroup_array():
    error = refused(BoundsError, INDEX + "threadgroup float a[8];\na[i] = 0.0f;\nout[i] = a[0];", grid=16)
    assert (error.buffer, error.index) == ("a", 8)
    assert lines(error) == [3]
    # A row of two dimensions is left while the array is not: only the compiler's check sees it.
    error = refused(BoundsError, INDEX + "threadgroup float a[4][8];\na[0][i] = 0.0f;\nout[i] = a[0][0];", grid=16)
    assert error.index == 8
    assert "float[8]" in str(error)


@pytest.mark.parametrize("checks", [ALL, frozenset()])
def test_an_index_of_a_private_array(checks: frozenset[str]):
    body = INDEX + "float a[4] = {1.0f, 2.0f, 3.0f, 4.0f};\nout[i] = a[int(x[i]) - 1];"
    error = refused(BoundsError, body, {"x": X}, checks=checks)
    assert error.index == -1
    assert lines(error) == [3]
    assert "float[4]" in str(error)


def test_the_private_memory_of_another_thread():
    body = """
    threadgroup ulong shared[1];
    uint i = thread_position_in_threadgroup.x;
    float mine[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    if (i == 0) {
        shared[0] = ulong((thread float*)mine);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = *(thread float*)shared[0] + mine[i % 4];
    """
    error = refused(BoundsError, body, grid=4)
    assert "private memory of thread 0" in str(error)
    assert [thread.index for thread in error.threads] == [1]


def test_constants_of_the_program_are_readable():
    header = "constant float table[5] = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f};\n"
    header += "float at(constant float* t, uint i) { return t[i]; }"
    outcome = start(INDEX + "out[i] = at(table, i);", grid=5, header=header)
    np.testing.assert_array_equal(result(outcome), [1, 2, 3, 4, 5])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_constant_buffer(size: int):
    x = np.arange(size, dtype=np.float32)
    error = refused(BoundsError, INDEX + "out[i] = x[i];", {"x": x}, grid=8)
    assert (error.buffer, error.index) == ("x", size)


def test_an_empty_buffer():
    error = refused(BoundsError, INDEX + "out[i] = x[i];", {"x": np.zeros(0, np.float32)})
    assert (error.buffer, error.index) == ("x", 0)


def test_guards_fault_without_hooks():
    # 64 KiB beyond: no memory at all. The line comes from the faulting instruction.
    body = INDEX + "out[i] =\nx[i + 20000];"
    error = refused(BoundsError, body, {"x": X}, checks=frozenset())
    assert (error.buffer, lines(error)) == ("x", [3])


def test_threadgroup_memory_read_before_a_write():
    body = INDEX + "threadgroup float a[64];\nif (i % 2 == 0) a[i] = x[i];\n" + BARRIER + "out[i] =\na[i ^ 1];"
    error = refused(UninitialisedError, body, {"x": X})
    assert (error.buffer, error.index, lines(error)) == ("a", 1, [6])
    outcome = start(body, {"x": X}, checks=ALL - {"uninitialised"})
    assert np.isnan(result(outcome)[::2]).all()


def test_threadgroup_memory_is_new_in_every_group():
    body = INDEX + "threadgroup float a[32];\nif (threadgroup_position_in_grid.x == 0) a[i] = 1.0f;\n" + BARRIER
    body += "out[threadgroup_position_in_grid.x * 32 + i] = a[i];"
    error = refused(UninitialisedError, body, grid=64, threadgroup=32)
    assert error.threads[0].group == (1, 0, 0)
    outcome = start(body, grid=64, threadgroup=32, checks=ALL - {"uninitialised"})
    assert np.isnan(result(outcome)[32:]).all()


def test_a_value_that_is_read_and_then_written_by_the_same_thread():
    body = INDEX + "threadgroup float a[64];\na[i] +=\n1.0f;\nout[i] = a[i];"
    error = refused(UninitialisedError, body)
    assert (error.buffer, error.index) == ("a", 0)


def test_what_follows_from_a_value_that_was_not_there():
    # The poisoned value is used as an index: told is the read.
    body = INDEX + "threadgroup int a[64];\nout[i] = x[a[i]];"
    assert refused(UninitialisedError, body, {"x": X}).buffer == "a"


def test_an_output_that_is_read():
    error = refused(UninitialisedError, INDEX + "out[i] += 1.0f;")
    assert (error.buffer, error.index) == ("out", 0)
    outcome = start(INDEX + "out[i] += 1.0f;", {}, {"out": X}, initialised=["out"])
    np.testing.assert_array_equal(result(outcome), X + 1)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int16, np.int64])
def test_elements_that_are_never_written(dtype: type):
    error = refused(UninitialisedError, INDEX + "if (i != 7 && i < 60) out[i] = 1;", {}, {"out": np.zeros(64, dtype)})
    assert (error.buffer, error.index) == ("out", 7)
    assert "5 of 64 elements" in str(error)


def test_half_an_element_is_not_written():
    body = INDEX + "((device ushort*)out)[i] = 0;\nif (i != 9) ((device ushort*)out)[i + 64] = 0;"
    error = refused(UninitialisedError, body)
    assert error.index == 36
    assert "1 of 64 elements" in str(error)


def test_outputs_are_poisoned():
    outcome = start(INDEX + "if (i > 3) out[i] = 0.0f;", checks=ALL - {"uninitialised"})
    assert np.isnan(result(outcome)[:4]).all()


@pytest.mark.parametrize(("vector", "misalignment"), [("float4", 4), ("float4", 8), ("float2", 4)])
def test_a_vector_at_an_address_of_its_elements(vector: str, misalignment: int):
    body = f"out[0] =\n((const device {vector}*)x)[1].x;"
    outputs = {"out": np.zeros(1, np.float32)}
    error = refused(AlignmentError, body, {"x": X}, outputs, grid=1, misalignment=misalignment)
    assert (error.buffer, lines(error)) == ("x", [2])
    assert f"{misalignment} more than a multiple" in str(error)
    start(body, {"x": X}, outputs, grid=1, misalignment=16)


@pytest.mark.parametrize("checks", [ALL - {"alignment"}, frozenset()], ids=["hooks", "no hooks"])
def test_a_vector_at_an_unaligned_address_without_the_check(checks: frozenset[str]):
    # The processor refuses or runs the instruction that clang chose for it: never the end of the process.
    body = "out[0] = ((const device float4*)x)[1].x;"
    try:
        outcome = start(body, {"x": X}, {"out": np.zeros(1, np.float32)}, grid=1, misalignment=4, checks=checks)
    except AlignmentError as error:
        message = str(error)
    else:
        message = f"vector access gave {result(outcome)[0]}"
    assert message.endswith("gave 4.0") or "refused a vector access" in message


def test_packed_vectors_need_no_alignment():
    body = "packed_float3 p = ((const device packed_float3*)x)[1];\nout[0] = p.x + p.y + p.z;"
    outputs = {"out": np.zeros(1, np.float32)}
    assert result(start(body, {"x": X}, outputs, grid=1, misalignment=4))[0] == 12


def test_a_buffer_is_used_in_other_units_than_its_elements():
    # Bytes of floats: the shadow goes on byte by byte and forgets nothing.
    body = (
        INDEX
        + """
    out[i] = 0.0f;
    threadgroup_barrier(mem_flags::mem_device);
    device uchar* bytes = (device uchar*)out;
    for (uint k = 0; k < 4; k++) {
        bytes[i * 4 + k] = ((const device uchar*)x)[i * 4 + k];
    }
    """
    )
    outcome = start(body, {"x": X})
    np.testing.assert_array_equal(result(outcome), X)
    assert outcome.counts.buffers[0].reads == 256
    assert outcome.counts.buffers[0].distinct_bytes_read == 256
    assert outcome.counts.buffers[1].writes == 64 + 256
    assert outcome.counts.buffers[1].distinct_bytes_written == 256


def test_threadgroup_memory_over_the_limit():
    body = INDEX + "threadgroup float a[8192];\na[i] = 1.0f;\nthreadgroup float b[1];\nb[0] = 1.0f;\nout[i] = a[i];"
    error = refused(LimitError, body, grid=1)
    assert "32772 bytes" in str(error)
    assert "'b'" in str(error)
    assert lines(error) == [4]
    assert result(start(body, grid=1, checks=ALL - {"limits"}))[0] == 1
    start(body.replace("8192", "8188"), grid=1)


def test_threadgroup_memory_over_all_bounds():
    body = "threadgroup float a[8000000];\na[0] = 1.0f;\nout[0] = a[0];"
    error = refused(LimitError, body, grid=1, checks=ALL - {"limits"})
    assert "no room" in str(error)


def test_arrays_are_aligned_for_every_vector():
    body = """
    threadgroup uchar a[3];
    threadgroup half b[5];
    threadgroup float4 c[2];
    a[0] = 1; b[0] = 1.0h; c[0] = 1.0f;
    ulong low = ulong((threadgroup void*)a) | ulong((threadgroup void*)b) | ulong((threadgroup void*)c);
    out[0] = float(low % 16);
    """
    assert result(start(body, grid=1))[0] == 0


def test_a_pointer_into_the_middle_of_its_data():
    # As with negative strides: element 0 lies inside.
    from forge_mlx.metal.emulator.launch import Buffer, launch
    from forge_mlx.metal.emulator.settings import Settings
    from runtime_launch import compiled

    outputs = {"out": np.zeros(64, np.float32)}

    def run(body: str) -> np.ndarray:
        kernel = compiled(body, {"x": X}, outputs, settings=Settings())
        buffers = [
            Buffer("x", X, 4, "float32", misalignment=4, offset=63 * 4),
            Buffer("out", outputs["out"], 4, "float32", writable=True, initialised=False),
        ]
        return result(launch(kernel, buffers, (64, 1, 1), (64, 1, 1), Settings()))

    np.testing.assert_array_equal(run(INDEX + "out[i] = x[-int(i)];"), X[::-1])
    assert (run(INDEX + "out[i] = float(ulong(x) % 256);") == 4).all()
    with pytest.raises(BoundsError) as info:
        run(INDEX + "out[i] = x[-int(i) - 1];")
    assert info.value.index == -64
    with pytest.raises(BoundsError) as info:
        run(INDEX + "out[i] = x[i + 1];")
    assert info.value.index == 1


def test_a_write_to_a_constant_of_the_program():
    # In a function of its own: the compiler drops a write that it sees to be one to a constant.
    header = "constant float table[2] = {1.0f, 2.0f};\n"
    header += "__attribute__((noinline)) void put(device float* p, float v) { *p = v; }"
    error = refused(BoundsError, "put((device float*)ulong(&table[0]), x[0]);\nout[0] = 0.0f;", {"x": X}, header=header)
    assert "thread 0 at k header:2 writes" in str(error)
