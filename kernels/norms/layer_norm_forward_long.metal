// y = (x - mean(x)) * s * w + b and s = 1 / sqrt(var(x) + eps) for rows of any length: one threadgroup a row, which it
// reads twice. The first time each thread keeps the mean of what it has seen and the sum of squared differences from
// it, and joins the next vector's to them (Chan, Golub and LeVeque): nothing cancels, however far the mean is from 0.

#include <metal_stdlib>

#include "long_rows.h"

using namespace metal;

template <typename T, typename W, typename B, typename Y, bool WEIGHT, bool BIAS>
[[kernel]] void layer_norm_forward_long(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device B* b [[buffer(3)]],
    const constant float& eps [[buffer(4)]],
    device Y* y [[buffer(5)]],
    device float* mean [[buffer(6)]],
    device float* inverse_std [[buffer(7)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[2 * 32];

  const int columns = x_shape[2];
  const int threads = threads_per_threadgroup.x;
  const int begin = thread_position_in_threadgroup.x * N;
  const size_t row = size_t(threadgroup_position_in_grid.y) * x_shape[1] + threadgroup_position_in_grid.x;
  x += row * columns;

  int seen = 0;
  float own_mean = 0.0f;
  float own_squares = 0.0f;
  for (int column = begin; column < columns; column += threads * N) {
    const int limit = min(columns - column, N);
    float values[N];
    forge::load_floats(x + column, limit, values);
    float of_vector = 0.0f;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      of_vector += values[i];
    }
    of_vector /= limit;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      const float difference = i < limit ? values[i] - of_vector : 0.0f;
      own_squares += difference * difference;
    }
    const float part = float(limit) / (seen + limit);
    const float step = of_vector - own_mean;
    // In this order 0 of before times a square past float32 is no NaN.
    own_squares += step * (seen * part) * step;
    own_mean += step * part;
    seen += limit;
  }

  // A long row has a vector for each thread.
  float sum[1] = {own_mean * seen};
  forge::over_threadgroup<forge::Sum>(
      sum, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
  const float of_row = sum[0] / columns;
  const float step = own_mean - of_row;
  float squares[1] = {own_squares + seen * step * step};
  forge::over_threadgroup<forge::Sum>(
      squares, scratch + 32, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
  const float s = precise::rsqrt(squares[0] / columns + eps);
  if (begin == 0) {
    mean[row] = of_row;
    inverse_std[row] = s;
  }

  const size_t weights = size_t(threadgroup_position_in_grid.y) * columns;
  forge::write_normalised<N, WEIGHT, BIAS>(
      x, w + weights, b + weights, y + row * columns, columns, begin, threads * N, of_row, s);
}
