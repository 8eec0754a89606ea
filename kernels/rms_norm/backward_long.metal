// dx = r * (g - n * c) with n = x * r, g = dy * w and c of each row from backward_long_rows.metal, and the sum of
// dy * n over the rows of each threadgroup. A thread owns one vector of columns and goes down its threadgroup's rows,
// so that w and the sum stay in registers however long a row is.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT>
[[kernel]] void rms_norm_backward_long(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* inverse_rms [[buffer(3)]],
    const device Y* dy [[buffer(4)]],
    const device float* c [[buffer(5)]],
    const constant int& rows_per_group [[buffer(6)]],
    device T* dx [[buffer(7)]],
    device float* partial_dw [[buffer(8)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const ushort lane = thread_index_in_simdgroup;
  const int columns = x_shape[2];
  const int column = thread_position_in_grid.x * N;
  const int limit = clamp(columns - column, 0, N);
  const int first = threadgroup_position_in_grid.y * rows_per_group;
  const int count = min(rows_per_group, x_shape[1] - first);
  const size_t of_batch = threadgroup_position_in_grid.z;

  float weight[N];
  float dw[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    dw[i] = 0.0f;
  }
  if constexpr (WEIGHT) {
    forge::load_floats(w + of_batch * columns + column, limit, weight);
  }

  const size_t row0 = size_t(threadgroup_position_in_grid.z) * x_shape[1] + first;
  for (int row = 0; row < count; row++) {
    const size_t at = (row0 + row) * columns + column;
    const float r = forge::from_first(lane == 0 ? inverse_rms[row0 + row] : 0.0f, lane, 32);
    const float of_row = forge::from_first(lane == 0 ? c[row0 + row] : 0.0f, lane, 32);
    float n[N];
    float g[N];
    forge::load_floats(x + at, limit, n);
    forge::load_floats(dy + at, limit, g);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      n[i] *= r;
      if constexpr (WEIGHT) {
        dw[i] += g[i] * n[i];
        g[i] *= weight[i];
      }
      n[i] = r * (g[i] - n[i] * of_row);
    }
    forge::store_floats(dx + at, limit, n);
  }
  if constexpr (WEIGHT) {
    const uint part = threadgroup_position_in_grid.z * threadgroups_per_grid.y + threadgroup_position_in_grid.y;
    forge::store_floats(partial_dw + size_t(part) * columns + column, limit, dw);
  } else if (all(thread_position_in_grid == uint3(0))) {
    // Nothing to sum, and an output that must not stay unwritten: one element.
    partial_dw[0] = 0.0f;
  }
}
