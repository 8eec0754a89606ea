// p = e^(x - max(x)) / sum of these, for rows that fit in the registers of one threadgroup: each thread holds one vector
// of a row. A row belongs to `width` threads: neighbouring lanes of a simdgroup, or the whole threadgroup.

#include <metal_stdlib>

#include "../_common/exp_sum.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void softmax_forward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const constant int& width [[buffer(2)]],
    const constant int& rows_per_group [[buffer(3)]],
    device T* p [[buffer(4)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[2 * 64];

  const int columns = x_shape[1];
  const int row_threads = width;
  const ushort lane = thread_index_in_simdgroup;
  const int threads = threads_per_threadgroup.x;
  const int own_row = thread_position_in_threadgroup.x / row_threads;
  const int rows_at_once = threads / row_threads;
  const int column = thread_position_in_threadgroup.x % row_threads * N;
  const size_t row0 = size_t(threadgroup_position_in_grid.x) * rows_per_group;
  const int count = min(size_t(rows_per_group), x_shape[0] - row0);

  for (int start = 0, turn = 0; start < count; start += rows_at_once, turn ^= 1) {
    const int row = start + own_row;
    const size_t at = (row0 + row) * columns + column;
    const int limit = row < count ? clamp(columns - column, 0, N) : 0;
    float values[N];
    forge::load_floats(x + at, limit, values);

    forge::ExpSum sum;
    sum.add(values, limit);
    const float own_largest = sum.largest;
    if (row_threads <= 32) {
      sum.join_lanes(row_threads);
    } else {
      sum.join_threadgroup(scratch + turn * 64, lane, simdgroup_index_in_threadgroup, threads);
    }
    const float factor = precise::exp(own_largest - sum.largest) / sum.total;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] *= factor;
    }
    forge::store_floats(p + at, limit, values);
  }
}
