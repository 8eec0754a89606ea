// The shadow of the memory: who used each granule last, and what follows from it.
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "access.h"

void emu_map_shadow(struct emu_region* region) {
  uint64_t granules = (region->bytes >> region->granule_shift) + 1;
  uint64_t bytes = granules * (region->writable ? sizeof(struct cell) : 1);
  void* shadow = emu_map(bytes, 1);
  region->mapped = shadow ? bytes : 0;
  region->cells = region->mapped && region->writable ? shadow : NULL;
  region->seen = region->mapped && !region->writable ? shadow : NULL;
}

void emu_unmap_shadow(struct emu_region* region) {
  if (region->mapped) munmap(region->cells ? (void*)region->cells : region->seen, region->mapped);
  region->mapped = 0;
  region->cells = NULL;
  region->seen = NULL;
}

// Gives every byte of a region a granule of its own.
EMU_COLD void emu_refine(struct emu_region* region) {
  struct emu_region coarse = *region;
  region->granule_shift = 0;
  emu_map_shadow(region);
  if (!region->mapped) {
    *region = coarse;
    emu_stop_at(FINDING_LIMIT, (uintptr_t)emu_image_low, 0, 2, NULL);
  }
  uint64_t covered = region->bytes >> coarse.granule_shift << coarse.granule_shift;
  for (uint64_t i = 0; i < covered; i++) {
    if (region->cells)
      region->cells[i] = coarse.cells[i >> coarse.granule_shift];
    else
      region->seen[i] = coarse.seen[i >> coarse.granule_shift];
  }
  emu_unmap_shadow(&coarse);
}

// Keeps two users of a granule such that whoever conflicts with any user of it conflicts with one of these: of different simdgroups where
// there are such, and never one that is ordered before everything to come in place of one that is not.
void emu_keep_user(struct record* users, struct record mine, uint32_t device) {
  uint32_t epoch = emu_now.epoch[device];
  uint32_t simdgroup = (mine.who & WHO_THREAD) / EMU_LANES;
  for (int i = 0; i < 2; i++)
    if (users[i].epoch == epoch && !((users[i].who ^ mine.who) & WHO_THREAD)) {
      // A thread's atomic that wrote tells more than its atomic load.
      mine.who |= users[i].who & WHO_WROTE;
      users[i] = mine;
      return;
    }
  for (int i = 0; i < 2; i++)
    if (users[i].epoch != epoch && !(users[i].epoch - 1 < emu_now.foreign[device] - 1)) {
      users[i] = mine;
      return;
    }
  uint32_t theirs[2];
  for (int i = 0; i < 2; i++) theirs[i] = users[i].epoch == epoch ? (users[i].who & WHO_THREAD) / EMU_LANES : UINT32_MAX - i;
  // A lane of the same simdgroup that a simdgroup_barrier has ordered since, or one that only loaded.
  for (int i = 0; i < 2; i++)
    if (theirs[i] == simdgroup &&
        (users[i].who / WHO_STEP != mine.who / WHO_STEP || (mine.who & ~users[i].who & WHO_WROTE))) {
      users[i] = mine;
      return;
    }
  if (theirs[0] == theirs[1] || (mine.who & ~users[1].who & WHO_WROTE)) users[1] = mine;
}

static void fill_conflict(struct emu_finding* finding, const struct emu_region* region, uintptr_t address, uint32_t size,
                          const struct record* other, uint32_t other_access, uint32_t access, uintptr_t pc) {
  emu_add_place(finding, region, address, size);
  emu_add_party(finding, emu_group, emu_current->index, access, pc);
  emu_add_party(finding, emu_group_of_epoch(region->device ? other->epoch : UINT32_MAX), other->who & WHO_THREAD, other_access,
                (uintptr_t)emu_image_low + other->pc);
}

// Two accesses that no barrier of the group orders: the end, unless both are of one simdgroup.
EMU_COLD void emu_conflict(struct emu_region* region, uintptr_t address, uint32_t size, const struct record* other, uint32_t other_access,
                           uint32_t access, uintptr_t pc) {
  uint32_t device = region->device;
  uint32_t who = emu_now.who[device];
  int same_simdgroup =
      other->epoch == emu_now.epoch[device] && (other->who & WHO_THREAD) / EMU_LANES == (who & WHO_THREAD) / EMU_LANES;
  if (same_simdgroup) {
    if (!(emu_now.checks & CHECK_LOCKSTEP) || other->who / WHO_STEP != who / WHO_STEP) return;
    struct emu_finding warning;
    emu_begin_warning(&warning, FINDING_LOCKSTEP);
    fill_conflict(&warning, region, address, size, other, other_access, access, pc);
    if (access == ACCESS_WRITE && other_access == ACCESS_WRITE)
      emu_same_value(&warning);
    else
      emu_warn(&warning);
    return;
  }
  if (!(emu_now.checks & CHECK_RACES)) return;
  fill_conflict(emu_begin_finding(FINDING_RACE), region, address, size, other, other_access, access, pc);
  emu_stop();
}

_Noreturn void emu_stop_in_region(enum finding_kind kind, struct emu_region* region, uintptr_t address, uint32_t size, uint32_t access,
                                  uintptr_t pc) {
  struct emu_finding* finding = emu_begin_finding(kind);
  emu_add_party(finding, emu_group, emu_current->index, access, pc);
  emu_add_place(finding, region, address, size);
  emu_stop();
}

EMU_COLD void emu_misaligned(struct emu_region* region, uintptr_t address, uint32_t size, uint32_t access, uintptr_t pc) {
  if (emu_now.checks & CHECK_ALIGNMENT) emu_stop_in_region(FINDING_ALIGNMENT, region, address, size, access, pc);
}

EMU_COLD void emu_read_only(struct emu_region* region, uintptr_t address, uint32_t size, uintptr_t pc) {
  if (emu_now.checks & CHECK_BOUNDS) emu_stop_in_region(FINDING_READ_ONLY, region, address, size, ACCESS_WRITE, pc);
}

// Of a buffer that had no value: the number of elements that were never written, and in *first the first of them.
EMU_EXPORT uint64_t emu_unwritten(uint32_t index, uint64_t* first) {
  const struct emu_region* region = &emu_regions[index];
  if (!region->undefined || !region->cells || region->distinct[1] == region->bytes) return 0;
  uint64_t missing = 0;
  uint64_t granules = region->item_bytes >> region->granule_shift;
  for (uint64_t element = 0; element < region->bytes / region->item_bytes; element++) {
    int written = 1;
    for (uint64_t i = 0; i < granules; i++) written &= (region->cells[element * granules + i].mark & MARK_WRITTEN) != 0;
    if (written) continue;
    if (!missing) *first = element;
    missing++;
  }
  return missing;
}
