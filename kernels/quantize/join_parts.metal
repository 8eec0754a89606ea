// The scale of each row from what find_parts.metal has left of its parts, always joined in the same order.

#include <metal_stdlib>

#include "modes.h"

using namespace metal;

template <int MODE>
[[kernel]] void join_parts(
    const device float* parts [[buffer(0)]],
    const constant int* parts_shape [[buffer(1)]],
    const constant int& columns [[buffer(2)]],
    device float* scales [[buffer(3)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  typedef typename forge::RowMode<MODE>::Found Found;
  threadgroup float scratch[32 * Found::size];

  const int count = parts_shape[1];
  parts += size_t(threadgroup_position_in_grid.x) * count * Found::size;
  Found found;
  for (int part = thread_position_in_threadgroup.x; part < count; part += threads_per_threadgroup.x) {
    found.join(parts + part * Found::size);
  }
  forge::join_threadgroup(
      found, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads_per_threadgroup.x);
  if (thread_position_in_threadgroup.x == 0) {
    scales[threadgroup_position_in_grid.x] = forge::RowMode<MODE>::scale(found, float(columns));
  }
}
