// The sum of x, or of its squares (SQUARES), over the part of a row that a threadgroup has. Each thread adds up vectors
// of 16 bytes that lie one threadgroup's width apart; which ones follows from the sizes alone.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T, bool SQUARES>
[[kernel]] void sum_elements(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const constant int& elements_per_group [[buffer(2)]],
    device float* sums [[buffer(3)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[32];

  const int columns = x_shape[1];
  const int first = threadgroup_position_in_grid.x * elements_per_group;
  const int count = min(elements_per_group, columns - first);
  const int step = threads_per_threadgroup.x * N;
  x += size_t(threadgroup_position_in_grid.y) * columns + first;

  float totals[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    totals[i] = 0.0f;
  }
  // Down from what is left: a place past the end might not fit an int.
  for (int left = count - int(thread_position_in_threadgroup.x) * N; left > 0; left -= step) {
    float values[N];
    forge::load_floats(x + (count - left), min(left, N), values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      totals[i] += SQUARES ? values[i] * values[i] : values[i];
    }
  }
  float sum[1] = {totals[0]};
#pragma clang loop unroll(full)
  for (int i = 1; i < N; i++) {
    sum[0] += totals[i];
  }
  forge::over_threadgroup<forge::Sum>(
      sum, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads_per_threadgroup.x);
  if (thread_position_in_threadgroup.x == 0) {
    sums[threadgroup_position_in_grid.y * threadgroups_per_grid.x + threadgroup_position_in_grid.x] = sum[0];
  }
}
