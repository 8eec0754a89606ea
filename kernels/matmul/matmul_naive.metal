// y = a b (+ c), one thread an element, each of which reads its row of a and its column of b.

#include <metal_stdlib>

#include "work.h"

using namespace metal;

template <typename A, typename B, typename C, typename Y, bool ACCUMULATE>
[[kernel]] void matmul_naive(
    const device A* a [[buffer(0)]],
    const device B* b [[buffer(1)]],
    const device C* c [[buffer(2)]],
    const device long* strides [[buffer(3)]],
    const constant int& inner_batches [[buffer(4)]],
    const constant int& splits [[buffer(5)]],
    const constant int& split_depth [[buffer(6)]],
    const constant int& parts [[buffer(7)]],
    const constant int& rows [[buffer(8)]],
    const constant int& columns [[buffer(9)]],
    const constant int& depth [[buffer(10)]],
    const constant int& c_stride [[buffer(11)]],
    const constant bool& transpose_a [[buffer(12)]],
    const constant bool& transpose_b [[buffer(13)]],
    device Y* y [[buffer(14)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const uint index = thread_position_in_grid.x;
  const int width = columns;
  if (index >= uint(rows) * uint(width)) {
    return;
  }
  const forge::Work work = forge::work_of(
      thread_position_in_grid.z, strides, inner_batches, splits, split_depth, rows, width, depth);
  const long row = index / uint(width);
  const long column = index % uint(width);
  const long a_step = transpose_a ? rows : 1;
  const long b_step = transpose_b ? 1 : width;
  size_t a_at = work.a + work.first * a_step + (transpose_a ? row : row * depth);
  size_t b_at = work.b + work.first * b_step + (transpose_b ? column * depth : column);

  float sum = 0.0f;
  for (int part = parts; part > 0; part--) {
    auto left = a + a_at;
    auto right = b + b_at;
    for (int k = work.first; k < work.last; k++) {
      sum += static_cast<float>(*left) * static_cast<float>(*right);
      left += a_step;
      right += b_step;
    }
    if (part > 1) {
      a_at += strides[forge::A_PART];
      b_at += strides[forge::B_PART];
    }
  }
  if constexpr (ACCUMULATE) {
    sum += static_cast<float>(c[work.c + row * c_stride + column]);
  }
  y[work.y + index] = static_cast<Y>(sum);
}
