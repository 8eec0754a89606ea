// out[n] = the sum of gates[n, indices[n, j]] * y[positions[n, j]] over the slots j, in their order; nothing is read for
// an expert that is not there. Some lanes share a token; each has one vector of it.

#include <metal_stdlib>

#include "token.h"

using namespace metal;

template <typename T, typename G>
[[kernel]] void moe_combine_forward(
    const device T* y [[buffer(0)]],
    const constant int* y_shape [[buffer(1)]],
    const device G* gates [[buffer(2)]],
    const constant int* gates_shape [[buffer(3)]],
    const device int* positions [[buffer(4)]],
    const constant int* positions_shape [[buffer(5)]],
    const device int* indices [[buffer(6)]],
    const constant int& lanes_per_token [[buffer(7)]],
    device T* out [[buffer(8)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const int columns = y_shape[1];
  const int experts = gates_shape[1];
  const int slots = positions_shape[1];
  const forge::TokenPart<N> part(
      positions_shape[0], columns, lanes_per_token, thread_position_in_grid, thread_index_in_simdgroup);

  float total[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    total[i] = 0.0f;
  }
  for (int first = 0; first < slots; first += part.lanes.lanes) {
    const int own_expert = part.lanes.own(indices, first, slots, -1);
    const bool is_expert = own_expert >= 0 && own_expert < experts;
    const int own = is_expert ? part.lanes.own(positions, first, slots, 0) : -1;
    const float own_gate = part.lanes.gate(gates, own_expert, experts);
    for (int slot = 0; slot < part.lanes.rounds(first, slots); slot++) {
      const int row = part.lanes.of_slot(own, slot);
      const float gate = part.lanes.of_slot(own_gate, slot);
      float values[N];
      forge::load_floats(y + size_t(max(row, 0)) * columns + part.column, row < 0 ? 0 : part.limit, values);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        total[i] += gate * values[i];
      }
    }
  }
  forge::store_floats(out + size_t(part.lanes.token) * columns + part.column, part.limit, total);
}
