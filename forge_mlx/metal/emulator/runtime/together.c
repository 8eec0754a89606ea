// What threads do together: barriers, and the exchange that every simdgroup function is made of.
#include <string.h>

#include "state.h"

enum { MAX_BYTES = 64 };

// The chain of return addresses of a waiting fibre, from its innermost frame outwards; returns the depth, and the address at `level`.
static uint32_t walk(const struct fibre* fibre, uint32_t level, uintptr_t* address) {
  uintptr_t frame = fibre->frame;
  uint32_t depth = 0;
  for (; frame > FRAME_BROKEN; frame = next_frame(fibre, frame)) {
    if (depth == level) *address = ((const uintptr_t*)frame)[1];
    depth++;
  }
  return depth;
}

// Order of two places in the code: the outermost frame that differs decides.
static int compare_sites(const struct fibre* a, const struct fibre* b) {
  if (a->site == b->site) return 0;
  uintptr_t at_a = 0, at_b = 0;
  uint32_t depth_a = walk(a, UINT32_MAX, &at_a), depth_b = walk(b, UINT32_MAX, &at_b);
  for (uint32_t i = 1; i <= depth_a && i <= depth_b; i++) {
    walk(a, depth_a - i, &at_a);
    walk(b, depth_b - i, &at_b);
    if (at_a != at_b) return at_a < at_b ? -1 : 1;
  }
  return depth_a < depth_b ? -1 : depth_a > depth_b;
}

static void wait_here(uint32_t state, uint32_t kind, uintptr_t frame) {
  struct fibre* self = emu_current;
  self->state = state;
  self->kind = kind;
  self->frame = frame;
  uint64_t hash = 0;
  uintptr_t outer = frame;
  for (; outer > FRAME_BROKEN; outer = next_frame(self, outer)) {
    hash = (hash ^ ((const uintptr_t*)outer)[1]) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  if (outer == FRAME_BROKEN) emu_stop_at(FINDING_PRIVATE_INDEX, ((const uintptr_t*)frame)[1] - 1, OVERRUN_STACK, 0, NULL);
  self->site = hash;
  emu_suspend();
}

void emu_barrier(emu_uint scope, emu_uint flags) {
  wait_here(scope ? FIBRE_SIMDGROUP_BARRIER : FIBRE_THREADGROUP_BARRIER, flags, (uintptr_t)__builtin_frame_address(0));
  // Keeps the call from becoming a jump, which would drop this frame.
  __asm__ volatile("");
}

static int on_stack(const struct fibre* fibre, const void* memory, uint32_t bytes) {
  uintptr_t at = (uintptr_t)memory - fibre->stack_low;
  return at < emu_now.stack_bytes && emu_now.stack_bytes - at >= bytes;
}

emu_uint emu_exchange(emu_uint kind, const void* mine, emu_uint bytes, void* all) {
  struct fibre* self = emu_current;
  // The scheduler is going to use them, where a fault would be the process's: a caller whose frame was overwritten may pass anything.
  if (EMU_UNLIKELY(bytes && (!on_stack(self, mine, bytes) || !on_stack(self, all, EMU_LANES * bytes))))
    emu_stop_at(FINDING_PRIVATE_INDEX, EMU_CALLER, OVERRUN_STACK, 0, NULL);
  self->mine = mine;
  self->all = all;
  self->bytes = bytes;
  wait_here(FIBRE_EXCHANGE, kind, (uintptr_t)__builtin_frame_address(0));
  return self->active;
}

emu_uint emu_lane(void) { return (emu_uint)(emu_current - emu_fibres) % EMU_LANES; }

void emu_require_lane(emu_uint active, emu_uint lane) {
  if (EMU_UNLIKELY(lane >= EMU_LANES || !(active >> lane & 1)) && (emu_now.checks & CHECK_BARRIERS))
    emu_stop_at(FINDING_INACTIVE_LANE, EMU_CALLER, lane, active, NULL);
}

static uint32_t lane_mask(uint32_t lanes) { return lanes == 32 ? UINT32_MAX : (1u << lanes) - 1; }

// Order of two lanes: the program's, and within one place that of the machine code.
static int compare_lanes(const struct fibre* a, const struct fibre* b) {
  int order = emu_compare_places(a, b);
  return order ? order : compare_sites(a, b);
}

// The first place in the program's order among the lanes in `state`: the mask of those who stand there.
static uint32_t first_site(struct fibre* lanes, uint32_t count, uint32_t state) {
  struct fibre* first = NULL;
  uint32_t mask = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (lanes[i].state != state) continue;
    int order = first ? compare_lanes(&lanes[i], first) : -1;
    if (order < 0) {
      first = &lanes[i];
      mask = 0;
    }
    if (order <= 0) mask |= 1u << i;
  }
  return mask;
}

static int part_found(struct fibre* lanes, uint32_t count, uint32_t mask) {
  const struct fibre* here = &lanes[__builtin_ctz(mask)];
  uint32_t rest = lane_mask(count) & ~mask;
  if (here->kind == EMU_MATRIX && mask != UINT32_MAX && (emu_now.checks & CHECK_BARRIERS)) {
    struct emu_finding* finding = emu_begin_finding(FINDING_MATRIX_PART);
    emu_add_waiting(finding, here);
    if (rest) emu_add_waiting(finding, &lanes[__builtin_ctz(rest)]);
    finding->number[0] = mask;
    finding->number[1] = count;
    return 1;
  }
  if (here->kind == EMU_REDUCE && rest && (emu_now.checks & CHECK_BARRIERS)) {
    struct emu_finding warning;
    emu_begin_warning(&warning, FINDING_REDUCE_PART);
    emu_add_waiting(&warning, here);
    emu_add_waiting(&warning, &lanes[__builtin_ctz(rest)]);
    warning.number[0] = mask;
    warning.number[1] = count;
    emu_warn(&warning);
  }
  return 0;
}

