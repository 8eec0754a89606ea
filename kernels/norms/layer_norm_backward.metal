// dx = s * (g - a - n * c) + dmean / C with n = (x - mean) * s, g = dy * w, a = sum(g) / C and
// c = (sum(g * n) + ds * s) / C; and the sums of dy * n and of dy over the rows of each threadgroup, beside each other;
// for rows that fit in the registers of one threadgroup. CROWDED: with more than 512 threads of 8 elements, w waits in
// threadgroup memory, in its own 16 bits: with it there would be 40 live floats of data.

#include <metal_stdlib>

#include "gradient.h"
#include "short_rows.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT, bool BIAS, bool NARROW, bool CROWDED>
[[kernel]] void layer_norm_backward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* mean [[buffer(3)]],
    const device float* inverse_std [[buffer(4)]],
    const device Y* dy [[buffer(5)]],
    const device float* dmean [[buffer(6)]],
    const device float* ds [[buffer(7)]],
    const constant int& lanes_per_row [[buffer(8)]],
    const constant int& rows_per_group [[buffer(9)]],
    device T* dx [[buffer(10)]],
    device float* parts [[buffer(11)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[(WEIGHT || BIAS) && NARROW ? 8 * 32 * N : 2 * 2 * 32];
  threadgroup W aside[CROWDED ? 1024 * N : 1];

  const forge::ShortRows<N, NARROW> rows(
      x_shape,
      lanes_per_row,
      rows_per_group,
      threadgroup_position_in_grid,
      thread_position_in_threadgroup.x,
      threads_per_threadgroup.x,
      thread_index_in_simdgroup,
      simdgroup_index_in_threadgroup);
  float weight[N];
  float dw[N];
  float db[N];
  forge::clear(dw);
  forge::clear(db);
  if constexpr (WEIGHT) {
    rows.load_weights(w, threadgroup_position_in_grid.y, scratch, weight);
  }
  if constexpr (CROWDED) {
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      aside[rows.column + i] = static_cast<W>(weight[i]);
    }
  }

  for (int start = 0, turn = 0; start < rows.count; start += rows.rows_at_once, turn ^= 1) {
    const int row = start + rows.own_row;
    const int limit = rows.limit_of(row);
    const float of_row = rows.of_row(mean, row);
    const float s = rows.of_row(inverse_std, row);
    float n[N];
    float g[N];
    forge::load_floats(x + rows.at(row), limit, n);
    forge::load_floats(dy + rows.at(row), limit, g);
    if constexpr (CROWDED) {
      // Each thread reads what it has written itself.
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        weight[i] = static_cast<float>(aside[rows.column + i]);
      }
    }
    if constexpr (BIAS) {
      forge::add(db, g);
    }

    float sums[2] = {0.0f, rows.leads(row) ? ds[rows.first + row] * s : 0.0f};
    forge::begin_gradient<WEIGHT>(n, g, weight, dw, of_row, s);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sums[0] += g[i];
    }
    forge::add_products(sums[1], g, n);
    rows.sum(sums, scratch + turn * 64);
    forge::end_gradient(n, g, s, sums[0] / rows.columns, sums[1] / rows.columns);
    const float of_mean = rows.of_row(dmean, row) / rows.columns;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      n[i] += of_mean;
    }
    forge::store_floats(dx + rows.at(row), limit, n);
  }

  const uint part = threadgroup_position_in_grid.y * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  parts += size_t(part) * rows.columns * (WEIGHT + BIAS);
  if constexpr (WEIGHT) {
    rows.store_part(dw, parts, scratch);
  }
  if constexpr (BIAS) {
    rows.store_part(db, parts + WEIGHT * rows.columns, scratch);
  }
  if constexpr (!WEIGHT && !BIAS) {
    // Nothing to sum, and an output that must not stay unwritten: one element.
    if (part + thread_position_in_threadgroup.x == 0) {
      parts[0] = 0.0f;
    }
  }
}
