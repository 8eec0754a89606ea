// a b for 8x8 matrices, wrongly: the kernel computes a lane's elements by Apple's order instead of asking the tile.

#include <metal_stdlib>

#include "tile.h"

using namespace metal;

[[kernel]] void tile_assumes_apple(
    const device float* a [[buffer(0)]],
    const device float* b [[buffer(1)]],
    device float* product [[buffer(2)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  const ushort lane = thread_index_in_simdgroup;
  forge::Tile<float, 8, 8, forge::Role::A> left(lane);
  forge::Tile<float, 8, 8, forge::Role::B> right(lane);
  forge::Tile<float, 8, 8, forge::Role::Acc> sum(lane);
  left.load(a, 8);
  right.load(b, 8);
  sum.fill(0.0f);
  forge::mma(sum, left, right);
  const int row = ((lane / 4) & 4) + (lane / 2) % 4;
  const int col = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
  product[row * 8 + col] = sum.fragment(0, 0)[0];
  product[row * 8 + col + 1] = sum.fragment(0, 0)[1];
}
