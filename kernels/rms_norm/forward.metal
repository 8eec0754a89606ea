// y = x * r * w and r = 1 / sqrt(mean(x^2) + eps) for rows that fit in the registers of one threadgroup: each thread
// holds one vector of a row. A row belongs to `lanes_per_row` neighbouring lanes (NARROW) or to the whole threadgroup.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

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

  const float epsilon = eps;
  const int columns = x_shape[2];
  const int lanes = NARROW ? lanes_per_row : 32;
  const int threads = threads_per_threadgroup.x;
  const int thread_index = thread_position_in_threadgroup.x;
  const int first = threadgroup_position_in_grid.x * rows_per_group;
  const int count = min(rows_per_group, x_shape[1] - first);

  const int rows_at_once = NARROW ? threads / lanes : 1;
  const int own_row = NARROW ? thread_index / lanes : 0;
  const int member = NARROW ? thread_index % lanes : thread_index;
  const int column = member * N;
  const int limit = clamp(columns - column, 0, N);

  float weight[N];
  if constexpr (WEIGHT) {
    const size_t at = size_t(threadgroup_position_in_grid.y) * columns + column;
    if constexpr (NARROW) {
      forge::load_shared(w + at, limit, own_row == 0, scratch, column, weight);
    } else {
      forge::load_floats(w + at, limit, weight);
    }
  }

  const size_t row0 = size_t(threadgroup_position_in_grid.y) * x_shape[1] + first;
  for (int start = 0, turn = 0; start < count; start += rows_at_once, turn ^= 1) {
    const int row = start + own_row;
    const int at = row * columns + column;
    const int row_limit = row < count ? limit : 0;
    float values[N];
    forge::load_floats(x + row0 * columns + at, row_limit, values);

    float sum[1] = {0.0f};
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sum[0] += values[i] * values[i];
    }
    if constexpr (NARROW) {
      sum[0] = forge::over_lanes<forge::Sum>(sum[0], lanes);
    } else {
      forge::over_threadgroup<forge::Sum>(
          sum, scratch + turn * 32, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
    }
    const float r = precise::rsqrt(sum[0] / columns + epsilon);

#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] *= r;
      if constexpr (WEIGHT) {
        values[i] *= weight[i];
      }
    }
    forge::store_floats(y + row0 * columns + at, row_limit, values);
    if (member == 0 && row < count) {
      inverse_rms[row0 + row] = r;
    }
  }
}
