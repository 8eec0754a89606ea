// The loss of each row, and largest and spread, two numbers side by side whose sum is L = logsumexp(z), from one reading
// of the logits however long a row is. A row belongs to `width` threads: neighbouring lanes of a simdgroup, or the whole
// threadgroup. The logits of an ignored row are not read.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"
#include "token_loss.h"

using namespace metal;

template <typename T, bool CAP>
[[kernel]] void cross_entropy_forward(
    const device T* logits [[buffer(0)]],
    const constant int* logits_shape [[buffer(1)]],
    const device int* codes [[buffer(2)]],
    const constant float& smoothing [[buffer(3)]],
    const constant float& cap [[buffer(4)]],
    const constant float& z_loss [[buffer(5)]],
    const constant int& width [[buffer(6)]],
    const constant int& rows_per_group [[buffer(7)]],
    device float* loss [[buffer(8)]],
    device float* parts [[buffer(9)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[2 * 128];

  const float inverse_cap = 1.0f / cap;
  const int columns = logits_shape[1];
  const int row_threads = width;
  const ushort lane = thread_index_in_simdgroup;
  const ushort lanes = min(row_threads, 32);
  const int threads = threads_per_threadgroup.x;
  const int own_row = thread_position_in_threadgroup.x / row_threads;
  const int member = thread_position_in_threadgroup.x % row_threads;
  const int rows_at_once = threads / row_threads;
  const size_t row0 = size_t(threadgroup_position_in_grid.x) * rows_per_group;
  const int count = min(size_t(rows_per_group), logits_shape[0] - row0);

  for (int start = 0, turn = 0; start < count; start += rows_at_once, turn ^= 1) {
    const int row = start + own_row;
    const bool is_row = row < count;
    const int code = forge::from_first(is_row && lane % lanes == 0 ? codes[row0 + row] : forge::IGNORED, lane, lanes);
    const int row_columns = code == forge::IGNORED ? 0 : columns;
    const size_t of_row = (row0 + row) * columns;

    forge::LogitSums sums;
    for (int column = member * N; column < row_columns; column += row_threads * N) {
      const int limit = min(columns - column, N);
      float z[N];
      forge::load_floats(logits + of_row + column, limit, z);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        z[i] = forge::capped<CAP>(z[i], cap, inverse_cap);
      }
      sums.add(z, limit, code - column);
    }
    if (row_threads <= 32) {
      sums.join_lanes(lanes);
    } else {
      sums.join_threadgroup(scratch + turn * 128, lane, simdgroup_index_in_threadgroup, threads);
    }
    if (member == 0 && is_row) {
      loss[row0 + row] = sums.loss(code, columns, smoothing, z_loss);
      const bool is_ignored = code == forge::IGNORED;
      parts[2 * (row0 + row)] = is_ignored ? 0.0f : sums.exponentials.largest;
      parts[2 * (row0 + row) + 1] = is_ignored ? 0.0f : sums.spread();
    }
  }
}
