// The scale of a row that fits in the registers of one threadgroup: each thread holds one vector of it.

#ifndef FORGE_QUANTIZE_ROW_H
#define FORGE_QUANTIZE_ROW_H

#include <metal_stdlib>

#include "modes.h"

namespace forge {

// The scale of the row of which this thread has x[i] for i < limit and 0 elsewhere. A row belongs to `row_threads`
// threads: neighbouring lanes, or the whole threadgroup, and then there is one barrier inside. `scratch` as
// join_threadgroup takes it.
template <int MODE, int N>
METAL_FUNC float row_scale(
    const thread float (&x)[N],
    int columns,
    int row_threads,
    threadgroup float* scratch,
    ushort lane,
    uint simdgroup,
    uint threads) {
  typename RowMode<MODE>::Found found;
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    found.add(x[i]);
  }
  if (row_threads <= 32) {
    found.join_lanes(row_threads);
  } else {
    join_threadgroup(found, scratch, lane, simdgroup, threads);
  }
  return RowMode<MODE>::scale(found, float(columns));
}

}  // namespace forge

#endif
