// <metal_compute>: barriers.
#pragma once

#include "../runtime/abi.h"

// Lives as long as a function of the translated source does.
struct emu_frame {
  emu_ulong before;
  __attribute__((always_inline, nodebug)) emu_frame() : before(emu_enter()) {}
  __attribute__((always_inline, nodebug)) ~emu_frame() { emu_leave(before); }
};

namespace metal {

enum class mem_flags : uint {
  mem_none = EMU_MEM_NONE,
  mem_device = EMU_MEM_DEVICE,
  mem_threadgroup = EMU_MEM_THREADGROUP,
  mem_texture = EMU_MEM_TEXTURE,
  mem_threadgroup_imageblock = EMU_MEM_THREADGROUP_IMAGEBLOCK,
};

EMU_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
EMU_FUNC constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }

EMU_FUNC void threadgroup_barrier(mem_flags flags) { emu_barrier(0, uint(flags)); }
EMU_FUNC void simdgroup_barrier(mem_flags flags) { emu_barrier(1, uint(flags)); }

} // namespace metal
