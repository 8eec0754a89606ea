"""A few lines in the place of the Metal headers and of the runtime, so that the toolchain is tested by itself."""

import ctypes
from pathlib import Path
from typing import Any

from forge_mlx.metal.emulator import toolchain
import pytest

PRELUDE = """
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
typedef unsigned int uint;
typedef __bf16 bfloat;
extern "C" float expf(float);
"""

# Counts what the sanitizers call, and keeps the return addresses of the last access, innermost first.
RUNTIME = """
#include <stdint.h>
#define EXPORT __attribute__((visibility("default")))
EXPORT uint64_t reads, writes, steps;
EXPORT uintptr_t chain[3];

static void keep(uintptr_t first, uintptr_t const* frame) {
  chain[0] = first;
  for (int i = 1; i < 3; i++) {
    chain[i] = frame[1];
    frame = (uintptr_t const*)frame[0];
  }
}
#define KEEP keep((uintptr_t)__builtin_return_address(0), *(uintptr_t* const*)__builtin_frame_address(0))
void __tsan_read4(void* address) { reads++; KEEP; }
void __tsan_write4(void* address) { writes++; KEEP; }
void __tsan_memset(void* to, int value, uintptr_t size) { writes++; }
void __tsan_init(void) {}
void __sanitizer_cov_trace_pc(void) { steps++; }
void __ubsan_handle_out_of_bounds_abort(void* where, uintptr_t index) { __builtin_trap(); }
void __ubsan_handle_divrem_overflow_abort(void* where, uintptr_t a, uintptr_t b) { __builtin_trap(); }
void __ubsan_handle_local_out_of_bounds_abort(void) { __builtin_trap(); }
uintptr_t __stack_chk_guard = 7;
void __stack_chk_fail(void) { __builtin_trap(); }
EXPORT float expf(float x) { return 42.0f; }
"""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let the toolchain use tiny headers, a tiny runtime and an empty cache, all in a folder; returns the cache."""
    for name, file, text in (("_HEADERS", "msl/prelude.h", PRELUDE), ("_RUNTIME", "runtime/tiny.c", RUNTIME)):
        path = folder / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        monkeypatch.setattr(toolchain, name, path.parent)
    monkeypatch.setenv("FORGE_MLX_CACHE", str(folder / "cache"))
    return folder / "cache" / "emulator"


def load(text: str, *, instrument: bool = False, **options: Any) -> ctypes.CDLL:
    """Compile C++ for OpenCL and load it."""
    return ctypes.CDLL(str(toolchain.compile_source(text, instrument=instrument, preamble=False, **options)))


def counter(library: ctypes.CDLL, name: str) -> int:
    """A counter of the tiny runtime."""
    return ctypes.c_uint64.in_dll(library, name).value
