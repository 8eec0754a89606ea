// dx = p * (dp - sum(p * dp)) for rows that fit in the registers of one threadgroup, shared out as in
// softmax_forward.metal.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void softmax_backward(
    const device T* p [[buffer(0)]],
    const constant int* p_shape [[buffer(1)]],
    const device T* dp [[buffer(2)]],
    const constant int& width [[buffer(3)]],
    const constant int& rows_per_group [[buffer(4)]],
    device T* dx [[buffer(5)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[2 * 32];

  const int columns = p_shape[1];
  const int row_threads = width;
  const int threads = threads_per_threadgroup.x;
  const int own_row = thread_position_in_threadgroup.x / row_threads;
  const int rows_at_once = threads / row_threads;
  const int column = thread_position_in_threadgroup.x % row_threads * N;
  const size_t row0 = size_t(threadgroup_position_in_grid.x) * rows_per_group;
  const int count = min(size_t(rows_per_group), p_shape[0] - row0);

  for (int start = 0, turn = 0; start < count; start += rows_at_once, turn ^= 1) {
    const int row = start + own_row;
    const size_t at = (row0 + row) * columns + column;
    const int limit = row < count ? clamp(columns - column, 0, N) : 0;
    float values[N];
    float g[N];
    forge::load_floats(p + at, limit, values);
    forge::load_floats(dp + at, limit, g);

    float sum[1] = {0.0f};
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sum[0] += values[i] * g[i];
    }
    if (row_threads <= 32) {
      sum[0] = forge::over_lanes<forge::Sum>(sum[0], row_threads);
    } else {
      forge::over_threadgroup<forge::Sum>(
          sum, scratch + turn * 32, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] *= g[i] - sum[0];
    }
    forge::store_floats(dx + at, limit, values);
  }
}
