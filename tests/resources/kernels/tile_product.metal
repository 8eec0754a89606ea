// s = 1 + a b for a [R, 16] and b [16, C], the largest element and the sum of each row of s, and s v for v [C, 8], s
// being the left operand as it lies. What `rows`, `depth` and `cols` cut off counts as 0. One simdgroup.
// `row_results` is [2 reductions, 2 lanes, R]: the lane that holds column 0 of a row writes, and the one that holds 7.

#include <metal_stdlib>

#include "tile.h"

using namespace metal;

template <typename T, int R, int C, bool TRANSPOSED>
[[kernel]] void tile_product(
    const device T* a [[buffer(0)]],
    const device T* b [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const constant int& rows [[buffer(3)]],
    const constant int& depth [[buffer(4)]],
    const constant int& cols [[buffer(5)]],
    device float* product [[buffer(6)]],
    device float* row_results [[buffer(7)]],
    device float* chained [[buffer(8)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  const ushort lane = thread_index_in_simdgroup;
  forge::Tile<T, R, 16, forge::Role::A> left(lane);
  forge::Tile<T, 16, C, forge::Role::B> right(lane);
  forge::Tile<float, R, C, forge::Role::Acc> sum(lane);
  left.load(a, 16, rows, depth);
  if constexpr (TRANSPOSED) {
    right.load_transposed(b, 16, depth, cols);
  } else {
    right.load(b, C, depth, cols);
  }
  sum.fill(1.0f);
  forge::mma(sum, left, right);
  sum.store(product, C);

  float largest[R / 8];
  float total[R / 8];
  sum.row_max(largest);
  sum.row_sum(total);
  const bool is_first = sum.col(0, 0) == 0;
  const bool is_last = sum.col(0, 1) == 7;
  if (is_first || is_last) {
#pragma clang loop unroll(full)
    for (short i = 0; i < R / 8; i++) {
      row_results[is_last * R + sum.row(i)] = largest[i];
      row_results[(2 + is_last) * R + sum.row(i)] = total[i];
    }
  }

  const forge::Tile<T, R, C, forge::Role::A> again = forge::as_a<T>(sum);
  forge::Tile<T, C, 8, forge::Role::B> next(lane);
  forge::Tile<float, R, 8, forge::Role::Acc> last(lane);
  next.load(v, 8);
  last.fill(0.0f);
  forge::mma(last, again, next);
  last.store(chained, 8);
}
