// total = x + residual, rounded to R; y = total * s * w and s = 1 / sqrt(mean(total^2) + eps), for rows of any length:
// one threadgroup a row. x and residual are read once, then total, by the thread that has written it.

#include <metal_stdlib>

#include "long_rows.h"
#include "rms.h"

using namespace metal;

template <typename T, typename U, typename R, typename W, typename Y, bool WEIGHT>
[[kernel]] void add_rms_norm_forward_long(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device U* residual [[buffer(2)]],
    const device W* w [[buffer(3)]],
    const constant float& eps [[buffer(4)]],
    device Y* y [[buffer(5)]],
    device R* total [[buffer(6)]],
    device float* inverse_rms [[buffer(7)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<R>();
  threadgroup float scratch[32];

  const int columns = x_shape[2];
  const int threads = threads_per_threadgroup.x;
  const int begin = thread_position_in_threadgroup.x * N;
  const size_t row = size_t(threadgroup_position_in_grid.y) * x_shape[1] + threadgroup_position_in_grid.x;
  total += row * columns;

  float sum[1] = {0.0f};
  for (int column = begin; column < columns; column += threads * N) {
    const int limit = min(columns - column, N);
    float values[N];
    forge::load_sums<R>(x + row * columns + column, residual + row * columns + column, limit, values);
    forge::store_floats(total + column, limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sum[0] += values[i] * values[i];
    }
  }
  forge::over_threadgroup<forge::Sum>(
      sum, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
  const float s = precise::rsqrt(sum[0] / columns + eps);
  if (begin == 0) {
    inverse_rms[row] = s;
  }

  const size_t weights = size_t(threadgroup_position_in_grid.y) * columns;
  forge::write_normalised<N, WEIGHT, false>(
      total, w + weights, w, y + row * columns, columns, begin, threads * N, 0.0f, s);
}
