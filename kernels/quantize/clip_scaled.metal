// dw = dout, and 0 where the code of w was clipped, with the scale of each row as in fake_quant_scaled.metal.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"
#include "modes.h"

using namespace metal;

template <typename T, int MODE>
[[kernel]] void clip_scaled(
    const device T* w [[buffer(0)]],
    const constant int* w_shape [[buffer(1)]],
    const device float* scales [[buffer(2)]],
    const constant int& groups_per_row [[buffer(3)]],
    const device T* dout [[buffer(4)]],
    device T* dw [[buffer(5)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  typedef typename forge::RowMode<MODE>::type Codec;

  const uint columns = w_shape[1];
  const uint row = threadgroup_position_in_grid.x / groups_per_row;
  const uint group = threadgroup_position_in_grid.x - row * groups_per_row;
  const uint column = (group * threads_per_threadgroup.x + thread_position_in_threadgroup.x) * N;
  const int limit = column < columns ? min(columns - column, uint(N)) : 0;
  const size_t at = size_t(row) * columns + column;
  float x[N];
  forge::load_floats(w + at, limit, x);
  const ushort lane = thread_index_in_simdgroup;
  const float scale = forge::from_first(lane == 0 ? scales[row] : 0.0f, lane, 32);
  const Codec codec(scale);
  float g[N];
  forge::load_floats(dout + at, limit, g);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    g[i] = codec.clips(x[i]) ? 0.0f : g[i];
  }
  forge::store_floats(dw + at, limit, g);
}
