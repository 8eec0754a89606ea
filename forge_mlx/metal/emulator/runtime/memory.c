// Device buffers and threadgroup arrays. All lie in one arena of 64 KiB blocks: every region begins in a block of its own and is followed by a
// block that cannot be touched, so that one table says which region an address belongs to, and a miss faults even without hooks.
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "state.h"

enum { POISON = 0xff, ARRAY_LIMIT = 32768, MAX_BUFFERS = 256 };

struct now emu_now;
struct emu_launch* emu_launched;
struct emu_region emu_regions[MAX_BUFFERS + EMU_ARRAYS];
uint32_t emu_region_count;

static uint64_t array_end;                  // Where the next threadgroup array goes: offset in the arena.
static uint64_t array_bytes;                // Of all arrays so far.
static uint16_t region_of_id[EMU_ARRAYS];   // 0 where an array is not yet known, else its region + 1.

static uint64_t round_up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

// Pages full of zeros that take memory only once they are touched, or (not usable) address space alone. NULL where there is none.
void* emu_map(uint64_t bytes, int usable) {
  int flags = MAP_PRIVATE | MAP_ANON;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* mapped = mmap(NULL, bytes, usable ? PROT_READ | PROT_WRITE : PROT_NONE, flags, -1, 0);
  return mapped == MAP_FAILED ? NULL : mapped;
}

static uint32_t shift_of(uint32_t bytes) {
  uint32_t shift = 0;
  while (shift < 3 && bytes % (2u << shift) == 0) shift++;
  return shift;
}

// Opens the blocks of a region at `block` (an offset in the arena); its first byte lies `misalignment` bytes in.
static int open_region(struct emu_region* region, uint64_t block, uint64_t misalignment) {
  uint64_t bytes = round_up(region->bytes + misalignment, EMU_BLOCK);
  char* start = (char*)emu_now.arena_low + block;
  if (mprotect(start, bytes, PROT_READ | PROT_WRITE)) return -1;
  region->base = (uint64_t)start + misalignment;
  for (uint64_t i = 0; i < bytes >> EMU_BLOCK_SHIFT; i++) emu_now.blocks[(block >> EMU_BLOCK_SHIFT) + i] = region;
  emu_map_shadow(region);
  return region->mapped ? 0 : -1;
}

static struct emu_region no_region; // Stands for the guard blocks: it has no bytes.

static int open_arena(const struct emu_launch* launch) {
  uint64_t bytes = EMU_BLOCK + EMU_ARRAY_ARENA;
  for (uint32_t i = 0; i < launch->buffer_count; i++)
    bytes += round_up(launch->buffers[i].bytes + launch->buffers[i].misalignment, EMU_BLOCK) + EMU_BLOCK;
  uint64_t blocks = bytes >> EMU_BLOCK_SHIFT;
  // One block more, because mmap aligns to pages only.
  char* mapped = emu_map(bytes + EMU_BLOCK, 0);
  if (!mapped) return -1;
  char* arena = (char*)round_up((uint64_t)mapped, EMU_BLOCK);
  if (arena != mapped) munmap(mapped, arena - mapped);
  if (arena + bytes != mapped + bytes + EMU_BLOCK) munmap(arena + bytes, mapped + EMU_BLOCK - arena);
  emu_now.arena_low = (uintptr_t)arena;
  emu_now.arena_bytes = bytes;
  emu_now.blocks = emu_map(blocks * sizeof(void*), 1);
  if (!emu_now.blocks) return -1;
  for (uint64_t i = 0; i < blocks; i++) emu_now.blocks[i] = &no_region;
  return 0;
}

EMU_EXPORT void emu_close(void) {
  for (uint32_t i = 0; i < emu_region_count; i++) emu_unmap_shadow(&emu_regions[i]);
  if (emu_now.blocks)
    munmap(emu_now.blocks, (emu_now.arena_bytes >> EMU_BLOCK_SHIFT) * sizeof(void*));
  if (emu_now.arena_bytes) munmap((void*)emu_now.arena_low, emu_now.arena_bytes);
  memset(&emu_now, 0, sizeof emu_now);
  memset(emu_regions, 0, sizeof emu_regions);
  memset(region_of_id, 0, sizeof region_of_id);
  emu_region_count = 0;
  emu_launched = NULL;
}

// Gives every buffer of a launch its memory. Returns 0, or -1 where there is none left.
EMU_EXPORT int emu_open(struct emu_launch* launch) {
  emu_close();
  emu_launched = launch;
  if (launch->buffer_count > MAX_BUFFERS || open_arena(launch)) return -1;
  uint64_t block = EMU_BLOCK;
  for (uint32_t i = 0; i < launch->buffer_count; i++) {
    struct emu_buffer* buffer = &launch->buffers[i];
    struct emu_region* region = &emu_regions[emu_region_count++];
    region->bytes = buffer->bytes;
    region->item_bytes = buffer->item_bytes;
    region->granule_shift = shift_of(buffer->item_bytes);
    region->device = 1;
    region->writable = buffer->writable;
    region->undefined = !buffer->initialised;
    if (open_region(region, block, buffer->misalignment)) return -1;
    buffer->address = (void*)region->base;
    block += round_up(buffer->bytes + buffer->misalignment, EMU_BLOCK) + EMU_BLOCK;
  }
  array_end = block;
  array_bytes = 0;
  return 0;
}

