// What compiled kernels and the runtime call each other with. Read by the runtime (C) and by the Metal headers (C++ for OpenCL).
#pragma once

#ifdef __METAL__
#define EMU_CONSTANT __constant
#define EMU_PRIVATE __private
#define EMU_LOCAL __local
#define EMU_CONVERGENT __attribute__((convergent, nomerge))
extern "C" {
#else
#define EMU_CONSTANT
#define EMU_PRIVATE
#define EMU_LOCAL
#define EMU_CONVERGENT
#endif

typedef unsigned int emu_uint;
typedef unsigned long emu_ulong;

// Where a thread stands: the source of every [[attribute]]. Filled for each thread before it starts.
struct emu_ids {
  emu_uint thread_position_in_grid[3];
  emu_uint thread_position_in_threadgroup[3];
  emu_uint threadgroup_position_in_grid[3];
  emu_uint threads_per_threadgroup[3];          // Of this threadgroup: smaller at the grid's edge.
  emu_uint dispatch_threads_per_threadgroup[3]; // Of every whole threadgroup.
  emu_uint threads_per_grid[3];
  emu_uint threadgroups_per_grid[3];
  emu_uint grid_origin[3];
  emu_uint grid_size[3];
  emu_uint thread_index_in_threadgroup;
  emu_uint thread_index_in_simdgroup;
  emu_uint thread_index_in_quadgroup;
  emu_uint simdgroup_index_in_threadgroup;
  emu_uint quadgroup_index_in_threadgroup;
  emu_uint simdgroups_per_threadgroup;
  emu_uint quadgroups_per_threadgroup;
  emu_uint dispatch_simdgroups_per_threadgroup;
  emu_uint dispatch_quadgroups_per_threadgroup;
  emu_uint threads_per_simdgroup;
  emu_uint thread_execution_width;
};

// A threadgroup array: the same memory for every thread of a group that passes the same id. The translated source calls it
// where the array is declared; `name` is for messages.
EMU_LOCAL void* emu_threadgroup(emu_uint id, emu_uint bytes, emu_uint element_bytes, const EMU_CONSTANT char* name);

// A barrier. scope: 0 the threadgroup, 1 the simdgroup. flags: bits of Metal's mem_flags as below.
enum { EMU_MEM_NONE = 0, EMU_MEM_DEVICE = 1, EMU_MEM_THREADGROUP = 2, EMU_MEM_TEXTURE = 4, EMU_MEM_THREADGROUP_IMAGEBLOCK = 8 };
void emu_barrier(emu_uint scope, emu_uint flags) EMU_CONVERGENT;

// Every active lane of the simdgroup hands in `bytes` (at most 64) and receives what all lanes handed in: `all` has room for 32 of them,
// zeros where a lane is inactive. Returns the mask of the active lanes. Lanes are together when they stand at the same call.
enum {
  EMU_REDUCE,  // Reductions, prefix sums, votes, ballots: by part of a simdgroup legal, with a warning.
  EMU_SHUFFLE, // Shuffles and broadcasts: part is legal; reading an inactive lane is not (emu_require_lane).
  EMU_MATRIX,  // simdgroup_matrix functions: all 32 lanes, or an error.
  EMU_QUAD     // As EMU_SHUFFLE, for functions of a quadgroup.
};
emu_uint emu_exchange(emu_uint kind, const EMU_PRIVATE void* mine, emu_uint bytes, EMU_PRIVATE void* all) EMU_CONVERGENT;

// Index of the calling thread in its simdgroup.
emu_uint emu_lane(void);

// The order of the program, which decides who is together (runtime/place.c). The translated source says emu_stand before a call that waits for
// other lanes, with its place in the source and the number of loops around it in its function; emu_iterate when an iteration of such a loop
// begins; emu_enter and emu_leave at the ends of a function that waits.
void emu_stand(emu_uint place, emu_uint depth) EMU_CONVERGENT;
void emu_iterate(emu_uint depth, emu_uint place) EMU_CONVERGENT;
emu_ulong emu_enter(void) EMU_CONVERGENT;
void emu_leave(emu_ulong before) EMU_CONVERGENT;

// Stops the launch with an InactiveLaneError unless `lane` is in `active`; a lane of 32 or more never is.
void emu_require_lane(emu_uint active, emu_uint lane);

// One simdgroup_matrix multiply-accumulate of an 8x8x8 product, told by every lane that took part.
void emu_count_matrix(void);

// An atomic operation on 4 or 8 bytes in device or threadgroup memory. operand, expected and old are of the same type; `expected` is read
// by EMU_COMPARE_EXCHANGE alone; `old` receives the value before. Returns 1 where a value was stored.
enum { EMU_I32, EMU_U32, EMU_F32, EMU_U64, EMU_I64, EMU_BOOL };
enum {
  EMU_LOAD, EMU_STORE, EMU_EXCHANGE, EMU_COMPARE_EXCHANGE, EMU_ADD, EMU_SUB, EMU_MIN, EMU_MAX, EMU_AND, EMU_OR, EMU_XOR
};
emu_uint emu_atomic(void* address, emu_uint type, emu_uint operation, const EMU_PRIVATE void* operand,
                    const EMU_PRIVATE void* expected, EMU_PRIVATE void* old);

// a*b+c of half and bfloat (as bits), rounded once to nearest even.
unsigned short emu_fma_half(unsigned short a, unsigned short b, unsigned short c);
unsigned short emu_fma_bfloat(unsigned short a, unsigned short b, unsigned short c);

#ifdef __METAL__
}
// The one entry of a compiled kernel: calls the kernel with its arguments, in the order of its generated signature.
extern "C" void emu_entry(void* const* arguments, const emu_ids* ids);
#endif
