// dx = s * (g - a - n * c) + dmean / C with n = (x - mean) * s, g = dy * w and the three numbers a, c and dmean / C of
// each row from layer_norm_backward_long_rows.metal; and the sums of dy * n and of dy over the rows of each
// threadgroup, beside each other. A thread owns one vector of columns and goes down its threadgroup's rows, so that w
// and the sums stay in registers however long a row is.

#include <metal_stdlib>

#include "gradient.h"
#include "long_rows.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT, bool BIAS>
[[kernel]] void layer_norm_backward_long(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* mean [[buffer(3)]],
    const device float* inverse_std [[buffer(4)]],
    const device Y* dy [[buffer(5)]],
    const device float* numbers [[buffer(6)]],
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
  float db[N];
  forge::clear(dw);
  forge::clear(db);
  if constexpr (WEIGHT) {
    columns.load_weights(w, threadgroup_position_in_grid.z, weight);
  }

  for (int row = 0; row < columns.count; row++) {
    const float s = columns.of_row(inverse_std, row);
    float n[N];
    float g[N];
    forge::load_floats(x + columns.at(row), columns.limit, n);
    forge::load_floats(dy + columns.at(row), columns.limit, g);
    if constexpr (BIAS) {
      forge::add(db, g);
    }
    forge::begin_gradient<WEIGHT>(n, g, weight, dw, columns.of_row(mean, row), s);
    forge::end_gradient(n, g, s, columns.of_row(numbers, row, 0, 3), columns.of_row(numbers, row, 1, 3));
    const float of_mean = columns.of_row(numbers, row, 2, 3);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      n[i] += of_mean;
    }
    forge::store_floats(dx + columns.at(row), columns.limit, n);
  }

  parts += columns.part * columns.columns * (WEIGHT + BIAS) + columns.column;
  if constexpr (WEIGHT) {
    forge::store_floats(parts, columns.limit, dw);
  }
  if constexpr (BIAS) {
    forge::store_floats(parts + WEIGHT * columns.columns, columns.limit, db);
  }
  if constexpr (!WEIGHT && !BIAS) {
    // Nothing to sum, and an output that must not stay unwritten: one element.
    if (all(thread_position_in_grid == uint3(0))) {
      parts[0] = 0.0f;
    }
  }
}
