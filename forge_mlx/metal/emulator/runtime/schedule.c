// One run of a launch: its threadgroups one after the other, the threads of each as fibres, in a given order.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "state.h"

enum { ORDER_FORWARD, ORDER_REVERSE, ORDER_RANDOM };
enum { RUN_DONE, RUN_MORE, RUN_FINDING };

struct fibre emu_fibres[EMU_THREADS];
struct emu_counts emu_counted;
uint32_t emu_group;
uint32_t emu_group_threads;

static uint32_t order;
static uint64_t random_state;
static uint32_t groups[3];
static uint32_t group_count;
static uint32_t ordinal;     // Groups begun so far.
static int in_group;
static uint32_t turn;        // Position in simdgroup_order where the round goes on.
static uint32_t* group_order; // Random order alone: the permutation.
static uint32_t* first_epoch; // Of each group begun, in device memory's count.
static uint32_t simdgroup_count;
static uint32_t simdgroup_order[EMU_SIMDGROUPS];
static uint8_t lane_order[EMU_SIMDGROUPS][EMU_LANES];

// splitmix64: small, and the same on every platform.
static uint64_t next_random(void) {
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The element that takes place i when i elements have their place already (Fisher and Yates, inside out).
static uint32_t random_place(uint32_t i) { return (uint32_t)(next_random() % (i + 1)); }

static uint32_t ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

uint32_t emu_simdgroup_lanes(uint32_t simdgroup) {
  uint32_t left = emu_group_threads - simdgroup * EMU_LANES;
  return left < EMU_LANES ? left : EMU_LANES;
}

static uint32_t group_at(uint32_t place) {
  if (order == ORDER_RANDOM) return group_order[place];
  return order == ORDER_FORWARD ? place : group_count - 1 - place;
}

// The group that was running at an epoch of device memory.
uint32_t emu_group_of_epoch(uint32_t epoch) {
  uint32_t low = 0, high = ordinal;
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    if (first_epoch[middle] <= epoch)
      low = middle;
    else
      high = middle;
  }
  return group_at(low);
}

EMU_EXPORT struct emu_counts* emu_counts(void) { return &emu_counted; }
EMU_EXPORT const struct emu_region* emu_region_table(void) { return emu_regions; }
EMU_EXPORT uint32_t emu_region_total(void) { return emu_region_count; }

EMU_EXPORT void emu_finish(void) {
  free(group_order);
  free(first_epoch);
  group_order = NULL;
  first_epoch = NULL;
}

// Begins a run in the given order: nothing was read, written or found. Returns 0, or -1 without memory.
EMU_EXPORT int emu_start(uint32_t new_order, uint64_t seed) {
  const struct emu_launch* launch = emu_launched;
  emu_finish();
  emu_clear_findings();
  emu_early_forget();
  emu_reset_memory();
  memset(&emu_counted, 0, sizeof emu_counted);
  order = new_order;
  random_state = seed;
  group_count = 1;
  for (int i = 0; i < 3; i++) {
    groups[i] = ceil_div(launch->grid[i], launch->threadgroup[i]);
    group_count *= groups[i];
  }
  ordinal = 0;
  in_group = 0;
  emu_now.stack_bytes = launch->stack_bytes;
  emu_now.checks = launch->checks;
  emu_now.epoch[0] = emu_now.epoch[1] = 0;
  first_epoch = malloc(group_count * sizeof *first_epoch);
  if (!first_epoch) return -1;
  if (order != ORDER_RANDOM) return 0;
  group_order = malloc(group_count * sizeof *group_order);
  if (!group_order) return -1;
  for (uint32_t i = 0; i < group_count; i++) {
    uint32_t place = random_place(i);
    group_order[i] = group_order[place];
    group_order[place] = i;
  }
  return 0;
}

static void order_simdgroup(uint32_t simdgroup) {
  uint32_t lanes = emu_simdgroup_lanes(simdgroup);
  uint8_t* mine = lane_order[simdgroup];
  for (uint32_t i = 0; i < lanes; i++) {
    uint32_t place = order == ORDER_RANDOM ? random_place(i) : i;
    mine[i] = mine[place];
    mine[place] = (uint8_t)(order == ORDER_REVERSE ? lanes - 1 - i : i);
  }
}

// Threads of one simdgroup stay together, as their exchanges need them together; simdgroups and the lanes of each are permuted.
static void order_threads(void) {
  simdgroup_count = ceil_div(emu_group_threads, EMU_LANES);
  for (uint32_t i = 0; i < simdgroup_count; i++) {
    uint32_t place = order == ORDER_RANDOM ? random_place(i) : i;
    simdgroup_order[i] = simdgroup_order[place];
    simdgroup_order[place] = order == ORDER_REVERSE ? simdgroup_count - 1 - i : i;
    order_simdgroup(i);
  }
}

