// c = (sum(g * n) + dr * r) / C with n = x * r and g = dy * w, one number a row, for rows of any length: one
// threadgroup a row. rms_norm_backward_long.metal takes it from there.

#include <metal_stdlib>

#include "long_rows.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT>
[[kernel]] void rms_norm_backward_long_rows(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* inverse_rms [[buffer(3)]],
    const device Y* dy [[buffer(4)]],
    const device float* dr [[buffer(5)]],
    device float* c [[buffer(6)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[32];

  const int columns = x_shape[2];
  const int threads = threads_per_threadgroup.x;
  const int begin = thread_position_in_threadgroup.x * N;
  const size_t row = size_t(threadgroup_position_in_grid.y) * x_shape[1] + threadgroup_position_in_grid.x;
  const size_t weights = size_t(threadgroup_position_in_grid.y) * columns;
  const float r = inverse_rms[row];

  float sum_g;
  float sum[1];
  forge::sum_gradient<N, WEIGHT>(
      x + row * columns, dy + row * columns, w + weights, columns, begin, threads * N, 0.0f, r, sum_g, sum[0]);
  forge::over_threadgroup<forge::Sum>(
      sum, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
  if (begin == 0) {
    c[row] = (sum[0] + dr[row] * r) / columns;
  }
}
