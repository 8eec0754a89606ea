// total = x + residual, rounded to R; y = total * s * w and s = 1 / sqrt(mean(total^2) + eps), for rows that fit in the
// registers of one threadgroup.

#include <metal_stdlib>

#include "rms.h"

using namespace metal;

template <typename T, typename U, typename R, typename W, typename Y, bool WEIGHT, bool NARROW>
[[kernel]] void add_rms_norm_forward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device U* residual [[buffer(2)]],
    const device W* w [[buffer(3)]],
    const constant float& eps [[buffer(4)]],
    const constant int& lanes_per_row [[buffer(5)]],
    const constant int& rows_per_group [[buffer(6)]],
    device Y* y [[buffer(7)]],
    device R* total [[buffer(8)]],
    device float* inverse_rms [[buffer(9)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<R>();
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
    const int limit = rows.limit_of(row);
    float values[N];
    forge::load_sums<R>(x + rows.at(row), residual + rows.at(row), limit, values);
    forge::store_floats(total + rows.at(row), limit, values);
    const float s = forge::normalise_by_rms<WEIGHT>(rows, values, weight, eps, scratch + turn * 32);
    forge::store_floats(y + rows.at(row), limit, values);
    if (rows.leads(row)) {
      inverse_rms[rows.first + row] = s;
    }
  }
}
