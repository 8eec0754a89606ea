// Atomic operations. One thread runs at a time, so each is a plain load and store; what matters is what the shadow learns of it.
#include <string.h>

#include "access.h"

static uint32_t size_of(uint32_t type) { return type == EMU_U64 || type == EMU_I64 ? 8 : 4; }

// The checks of an atomic access, as access_cell makes them for plain ones.
static void check_cell(struct emu_region* region, struct cell* cell, uintptr_t address, uint32_t size, int reads, int writes,
                       uintptr_t pc) {
  uint32_t device = region->device;
  uint32_t mark = cell->mark;
  if ((mark ^ region->generation) >= GENERATION_STEP) mark = region->generation;
  if (reads && !(mark & MARK_WRITTEN) && region->undefined && (emu_now.checks & CHECK_UNINITIALISED))
    emu_stop_in_region(FINDING_UNINITIALISED, region, address, size, ACCESS_ATOMIC, pc);
  uint32_t bits = (reads ? MARK_READ : 0) | (writes ? MARK_WRITTEN : 0);
  for (int i = 0; i < 2; i++)
    if (bits & ~mark & (1u << i)) region->distinct[i] += 1ull << region->granule_shift;
  cell->mark = mark | bits;
  if (unordered(&cell->writer, device)) emu_conflict(region, address, size, &cell->writer, ACCESS_WRITE, ACCESS_ATOMIC, pc);
  for (int i = 0; i < 2 && writes; i++)
    if (unordered(&cell->reader[i], device)) emu_conflict(region, address, size, &cell->reader[i], ACCESS_READ, ACCESS_ATOMIC, pc);
  emu_keep_user(cell->atomic, record_now(device, writes ? WHO_WROTE : 0, pc), device);
}

static void check(uintptr_t address, uint32_t size, uint32_t operation, uintptr_t pc) {
  int reads = operation != EMU_STORE, writes = operation != EMU_LOAD;
  uintptr_t in_arena = address - emu_now.arena_low;
  struct emu_region* region = in_arena < emu_now.arena_bytes ? emu_now.blocks[in_arena >> EMU_BLOCK_SHIFT] : NULL;
  uintptr_t at = region ? address - region->base : 0;
  if (!region || at >= region->bytes || region->bytes - at < size) {
    emu_access_outside(address, size, ACCESS_ATOMIC, pc);
    return;
  }
  if (address & (size - 1)) emu_misaligned(region, address, size, ACCESS_ATOMIC, pc);
  if (writes && !region->writable) emu_read_only(region, address, size, pc);
  region->atomics++;
  uint32_t log2_size = size == 8 ? 3 : 2;
  if (reads) region->accesses[0][log2_size]++;
  if (writes) region->accesses[1][log2_size]++;
  if (!region->cells) {
    access_granules(region, at, size, 0, pc);
    return;
  }
  uintptr_t unit = (uintptr_t)1 << region->granule_shift;
  if ((at | size) & (unit - 1)) {
    emu_refine(region);
    unit = 1;
  }
  for (uintptr_t i = at >> region->granule_shift, end = (at + size) >> region->granule_shift; i < end; i++)
    check_cell(region, &region->cells[i], region->base + i * unit, (uint32_t)unit, reads, writes, pc);
}

#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define MOST(a, b) ((a) > (b) ? (a) : (b))

// The value after an operation on integers of 64 bits; narrower ones are extended before and cut after it.
static uint64_t integer_after(uint32_t operation, uint64_t old, uint64_t operand, int is_signed) {
  switch (operation) {
    case EMU_ADD: return old + operand;
    case EMU_SUB: return old - operand;
    case EMU_AND: return old & operand;
    case EMU_OR: return old | operand;
    case EMU_XOR: return old ^ operand;
    case EMU_MIN: return is_signed ? (uint64_t)LEAST((int64_t)old, (int64_t)operand) : LEAST(old, operand);
    case EMU_MAX: return is_signed ? (uint64_t)MOST((int64_t)old, (int64_t)operand) : MOST(old, operand);
    default: return operand;
  }
}

static float float_after(uint32_t operation, float old, float operand) {
  switch (operation) {
    case EMU_ADD: return old + operand;
    case EMU_SUB: return old - operand;
    case EMU_MIN: return __builtin_fminf(old, operand);
    case EMU_MAX: return __builtin_fmaxf(old, operand);
    default: return operand;
  }
}

static uint64_t extend(const void* bytes, uint32_t type) {
  if (type == EMU_I32) {
    int32_t value;
    memcpy(&value, bytes, 4);
    return (uint64_t)(int64_t)value;
  }
  uint64_t value = 0;
  memcpy(&value, bytes, size_of(type));
  return value;
}

emu_uint emu_atomic(void* address, emu_uint type, emu_uint operation, const void* operand, const void* expected, void* old) {
  uint32_t size = size_of(type);
  check((uintptr_t)address, size, operation, EMU_CALLER);
  // In this order: `old` and `expected` may be the same variable.
  unsigned char before[8], wanted[8];
  memcpy(before, address, size);
  if (operation == EMU_COMPARE_EXCHANGE) memcpy(wanted, expected, size);
  if (operation != EMU_STORE && old) memcpy(old, before, size);
  if (operation == EMU_LOAD) return 0;
  if (operation == EMU_COMPARE_EXCHANGE && memcmp(before, wanted, size)) return 0;
  if (type == EMU_F32) {
    float was, with;
    memcpy(&was, before, 4);
    memcpy(&with, operand, 4);
    float after = float_after(operation, was, with);
    memcpy(address, &after, 4);
  } else {
    uint64_t after = integer_after(operation, extend(before, type), extend(operand, type), type == EMU_I32 || type == EMU_I64);
    memcpy(address, &after, size);
  }
  return 1;
}
