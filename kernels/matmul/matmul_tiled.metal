// y = a b (+ c), 16 x 16 elements a threadgroup: tiles of a and b lie in threadgroup memory, a thread sums one element.

#include <metal_stdlib>

#include "work.h"

using namespace metal;

template <typename A, typename B, typename C, typename Y, bool ACCUMULATE>
[[kernel]] void matmul_tiled(
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
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  constexpr int SIZE = 16;
  // One column more, so that neither a row nor a column of a tile falls into one bank.
  constexpr int STRIDE = SIZE + 1;
  threadgroup float a_tile[SIZE * STRIDE];
  threadgroup float b_tile[SIZE * STRIDE];

  const forge::Work work = forge::work_of(
      threadgroup_position_in_grid.z, strides, inner_batches, splits, split_depth, rows, columns, depth);
  const int x = thread_position_in_threadgroup.x;
  const int own = thread_position_in_threadgroup.y;
  const int row0 = threadgroup_position_in_grid.y * SIZE;
  const int column0 = threadgroup_position_in_grid.x * SIZE;

  // Neighbouring threads read neighbouring elements, whichever way a matrix lies.
  const int a_row = transpose_a ? x : own;
  const int a_depth = transpose_a ? own : x;
  const int b_column = transpose_b ? own : x;
  const int b_depth = transpose_b ? x : own;
  const bool a_inside = row0 + a_row < rows;
  const bool b_inside = column0 + b_column < columns;
  const long a_step = transpose_a ? rows : 1;
  const long b_step = transpose_b ? 1 : columns;
  size_t a_at = work.a + a_depth * a_step + size_t(row0 + a_row) * (transpose_a ? 1 : depth);
  size_t b_at = work.b + b_depth * b_step + size_t(column0 + b_column) * (transpose_b ? depth : 1);

  float sum = 0.0f;
  for (int part = parts; part > 0; part--) {
    for (int start = work.first; start < work.last; start += SIZE) {
      const int left = work.last - start;
      const float a_value = a_inside && a_depth < left ? static_cast<float>(a[a_at + start * a_step]) : 0.0f;
      const float b_value = b_inside && b_depth < left ? static_cast<float>(b[b_at + start * b_step]) : 0.0f;
      // The last tiles have been read.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      a_tile[a_row * STRIDE + a_depth] = a_value;
      b_tile[b_depth * STRIDE + b_column] = b_value;
      threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
      for (int k = 0; k < SIZE; k++) {
        sum += a_tile[own * STRIDE + k] * b_tile[k * STRIDE + x];
      }
    }
    if (part > 1) {
      a_at += strides[forge::A_PART];
      b_at += strides[forge::B_PART];
    }
  }

  const int row = row0 + own;
  const int column = column0 + x;
  if (row >= rows || column >= columns) {
    return;
  }
  if constexpr (ACCUMULATE) {
    sum += static_cast<float>(c[work.c + size_t(row) * c_stride + column]);
  }
  y[work.y + size_t(row) * columns + column] = static_cast<Y>(sum);
}
