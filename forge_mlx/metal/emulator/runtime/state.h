// What the files of the runtime share. The runtime is linked into every compiled kernel and runs one launch at a time on one OS thread,
// so its state is plain global variables.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "abi.h"

// What native.py calls. All else is hidden: the kernel then calls it directly, and no other library can get in between.
#define EMU_EXPORT __attribute__((visibility("default")))
#define EMU_INLINE static inline __attribute__((always_inline))
#define EMU_COLD __attribute__((cold, noinline))
#define EMU_LIKELY(x) __builtin_expect(!!(x), 1)
#define EMU_UNLIKELY(x) __builtin_expect(!!(x), 0)
// Where the caller goes on: one byte before is inside the call, which is what a line table is asked for.
#define EMU_CALLER ((uintptr_t)__builtin_return_address(0) - 1)

enum { EMU_LANES = 32, EMU_THREADS = 1024, EMU_SIMDGROUPS = EMU_THREADS / EMU_LANES, EMU_ARRAYS = 256, EMU_FRAMES = 12, EMU_PATH = 64, EMU_WARNINGS = 64 };

// Checks, as bits of emu_launch.checks.
enum {
  CHECK_BOUNDS = 1,
  CHECK_RACES = 2,
  CHECK_UNINITIALISED = 4,
  CHECK_BARRIERS = 8,
  CHECK_ALIGNMENT = 16,
  CHECK_LIMITS = 32,
  CHECK_LOCKSTEP = 64
};

// What stops a launch, and (the last two) what is only told. findings.py holds the same table.
enum finding_kind {
  FINDING_NONE,
  FINDING_OUTSIDE,       // Beside a buffer or an array.
  FINDING_WILD,          // Nowhere near one.
  FINDING_READ_ONLY,     // A write to an input.
  FINDING_OTHER_STACK,   // Another thread's private memory.
  FINDING_PRIVATE_INDEX, // Beside an array whose size the compiler knows. `text` is its type for an index; else number[0] is an OVERRUN_.
  FINDING_RACE,
  FINDING_UNINITIALISED,
  FINDING_ALIGNMENT,
  FINDING_DIVISION,
  FINDING_STEPS,
  FINDING_STACK,
  FINDING_FAULT, // A signal that none of the above explains.
  FINDING_BARRIER_MISSING,
  FINDING_BARRIER_TWO,
  FINDING_DEADLOCK,
  FINDING_MATRIX_PART,
  FINDING_INACTIVE_LANE,
  FINDING_LIMIT,
  FINDING_REDUCE_PART,
  FINDING_LOCKSTEP
};

// How an array was left without an index of its own: seen at the access, or later by what the access had overwritten.
enum { OVERRUN_ACCESS, OVERRUN_STACK };

enum access { ACCESS_NONE, ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC };

// A thread that takes part in a finding and where it stands: `pcs` are offsets in the image, innermost first.
struct emu_party {
  uint32_t group;
  uint32_t thread;
  uint32_t access;
  uint32_t state;
  uint32_t pc_count;
  uint32_t pcs[EMU_FRAMES];
};

struct emu_finding {
  uint32_t kind;
  uint32_t parties;
  struct emu_party party[2];
  int32_t region; // Index of the buffer; threadgroup arrays count on from there; -1 for none.
  uint32_t size;
  int64_t offset; // In bytes from the region's first.
  uint64_t address;
  int64_t number[3]; // By kind; see where it is reported.
  const char* text;
};

// An argument of the kernel.
struct emu_buffer {
  uint64_t bytes;
  uint64_t offset; // Of the byte that the kernel's pointer points at.
  uint32_t item_bytes;
  uint32_t misalignment; // Of the first byte's address, modulo 256.
  uint32_t writable;
  uint32_t initialised;
  void* address; // Set by emu_open.
};

struct emu_launch {
  struct emu_buffer* buffers;
  uint64_t stacks; // Address of emu_map_stacks' block.
  uint64_t max_steps;
  uint32_t buffer_count;
  uint32_t stack_count;
  uint32_t stack_bytes;
  uint32_t checks;
  uint32_t grid[3];
  uint32_t threadgroup[3];
};

