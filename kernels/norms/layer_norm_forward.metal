// y = (x - mean(x)) * s * w + b and s = 1 / sqrt(var(x) + eps) for rows that fit in the registers of one threadgroup.
// The variance is that of the differences from the mean, in a second pass over the registers.

#include <metal_stdlib>

#include "short_rows.h"

using namespace metal;

template <typename T, typename W, typename B, typename Y, bool WEIGHT, bool BIAS, bool NARROW>
[[kernel]] void layer_norm_forward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device B* b [[buffer(3)]],
    const constant float& eps [[buffer(4)]],
    const constant int& lanes_per_row [[buffer(5)]],
    const constant int& rows_per_group [[buffer(6)]],
    device Y* y [[buffer(7)]],
    device float* mean [[buffer(8)]],
    device float* inverse_std [[buffer(9)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  // One half for w and for the first sum of a row, one for b and the second.
  constexpr int HALF = (WEIGHT || BIAS) && NARROW ? 32 * N : 32;
  threadgroup float scratch[2 * HALF];

  const forge::ShortRows<N, NARROW> rows(
      x_shape,
      lanes_per_row,
      rows_per_group,
      threadgroup_position_in_grid,
      thread_position_in_threadgroup.x,
      threads_per_threadgroup.x,
      thread_index_in_simdgroup,
      simdgroup_index_in_threadgroup);
  float weight[N];
  float bias[N];
  if constexpr (WEIGHT) {
    rows.load_weights(w, threadgroup_position_in_grid.y, scratch, weight);
  }
  if constexpr (BIAS) {
    rows.load_weights(b, threadgroup_position_in_grid.y, scratch + HALF, bias);
  }

  for (int start = 0; start < rows.count; start += rows.rows_at_once) {
    const int row = start + rows.own_row;
    const int limit = rows.limit_of(row);
    float values[N];
    forge::load_floats(x + rows.at(row), limit, values);
    float sum[1] = {0.0f};
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sum[0] += values[i];
    }
    rows.sum(sum, scratch);
    const float of_row = sum[0] / rows.columns;

    float squares[1] = {0.0f};
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] = i < limit ? values[i] - of_row : 0.0f;
      squares[0] += values[i] * values[i];
    }
    rows.sum(squares, scratch + HALF);
    const float s = precise::rsqrt(squares[0] / rows.columns + eps);

#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] *= s;
      if constexpr (WEIGHT) {
        values[i] *= weight[i];
      }
      if constexpr (BIAS) {
        values[i] += bias[i];
      }
    }
    forge::store_floats(y + rows.at(row), limit, values);
    if (rows.leads(row)) {
      mean[rows.first + row] = of_row;
      inverse_std[rows.first + row] = s;
    }
  }
}
