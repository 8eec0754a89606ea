// The gradient of the logits, from one reading of them, the two parts of L and the cotangents of each row's loss and
// spread. A thread goes down one vector of columns; `width` threads of a threadgroup lie beside each other. An ignored
// row is written and not read.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"
#include "token_loss.h"

using namespace metal;

template <typename T, bool CAP>
[[kernel]] void cross_entropy_backward(
    const device T* logits [[buffer(0)]],
    const constant int* logits_shape [[buffer(1)]],
    const device int* codes [[buffer(2)]],
    const device float* parts [[buffer(3)]],
    const device float* dloss [[buffer(4)]],
    const device float* dparts [[buffer(5)]],
    const constant float& smoothing [[buffer(6)]],
    const constant float& cap [[buffer(7)]],
    const constant float& z_loss [[buffer(8)]],
    const constant int& width [[buffer(9)]],
    const constant int& rows_per_group [[buffer(10)]],
    device T* dlogits [[buffer(11)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();

  const float inverse_cap = 1.0f / cap;
  const int columns = logits_shape[1];
  const ushort lane = thread_index_in_simdgroup;
  const ushort lanes = min(width, 32);
  const int own_row = thread_position_in_threadgroup.x / width;
  const int rows_at_once = threads_per_threadgroup.x / width;
  const int column = (threadgroup_position_in_grid.x * width + thread_position_in_threadgroup.x % width) * N;
  const int limit = clamp(columns - column, 0, N);
  const size_t row0 = size_t(threadgroup_position_in_grid.y) * rows_per_group;
  const int count = min(size_t(rows_per_group), logits_shape[0] - row0);

  for (int start = 0; start < count; start += rows_at_once) {
    const size_t row = row0 + start + own_row;
    const bool is_row = start + own_row < count;
    const bool is_reader = is_row && lane % lanes == 0;
    const int code = forge::from_first(is_reader ? codes[row] : forge::IGNORED, lane, lanes);
    const float largest = forge::from_first(is_reader ? parts[2 * row] : 0.0f, lane, lanes);
    const float spread = forge::from_first(is_reader ? parts[2 * row + 1] : 0.0f, lane, lanes);
    const float of_loss = forge::from_first(is_reader ? dloss[row] : 0.0f, lane, lanes);
    const float of_spread = forge::from_first(is_reader ? dparts[2 * row + 1] : 0.0f, lane, lanes);
    const forge::LogitGradient gradient(code, columns, largest, spread, of_loss, of_spread, smoothing, z_loss);
    const bool is_kept = code != forge::IGNORED;

    float values[N];
    forge::load_floats(logits + row * columns + column, is_kept ? limit : 0, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      const float z = forge::capped<CAP>(values[i], cap, inverse_cap);
      values[i] = is_kept ? gradient.at<CAP>(z, column + i == code, inverse_cap) : 0.0f;
    }
    forge::store_floats(dlogits + row * columns + column, is_row ? limit : 0, values);
  }
}
