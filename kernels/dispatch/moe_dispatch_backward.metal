// dx[n] = the sum of drows[positions[n, j]] over the slots j, in their order. Some lanes share a token; each has one
// vector of it.

#include <metal_stdlib>

#include "token.h"

using namespace metal;

template <typename T>
[[kernel]] void moe_dispatch_backward(
    const device T* drows [[buffer(0)]],
    const constant int* drows_shape [[buffer(1)]],
    const device int* positions [[buffer(2)]],
    const constant int* positions_shape [[buffer(3)]],
    const constant int& lanes_per_token [[buffer(4)]],
    device T* dx [[buffer(5)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const int columns = drows_shape[1];
  const int slots = positions_shape[1];
  const forge::TokenPart<N> part(
      positions_shape[0], columns, lanes_per_token, thread_position_in_grid, thread_index_in_simdgroup);

  float total[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    total[i] = 0.0f;
  }
  for (int first = 0; first < slots; first += part.lanes.lanes) {
    const int own = part.lanes.own(positions, first, slots, 0);
    for (int slot = 0; slot < part.lanes.rounds(first, slots); slot++) {
      const int row = part.lanes.of_slot(own, slot);
      float values[N];
      forge::load_floats(drows + size_t(row) * columns + part.column, part.limit, values);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        total[i] += values[i];
      }
    }
  }
  forge::store_floats(dx + size_t(part.lanes.token) * columns + part.column, part.limit, total);
}
