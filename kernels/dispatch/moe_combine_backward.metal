// For every slot j of token n, its row r = positions[n, j] and its expert e = indices[n, j]: dy[r] = gates[n, e] *
// dout[n], and dgates[n, e] = the sum of dout[n] * y[r]. Some lanes or a threadgroup share a token. Each member clears
// every width-th gradient of its gates, and alone adds to it: no atomics, and no barrier but those of the sums.

#include <metal_stdlib>

#include "token.h"

using namespace metal;

template <typename T, typename G, bool NARROW>
[[kernel]] void moe_combine_backward(
    const device T* y [[buffer(0)]],
    const constant int* y_shape [[buffer(1)]],
    const device G* gates [[buffer(2)]],
    const constant int* gates_shape [[buffer(3)]],
    const device int* positions [[buffer(4)]],
    const constant int* positions_shape [[buffer(5)]],
    const device int* indices [[buffer(6)]],
    const device T* dout [[buffer(7)]],
    const constant int& lanes_per_token [[buffer(8)]],
    device T* dy [[buffer(9)]],
    device float* dgates [[buffer(10)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[2 * 32];

  const int columns = y_shape[1];
  const int experts = gates_shape[1];
  const int slots = positions_shape[1];
  const forge::WholeToken<N, NARROW> whole(
      positions_shape[0],
      columns,
      lanes_per_token,
      thread_position_in_grid.x,
      threads_per_threadgroup.x,
      thread_index_in_simdgroup,
      simdgroup_index_in_threadgroup);
  const size_t token = whole.lanes.token;
  for (int each = whole.member; each < (whole.lanes.is_token ? experts : 0); each += whole.width) {
    dgates[token * experts + each] = 0.0f;
  }

  int turn = 0;
  for (int start = 0; start < columns; start += whole.width * N) {
    const int column = start + whole.member * N;
    const int limit = whole.limit(column);
    float gradient[N];
    forge::load_floats(dout + token * columns + column, limit, gradient);
    for (int first = 0; first < slots; first += whole.lanes.lanes) {
      const int own_row = whole.lanes.own(positions, first, slots, 0);
      const int index = whole.lanes.own(indices, first, slots, -1);
      const int own_expert = index < experts ? index : -1;
      const float own_gate = whole.lanes.gate(gates, own_expert, experts);
      for (int slot = 0; slot < whole.lanes.rounds(first, slots); slot++) {
        const size_t at = size_t(whole.lanes.of_slot(own_row, slot)) * columns + column;
        const int expert = whole.lanes.of_slot(own_expert, slot);
        const float gate = whole.lanes.of_slot(own_gate, slot);
        float values[N];
        forge::load_floats(y + at, expert < 0 ? 0 : limit, values);
        float dot = 0.0f;
#pragma clang loop unroll(full)
        for (int i = 0; i < N; i++) {
          dot += values[i] * gradient[i];
          // Not 0 times a cotangent, which may be infinite.
          values[i] = expert < 0 ? 0.0f : gate * gradient[i];
        }
        forge::store_floats(dy + at, limit, values);
        dot = whole.sum(dot, scratch + turn * 32);
        turn ^= 1;
        if (expert >= 0 && whole.owns(expert)) {
          dgates[token * experts + expert] += dot;
        }
      }
    }
  }
}