// Gives every lane of the mask what all of them handed in.
static void exchange(struct fibre* lanes, uint32_t mask) {
  unsigned char all[EMU_LANES * MAX_BYTES];
  uint32_t bytes = lanes[__builtin_ctz(mask)].bytes;
  for (uint32_t i = 0; i < EMU_LANES; i++) {
    if (mask >> i & 1)
      memcpy(all + i * bytes, lanes[i].mine, bytes);
    else
      memset(all + i * bytes, 0, bytes);
  }
  for (uint32_t left = mask; left; left &= left - 1) {
    struct fibre* lane = &lanes[__builtin_ctz(left)];
    memcpy(lane->all, all, EMU_LANES * bytes);
    lane->active = mask;
    lane->state = FIBRE_READY;
  }
  emu_counted.simdgroup_functions++;
}

// Tells of a barrier that cannot complete because not all of `count` fibres stand at it. It is that of the first fibre in `state`; the other
// half is the first fibre at another one, or else one that waits for something else, or else one that has finished.
static void barrier_found(const struct fibre* fibres, uint32_t count, uint32_t state) {
  const struct fibre *here = NULL, *second = NULL, *waits = NULL, *done = NULL;
  uint32_t there = 0;
  for (uint32_t i = 0; i < count; i++) {
    const struct fibre* fibre = &fibres[i];
    if (fibre->state == state && (!here || !compare_sites(fibre, here))) {
      if (!here) here = fibre;
      there++;
    } else if (fibre->state == state) {
      if (!second) second = fibre;
    } else if (fibre->state != FIBRE_FINISHED) {
      if (!waits) waits = fibre;
    } else if (!done) {
      done = fibre;
    }
  }
  enum finding_kind kind = second ? FINDING_BARRIER_TWO : waits ? FINDING_DEADLOCK : FINDING_BARRIER_MISSING;
  struct emu_finding* finding = emu_begin_finding(kind);
  emu_add_waiting(finding, here);
  emu_add_waiting(finding, second ? second : waits ? waits : done);
  finding->number[0] = there;
  finding->number[1] = count - there;
}

// Orders what the lanes of a mask did before a simdgroup_barrier before what they do after it.
static void pass_simdgroup_barrier(struct fibre* lanes, uint32_t mask) {
  uint32_t flags = UINT32_MAX;
  for (uint32_t left = mask; left; left &= left - 1) flags &= lanes[__builtin_ctz(left)].kind;
  for (uint32_t left = mask; left; left &= left - 1) {
    struct fibre* lane = &lanes[__builtin_ctz(left)];
    if (flags & EMU_MEM_THREADGROUP) lane->who[0] += WHO_STEP;
    if (flags & EMU_MEM_DEVICE) lane->who[1] += WHO_STEP;
    lane->state = FIBRE_READY;
  }
  emu_counted.simdgroup_barriers++;
}

// When no lane of a simdgroup can go on: lets those go on together that stand at one place. False where all have finished or wait for
// the rest of the threadgroup, or on a finding.

int emu_resolve_simdgroup(uint32_t simdgroup) {
  struct fibre* lanes = &emu_fibres[simdgroup * EMU_LANES];
  uint32_t count = emu_simdgroup_lanes(simdgroup);
  uint32_t mask = first_site(lanes, count, FIBRE_EXCHANGE);
  if (mask) {
    if (part_found(lanes, count, mask)) return 0;
    exchange(lanes, mask);
    return 1;
  }
  mask = first_site(lanes, count, FIBRE_SIMDGROUP_BARRIER);
  if (!mask) return 0;
  if (mask != lane_mask(count) && (emu_now.checks & CHECK_BARRIERS)) {
    barrier_found(lanes, count, FIBRE_SIMDGROUP_BARRIER);
    return 0;
  }
  pass_simdgroup_barrier(lanes, mask);
  return 1;
}

static void pass_threadgroup_barrier(const struct fibre* here) {
  uint32_t flags = UINT32_MAX;
  for (uint32_t i = 0; i < emu_group_threads; i++) {
    struct fibre* fibre = &emu_fibres[i];
    if (fibre->state == FIBRE_FINISHED || compare_sites(fibre, here)) continue;
    flags &= fibre->kind;
    fibre->state = FIBRE_READY;
  }
  if (emu_early_settle(flags)) return;
  emu_now.epoch[0] += (flags & EMU_MEM_THREADGROUP) != 0;
  emu_now.epoch[1] += (flags & EMU_MEM_DEVICE) != 0;
  emu_counted.threadgroup_barriers++;
}

// When every thread of the group has finished or waits at a threadgroup_barrier: completes it. False where the group is done.
int emu_resolve_threadgroup(void) {
  struct fibre* here = NULL;
  uint32_t there = 0;
  for (uint32_t i = 0; i < emu_group_threads; i++) {
    struct fibre* fibre = &emu_fibres[i];
    if (fibre->state == FIBRE_FINISHED) continue;
    int order = here ? compare_sites(fibre, here) : -1;
    if (order < 0) {
      here = fibre;
      there = 0;
    }
    there += order <= 0;
  }
  if (!here) return 0;
  if (there < emu_group_threads && (emu_now.checks & CHECK_BARRIERS))
    barrier_found(emu_fibres, emu_group_threads, FIBRE_THREADGROUP_BARRIER);
  else
    pass_threadgroup_barrier(here);
  return 1;
}
