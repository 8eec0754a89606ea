// What a row's scale follows from (found.h), of the part of the row that a threadgroup has. Each thread goes through
// vectors of 16 bytes that lie one threadgroup's width apart; which ones follows from the sizes alone.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "modes.h"

using namespace metal;

template <typename T, int MODE>
[[kernel]] void find_parts(
    const device T* w [[buffer(0)]],
    const constant int* w_shape [[buffer(1)]],
    const constant int& elements_per_group [[buffer(2)]],
    const constant int& groups_per_row [[buffer(3)]],
    device float* parts [[buffer(4)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  typedef typename forge::RowMode<MODE>::Found Found;
  threadgroup float scratch[32 * Found::size];

  const int columns = w_shape[1];
  const uint row = threadgroup_position_in_grid.x / groups_per_row;
  const int first = (threadgroup_position_in_grid.x - row * groups_per_row) * elements_per_group;
  const int count = min(elements_per_group, columns - first);
  const int step = threads_per_threadgroup.x * N;
  w += size_t(row) * columns + first;

  Found found;
  // Down from what is left: a place past the end might not fit an int.
  for (int left = count - int(thread_position_in_threadgroup.x) * N; left > 0; left -= step) {
    float x[N];
    forge::load_floats(w + (count - left), min(left, N), x);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      found.add(x[i]);
    }
  }
  forge::join_threadgroup(
      found, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads_per_threadgroup.x);
  if (thread_position_in_threadgroup.x == 0) {
    found.leave(parts + size_t(threadgroup_position_in_grid.x) * Found::size);
  }
}
