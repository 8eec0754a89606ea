// y = x * r * w and r = 1 / sqrt(mean(x^2) + eps) for rows of any length: one threadgroup a row, which it reads twice.

#include <metal_stdlib>

#include "long_rows.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT>
[[kernel]] void rms_norm_forward_long(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const constant float& eps [[buffer(3)]],
    device Y* y [[buffer(4)]],
    device float* inverse_rms [[buffer(5)]],
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
  x += row * columns;

  float sum[1] = {0.0f};
  for (int column = begin; column < columns; column += threads * N) {
    float values[N];
    forge::load_floats(x + column, min(columns - column, N), values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sum[0] += values[i] * values[i];
    }
  }
  forge::over_threadgroup<forge::Sum>(
      sum, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
  const float r = precise::rsqrt(sum[0] / columns + eps);
  if (begin == 0) {
    inverse_rms[row] = r;
  }

  const size_t weights = size_t(threadgroup_position_in_grid.y) * columns;
  forge::write_normalised<N, WEIGHT, false>(
      x, w + weights, w, y + row * columns, columns, begin, threads * N, 0.0f, r);
}
