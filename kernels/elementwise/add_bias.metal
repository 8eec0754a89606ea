// x + b with one b [C] for each batch of rows. A thread keeps its vector of b in registers and goes down its
// threadgroup's rows; b is read once a threadgroup.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "columns.h"

using namespace metal;

template <typename X, typename B, typename T>
[[kernel]] void add_bias(
    const device X* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device B* b [[buffer(2)]],
    const constant int& lanes [[buffer(3)]],
    const constant int& rows_per_group [[buffer(4)]],
    device T* out [[buffer(5)]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<X>();
  threadgroup float scratch[256 * N];

  const forge::ColumnRows<N> rows(
      x_shape,
      lanes,
      rows_per_group,
      threadgroup_position_in_grid,
      thread_position_in_threadgroup.x,
      threads_per_threadgroup.x);
  float bias[N];
  forge::load_shared(
      b + size_t(threadgroup_position_in_grid.z) * rows.columns + rows.column,
      rows.limit,
      rows.own_row == 0,
      scratch,
      rows.own_lane * N,
      bias);
  for (int row = rows.own_row; row < rows.count; row += rows.high) {
    float values[N];
    forge::load_floats(x + rows.at(row), rows.limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] += bias[i];
    }
    forge::store_floats(out + rows.at(row), rows.limit, values);
  }
}
