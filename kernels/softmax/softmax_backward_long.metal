// dx = p * (dp - sum(p * dp)) for rows of any length: one threadgroup a row, which it reads twice.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void softmax_backward_long(
    const device T* p [[buffer(0)]],
    const constant int* p_shape [[buffer(1)]],
    const device T* dp [[buffer(2)]],
    device T* dx [[buffer(3)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[32];

  const int columns = p_shape[1];
  const int threads = threads_per_threadgroup.x;
  const int begin = thread_position_in_threadgroup.x * N;
  const size_t first = size_t(threadgroup_position_in_grid.x) * columns;

  float sum[1] = {0.0f};
  for (int column = begin; column < columns; column += threads * N) {
    const int limit = min(columns - column, N);
    float values[N];
    float g[N];
    forge::load_floats(p + first + column, limit, values);
    forge::load_floats(dp + first + column, limit, g);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sum[0] += values[i] * g[i];
    }
  }
  forge::over_threadgroup<forge::Sum>(
      sum, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);

  for (int column = begin; column < columns; column += threads * N) {
    const int limit = min(columns - column, N);
    float values[N];
    float g[N];
    forge::load_floats(p + first + column, limit, values);
    forge::load_floats(dp + first + column, limit, g);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] *= g[i] - sum[0];
    }
    forge::store_floats(dx + first + column, limit, values);
  }
}
