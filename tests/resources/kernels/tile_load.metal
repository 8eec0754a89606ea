// A tile of each role, loaded within `rows` and `cols` unless WHOLE, then stored whole and, unless WHOLE, within them.
// The left operand comes from threadgroup memory. `out` is [3 roles, 2 stores, 64, 64]. One simdgroup.

#include <metal_stdlib>

#include "tile.h"

using namespace metal;

template <forge::Role ROLE, typename E, int R, int C, bool TRANSPOSED, bool WHOLE, typename P>
METAL_FUNC void through_tile(P source, device float* out, int rows, int cols, ushort lane) {
  forge::Tile<E, R, C, ROLE> tile(lane);
  if constexpr (TRANSPOSED && WHOLE) {
    tile.load_transposed(source, 64);
  } else if constexpr (TRANSPOSED) {
    tile.load_transposed(source, 64, rows, cols);
  } else if constexpr (WHOLE) {
    tile.load(source, 64);
  } else {
    tile.load(source, 64, rows, cols);
  }
  tile.store(out, 64);
  if constexpr (!WHOLE) {
    tile.store(out + 4096, 64, rows, cols);
  }
}

template <typename T, int R, int C, bool TRANSPOSED, bool WHOLE>
[[kernel]] void tile_load(
    const device T* source [[buffer(0)]],
    const constant int& rows [[buffer(1)]],
    const constant int& cols [[buffer(2)]],
    device float* out [[buffer(3)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  threadgroup T shared[4096];
  for (int i = thread_index_in_simdgroup; i < 4096; i += 32) {
    shared[i] = source[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const threadgroup T* staged = shared;
  const ushort lane = thread_index_in_simdgroup;
  through_tile<forge::Role::A, T, R, C, TRANSPOSED, WHOLE>(staged, out, rows, cols, lane);
  through_tile<forge::Role::B, T, R, C, TRANSPOSED, WHOLE>(source, out + 2 * 4096, rows, cols, lane);
  through_tile<forge::Role::Acc, float, R, C, TRANSPOSED, WHOLE>(source, out + 4 * 4096, rows, cols, lane);
}
