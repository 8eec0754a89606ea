// out = x * gates[:, expert], or dst + x * gates[:, expert]. Some lanes share a token and its gate; each has one vector.

#include <metal_stdlib>

#include "token.h"

using namespace metal;

template <typename X, typename G, typename T, bool ADD>
[[kernel]] void row_scale_forward(
    const device T* dst [[buffer(0)]],
    const device X* x [[buffer(1)]],
    const constant int* x_shape [[buffer(2)]],
    const device G* gates [[buffer(3)]],
    const constant int* gates_shape [[buffer(4)]],
    const constant int& expert [[buffer(5)]],
    const constant int& lanes_per_token [[buffer(6)]],
    device T* out [[buffer(7)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = 16 / (sizeof(X) < sizeof(T) ? sizeof(X) : sizeof(T));

  const int columns = x_shape[1];
  const forge::TokenPart<N> part(
      x_shape[0], columns, lanes_per_token, thread_position_in_grid, thread_index_in_simdgroup);
  const bool is_reader = part.lanes.lane == part.lanes.leader;
  const float own = is_reader ? part.lanes.gate(gates, expert, gates_shape[1]) : 0.0f;
  const float gate = part.lanes.of_slot(own, 0);

  const size_t at = size_t(part.lanes.token) * columns + part.column;
  float values[N];
  forge::load_floats(x + at, part.limit, values);
  if constexpr (ADD) {
    float sums[N];
    forge::load_floats(dst + at, part.limit, sums);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] = sums[i] + gate * values[i];
    }
  } else {
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] *= gate;
    }
  }
  forge::store_floats(out + at, part.limit, values);
}
