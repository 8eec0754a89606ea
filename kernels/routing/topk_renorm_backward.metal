// dp = (dgates - the sum of g * dgates) / (the sum of p + eps) on the elements that indices names, with g the gates in
// float32; dgates alone without NORMALIZE; 0 elsewhere. Rows are shared out as in topk_renorm_forward.metal.

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T, int VECTORS, bool NORMALIZE>
[[kernel]] void topk_renorm_backward(
    const device T* p [[buffer(0)]],
    const constant int* p_shape [[buffer(1)]],
    const device int* indices [[buffer(2)]],
    const device T* dgates [[buffer(3)]],
    const constant int& k [[buffer(4)]],
    const constant float& eps [[buffer(5)]],
    const constant int& lanes_per_row [[buffer(6)]],
    device T* dp [[buffer(7)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const int columns = p_shape[1];
  const int lanes = lanes_per_row;
  const int member = thread_position_in_grid.x % lanes;
  const int row = thread_position_in_grid.x / lanes;
  const ushort leader = thread_index_in_simdgroup - member;
  const bool is_row = row < p_shape[0];
  const size_t begin = size_t(row) * columns;

  // A bit for each own element. A lane has a second vector only where all 32 share the row.
  uint chosen = 0;
  for (int start = 0; start < k; start += lanes) {
    const int mine = start + member;
    const int own = is_row && mine < k ? indices[size_t(row) * k + mine] : -1;
    const int turns = min(lanes, k - start);
    for (int turn = 0; turn < turns; turn++) {
      const int index = simd_shuffle(own, ushort(leader + turn));
      const int vector = index / N;
      if (index >= 0 && (vector & (lanes - 1)) == member) {
        chosen |= 1u << (vector / 32 * N + index % N);
      }
    }
  }

  float gates[VECTORS][N];
  float g[VECTORS][N];
  float sum = 0.0f;
#pragma clang loop unroll(full)
  for (int v = 0; v < VECTORS; v++) {
    const size_t at = begin + (v * lanes + member) * N;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      const bool is_chosen = (chosen >> (v * N + i) & 1) != 0;
      g[v][i] = is_chosen ? static_cast<float>(dgates[at + i]) : 0.0f;
      if constexpr (NORMALIZE) {
        gates[v][i] = is_chosen ? static_cast<float>(p[at + i]) : 0.0f;
        sum += gates[v][i];
      }
    }
  }
  if constexpr (NORMALIZE) {
    const float total = forge::over_lanes<forge::Sum>(sum, lanes) + eps;
    float dot = 0.0f;
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        dot += (chosen >> (v * N + i) & 1) != 0 ? gates[v][i] / total * g[v][i] : 0.0f;
      }
    }
    dot = forge::over_lanes<forge::Sum>(dot, lanes);
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        g[v][i] = (chosen >> (v * N + i) & 1) != 0 ? (g[v][i] - dot) / total : 0.0f;
      }
    }
  }
#pragma clang loop unroll(full)
  for (int v = 0; v < VECTORS; v++) {
    const int column = (v * lanes + member) * N;
    forge::store_floats(dp + begin + column, is_row ? clamp(columns - column, 0, N) : 0, g[v]);
  }
}
