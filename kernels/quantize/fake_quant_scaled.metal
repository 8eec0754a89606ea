// values = dequantized(quantized(w)) with the scale of each row, which another launch has found. A thread has one
// vector of 16 bytes.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"
#include "modes.h"

using namespace metal;

template <typename T, int MODE>
[[kernel]] void fake_quant_scaled(
    const device T* w [[buffer(0)]],
    const constant int* w_shape [[buffer(1)]],
    const device float* scales [[buffer(2)]],
    device T* values [[buffer(3)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();
  typedef typename forge::RowMode<MODE>::type Codec;

  const uint columns = w_shape[1];
  const uint column = thread_position_in_grid.x * N;
  const int limit = column < columns ? min(columns - column, uint(N)) : 0;
  const size_t at = size_t(thread_position_in_grid.y) * columns + column;
  float x[N];
  forge::load_floats(w + at, limit, x);
  const ushort lane = thread_index_in_simdgroup;
  const float scale = forge::from_first(lane == 0 ? scales[thread_position_in_grid.y] : 0.0f, lane, 32);
  const Codec codec(scale);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    x[i] = codec.value(codec.code(x[i]));
  }
  forge::store_floats(values + at, limit, x);
}
