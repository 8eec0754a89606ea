// dx = 2 * x * dtotal, with one dtotal a row: a thread takes 16 bytes of x.

#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void sum_squares_backward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device float* dtotal [[buffer(2)]],
    device T* dx [[buffer(3)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();
  const int columns = x_shape[1];
  const uint first = thread_position_in_grid.x * N;
  if (first >= uint(columns)) {
    return;
  }
  const int limit = min(columns - int(first), N);
  const size_t at = size_t(thread_position_in_grid.y) * columns + first;
  const float factor = 2.0f * dtotal[thread_position_in_grid.y];

  float values[N];
  forge::load_floats(x + at, limit, values);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] *= factor;
  }
  forge::store_floats(dx + at, limit, values);
}
