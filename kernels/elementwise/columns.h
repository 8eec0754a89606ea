// A threadgroup that goes down some rows: `lanes` neighbouring threads hold a vector of N columns each, and the next
// `lanes` threads the same columns of the next row.

#ifndef FORGE_ELEMENTWISE_COLUMNS_H
#define FORGE_ELEMENTWISE_COLUMNS_H

#include <metal_stdlib>

namespace forge {

// Where a thread stands. Threadgroups beside each other share the columns, those below each other the rows of a batch,
// and a batch has a layer of them.
template <int N>
struct ColumnRows {
  size_t first;
  int columns;
  int count;
  int high;
  int own_row;
  int own_lane;
  int column;
  int limit;

  // `shape`: [B, M, C].
  METAL_FUNC ColumnRows(
      const constant int* shape,
      int lanes,
      int rows_per_group,
      metal::uint3 group,
      uint thread_index,
      uint threads) thread {
    columns = shape[2];
    high = threads / lanes;
    own_row = thread_index / lanes;
    own_lane = thread_index - own_row * lanes;
    column = (group.x * lanes + own_lane) * N;
    limit = metal::clamp(columns - column, 0, N);
    const int before = group.y * rows_per_group;
    first = size_t(group.z) * shape[1] + before;
    count = metal::min(rows_per_group, shape[1] - before);
  }

  // Where the thread's vector of a row of the threadgroup begins.
  METAL_FUNC size_t at(int row) const thread {
    return (first + row) * columns + column;
  }
};

}  // namespace forge

#endif
