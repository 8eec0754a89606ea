// Where the source says that a thread stands (convergence.py): the calls it is inside of, the iteration of each loop, and its place there.
// Compared entry by entry that is the order of the program, which machine addresses are not.
#include "state.h"

// Entries past the end are counted and not kept: two places that differ only there are one.
static void set(struct fibre* fibre, uint32_t index, uint32_t value) {
  if (index < EMU_PATH) fibre->path[index] = value;
}

static uint32_t entry(const struct fibre* fibre, uint32_t index) { return index < EMU_PATH ? fibre->path[index] : 0; }

void emu_place_begin(struct fibre* fibre) { fibre->place = fibre->path_base = fibre->path_top = 0; }

void emu_stand(emu_uint place, emu_uint depth) {
  emu_current->path_top = emu_current->path_base + 2 * depth;
  emu_current->place = place;
}

void emu_iterate(emu_uint depth, emu_uint place) {
  struct fibre* self = emu_current;
  uint32_t index = self->path_base + 2 * depth;
  int again = self->path_top > index && entry(self, index) == place;
  set(self, index + 1, again ? entry(self, index + 1) + 1 : 1);
  set(self, index, place);
  self->path_top = index + 2;
}

emu_ulong emu_enter(void) {
  struct fibre* self = emu_current;
  emu_ulong before = (emu_ulong)self->path_base << 32 | self->path_top;
  set(self, self->path_top, self->place);
  self->path_base = ++self->path_top;
  self->place = 0;
  return before;
}

void emu_leave(emu_ulong before) {
  struct fibre* self = emu_current;
  uint32_t base = (uint32_t)(before >> 32), top = (uint32_t)before;
  // It was kept on the thread's stack.
  if (top >= self->path_base || base > top) emu_stop_at(FINDING_PRIVATE_INDEX, EMU_CALLER, OVERRUN_STACK, 0, NULL);
  self->path_base = base;
  self->path_top = top;
  self->place = entry(self, self->path_top);
}

static uint32_t step(const struct fibre* fibre, uint32_t index) { return index < fibre->path_top ? entry(fibre, index) : fibre->place; }

int emu_compare_places(const struct fibre* a, const struct fibre* b) {
  for (uint32_t i = 0; i <= a->path_top && i <= b->path_top; i++)
    if (step(a, i) != step(b, i)) return step(a, i) < step(b, i) ? -1 : 1;
  return a->path_top < b->path_top ? -1 : a->path_top > b->path_top;
}
