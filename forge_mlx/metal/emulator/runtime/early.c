// Findings that what comes later decides.
//
// A read of memory without a value: mostly a barrier is missing, and the thread that writes the value just has not run yet. The read is then
// one half of a race, which says more than "read before it was written". So the group goes on until somebody writes the granule, or until
// nobody can any more without a barrier between.
//
// Two lanes of a simdgroup that write one granule: nothing depends on lockstep where both write the same.
#include <string.h>

#include "access.h"

enum { MAX_EARLY = 256 };

struct early {
  struct emu_region* region;
  uintptr_t address;
  uintptr_t pc;
  uint32_t size;
  uint32_t thread;
};

static struct early early[MAX_EARLY];
static uint32_t early_count;

static struct emu_finding write_finding;
static unsigned char write_value[16];
static int write_waits;

void emu_early_forget(void) {
  early_count = 0;
  write_waits = 0;
}

static void find(const struct early* read) {
  struct emu_finding* finding = emu_begin_finding(FINDING_UNINITIALISED);
  emu_add_party(finding, emu_group, read->thread, ACCESS_READ, read->pc);
  emu_add_place(finding, read->region, read->address, read->size);
}

// Whether an access lies inside one element and some of it has a value: the padding of a structure has none, nor have the components of a
// vector that nobody uses, though it is read as a whole.
static int element_has_value(const struct emu_region* region, uintptr_t at, uint64_t size) {
  uint64_t in_element = at % region->item_bytes;
  if (in_element + size > region->item_bytes) return 0;
  for (uintptr_t i = at >> region->granule_shift; i << region->granule_shift < at + size; i++) {
    uint32_t mark = region->cells[i].mark;
    if ((mark ^ region->generation) < GENERATION_STEP && (mark & MARK_WRITTEN)) return 1;
  }
  return 0;
}

// A read of a granule without a value, as part of one to `whole_size` bytes from offset `whole` of the region. Where races are not looked
// for, there is nothing to wait for.
EMU_COLD void emu_early_read(struct emu_region* region, struct cell* cell, uintptr_t address, uint32_t size, uintptr_t whole,
                             uint64_t whole_size, uintptr_t pc) {
  if (whole_size > size && element_has_value(region, whole, whole_size)) return;
  if (!(emu_now.checks & CHECK_RACES) || early_count == MAX_EARLY)
    emu_stop_in_region(FINDING_UNINITIALISED, region, address, size, ACCESS_READ, pc);
  if (cell->mark & MARK_EARLY) return;
  cell->mark |= MARK_EARLY;
  early[early_count++] = (struct early){region, address, pc, size, emu_current->index};
}

// A write to such a granule that is no race, or is one inside a simdgroup that has been told of.
EMU_COLD void emu_early_written(struct emu_region* region, struct cell* cell, uintptr_t address) {
  cell->mark &= ~(uint32_t)MARK_EARLY;
  for (uint32_t i = 0; i < early_count; i++) {
    if (early[i].region != region || address - early[i].address >= early[i].size) continue;
    int others = early[i].thread != emu_current->index;
    if (!others || !(emu_now.checks & CHECK_LOCKSTEP)) {
      find(&early[i]);
      emu_stop();
    }
  }
}

static int unsettled(const struct early* read) {
  const struct emu_region* region = read->region;
  return (region->cells[(read->address - region->base) >> region->granule_shift].mark & MARK_EARLY) != 0;
}

// At a barrier with these flags, and at the end of a group: what was read early and is not written by now has no writer. True where that
// stops the launch.
int emu_early_settle(uint32_t flags) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < early_count; i++) {
    if (!unsettled(&early[i])) continue;
    if (flags & (early[i].region->device ? EMU_MEM_DEVICE : EMU_MEM_THREADGROUP)) {
      find(&early[i]);
      return 1;
    }
    early[kept++] = early[i];
  }
  early_count = kept;
  return 0;
}

// Whether the running thread has read early: then what else it does wrong follows from that, and this is the finding.
void emu_early_by_current(void) {
  for (uint32_t i = 0; i < early_count; i++) {
    if (early[i].thread != emu_current->index || !unsettled(&early[i])) continue;
    find(&early[i]);
    return;
  }
}

// The write has not happened yet: it is looked at when the thread next comes to such a place or stops.
EMU_COLD void emu_same_value(const struct emu_finding* warning) {
  emu_settle_write();
  if (warning->size > sizeof write_value) return;
  write_finding = *warning;
  memcpy(write_value, (const void*)warning->address, warning->size);
  write_waits = 1;
}

void emu_settle_write(void) {
  if (!write_waits) return;
  write_waits = 0;
  if (memcmp(write_value, (const void*)write_finding.address, write_finding.size)) emu_warn(&write_finding);
}
