// Rows of a head, read by any strides, in threadgroup memory, and numbers of rows.

#ifndef FORGE_ATTENTION_STAGE_H
#define FORGE_ATTENTION_STAGE_H

#include <metal_stdlib>

#include "../_common/block.h"
#include "../_common/vector.h"
#include "scores.h"

namespace forge {

// Element (r, c) of the block is source[r * down + c * across] where r < rows; elsewhere 0, and nothing is read. Rows
// whose elements are neighbours and that begin at multiples of 16 bytes are copied in vectors.
template <typename T, int ROWS, int COLUMNS, int THREADS>
METAL_FUNC void stage_rows(
    const device T* source, long down, long across, int rows, threadgroup metal::uint4* target, ushort thread_index) {
  typedef Block<T, ROWS, COLUMNS> Own;
  if (across == 1 && down * sizeof(T) % 16 == 0 && is_aligned(source, 16)) {
    for (int at = thread_index; at < ROWS * Own::vectors_per_row; at += THREADS) {
      const int row = at / Own::vectors_per_row;
      const int vector = at % Own::vectors_per_row;
      metal::uint4 elements = 0;
      if (row < rows) {
        elements = *reinterpret_cast<const device metal::uint4*>(source + row * down + vector * Own::vector);
      }
      target[row * (Own::vectors_per_row + 1) + vector] = elements;
    }
    return;
  }
  threadgroup T* elements = reinterpret_cast<threadgroup T*>(target);
  for (int at = thread_index; at < ROWS * COLUMNS; at += THREADS) {
    const int row = at / COLUMNS;
    const int column = at % COLUMNS;
    elements[row * Own::stride + column] = row < rows ? source[row * down + column * across] : T(0);
  }
}

// target[r] = source[r] for r < rows, and `otherwise` for the rest of SIZE.
template <int SIZE, int THREADS, typename P, typename U>
METAL_FUNC void stage_values(P source, int rows, U otherwise, threadgroup U* target, ushort thread_index) {
  for (int at = thread_index; at < SIZE; at += THREADS) {
    target[at] = at < rows ? source[at] : otherwise;
  }
}

// target[r] = what row r brings to the gradient of its scores for r < rows, and 0 for the rest of SIZE: its log-sum-exp
// in units of log2, -INFINITY where it sees nothing, and its delta.
template <int SIZE, int THREADS, typename P, typename Q>
METAL_FUNC void stage_statistics(P lse, Q delta, int rows, threadgroup metal::float2* target, ushort thread_index) {
  for (int at = thread_index; at < SIZE; at += THREADS) {
    target[at] = at < rows ? metal::float2(lse[at] * LOG2_E, delta[at]) : metal::float2(0.0f);
  }
}

}  // namespace forge

#endif