struct emu_counts {
  uint64_t threadgroup_barriers;
  uint64_t simdgroup_barriers;
  uint64_t simdgroup_functions; // Once a simdgroup.
  uint64_t matrix_lanes;        // Multiply-accumulates of 8x8x8, once a lane.
  uint64_t steps;
  uint64_t threads;
};

// One buffer or threadgroup array. counts: accesses by kind and by log2 of their size.
struct emu_region {
  uint64_t base;
  uint64_t bytes;
  struct cell* cells; // Of memory that is written; otherwise `seen` has one byte a granule.
  uint8_t* seen;
  uint64_t accesses[2][5];
  uint64_t other_accesses[2]; // Copies of other sizes,
  uint64_t other_bytes[2];    // and their bytes.
  uint64_t distinct[2];
  uint64_t atomics;
  uint64_t mapped; // Bytes of `cells` or `seen`.
  const char* name;
  uint32_t generation; // See cell.mark.
  uint32_t item_bytes;
  uint32_t granule_shift;
  uint32_t device; // 0 threadgroup memory, 1 device or constant.
  uint32_t writable;
  uint32_t undefined; // What nobody wrote has no value.
};

// When and by whom: epoch counts barriers over the whole launch, so that it also tells the group; 0 is never.
// who: bits 0-9 thread, bit 10 an atomic that wrote, above the simdgroup's own epoch.
struct record {
  uint32_t epoch;
  uint32_t who;
  uint32_t pc;
};
enum { WHO_THREAD = 1023, WHO_WROTE = 1024, WHO_STEP = 2048 };

// What is known of one granule of memory. mark: MARK_ bits, and above them the generation that they belong to (each group is one for
// threadgroup memory; device memory has only generation 0). MARK_EARLY: see early.c.
struct cell {
  struct record writer;
  struct record reader[2];
  struct record atomic[2];
  uint32_t mark;
};
enum { MARK_READ = 1, MARK_WRITTEN = 2, MARK_EARLY = 4, GENERATION_STEP = 8 };

// What the hooks read at every access, in one place. Index 0 is threadgroup memory, 1 device memory.
struct now {
  uintptr_t stack_low;
  uintptr_t stack_bytes;
  uintptr_t arena_low;
  uintptr_t arena_bytes;
  struct emu_region** blocks; // The region of every block of the arena.
  uint64_t steps_left;
  uint32_t epoch[2];
  uint32_t foreign[2]; // Records before this epoch are another group's (1: there is no such record).
  uint32_t who[2];
  uint32_t checks;
};

enum fibre_state { FIBRE_READY, FIBRE_EXCHANGE, FIBRE_SIMDGROUP_BARRIER, FIBRE_THREADGROUP_BARRIER, FIBRE_FINISHED };

struct fibre {
  void* sp;
  uintptr_t stack_low;
  uint32_t state;
  uint32_t index;
  uint32_t who[2];
  uint64_t steps_left;
  // Where it waits and with what.
  uintptr_t frame;
  uint64_t site; // A hash of the chain of return addresses.
  uint32_t kind; // EMU_REDUCE, ..., or the barrier's flags.
  uint32_t bytes;
  const void* mine;
  void* all;
  uint32_t active;
  // See place.c.
  uint32_t place;
  uint32_t path_base;
  uint32_t path_top;
  uint32_t path[EMU_PATH];
};

extern struct now emu_now;
extern struct fibre emu_fibres[EMU_THREADS];
extern struct fibre* emu_current;
extern struct emu_launch* emu_launched;
extern struct emu_finding emu_found;
extern struct emu_counts emu_counted;
extern struct emu_region emu_regions[];
extern uint32_t emu_region_count;
extern uint32_t emu_group;        // Linear position of the running group.
extern uint32_t emu_group_threads; // Threads in it.

extern void emu_entry(void* const* arguments, const struct emu_ids* ids) __attribute__((visibility("hidden")));

// The kernel's own shared object: first byte, and one past the last.
#ifdef __APPLE__
extern char emu_image_low[] __asm("segment$start$__TEXT");
extern char emu_image_high[] __asm("segment$end$__LINKEDIT");
#else
extern char emu_image_low[] __asm("__ehdr_start") __attribute__((visibility("hidden")));
extern char emu_image_high[] __asm("_end") __attribute__((visibility("hidden")));
#endif

