// The path that every hooked access takes. It is inlined into each hook, where size and direction are constants.
#pragma once

#include "state.h"

// Whether `record` might conflict with an access made now: another thread's, and no barrier of the group since; or another group's.
// Records of the same simdgroup need a second look (emu_conflict).
EMU_INLINE int unordered(const struct record* record, uint32_t device) {
  if (record->epoch == emu_now.epoch[device]) return (record->who ^ emu_now.who[device]) & WHO_THREAD;
  return record->epoch - 1 < emu_now.foreign[device] - 1;
}

EMU_INLINE struct record record_now(uint32_t device, uint32_t extra, uintptr_t pc) {
  return (struct record){emu_now.epoch[device], emu_now.who[device] | extra, (uint32_t)(pc - (uintptr_t)emu_image_low)};
}

EMU_INLINE uint32_t simdgroup_of(const struct record* record) { return (record->who & WHO_THREAD) / EMU_LANES; }
EMU_INLINE int later_step(const struct record* a, const struct record* b) {
  return simdgroup_of(a) == simdgroup_of(b) && a->who / WHO_STEP != b->who / WHO_STEP;
}

// Whether emu_keep_user would leave the two users of a granule as they are: what it comes to for most reads of shared memory.
EMU_INLINE int adds_nothing(const struct record* a, const struct record* b, const struct record* mine) {
  if (a->epoch != mine->epoch) return 0;
  if (a->who == mine->who) return 1;
  if (b->epoch != mine->epoch || later_step(a, mine) || later_step(b, mine)) return 0;
  return simdgroup_of(a) != simdgroup_of(b) || simdgroup_of(a) == simdgroup_of(mine);
}

// A plain access to one granule that lies at `address`, as part of one to `whole_size` bytes from offset `whole` of the region.
EMU_INLINE void access_cell(struct emu_region* region, struct cell* cell, uintptr_t address, uint32_t size, uintptr_t whole,
                            uint64_t whole_size, int write, uintptr_t pc) {
  uint32_t device = region->device;
  uint32_t mark = cell->mark;
  if ((mark ^ region->generation) >= GENERATION_STEP) mark = region->generation;
  uint32_t bit = write ? MARK_WRITTEN : MARK_READ;
  if (!(mark & bit)) region->distinct[write] += 1ull << region->granule_shift;
  cell->mark = mark | bit;
  if (!write && EMU_UNLIKELY(!(mark & MARK_WRITTEN)) && region->undefined && (emu_now.checks & CHECK_UNINITIALISED))
    emu_early_read(region, cell, address, size, whole, whole_size, pc);
  if (EMU_UNLIKELY(unordered(&cell->writer, device))) emu_conflict(region, address, size, &cell->writer, ACCESS_WRITE, write ? ACCESS_WRITE : ACCESS_READ, pc);
  if (EMU_UNLIKELY(region->atomics))
    for (int i = 0; i < 2; i++)
      if ((write || (cell->atomic[i].who & WHO_WROTE)) && unordered(&cell->atomic[i], device))
        emu_conflict(region, address, size, &cell->atomic[i], ACCESS_ATOMIC, write ? ACCESS_WRITE : ACCESS_READ, pc);
  struct record mine = record_now(device, 0, pc);
  if (write) {
    for (int i = 0; i < 2; i++)
      if (EMU_UNLIKELY(unordered(&cell->reader[i], device)))
        emu_conflict(region, address, size, &cell->reader[i], ACCESS_READ, ACCESS_WRITE, pc);
    if (EMU_UNLIKELY(mark & MARK_EARLY)) emu_early_written(region, cell, address);
    cell->writer = mine;
  } else if (adds_nothing(&cell->reader[0], &cell->reader[1], &mine)) {
    return;
  } else {
    emu_keep_user(cell->reader, mine, device);
  }
}

EMU_INLINE void access_granule(struct emu_region* region, uintptr_t index, uintptr_t unit, uintptr_t at, uint64_t size, int write,
                               uintptr_t pc) {
  if (region->cells) {
    access_cell(region, &region->cells[index], region->base + index * unit, (uint32_t)unit, at, size, write, pc);
  } else if (!(region->seen[index] & (1 << write))) {
    region->seen[index] |= 1 << write;
    region->distinct[write] += unit;
  }
}

EMU_INLINE void access_granules(struct emu_region* region, uintptr_t at, uint64_t size, int write, uintptr_t pc) {
  uintptr_t unit = (uintptr_t)1 << region->granule_shift;
  if (EMU_UNLIKELY((at | size) & (unit - 1))) {
    emu_refine(region);
    unit = 1;
  }
  for (uintptr_t i = at >> region->granule_shift, end = (at + size) >> region->granule_shift; i < end; i++)
    access_granule(region, i, unit, at, size, write, pc);
}

EMU_COLD void emu_misaligned(struct emu_region* region, uintptr_t address, uint32_t size, uint32_t access, uintptr_t pc);
EMU_COLD void emu_read_only(struct emu_region* region, uintptr_t address, uint32_t size, uintptr_t pc);

// `log2_size` tells a hook of a fixed size; a copy passes -1. `aligned`: the code relies on the address being a multiple of the size.
EMU_INLINE void emu_access(uintptr_t address, uint64_t size, int log2_size, int write, int aligned, uintptr_t pc) {
  if (EMU_LIKELY(address - emu_now.stack_low < emu_now.stack_bytes)) return;
  uintptr_t in_arena = address - emu_now.arena_low;
  struct emu_region* region = in_arena < emu_now.arena_bytes ? emu_now.blocks[in_arena >> EMU_BLOCK_SHIFT] : NULL;
  uintptr_t at = region ? address - region->base : 0;
  if (EMU_UNLIKELY(!region || at >= region->bytes || region->bytes - at < size)) {
    emu_access_outside(address, size, write ? ACCESS_WRITE : ACCESS_READ, pc);
    return;
  }
  if (aligned && EMU_UNLIKELY(address & (size - 1))) emu_misaligned(region, address, (uint32_t)size, write ? ACCESS_WRITE : ACCESS_READ, pc);
  if (write && EMU_UNLIKELY(!region->writable)) emu_read_only(region, address, (uint32_t)size, pc);
  if (log2_size >= 0) {
    region->accesses[write][log2_size]++;
    if (EMU_LIKELY(region->granule_shift == (uint32_t)log2_size && !(at & (size - 1)))) {
      access_granule(region, at >> log2_size, size, at, size, write, pc);
      return;
    }
  } else {
    region->other_accesses[write]++;
    region->other_bytes[write] += size;
  }
  access_granules(region, at, size, write, pc);
}
