"""The real headers and runtime, compiled and linked for the machines on which nothing of this has run."""

from forge_mlx.metal import signature
from forge_mlx.metal.emulator import toolchain
from forge_mlx.metal.emulator.translate import translate
import mlx.core as mx
import pytest

BODY = """
    uint i = thread_position_in_grid.x;
    threadgroup float4 shared[32];
    shared[i] = float4(x[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bfloat16_t b = bfloat16_t(shared[31 - i].x);
    y[i] = simd_sum(float(b)) + float(half(x[i]) * half(2.0f));
"""


@pytest.mark.slow
@pytest.mark.parametrize("machine", [("linux", "aarch64"), ("darwin", "arm64")], ids=" ".join)
def test_kernel_compiles_and_links(machine, monkeypatch):
    monkeypatch.setattr(toolchain, "host_target", lambda: toolchain._TARGETS[machine])
    generated = signature.generate(
        "elsewhere",
        inputs=[signature.Input("x", mx.float32, 32, 1)],
        outputs=[signature.Output("y", mx.float32)],
        source=BODY,
    )
    library = toolchain.compile_source(translate(generated), instrument=True, preamble=True)
    image = library.read_bytes()
    names = ("emu_open", "emu_start", "emu_run", "emu_finding", "emu_unwritten", "emu_map_stacks", "emu_sizes")
    assert [name for name in names if name.encode() not in image] == []
