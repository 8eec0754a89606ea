// A block of a matrix from device memory to threadgroup memory, as it lies and in its own dtype.

#ifndef FORGE_MATMUL_STAGE_H
#define FORGE_MATMUL_STAGE_H

#include <metal_stdlib>

#include "../_common/block.h"
#include "../_common/vector.h"

namespace forge {

// Element (r, c) of the block is source[r * stride + c] where r < rows and c < columns; elsewhere 0, and nothing is
// read.
template <typename T, int ROWS, int COLUMNS, int THREADS, typename P>
METAL_FUNC void stage_edge(P source, int stride, int rows, int columns, threadgroup T* target, ushort thread_index) {
#pragma clang loop unroll(full)
  for (int i = 0; i < ROWS * COLUMNS / THREADS; i++) {
    const int at = i * THREADS + thread_index;
    const int row = at / COLUMNS;
    const int column = at % COLUMNS;
    const bool inside = row < rows && column < columns;
    target[row * Block<T, ROWS, COLUMNS>::stride + column] = inside ? source[row * stride + column] : T(0);
  }
}

// The same; a block that lies inside and whose rows begin at multiples of 16 bytes is copied in vectors.
template <typename T, int ROWS, int COLUMNS, int THREADS>
METAL_FUNC void stage(
    const device T* source, int stride, int rows, int columns, threadgroup metal::uint4* target, ushort thread_index) {
  typedef Block<T, ROWS, COLUMNS> Own;
  const bool is_whole = rows >= ROWS && columns >= COLUMNS;
  if (!is_whole || stride % Own::vector != 0 || !is_aligned(source, 16)) {
    stage_edge<T, ROWS, COLUMNS, THREADS>(
        source, stride, rows, columns, reinterpret_cast<threadgroup T*>(target), thread_index);
    return;
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < ROWS * Own::vectors_per_row / THREADS; i++) {
    const int at = i * THREADS + thread_index;
    const int row = at / Own::vectors_per_row;
    const int vector = at % Own::vectors_per_row;
    target[row * (Own::vectors_per_row + 1) + vector] =
        *reinterpret_cast<const device metal::uint4*>(source + row * stride + vector * Own::vector);
  }
}

// An array of fewer than 8 elements comes as `constant`, and is all edge.
template <typename T, int ROWS, int COLUMNS, int THREADS>
METAL_FUNC void stage(
    const constant T* source,
    int stride,
    int rows,
    int columns,
    threadgroup metal::uint4* target,
    ushort thread_index) {
  stage_edge<T, ROWS, COLUMNS, THREADS>(
      source, stride, rows, columns, reinterpret_cast<threadgroup T*>(target), thread_index);
}

}  // namespace forge

#endif
