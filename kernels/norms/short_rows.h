// Rows that fit in the registers of a threadgroup: each thread holds one vector of N elements of a row. A row belongs
// to some neighbouring lanes of a simdgroup (NARROW, at most 8 simdgroups) or to the whole threadgroup.

#ifndef FORGE_SHORT_ROWS_H
#define FORGE_SHORT_ROWS_H

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

namespace forge {

// Where a thread stands. The rows of a threadgroup are those from `first` on, counted over all batches; it goes through
// them `rows_at_once` at a time. A row in a loop is counted from `first`.
template <int N, bool NARROW>
struct ShortRows {
  enum { width = 32 * N };

  size_t first;
  int columns;
  int count;
  int rows_at_once;
  int own_row;
  int column;
  int limit;
  int threads;
  ushort lanes;
  ushort lane;
  ushort simdgroup;

  // `shape`: [B, M, C]. `lanes_per_row` counts if NARROW. A batch has a row of threadgroups.
  METAL_FUNC ShortRows(
      const constant int* shape,
      int lanes_per_row,
      int rows_per_group,
      metal::uint3 threadgroup_index,
      uint thread_index,
      uint threads_in_all,
      uint lane_index,
      uint simdgroup_index) thread {
    threads = threads_in_all;
    lanes = NARROW ? lanes_per_row : 32;
    lane = lane_index;
    simdgroup = simdgroup_index;
    columns = shape[2];
    const int before = threadgroup_index.x * rows_per_group;
    first = size_t(threadgroup_index.y) * shape[1] + before;
    count = metal::min(rows_per_group, shape[1] - before);
    rows_at_once = NARROW ? threads / lanes : 1;
    own_row = NARROW ? thread_index / lanes : 0;
    column = (NARROW ? thread_index % lanes : thread_index) * N;
    limit = metal::clamp(columns - column, 0, N);
  }

  // Where the thread's vector of a row begins.
  METAL_FUNC size_t at(int row) const thread {
    return first * columns + (row * columns + column);
  }

  // How many elements of the thread's vector of a row there are: none behind the last row.
  METAL_FUNC int limit_of(int row) const thread {
    return row < count ? limit : 0;
  }

  // Whether the thread is the first of a row.
  METAL_FUNC bool leads(int row) const thread {
    return column == 0 && row < count;
  }

  // What a row has once: one lane of each simdgroup reads it. The whole simdgroup takes part.
  template <typename P>
  METAL_FUNC float of_row(P values, int row) const thread {
    return from_first(lane % lanes == 0 && row < count ? values[first + row] : 0.0f, lane, lanes);
  }

  // Each of M values summed over its row. `scratch` as over_threadgroup takes it; not used if NARROW.
  template <int M>
  METAL_FUNC void sum(thread float (&values)[M], threadgroup float* scratch) const thread {
    if constexpr (NARROW) {
#pragma clang loop unroll(full)
      for (int m = 0; m < M; m++) {
        values[m] = over_lanes<Sum>(values[m], lanes);
      }
    } else {
      over_threadgroup<Sum>(values, scratch, lane, simdgroup, threads);
    }
  }

  // The thread's vector of weights [B, C], read once for the threadgroup. `scratch`, of `width` floats if NARROW, may
  // be used again only behind the next barrier.
  template <typename P>
  METAL_FUNC void load_weights(
      P weights, uint batch, threadgroup float* scratch, thread float (&values)[N]) const thread {
    weights += size_t(batch) * columns + column;
    if constexpr (NARROW) {
      load_shared(weights, limit, own_row == 0, scratch, column, values);
    } else {
      load_floats(weights, limit, values);
    }
  }

  // Writes what each column's threads have summed, `sums`, to `part`. `scratch`: 8 * `width` floats if NARROW, which
  // all threads are done with at the end only behind the next barrier; others may still read it when this begins.
  METAL_FUNC void store_part(thread float (&sums)[N], device float* part, threadgroup float* scratch) const thread {
    if constexpr (NARROW) {
      // Several rows at once: each simdgroup joins its own in registers, then the threadgroup joins the simdgroups.
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        for (ushort step = lanes; step < 32; step *= 2) {
          sums[i] += metal::simd_shuffle_xor(sums[i], step);
        }
        if (lane < lanes) {
          scratch[simdgroup * width + column + i] = sums[i];
        }
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      for (int of_thread = simdgroup * 32 + lane; of_thread < columns; of_thread += threads) {
        float total = 0.0f;
        for (int other = 0; other < threads / 32; other++) {
          total += scratch[other * width + of_thread];
        }
        part[of_thread] = total;
      }
    } else {
      store_floats(part + column, limit, sums);
    }
  }
};

}  // namespace forge

#endif
