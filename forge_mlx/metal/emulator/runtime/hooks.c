// What clang's sanitizers call in an instrumented kernel: -fsanitize=thread before every access, the undefined-behaviour checks where an index or a
// division fails, and the coverage hook at every branch.
#include <string.h>

#include "access.h"

#define HOOK(name, log2_size, write, aligned) \
  void name(void* address) { emu_access((uintptr_t)address, 1u << log2_size, log2_size, write, aligned, EMU_CALLER); }

HOOK(__tsan_read1, 0, 0, 0)
HOOK(__tsan_read2, 1, 0, 1)
HOOK(__tsan_read4, 2, 0, 1)
HOOK(__tsan_read8, 3, 0, 1)
HOOK(__tsan_read16, 4, 0, 1)
HOOK(__tsan_write1, 0, 1, 0)
HOOK(__tsan_write2, 1, 1, 1)
HOOK(__tsan_write4, 2, 1, 1)
HOOK(__tsan_write8, 3, 1, 1)
HOOK(__tsan_write16, 4, 1, 1)
HOOK(__tsan_unaligned_read2, 1, 0, 0)
HOOK(__tsan_unaligned_read4, 2, 0, 0)
HOOK(__tsan_unaligned_read8, 3, 0, 0)
HOOK(__tsan_unaligned_read16, 4, 0, 0)
HOOK(__tsan_unaligned_write2, 1, 1, 0)
HOOK(__tsan_unaligned_write4, 2, 1, 0)
HOOK(__tsan_unaligned_write8, 3, 1, 0)
HOOK(__tsan_unaligned_write16, 4, 1, 0)

void* __tsan_memcpy(void* to, const void* from, uintptr_t size) {
  if (size) emu_access((uintptr_t)from, size, -1, 0, 0, EMU_CALLER);
  if (size) emu_access((uintptr_t)to, size, -1, 1, 0, EMU_CALLER);
  return memcpy(to, from, size);
}

void* __tsan_memmove(void* to, const void* from, uintptr_t size) {
  if (size) emu_access((uintptr_t)from, size, -1, 0, 0, EMU_CALLER);
  if (size) emu_access((uintptr_t)to, size, -1, 1, 0, EMU_CALLER);
  return memmove(to, from, size);
}

void* __tsan_memset(void* to, int value, uintptr_t size) {
  if (size) emu_access((uintptr_t)to, size, -1, 1, 0, EMU_CALLER);
  return memset(to, value, size);
}

void __tsan_init(void) {}

void __sanitizer_cov_trace_pc(void) {
  if (EMU_UNLIKELY(--emu_now.steps_left == 0)) emu_stop_at(FINDING_STEPS, EMU_CALLER, (int64_t)emu_launched->max_steps, 0, NULL);
}

// What the compiler hands to its handlers: the place in the source, then the types.
struct type_descriptor {
  uint16_t kind;
  uint16_t info; // Of an integer: bit 0 whether it is signed, above it log2 of its bits.
  char name[];
};
struct source_location {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct index_data {
  struct source_location location;
  const struct type_descriptor* array;
  const struct type_descriptor* index;
};
struct division_data {
  struct source_location location;
  const struct type_descriptor* type;
};

static int64_t integer(const struct type_descriptor* type, uintptr_t value) {
  uint32_t bits = 1u << (type->info >> 1);
  if (!(type->info & 1) || bits >= 64) return (int64_t)value;
  return (int64_t)(value << (64 - bits)) >> (64 - bits);
}

void __ubsan_handle_out_of_bounds_abort(const struct index_data* data, uintptr_t index) {
  emu_stop_at(FINDING_PRIVATE_INDEX, EMU_CALLER, integer(data->index, index), 0, data->array->name);
}

// -fsanitize=local-bounds: a pointer that the compiler can follow to its array, private or a constant of the program.
void __ubsan_handle_local_out_of_bounds_abort(void) { emu_stop_at(FINDING_PRIVATE_INDEX, EMU_CALLER, OVERRUN_ACCESS, 0, NULL); }

// -fstack-protector-all: every function puts this word between its private arrays and what its caller left, and looks at it when it returns.
uintptr_t __stack_chk_guard = (uintptr_t)0x00c5a3d19be7f42d;

void __stack_chk_fail(void) { emu_stop_at(FINDING_PRIVATE_INDEX, EMU_CALLER, OVERRUN_STACK, 0, NULL); }

void __ubsan_handle_divrem_overflow_abort(const struct division_data* data, uintptr_t left, uintptr_t right) {
  emu_stop_at(FINDING_DIVISION, EMU_CALLER, integer(data->type, left), integer(data->type, right), data->type->name);
}

// One simdgroup_matrix product, told by each of its lanes.
void emu_count_matrix(void) { emu_counted.matrix_lanes++; }
