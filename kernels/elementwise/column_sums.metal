// The sum of each column over the rows of a threadgroup. A thread goes down its rows; what the threads of one column
// have found is then added up by halves, always in the same order.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "columns.h"

using namespace metal;

template <typename T>
[[kernel]] void column_sums(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const constant int& lanes [[buffer(2)]],
    const constant int& rows_per_group [[buffer(3)]],
    device float* parts [[buffer(4)]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[256 * N];

  const int width = lanes;
  const forge::ColumnRows<N> rows(
      x_shape,
      width,
      rows_per_group,
      threadgroup_position_in_grid,
      thread_position_in_threadgroup.x,
      threads_per_threadgroup.x);
  float sums[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    sums[i] = 0.0f;
  }
  for (int row = rows.own_row; row < rows.count; row += rows.high) {
    float values[N];
    forge::load_floats(x + rows.at(row), rows.limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sums[i] += values[i];
    }
  }

  for (int height = rows.high; height > 1;) {
    const int below = (height + 1) / 2;
    // The later rows leave their sums and the earlier ones take them: no place is written twice.
    if (rows.own_row >= below && rows.own_row < height) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        scratch[int(thread_position_in_threadgroup.x) * N + i] = sums[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (rows.own_row + below < height) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        sums[i] += scratch[(int(thread_position_in_threadgroup.x) + below * width) * N + i];
      }
    }
    height = below;
  }

  if (rows.own_row == 0) {
    const size_t before = size_t(threadgroup_position_in_grid.z) * threadgroups_per_grid.y;
    const size_t part = before + threadgroup_position_in_grid.y;
    forge::store_floats(parts + part * rows.columns + rows.column, rows.limit, sums);
  }
}
