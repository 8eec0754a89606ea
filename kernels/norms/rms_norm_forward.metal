// y = x * r * w and r = 1 / sqrt(mean(x^2) + eps) for rows that fit in the registers of one threadgroup.

#include <metal_stdlib>

#include "rms.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT, bool NARROW>
[[kernel]] void rms_norm_forward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const constant float& eps [[buffer(3)]],
    const constant int& lanes_per_row [[buffer(4)]],
    const constant int& rows_per_group [[buffer(5)]],
    device Y* y [[buffer(6)]],
    device float* inverse_rms [[buffer(7)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[WEIGHT && NARROW ? 32 * N : 2 * 32];

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
  if constexpr (WEIGHT) {
    rows.load_weights(w, threadgroup_position_in_grid.y, scratch, weight);
  }

  for (int start = 0, turn = 0; start < rows.count; start += rows.rows_at_once, turn ^= 1) {
    const int row = start + rows.own_row;
    float values[N];
    forge::load_floats(x + rows.at(row), rows.limit_of(row), values);
    const float r = forge::normalise_by_rms<WEIGHT>(rows, values, weight, eps, scratch + turn * 32);
    forge::store_floats(y + rows.at(row), rows.limit_of(row), values);
    if (rows.leads(row)) {
      inverse_rms[rows.first + row] = r;
    }
  }
}
