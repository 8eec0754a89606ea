"""Vectors in memory that are used by component."""

from forge_mlx.metal.emulator.errors import RaceError, UninitialisedError
from forge_mlx.metal.emulator.vector_memory import split_components
import numpy as np
import pytest
from runtime_launch import result, start

INDEX = "uint i = thread_position_in_threadgroup.x;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
THREADS = np.arange(64, dtype=np.float32)


@pytest.mark.parametrize("vector", ["float2", "float3", "float4", "half2", "half4", "bfloat4", "uchar4", "short2"])
def test_a_component_is_written_and_read(vector: str):
    body = INDEX + f"threadgroup {vector} s[64];\ns[i].x = i;\n" + BARRIER + "out[i] = float(s[63 - i].x);"
    outcome = start(body)
    np.testing.assert_array_equal(result(outcome), 63 - THREADS)
    size = {"f": 4, "h": 2, "b": 2, "u": 1, "s": 2}[vector[0]]
    assert outcome.counts.arrays[0].bytes_written == 64 * size


def test_components_by_an_index_belong_to_different_threads():
    body = INDEX + "threadgroup float4 s[16];\ns[i / 4][i % 4] = i;\n" + BARRIER + "out[i] = s[15 - i / 4][i % 4];"
    outcome = start(body, schedules=3)
    np.testing.assert_array_equal(result(outcome), 4 * (15 - THREADS // 4) + THREADS % 4)
    assert outcome.warnings == ()


def test_a_component_of_an_output():
    body = INDEX + "device float4* o = (device float4*)out;\no[i / 4][i % 4] = i;"
    np.testing.assert_array_equal(result(start(body)), THREADS)
    body = INDEX + "device float4* o = (device float4*)out;\no[i].y = i;"
    outputs = {"out": np.zeros(256, np.float32)}
    with pytest.raises(UninitialisedError, match="192 of 256 elements are never written, the first at index 0"):
        start(body, {}, outputs)


def test_several_components_at_once():
    body = INDEX + "threadgroup float4 s[64];\ns[i].xz = float2(i, 1.0f);\ns[i].wy = float2(2.0f, 3.0f);\n" + BARRIER
    body += "float4 v = s[63 - i];\nout[i] = v.x + 100.0f * v.y + 1000.0f * v.z + 10000.0f * v.w;"
    outcome = start(body)
    np.testing.assert_array_equal(result(outcome), 63 - THREADS + 21300)
    assert outcome.counts.arrays[0].bytes_written == 64 * 16


def test_a_component_is_updated():
    body = INDEX + "threadgroup int2 s[64];\ns[i] = int2(i, 7);\ns[i].x += 5;\ns[i].y++;\n" + BARRIER
    outcome = start(body + "out[i] = s[63 - i].x + 100 * s[63 - i].y;")
    np.testing.assert_array_equal(result(outcome), 63 - THREADS + 805)


def test_components_of_a_private_vector():
    body = INDEX + "float4 v[2];\nfor (int k = 0; k < 4; k++) { v[i % 2][k] = i + k; v[1 - i % 2].y = 3.0f; }\n"
    np.testing.assert_array_equal(
        result(start(body + "out[i] = v[i % 2].x + v[i % 2].w + v[1 - i % 2].y;")), 2 * THREADS + 6
    )


def test_a_component_that_others_write_is_a_race():
    for component in ("x", "z"):
        body = INDEX + f"threadgroup float3 s[64];\ns[i].{component} = i;\nout[i] = s[63 - i].{component};"
        with pytest.raises(RaceError) as info:
            start(body)
        assert info.value.buffer == "s"


def test_a_vector_of_which_nothing_is_written():
    body = INDEX + "threadgroup float2 s[64];\nif (i > 3) s[i].x = i;\n" + BARRIER + "out[i] =\ns[63 - i].x;"
    with pytest.raises(UninitialisedError) as info:
        start(body)
    assert (info.value.buffer, info.value.index, info.value.locations[0].line) == ("s", 63 - 60, 6)


def test_elements_read_together_all_need_a_value():
    body = INDEX + "threadgroup float a[64];\nif (i % 4 != 3) a[i] = i;\n" + BARRIER
    body += "float4 v = ((threadgroup float4*)a)[i / 4];\nout[i] = v.x + v.w;"
    with pytest.raises(UninitialisedError) as info:
        start(body)
    assert (info.value.buffer, info.value.index) == ("a", 3)


@pytest.mark.parametrize(
    "members", ["long a; int b;", "int a; char b;", "char a; float4 b;", "half a; half b; float c;"]
)
def test_the_padding_of_a_structure(members: str):
    last = members.split()[-1].rstrip(";")
    body = INDEX + f"struct S {{ {members} }};\nthreadgroup S s[64];\nthreadgroup S r[64];\n"
    writes = "".join(f"s[i].{name} = i;\n" for name in "abc" if f" {name};" in members)
    read = f"S t = r[i];\nout[i] = float(t.a) + float4(t.{last}).x;"
    outcome = start(body + writes + BARRIER + "r[i] = s[63 - i];\n" + BARRIER + read)
    np.testing.assert_array_equal(result(outcome), 2 * (63 - THREADS))
    with pytest.raises(UninitialisedError) as info:
        start(body + f"if (i > 3) {{ {writes} }}\n" + BARRIER + "r[i] = s[63 - i];\n" + BARRIER + read)
    assert (info.value.buffer, info.value.index) == ("s", 3)


STORE = """define void @f(ptr %s) {
  %own = alloca <4 x float>, align 16
  %1 = load <4 x float>, ptr %own, align 16
  %2 = insertelement <4 x float> %1, float 1.0, i64 2
  store <4 x float> %2, ptr %own, align 16
  %3 = load <4 x float>, ptr %s, align 16
  %4 = insertelement <4 x float> %3, float 1.0, i64 2
  store <4 x float> %4, ptr @elsewhere, align 16
  %5 = load volatile <4 x float>, ptr %s, align 16
}"""


def test_what_is_not_such_a_store_stays():
    assert split_components(STORE) == STORE
