// a = sum(g) / C, c = (sum(g * n) + ds * s) / C and dmean / C with n = (x - mean) * s and g = dy * w: three numbers a
// row, beside each other, for rows of any length: one threadgroup a row. layer_norm_backward_long.metal takes them from
// there.

#include <metal_stdlib>

#include "long_rows.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT>
[[kernel]] void layer_norm_backward_long_rows(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* mean [[buffer(3)]],
    const device float* inverse_std [[buffer(4)]],
    const device Y* dy [[buffer(5)]],
    const device float* dmean [[buffer(6)]],
    const device float* ds [[buffer(7)]],
    device float* numbers [[buffer(8)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[2 * 32];

  const int columns = x_shape[2];
  const int threads = threads_per_threadgroup.x;
  const int begin = thread_position_in_threadgroup.x * N;
  const size_t row = size_t(threadgroup_position_in_grid.y) * x_shape[1] + threadgroup_position_in_grid.x;
  const size_t weights = size_t(threadgroup_position_in_grid.y) * columns;
  const float of_row = mean[row];
  const float s = inverse_std[row];

  float sums[2];
  forge::sum_gradient<N, WEIGHT>(
      x + row * columns, dy + row * columns, w + weights, columns, begin, threads * N, of_row, s, sums[0], sums[1]);
  forge::over_threadgroup<forge::Sum>(
      sums, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);
  if (begin == 0) {
    numbers[3 * row] = sums[0] / columns;
    numbers[3 * row + 1] = (sums[1] + ds[row] * s) / columns;
    numbers[3 * row + 2] = dmean[row] / columns;
  }
}