// Frames of a fibre's stack: at each, the address of the next one outwards and the return address. The outermost has 0 for the next.
// FRAME_BROKEN: what lies there has been overwritten.
enum { FRAME_END, FRAME_BROKEN };

EMU_INLINE int in_image(uintptr_t pc) { return pc - (uintptr_t)emu_image_low < (uintptr_t)(emu_image_high - emu_image_low); }

EMU_INLINE int is_frame(const struct fibre* fibre, uintptr_t frame) {
  return frame % sizeof(uintptr_t) == 0 && frame >= fibre->stack_low &&
         frame - fibre->stack_low <= emu_launched->stack_bytes - 2 * sizeof(uintptr_t);
}

// The frame that follows `frame`, which is one, or FRAME_END or FRAME_BROKEN.
EMU_INLINE uintptr_t next_frame(const struct fibre* fibre, uintptr_t frame) {
  const uintptr_t* words = (const uintptr_t*)frame;
  if (!in_image(words[1])) return FRAME_BROKEN;
  if (!words[0]) return FRAME_END;
  return words[0] > frame && is_frame(fibre, words[0]) ? words[0] : FRAME_BROKEN;
}

// fibre.c
enum { EMU_STACK_GUARD = 65536 };
void emu_switch(void** save, void* load);
void emu_fibre_prepare(struct fibre* fibre, const struct emu_ids* ids);
void emu_resume(struct fibre* fibre);
void emu_suspend(void);
_Noreturn void emu_abandon(void);

// finding.c
_Noreturn void emu_stop(void);
struct emu_finding* emu_begin_finding(enum finding_kind kind);
void emu_add_party(struct emu_finding* finding, uint32_t group, uint32_t thread, uint32_t access, uintptr_t pc);
void emu_add_frames(struct emu_party* party, const struct fibre* fibre, uintptr_t frame);
void emu_add_place(struct emu_finding* finding, const struct emu_region* region, uintptr_t address, uint32_t size);
void emu_add_waiting(struct emu_finding* finding, const struct fibre* fibre);
void emu_begin_warning(struct emu_finding* finding, enum finding_kind kind);
void emu_warn(const struct emu_finding* finding);
void emu_clear_findings(void);
_Noreturn void emu_stop_at(enum finding_kind kind, uintptr_t pc, int64_t first, int64_t second, const char* text);

// memory.c
void* emu_map(uint64_t bytes, int usable);
enum { EMU_BLOCK_SHIFT = 16, EMU_BLOCK = 1 << EMU_BLOCK_SHIFT, EMU_ARRAY_ARENA = 16 << 20 };
void emu_poison_arrays(void);
void emu_reset_memory(void);
void emu_access_outside(uintptr_t address, uint64_t size, uint32_t access, uintptr_t pc);
int emu_describe(uintptr_t address, struct emu_finding* finding);

// shadow.c
void emu_map_shadow(struct emu_region* region);
void emu_unmap_shadow(struct emu_region* region);
void emu_refine(struct emu_region* region);
void emu_conflict(struct emu_region* region, uintptr_t address, uint32_t size, const struct record* other, uint32_t other_access,
                  uint32_t access, uintptr_t pc);
_Noreturn void emu_stop_in_region(enum finding_kind kind, struct emu_region* region, uintptr_t address, uint32_t size, uint32_t access,
                                  uintptr_t pc);
void emu_keep_user(struct record* users, struct record record, uint32_t device);

// early.c
void emu_early_read(struct emu_region* region, struct cell* cell, uintptr_t address, uint32_t size, uintptr_t whole, uint64_t whole_size,
                    uintptr_t pc);
void emu_early_written(struct emu_region* region, struct cell* cell, uintptr_t address);
void emu_same_value(const struct emu_finding* warning);
void emu_settle_write(void);
int emu_early_settle(uint32_t flags);
void emu_early_by_current(void);
void emu_early_forget(void);

// schedule.c
uint32_t emu_group_of_epoch(uint32_t epoch);
uint32_t emu_simdgroup_lanes(uint32_t simdgroup);

// place.c
void emu_place_begin(struct fibre* fibre);
int emu_compare_places(const struct fibre* a, const struct fibre* b);

// together.c
int emu_resolve_simdgroup(uint32_t simdgroup);
int emu_resolve_threadgroup(void);

// fault.c
void emu_install_handlers(void);
void emu_restore_handlers(void);
