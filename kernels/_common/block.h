// How a block of a matrix lies in threadgroup memory: row by row, in its own dtype, written and read in 16 bytes.

#ifndef FORGE_BLOCK_H
#define FORGE_BLOCK_H

namespace forge {

// A block of ROWS x COLUMNS elements of T in threadgroup memory.
template <typename T, int ROWS, int COLUMNS>
struct Block {
  enum {
    vector = 16 / sizeof(T),
    vectors_per_row = COLUMNS / vector,
    // 16 bytes more than the row: rows of a power of two would lie in the same banks.
    stride = COLUMNS + vector,
    words = ROWS * (vectors_per_row + 1)
  };
};

}  // namespace forge

#endif
