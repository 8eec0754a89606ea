// The columns of a head that one simdgroup holds, where several share its rows: parts of one width, the last one
// perhaps with fewer columns.

#ifndef FORGE_ATTENTION_PART_H
#define FORGE_ATTENTION_PART_H

#include <metal_stdlib>

#include "../_common/block.h"
#include "../_common/tile.h"

namespace forge {

// A head of SIZE columns in SPLIT parts.
template <int SIZE, int SPLIT>
struct Part {
  enum {
    width = (SIZE / 8 + SPLIT - 1) / SPLIT * 8,
    is_even = width * SPLIT == SIZE,
    // As many columns as the matrix units of both vendors take at once, where that divides the head and its parts.
    piece = width % 16 == 0 && SIZE % 16 == 0 ? 16 : 8
  };

  int first;

  METAL_FUNC Part(int index) thread {
    first = index * width;
  }

  // Whether the head has the piece of the part's columns from d on: the same in the whole simdgroup.
  METAL_FUNC bool has(short d) const thread {
    return is_even || first + d < SIZE;
  }

  // Rows of the part from device memory; those from `rows` on are 0.
  template <typename T, int ROWS, Role ROLE>
  METAL_FUNC void load(
      thread Tile<T, ROWS, width, ROLE>& tile, const device T* source, long down, long across, int rows) const thread {
    tile.load(source + first * across, int(down), int(across), rows, SIZE - first);
  }

  // sum += own (the part's columns) times rows of a staged block, transposed: for COLUMNS rows from `row` on, into the
  // columns of sum from there on. All arguments but the tiles are constants.
  template <int COLUMNS, typename T, typename TB, int ROWS, int STEP>
  METAL_FUNC void multiply_transposed(
      thread Tile<float, ROWS, STEP, Role::Acc>& sum,
      const thread Tile<T, ROWS, width, Role::A>& own,
      const threadgroup TB* block,
      short row) const thread {
    constexpr int STRIDE = Block<TB, STEP, SIZE>::stride;
#pragma clang loop unroll(full)
    for (short d = 0; d < width; d += piece) {
      if (has(d)) {
        Tile<TB, piece, COLUMNS, Role::B> other(own.lane);
        other.load_transposed(block + row * STRIDE + first + d, STRIDE);
        mma_part(sum, row, own, d, other);
      }
    }
  }

  // sum (the part's columns) += the columns of left from `row` on, times as many rows of a staged block.
  template <int COLUMNS, typename T, typename TB, int ROWS, int STEP>
  METAL_FUNC void multiply(
      thread Tile<float, ROWS, width, Role::Acc>& sum,
      const thread Tile<T, ROWS, STEP, Role::A>& left,
      const threadgroup TB* block,
      short row) const thread {
    constexpr int STRIDE = Block<TB, STEP, SIZE>::stride;
#pragma clang loop unroll(full)
    for (short d = 0; d < width; d += piece) {
      if (has(d)) {
        Tile<TB, COLUMNS, piece, Role::B> other(left.lane);
        other.load(block + row * STRIDE + first + d, STRIDE);
        mma_part(sum, d, left, row, other);
      }
    }
  }

  // Rows of the part to device memory, as far as they are fewer than `rows`.
  template <typename T, int ROWS>
  METAL_FUNC void store(
      const thread Tile<float, ROWS, width, Role::Acc>& tile, device T* target, int rows) const thread {
    tile.store(target + first, SIZE, rows, SIZE - first);
  }
};

// Each part of a row group has COUNT tiles in `scratch`, one behind the other: writes the one at `index`.
template <int SPLIT, int COUNT, int ROWS, int STEP>
METAL_FUNC void store_part(
    const thread Tile<float, ROWS, STEP, Role::Acc>& sum, threadgroup float* scratch, int group, int part, int index) {
  sum.store(scratch + ((group * SPLIT + part) * COUNT + index) * ROWS * STEP, STEP);
}

// Adds up what all parts have written at `index`, always in the order of the parts.
template <int SPLIT, int COUNT, int ROWS, int STEP>
METAL_FUNC void load_parts(
    thread Tile<float, ROWS, STEP, Role::Acc>& sum, const threadgroup float* scratch, int group, int index) {
  const threadgroup float* first = scratch + (group * SPLIT * COUNT + index) * ROWS * STEP;
  sum.load(first, STEP);
#pragma clang loop unroll(full)
  for (short other = 1; other < SPLIT; other++) {
    Tile<float, ROWS, STEP, Role::Acc> more(sum.lane);
    more.load(first + other * COUNT * ROWS * STEP, STEP);
#pragma clang loop unroll(full)
    for (short f = 0; f < ROWS / 8 * (STEP / 8); f++) {
      sum.fragments[f] += more.fragments[f];
    }
  }
}

// What the simdgroups of one row group have each summed over their own columns, added up in all of them. There is a
// barrier inside; `scratch`, of SPLIT tiles for each row group, may be used again only behind the next one. With one
// part nothing happens.
template <int SPLIT, int ROWS, int STEP>
METAL_FUNC void add_parts(
    thread Tile<float, ROWS, STEP, Role::Acc>& sum, threadgroup float* scratch, int group, int part) {
  if constexpr (SPLIT > 1) {
    store_part<SPLIT, 1>(sum, scratch, group, part, 0);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    load_parts<SPLIT, 1>(sum, scratch, group, 0);
  }
}

// The same of two tiles, with the one barrier; `scratch` holds twice as many.
template <int SPLIT, int ROWS, int STEP>
METAL_FUNC void add_parts(
    thread Tile<float, ROWS, STEP, Role::Acc>& sum,
    thread Tile<float, ROWS, STEP, Role::Acc>& second,
    threadgroup float* scratch,
    int group,
    int part) {
  if constexpr (SPLIT > 1) {
    store_part<SPLIT, 2>(sum, scratch, group, part, 0);
    store_part<SPLIT, 2>(second, scratch, group, part, 1);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    load_parts<SPLIT, 2>(sum, scratch, group, 0);
    load_parts<SPLIT, 2>(second, scratch, group, 1);
  }
}

}  // namespace forge

#endif
