// The sum of rows that threadgroups of another kernel left, always in the same order. A lane owns four columns; the
// simdgroups of a threadgroup share the parts, and their sums are joined at the end.

#include <metal_stdlib>

#include "vector.h"

using namespace metal;

template <typename T>
[[kernel]] void sum_parts(
    const device float* parts [[buffer(0)]],
    const constant int* parts_shape [[buffer(1)]],
    device T* total [[buffer(2)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = 4;
  constexpr int WIDTH = 32 * N;
  threadgroup float scratch[8 * WIDTH];

  const int count = parts_shape[1];
  const int columns = parts_shape[2];
  const int first = threadgroup_position_in_grid.x * WIDTH;
  const int own = thread_index_in_simdgroup * N;
  const int limit = clamp(columns - first - own, 0, N);
  const int simdgroups = simdgroups_per_threadgroup;

  float own_sum[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    own_sum[i] = 0.0f;
  }
  parts += size_t(threadgroup_position_in_grid.y) * count * columns + first + own;
  for (int part = simdgroup_index_in_threadgroup; part < count; part += simdgroups) {
    float values[N];
    forge::load_floats(parts + size_t(part) * columns, limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      own_sum[i] += values[i];
    }
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    scratch[simdgroup_index_in_threadgroup * WIDTH + own + i] = own_sum[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int step = threads_per_threadgroup.x;
  for (int column = thread_position_in_threadgroup.x; column < min(WIDTH, columns - first); column += step) {
    float sum = 0.0f;
    for (int simdgroup = 0; simdgroup < simdgroups; simdgroup++) {
      sum += scratch[simdgroup * WIDTH + column];
    }
    total[size_t(threadgroup_position_in_grid.y) * columns + first + column] = static_cast<T>(sum);
  }
}
