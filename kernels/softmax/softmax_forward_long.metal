// p = e^(x - max(x)) / sum of these, for rows of any length: one threadgroup a row, which it reads twice.

#include <metal_stdlib>

#include "../_common/exp_sum.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void softmax_forward_long(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    device T* p [[buffer(2)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[64];

  const int columns = x_shape[1];
  const int threads = threads_per_threadgroup.x;
  const int begin = thread_position_in_threadgroup.x * N;
  const size_t row = threadgroup_position_in_grid.x;
  x += row * columns;
  p += row * columns;

  forge::ExpSum sum;
  for (int column = begin; column < columns; column += threads * N) {
    const int limit = min(columns - column, N);
    float values[N];
    forge::load_floats(x + column, limit, values);
    sum.add(values, limit);
  }
  sum.join_threadgroup(scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads);

  const float factor = 1.0f / sum.total;
  for (int column = begin; column < columns; column += threads * N) {
    const int limit = min(columns - column, N);
    float values[N];
    forge::load_floats(x + column, limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] = precise::exp(values[i] - sum.largest) * factor;
    }
    forge::store_floats(p + column, limit, values);
  }
}
