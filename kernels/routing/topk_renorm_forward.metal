// gates = p on the k elements of each row with the largest p + bias, over their sum + eps; 0 elsewhere. indices names
// these elements, the best one first. Some lanes share a row; each holds vectors of it in registers. BIAS: 0, none;
// 1, one for all rows; 2, one for each row.

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"
#include "selection.h"

using namespace metal;

template <typename T, typename B, int BIAS, int VECTORS, bool NORMALIZE>
[[kernel]] void topk_renorm_forward(
    const device T* p [[buffer(0)]],
    const constant int* p_shape [[buffer(1)]],
    const device B* bias [[buffer(2)]],
    const constant int& k [[buffer(3)]],
    const constant float& eps [[buffer(4)]],
    const constant int& lanes_per_row [[buffer(5)]],
    device T* gates [[buffer(6)]],
    device int* indices [[buffer(7)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float shared_bias[1024];

  const int columns = p_shape[1];
  const int lanes = lanes_per_row;
  const int member = thread_position_in_grid.x % lanes;
  const int row = thread_position_in_grid.x / lanes;
  const bool is_row = row < p_shape[0];
  const size_t begin = size_t(row) * columns;

  if constexpr (BIAS == 1) {
    for (int i = thread_position_in_threadgroup.x; i < columns; i += threads_per_threadgroup.x) {
      shared_bias[i] = static_cast<float>(bias[i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  float values[VECTORS][N];
  uint keys[VECTORS][N];
#pragma clang loop unroll(full)
  for (int v = 0; v < VECTORS; v++) {
    const int column = (v * lanes + member) * N;
    const int limit = is_row ? clamp(columns - column, 0, N) : 0;
    forge::load_floats(p + begin + column, limit, values[v]);
    float added[N];
    if constexpr (BIAS == 2) {
      forge::load_floats(bias + begin + column, limit, added);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      float score = values[v][i];
      if constexpr (BIAS == 1) {
        score += i < limit ? shared_bias[column + i] : 0.0f;
      } else if constexpr (BIAS == 2) {
        score += added[i];
      }
      keys[v][i] = i < limit ? forge::order_key(score) : 0;
    }
  }

  for (int turn = 0; turn < k; turn++) {
    forge::Best best = {0, INT_MAX};
    // In ascending order, so that the first of equals stays.
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        if (keys[v][i] > best.key) {
          best.key = keys[v][i];
          best.index = (v * lanes + member) * N + i;
        }
      }
    }
    best.join_lanes(lanes);
    // What is taken has no key any more.
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        keys[v][i] = (v * lanes + member) * N + i == best.index ? 0 : keys[v][i];
      }
    }
    if (is_row && member == 0) {
      indices[size_t(row) * k + turn] = best.index;
    }
  }

  float total = 1.0f;
  if constexpr (NORMALIZE) {
    float sum = 0.0f;
#pragma clang loop unroll(full)
    for (int v = 0; v < VECTORS; v++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        // Past the end of the row the value is 0.
        sum += keys[v][i] == 0 ? values[v][i] : 0.0f;
      }
    }
    total = forge::over_lanes<forge::Sum>(sum, lanes) + eps;
  }
#pragma clang loop unroll(full)
  for (int v = 0; v < VECTORS; v++) {
    const int column = (v * lanes + member) * N;
    const int limit = is_row ? clamp(columns - column, 0, N) : 0;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[v][i] = keys[v][i] == 0 ? values[v][i] / total : 0.0f;
    }
    forge::store_floats(gates + begin + column, limit, values[v]);
  }
}
