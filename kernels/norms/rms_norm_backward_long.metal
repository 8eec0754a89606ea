// dx = r * (g - n * c) with n = x * r, g = dy * w and c of each row from rms_norm_backward_long_rows.metal, and the sum
// of dy * n over the rows of each threadgroup. A thread owns one vector of columns and goes down its threadgroup's
// rows, so that w and the sum stay in registers however long a row is. ADD: as in rms_norm_backward.metal.

#include <metal_stdlib>

#include "gradient.h"
#include "long_rows.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT, bool ADD>
[[kernel]] void rms_norm_backward_long(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* inverse_rms [[buffer(3)]],
    const device Y* dy [[buffer(4)]],
    const device float* c [[buffer(5)]],
    const device T* others [[buffer(6)]],
    const constant int& rows_per_group [[buffer(7)]],
    device T* dx [[buffer(8)]],
    device float* parts [[buffer(9)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const forge::Columns<N> columns(
      x_shape,
      rows_per_group,
      thread_position_in_grid,
      threadgroup_position_in_grid,
      threadgroups_per_grid,
      thread_index_in_simdgroup);
  float weight[N];
  float dw[N];
  if constexpr (WEIGHT) {
    columns.load_weights(w, threadgroup_position_in_grid.z, weight);
    forge::clear(dw);
  }

  for (int row = 0; row < columns.count; row++) {
    const float r = columns.of_row(inverse_rms, row);
    float n[N];
    float g[N];
    forge::load_floats(x + columns.at(row), columns.limit, n);
    forge::load_floats(dy + columns.at(row), columns.limit, g);
    forge::begin_gradient<WEIGHT>(n, g, weight, dw, 0.0f, r);
    forge::end_gradient(n, g, r, 0.0f, columns.of_row(c, row));
    if constexpr (ADD) {
      forge::load_floats(others + columns.at(row), columns.limit, g);
      forge::add(n, g);
    }
    forge::store_floats(dx + columns.at(row), columns.limit, n);
  }

  if constexpr (WEIGHT) {
    forge::store_floats(parts + columns.part * columns.columns + columns.column, columns.limit, dw);
  } else if (all(thread_position_in_grid == uint3(0))) {
    // Nothing to sum, and an output that must not stay unwritten: one element.
    parts[0] = 0.0f;
  }
}
