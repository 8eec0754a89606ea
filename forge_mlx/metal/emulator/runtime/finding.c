// What the checks found: the one finding that stops a launch, and a few warnings.
#include <string.h>

#include "state.h"

struct emu_finding emu_found;
static struct emu_finding warnings[EMU_WARNINGS];
static uint32_t warning_count;

EMU_EXPORT const struct emu_finding* emu_finding(void) { return &emu_found; }
EMU_EXPORT const struct emu_finding* emu_warnings(void) { return warnings; }
EMU_EXPORT uint32_t emu_warning_count(void) { return warning_count; }

// Bytes of each structure that native.py has too.
EMU_EXPORT const uint32_t* emu_sizes(void) {
  static const uint32_t sizes[] = {sizeof(struct emu_finding), sizeof(struct emu_buffer), sizeof(struct emu_launch),
                                   sizeof(struct emu_counts), sizeof(struct emu_region)};
  return sizes;
}

void emu_clear_findings(void) {
  memset(&emu_found, 0, sizeof emu_found);
  warning_count = 0;
}

static void begin(struct emu_finding* finding, enum finding_kind kind) {
  memset(finding, 0, sizeof *finding);
  finding->kind = kind;
  finding->region = -1;
}

struct emu_finding* emu_begin_finding(enum finding_kind kind) {
  begin(&emu_found, kind);
  return &emu_found;
}

void emu_begin_warning(struct emu_finding* finding, enum finding_kind kind) { begin(finding, kind); }

void emu_add_party(struct emu_finding* finding, uint32_t group, uint32_t thread, uint32_t access, uintptr_t pc) {
  struct emu_party* party = &finding->party[finding->parties++];
  party->group = group;
  party->thread = thread;
  party->access = access;
  party->pcs[0] = (uint32_t)(pc - (uintptr_t)emu_image_low);
  party->pc_count = 1;
}

// The return addresses from a frame outwards, as far as they are to be had.
void emu_add_frames(struct emu_party* party, const struct fibre* fibre, uintptr_t frame) {
  if (!is_frame(fibre, frame)) return;
  for (; frame > FRAME_BROKEN && party->pc_count < EMU_FRAMES; frame = next_frame(fibre, frame)) {
    uintptr_t pc = ((const uintptr_t*)frame)[1] - 1;
    if (in_image(pc)) party->pcs[party->pc_count++] = (uint32_t)(pc - (uintptr_t)emu_image_low);
  }
}

// Which bytes of which region it is about.
void emu_add_place(struct emu_finding* finding, const struct emu_region* region, uintptr_t address, uint32_t size) {
  finding->size = size;
  finding->address = address;
  finding->region = (int32_t)(region - emu_regions);
  finding->offset = (int64_t)(address - region->base);
}

// A thread that waits at a barrier or simdgroup function, or one that has finished.
void emu_add_waiting(struct emu_finding* finding, const struct fibre* fibre) {
  struct emu_party* party = &finding->party[finding->parties++];
  party->group = emu_group;
  party->thread = fibre->index;
  party->state = fibre->state;
  if (fibre->state != FIBRE_FINISHED && fibre->state != FIBRE_READY) emu_add_frames(party, fibre, fibre->frame);
}

// Stops the launch from within a thread: the finding is filled in and the thread never goes on.
_Noreturn void emu_stop(void) {
  uint32_t kind = emu_found.kind;
  if (kind != FINDING_RACE && kind != FINDING_UNINITIALISED && kind != FINDING_LIMIT && kind != FINDING_INACTIVE_LANE)
    emu_early_by_current();
  emu_abandon();
}

_Noreturn void emu_stop_at(enum finding_kind kind, uintptr_t pc, int64_t first, int64_t second, const char* text) {
  struct emu_finding* finding = emu_begin_finding(kind);
  emu_add_party(finding, emu_group, emu_current->index, ACCESS_NONE, pc);
  finding->number[0] = first;
  finding->number[1] = second;
  finding->text = text;
  emu_stop();
}

// Keeps a warning unless the same place has given one.
void emu_warn(const struct emu_finding* finding) {
  for (uint32_t i = 0; i < warning_count; i++)
    if (warnings[i].kind == finding->kind && warnings[i].party[0].pcs[0] == finding->party[0].pcs[0]) return;
  if (warning_count < EMU_WARNINGS) warnings[warning_count++] = *finding;
}