static void poison(struct emu_region* region) { memset((void*)region->base, POISON, region->bytes); }

// Before a run: forgets all that was seen, poisons what has no value yet and the rest of every region's blocks.
void emu_reset_memory(void) {
  for (uint32_t i = 0; i < emu_region_count; i++) {
    struct emu_region* region = &emu_regions[i];
    emu_unmap_shadow(region);
    emu_map_shadow(region);
    memset(region->accesses, 0, sizeof region->accesses);
    memset(region->other_accesses, 0, sizeof region->other_accesses);
    memset(region->other_bytes, 0, sizeof region->other_bytes);
    memset(region->distinct, 0, sizeof region->distinct);
    region->atomics = 0;
    region->generation = 0;
    if (region->undefined) poison(region);
    uint64_t end = region->base + region->bytes;
    memset((void*)end, POISON, round_up(end, 4096) - end);
    memset((void*)(region->base & ~(uint64_t)255), POISON, region->base & 255);
  }
}

// At the start of a group: threadgroup memory has no value.
void emu_poison_arrays(void) {
  for (uint32_t i = emu_launched->buffer_count; i < emu_region_count; i++) {
    poison(&emu_regions[i]);
    emu_regions[i].generation += GENERATION_STEP;
  }
}

static EMU_COLD void* new_array(uint32_t id, uint32_t bytes, uint32_t element_bytes, const char* name, uintptr_t pc) {
  uint64_t blocks = round_up(bytes ? bytes : 1, EMU_BLOCK);
  array_bytes = round_up(array_bytes, 16) + bytes;
  if ((emu_now.checks & CHECK_LIMITS) && array_bytes > ARRAY_LIMIT) emu_stop_at(FINDING_LIMIT, pc, array_bytes, 0, name);
  if (id >= EMU_ARRAYS || array_end + blocks + EMU_BLOCK > emu_now.arena_bytes)
    emu_stop_at(FINDING_LIMIT, pc, array_bytes, 1, name);
  struct emu_region* region = &emu_regions[emu_region_count];
  region->bytes = bytes;
  region->item_bytes = element_bytes;
  // A vector's components are often used one by one.
  region->granule_shift = element_bytes % 4 ? shift_of(element_bytes) : 2;
  region->writable = 1;
  region->undefined = 1;
  region->name = name;
  region->generation = GENERATION_STEP;
  if (open_region(region, array_end, 0)) emu_stop_at(FINDING_LIMIT, pc, array_bytes, 1, name);
  poison(region);
  memset((char*)region->base + bytes, POISON, round_up(bytes, 4096) - bytes);
  emu_region_count++;
  region_of_id[id] = (uint16_t)emu_region_count;
  array_end += blocks + EMU_BLOCK;
  return (void*)region->base;
}

void* emu_threadgroup(emu_uint id, emu_uint bytes, emu_uint element_bytes, const char* name) {
  if (EMU_LIKELY(id < EMU_ARRAYS && region_of_id[id])) return (void*)emu_regions[region_of_id[id] - 1].base;
  return new_array(id, bytes, element_bytes, name, EMU_CALLER);
}

// Fills in region and offset of an address in the arena: of the region it lies in, or else of the nearest. Indices run past an end far more
// often than below a start, so that way counts as shorter.
int emu_describe(uintptr_t address, struct emu_finding* finding) {
  finding->address = address;
  if (address - emu_now.arena_low >= emu_now.arena_bytes) return 0;
  uint64_t least = UINT64_MAX;
  for (uint32_t i = 0; i < emu_region_count; i++) {
    const struct emu_region* region = &emu_regions[i];
    uint64_t end = region->base + region->bytes;
    uint64_t distance = address < region->base ? 4 * (region->base - address) : address < end ? 0 : address - end + 1;
    if (distance >= least) continue;
    least = distance;
    finding->region = (int32_t)i;
    finding->offset = (int64_t)(address - region->base);
  }
  return finding->region >= 0;
}

// An access that no buffer or array holds: returns where that is legal.
EMU_COLD void emu_access_outside(uintptr_t address, uint64_t size, uint32_t access, uintptr_t pc) {
  if (!(emu_now.checks & CHECK_BOUNDS)) return;
  if (access == ACCESS_READ && in_image(address) && size <= (uintptr_t)emu_image_high - address) return;
  uint64_t stacks = emu_launched->stack_count * ((uint64_t)emu_launched->stack_bytes + EMU_STACK_GUARD);
  struct emu_finding* finding = emu_begin_finding(FINDING_WILD);
  emu_add_party(finding, emu_group, emu_current->index, access, pc);
  finding->size = (uint32_t)size;
  if (emu_describe(address, finding))
    finding->kind = FINDING_OUTSIDE;
  else if (address - emu_launched->stacks < stacks) {
    finding->kind = FINDING_OTHER_STACK;
    finding->number[0] = (int64_t)((address - emu_launched->stacks) / (emu_launched->stack_bytes + EMU_STACK_GUARD));
  }
  emu_stop();
}
