// rows[positions[n, j]] = x[n] for every slot j. Some lanes share a token; each reads one vector and writes it k times.

#include <metal_stdlib>

#include "token.h"

using namespace metal;

template <typename T>
[[kernel]] void moe_dispatch_forward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device int* positions [[buffer(2)]],
    const constant int* positions_shape [[buffer(3)]],
    const constant int& lanes_per_token [[buffer(4)]],
    device T* rows [[buffer(5)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const int columns = x_shape[1];
  const int slots = positions_shape[1];
  const forge::TokenPart<N> part(
      x_shape[0], columns, lanes_per_token, thread_position_in_grid, thread_index_in_simdgroup);

  float values[N];
  forge::load_floats(x + size_t(part.lanes.token) * columns + part.column, part.limit, values);
  for (int first = 0; first < slots; first += part.lanes.lanes) {
    const int own = part.lanes.own(positions, first, slots, 0);
    for (int slot = 0; slot < part.lanes.rounds(first, slots); slot++) {
      const int row = part.lanes.of_slot(own, slot);
      forge::store_floats(rows + size_t(row) * columns + part.column, part.limit, values);
    }
  }
}
