// dx = r * (g - n * c) with n = x * r, g = dy * w and c = (sum(g * n) + dr * r) / C, and the sum of dy * n over the
// rows of each threadgroup, for rows that fit in the registers of one threadgroup. ADD: dx gets `others` added, the
// gradient that x, a sum in add_rms_norm, has from elsewhere.

#include <metal_stdlib>

#include "gradient.h"
#include "short_rows.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT, bool ADD, bool NARROW>
[[kernel]] void rms_norm_backward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* inverse_rms [[buffer(3)]],
    const device Y* dy [[buffer(4)]],
    const device float* dr [[buffer(5)]],
    const device T* others [[buffer(6)]],
    const constant int& lanes_per_row [[buffer(7)]],
    const constant int& rows_per_group [[buffer(8)]],
    device T* dx [[buffer(9)]],
    device float* parts [[buffer(10)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[WEIGHT && NARROW ? 8 * 32 * N : 2 * 32];

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
  float dw[N];
  if constexpr (WEIGHT) {
    rows.load_weights(w, threadgroup_position_in_grid.y, scratch, weight);
    forge::clear(dw);
  }

  for (int start = 0, turn = 0; start < rows.count; start += rows.rows_at_once, turn ^= 1) {
    const int row = start + rows.own_row;
    const int limit = rows.limit_of(row);
    const float r = rows.of_row(inverse_rms, row);
    float n[N];
    float g[N];
    forge::load_floats(x + rows.at(row), limit, n);
    forge::load_floats(dy + rows.at(row), limit, g);

    float sum[1] = {rows.leads(row) ? dr[rows.first + row] * r : 0.0f};
    forge::begin_gradient<WEIGHT>(n, g, weight, dw, 0.0f, r);
    forge::add_products(sum[0], g, n);
    rows.sum(sum, scratch + turn * 32);
    forge::end_gradient(n, g, r, 0.0f, sum[0] / rows.columns);
    if constexpr (ADD) {
      forge::load_floats(others + rows.at(row), limit, g);
      forge::add(n, g);
    }
    forge::store_floats(dx + rows.at(row), limit, n);
  }

  if constexpr (WEIGHT) {
    const uint part = threadgroup_position_in_grid.y * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
    rows.store_part(dw, parts + size_t(part) * rows.columns, scratch);
  } else if (threadgroup_position_in_grid.x + threadgroup_position_in_grid.y + thread_position_in_threadgroup.x == 0) {
    // Nothing to sum, and an output that must not stay unwritten: one element.
    parts[0] = 0.0f;
  }
}
