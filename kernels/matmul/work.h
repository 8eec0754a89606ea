// Where the matrices of one plane of the grid begin and which part of the depth is summed: for all kernels of the room.

#ifndef FORGE_MATMUL_WORK_H
#define FORGE_MATMUL_WORK_H

#include <metal_stdlib>

namespace forge {

// Entries of the array `strides`, as launch.py fills it: elements from one matrix to the next, 0 for one that is
// repeated.
enum Stride { A_OUTER, A_INNER, A_PART, B_OUTER, B_INNER, B_PART, C_OUTER, C_INNER };

// Offsets of the first element of each matrix, and the depth from `first` to before `last`.
struct Work {
  size_t a;
  size_t b;
  size_t c;
  size_t y;
  int first;
  int last;
};

// Of plane z: outer batches before inner ones, and in each batch its splits of the depth.
METAL_FUNC Work work_of(
    uint z,
    const device long* strides,
    int inner_batches,
    int splits,
    int split_depth,
    int rows,
    int columns,
    int depth) {
  const uint batch = z / uint(splits);
  const int first = z % uint(splits) * split_depth;
  Work work = {0, 0, 0, size_t(z) * rows * columns, first, first + metal::min(depth - first, split_depth)};
  if (batch > 0) {
    const long outer = batch / uint(inner_batches);
    const long inner = batch % uint(inner_batches);
    work.a = outer * strides[A_OUTER] + inner * strides[A_INNER];
    work.b = outer * strides[B_OUTER] + inner * strides[B_INNER];
    work.c = outer * strides[C_OUTER] + inner * strides[C_INNER];
  }
  return work;
}

}  // namespace forge

#endif
