// Sum and maximum of two columns of `values` over one threadgroup, in several rounds with two scratches in turn. `out`
// is [rounds, threads, 4]: what each thread gets.

#include <metal_stdlib>

#include "reduce.h"

using namespace metal;

[[kernel]] void reduce_threadgroup(
    const device float* values [[buffer(0)]],
    const constant int& rounds [[buffer(1)]],
    device float* out [[buffer(2)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  threadgroup float scratch[2 * 64];
  const uint threads = threads_per_threadgroup.x;
  for (int round = 0; round < rounds; round++) {
    const uint at = round * threads + thread_index_in_threadgroup;
    float sums[2] = {values[2 * at], values[2 * at + 1]};
    float largest[2] = {values[2 * at], values[2 * at + 1]};
    forge::over_threadgroup<forge::Sum>(
        sums, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
    forge::over_threadgroup<forge::Max>(
        largest, scratch + 64, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
    for (int n = 0; n < 2; n++) {
      out[4 * at + n] = sums[n];
      out[4 * at + 2 + n] = largest[n];
    }
  }
}