// What is the same for every thread of a group. Returns the group's number of threads.
static uint32_t fill_group_ids(struct emu_ids* ids, uint32_t group) {
  const struct emu_launch* launch = emu_launched;
  uint32_t position[3] = {group % groups[0], group / groups[0] % groups[1], group / groups[0] / groups[1]};
  uint32_t whole = 1, threads = 1;
  memset(ids, 0, sizeof *ids);
  for (int i = 0; i < 3; i++) {
    uint32_t left = launch->grid[i] - position[i] * launch->threadgroup[i];
    ids->threadgroup_position_in_grid[i] = position[i];
    ids->threads_per_threadgroup[i] = left < launch->threadgroup[i] ? left : launch->threadgroup[i];
    ids->dispatch_threads_per_threadgroup[i] = launch->threadgroup[i];
    ids->threads_per_grid[i] = ids->grid_size[i] = launch->grid[i];
    ids->threadgroups_per_grid[i] = groups[i];
    threads *= ids->threads_per_threadgroup[i];
    whole *= launch->threadgroup[i];
  }
  ids->simdgroups_per_threadgroup = ceil_div(threads, EMU_LANES);
  ids->quadgroups_per_threadgroup = ceil_div(threads, 4);
  ids->dispatch_simdgroups_per_threadgroup = ceil_div(whole, EMU_LANES);
  ids->dispatch_quadgroups_per_threadgroup = ceil_div(whole, 4);
  ids->threads_per_simdgroup = ids->thread_execution_width = EMU_LANES;
  return threads;
}

static void fill_thread_ids(struct emu_ids* ids, uint32_t index) {
  const uint32_t* size = ids->threads_per_threadgroup;
  uint32_t position[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  for (int i = 0; i < 3; i++) {
    ids->thread_position_in_threadgroup[i] = position[i];
    ids->thread_position_in_grid[i] =
        ids->threadgroup_position_in_grid[i] * ids->dispatch_threads_per_threadgroup[i] + position[i];
  }
  ids->thread_index_in_threadgroup = index;
  ids->thread_index_in_simdgroup = index % EMU_LANES;
  ids->thread_index_in_quadgroup = index % 4;
  ids->simdgroup_index_in_threadgroup = index / EMU_LANES;
  ids->quadgroup_index_in_threadgroup = index / 4;
}

static void begin_group(void) {
  struct emu_ids ids;
  emu_group = group_at(ordinal);
  emu_now.epoch[0]++;
  first_epoch[ordinal++] = ++emu_now.epoch[1];
  emu_now.foreign[0] = 1;
  emu_now.foreign[1] = emu_now.epoch[1];
  emu_group_threads = fill_group_ids(&ids, emu_group);
  order_threads();
  emu_poison_arrays();
  for (uint32_t i = 0; i < emu_group_threads; i++) {
    fill_thread_ids(&ids, i);
    emu_fibres[i].index = i;
    emu_fibres[i].who[0] = emu_fibres[i].who[1] = i;
    emu_fibre_prepare(&emu_fibres[i], &ids);
  }
  emu_counted.threads += emu_group_threads;
  turn = 0;
  in_group = 1;
}

// Runs a simdgroup until each of its lanes has finished or waits for the rest of the threadgroup. False on a finding.
static int run_simdgroup(uint32_t simdgroup) {
  uint32_t lanes = emu_simdgroup_lanes(simdgroup);
  do {
    for (uint32_t i = 0; i < lanes; i++) {
      struct fibre* fibre = &emu_fibres[simdgroup * EMU_LANES + lane_order[simdgroup][i]];
      if (fibre->state != FIBRE_READY) continue;
      emu_resume(fibre);
      if (emu_found.kind) return 0;
      if (fibre->state == FIBRE_FINISHED) emu_counted.steps += emu_launched->max_steps - fibre->steps_left;
    }
  } while (emu_resolve_simdgroup(simdgroup));
  return !emu_found.kind;
}

static uint64_t nanoseconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint32_t run_until(uint64_t deadline) {
  for (;;) {
    if (!in_group) {
      if (ordinal == group_count) return RUN_DONE;
      begin_group();
    }
    while (turn < simdgroup_count) {
      if (!run_simdgroup(simdgroup_order[turn++])) return RUN_FINDING;
      if (nanoseconds() > deadline) return RUN_MORE;
    }
    turn = 0;
    in_group = emu_resolve_threadgroup();
    if (emu_found.kind || (!in_group && emu_early_settle(EMU_MEM_DEVICE | EMU_MEM_THREADGROUP))) return RUN_FINDING;
  }
}

// Goes on with the run for about so long.
EMU_EXPORT uint32_t emu_run(uint64_t budget) {
  emu_install_handlers();
  uint32_t status = run_until(nanoseconds() + budget);
  emu_restore_handlers();
  return status;
}
