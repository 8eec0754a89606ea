// Rows of any length: one threadgroup a row, whose threads go along it side by side; or threads that each go down one
// vector of columns.

#ifndef FORGE_LONG_ROWS_H
#define FORGE_LONG_ROWS_H

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

namespace forge {

// y = (x - mean) * scale * w + b for a thread's vectors of a row: at `begin` and every `step` from there.
template <int N, bool WEIGHT, bool BIAS, typename X, typename PW, typename PB, typename Y>
METAL_FUNC void write_normalised(
    const device X* x, PW w, PB b, device Y* y, int columns, int begin, int step, float mean, float scale) {
  for (int column = begin; column < columns; column += step) {
    const int limit = metal::min(columns - column, N);
    float values[N];
    float weight[N];
    float bias[N];
    load_floats(x + column, limit, values);
    if constexpr (WEIGHT) {
      load_floats(w + column, limit, weight);
    }
    if constexpr (BIAS) {
      load_floats(b + column, limit, bias);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] = (values[i] - mean) * scale;
      if constexpr (WEIGHT) {
        values[i] *= weight[i];
      }
      if constexpr (BIAS) {
        values[i] += bias[i];
      }
    }
    store_floats(y + column, limit, values);
  }
}

// The sums of g and of g * n over a thread's vectors of a row, with n = (x - mean) * scale and g = dy * w.
template <int N, bool WEIGHT, typename X, typename PW, typename Y>
METAL_FUNC void sum_gradient(
    const device X* x,
    const device Y* dy,
    PW w,
    int columns,
    int begin,
    int step,
    float mean,
    float scale,
    thread float& sum_g,
    thread float& sum_gn) {
  sum_g = 0.0f;
  sum_gn = 0.0f;
  for (int column = begin; column < columns; column += step) {
    const int limit = metal::min(columns - column, N);
    float values[N];
    float g[N];
    float weight[N];
    load_floats(x + column, limit, values);
    load_floats(dy + column, limit, g);
    if constexpr (WEIGHT) {
      load_floats(w + column, limit, weight);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      if constexpr (WEIGHT) {
        g[i] *= weight[i];
      }
      sum_g += g[i];
      sum_gn += g[i] * ((values[i] - mean) * scale);
    }
  }
}

// Where a thread stands that goes down one vector of N columns, through some rows of one batch. A batch has a layer of
// threadgroups, in which those beside each other share the columns and those below each other the rows.
template <int N>
struct Columns {
  size_t first;
  size_t part;
  int columns;
  int count;
  int column;
  int limit;
  ushort lane;

  // `shape`: [B, M, C].
  METAL_FUNC Columns(
      const constant int* shape,
      int rows_per_group,
      metal::uint3 position,
      metal::uint3 group,
      metal::uint3 groups,
      uint index) thread {
    columns = shape[2];
    column = position.x * N;
    limit = metal::clamp(columns - column, 0, N);
    const int before = group.y * rows_per_group;
    first = size_t(group.z) * shape[1] + before;
    count = metal::min(rows_per_group, shape[1] - before);
    part = size_t(group.z) * groups.y + group.y;
    lane = index;
  }

  // Where the thread's vector of a row begins.
  METAL_FUNC size_t at(int row) const thread {
    return (first + row) * columns + column;
  }

  // The thread's vector of weights [B, C].
  template <typename P>
  METAL_FUNC void load_weights(P weights, uint batch, thread float (&values)[N]) const thread {
    load_floats(weights + size_t(batch) * columns + column, limit, values);
  }

  // Number `n` of the numbers that a row has once, of which there are `each`: one lane of the simdgroup reads it.
  template <typename P>
  METAL_FUNC float of_row(P values, int row, int n = 0, int each = 1) const thread {
    return from_first(lane == 0 ? values[(first + row) * each + n] : 0.0f, lane, 32);
  }
};

}  // namespace forge

#endif
