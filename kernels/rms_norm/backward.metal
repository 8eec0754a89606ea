// dx = r * (g - n * c) with n = x * r, g = dy * w and c = (sum(g * n) + dr * r) / C, and the sum of dy * n over the
// rows of each threadgroup, for rows that fit in the registers of one threadgroup: each thread holds one vector of a
// row. A row belongs to `lanes_per_row` neighbouring lanes (NARROW, at most 8 simdgroups) or to the whole threadgroup.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T, typename W, typename Y, bool WEIGHT, bool NARROW>
[[kernel]] void rms_norm_backward(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device W* w [[buffer(2)]],
    const device float* inverse_rms [[buffer(3)]],
    const device Y* dy [[buffer(4)]],
    const device float* dr [[buffer(5)]],
    const constant int& lanes_per_row [[buffer(6)]],
    const constant int& rows_per_group [[buffer(7)]],
    device T* dx [[buffer(8)]],
    device float* partial_dw [[buffer(9)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  constexpr int WIDTH = 32 * N;
  threadgroup float scratch[WEIGHT && NARROW ? 8 * WIDTH : 2 * 32];

  const int columns = x_shape[2];
  const int lanes = NARROW ? lanes_per_row : 32;
  const ushort lane = thread_index_in_simdgroup;
  const int threads = threads_per_threadgroup.x;
  const int thread_index = thread_position_in_threadgroup.x;
  const int first = threadgroup_position_in_grid.x * rows_per_group;
  const int count = min(rows_per_group, x_shape[1] - first);

  const int rows_at_once = NARROW ? threads / lanes : 1;
  const int own_row = NARROW ? thread_index / lanes : 0;
  const int column = (NARROW ? thread_index % lanes : thread_index) * N;
  const int limit = clamp(columns - column, 0, N);

  float weight[N];
  float dw[N];
  if constexpr (WEIGHT) {
    const size_t at = size_t(threadgroup_position_in_grid.y) * columns + column;
    if constexpr (NARROW) {
      forge::load_shared(w + at, limit, own_row == 0, scratch, column, weight);
    } else {
      forge::load_floats(w + at, limit, weight);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      dw[i] = 0.0f;
    }
  }

  const size_t row0 = size_t(threadgroup_position_in_grid.y) * x_shape[1] + first;
  for (int start = 0, turn = 0; start < count; start += rows_at_once, turn ^= 1) {
    const int row = start + own_row;
    const int at = row * columns + column;
    const int row_limit = row < count ? limit : 0;
    const bool is_reader = lane % lanes == 0 && row < count;
    const float r = forge::from_first(is_reader ? inverse_rms[row0 + row] : 0.0f, lane, lanes);
    float n[N];
    float g[N];
    forge::load_floats(x + row0 * columns + at, row_limit, n);
    forge::load_floats(dy + row0 * columns + at, row_limit, g);

    float sum[1] = {column == 0 && row < count ? dr[row0 + row] * r : 0.0f};
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      n[i] *= r;
      if constexpr (WEIGHT) {
        dw[i] += g[i] * n[i];
        g[i] *= weight[i];
      }
      sum[0] += g[i] * n[i];
    }
    if constexpr (NARROW) {
      sum[0] = forge::over_lanes<forge::Sum>(sum[0], lanes);
    } else {
      forge::over_threadgroup<forge::Sum>(
          sum, scratch + turn * 32, lane, simdgroup_index_in_threadgroup, threads);
    }
    const float c = sum[0] / columns;

#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      n[i] = r * (g[i] - n[i] * c);
    }
    forge::store_floats(dx + row0 * columns + at, row_limit, n);
  }

  if constexpr (!WEIGHT) {
    // Nothing to sum, and an output that must not stay unwritten: one element.
    if (threadgroup_position_in_grid.x + threadgroup_position_in_grid.y + uint(thread_index) == 0) {
      partial_dw[0] = 0.0f;
    }
  } else {
    const uint part = threadgroup_position_in_grid.y * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
    partial_dw += size_t(part) * columns;
    if constexpr (NARROW) {
      // Several rows at once: each simdgroup joins its own in registers, then the threadgroup joins the simdgroups.
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        for (ushort step = lanes; step < 32; step *= 2) {
          dw[i] += simd_shuffle_xor(dw[i], step);
        }
        if (lane < lanes) {
          scratch[simdgroup_index_in_threadgroup * WIDTH + column + i] = dw[i];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int of_thread = thread_index; of_thread < columns; of_thread += threads) {
        float total = 0.0f;
        for (int simdgroup = 0; simdgroup < threads / 32; simdgroup++) {
          total += scratch[simdgroup * WIDTH + of_thread];
        }
        partial_dw[of_thread] = total;
      }
    } else {
      forge::store_floats(partial_dw + column, limit, dw);
    }
  }
}
