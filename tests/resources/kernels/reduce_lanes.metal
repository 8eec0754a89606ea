// Sum and maximum over each part of `lanes` lanes, and the value of its first lane. `out` is [32, 3]. One simdgroup.

#include <metal_stdlib>

#include "reduce.h"

using namespace metal;

[[kernel]] void reduce_lanes(
    const device float* values [[buffer(0)]],
    const constant int& lanes [[buffer(1)]],
    device float* out [[buffer(2)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  const float value = values[thread_index_in_simdgroup];
  device float* mine = out + 3 * thread_index_in_simdgroup;
  mine[0] = forge::over_lanes<forge::Sum>(value, lanes);
  mine[1] = forge::over_lanes<forge::Max>(value, lanes);
  mine[2] = forge::from_first(value, thread_index_in_simdgroup, lanes);
}
