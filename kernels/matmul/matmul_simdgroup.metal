// y = a b (+ c), 64 x 64 elements a threadgroup in steps of 16 of the depth. Blocks of a and b lie in threadgroup
// memory as they lie in device memory; each of 2 x 2 simdgroups sums 32 x 32 elements in its registers.

#include <metal_stdlib>

#include "../_common/tile.h"
#include "stage.h"
#include "work.h"

using namespace metal;

template <typename A, typename B, typename C, typename Y, bool TRANSPOSE_A, bool TRANSPOSE_B, bool ACCUMULATE>
[[kernel]] void matmul_simdgroup(
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
    device Y* y [[buffer(12)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  constexpr int SIZE = 64;
  constexpr int STEP = 16;
  constexpr int OWN = 32;
  constexpr int THREADS = 128;
  constexpr int A_ROWS = TRANSPOSE_A ? STEP : SIZE;
  constexpr int A_COLUMNS = TRANSPOSE_A ? SIZE : STEP;
  constexpr int B_ROWS = TRANSPOSE_B ? SIZE : STEP;
  constexpr int B_COLUMNS = TRANSPOSE_B ? STEP : SIZE;
  constexpr int A_STRIDE = forge::Block<A, A_ROWS, A_COLUMNS>::stride;
  constexpr int B_STRIDE = forge::Block<B, B_ROWS, B_COLUMNS>::stride;
  threadgroup uint4 a_block[forge::Block<A, A_ROWS, A_COLUMNS>::words];
  threadgroup uint4 b_block[forge::Block<B, B_ROWS, B_COLUMNS>::words];

  const forge::Work work = forge::work_of(
      threadgroup_position_in_grid.z, strides, inner_batches, splits, split_depth, rows, columns, depth);
  const int row0 = threadgroup_position_in_grid.y * SIZE;
  const int column0 = threadgroup_position_in_grid.x * SIZE;
  const int rows_left = rows - row0;
  const int columns_left = columns - column0;
  const int a_stride = TRANSPOSE_A ? rows : depth;
  const int b_stride = TRANSPOSE_B ? depth : columns;
  // Elements from one step of the depth to the next.
  const long a_step = TRANSPOSE_A ? a_stride : 1;
  const long b_step = TRANSPOSE_B ? 1 : b_stride;
  size_t a_at = work.a + row0 * size_t(TRANSPOSE_A ? 1 : a_stride);
  size_t b_at = work.b + column0 * size_t(TRANSPOSE_B ? b_stride : 1);
  const ushort thread_index = thread_index_in_threadgroup;

  const int own_row = simdgroup_index_in_threadgroup / 2 * OWN;
  const int own_column = simdgroup_index_in_threadgroup % 2 * OWN;
  // A simdgroup whose elements all lie outside helps to copy and does no products.
  const bool has_elements = own_row < rows_left && own_column < columns_left;
  const threadgroup A* own_a =
      reinterpret_cast<const threadgroup A*>(a_block) + (TRANSPOSE_A ? own_row : own_row * A_STRIDE);
  const threadgroup B* own_b =
      reinterpret_cast<const threadgroup B*>(b_block) + (TRANSPOSE_B ? own_column * B_STRIDE : own_column);

  forge::Tile<float, OWN, OWN, forge::Role::Acc> sum(thread_index_in_simdgroup);
  sum.fill(0.0f);
  for (int part = parts; part > 0; part--) {
    for (int start = work.first; start < work.last; start += STEP) {
      const int depth_left = work.last - start;
      // The last blocks have been read.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      forge::stage<A, A_ROWS, A_COLUMNS, THREADS>(
          a + a_at + start * a_step,
          a_stride,
          TRANSPOSE_A ? depth_left : rows_left,
          TRANSPOSE_A ? rows_left : depth_left,
          a_block,
          thread_index);
      forge::stage<B, B_ROWS, B_COLUMNS, THREADS>(
          b + b_at + start * b_step,
          b_stride,
          TRANSPOSE_B ? columns_left : depth_left,
          TRANSPOSE_B ? depth_left : columns_left,
          b_block,
          thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (!has_elements) {
        continue;
      }
      forge::Tile<A, OWN, STEP, forge::Role::A> left(thread_index_in_simdgroup);
      forge::Tile<B, STEP, OWN, forge::Role::B> right(thread_index_in_simdgroup);
      if constexpr (TRANSPOSE_A) {
        left.load_transposed(own_a, A_STRIDE);
      } else {
        left.load(own_a, A_STRIDE);
      }
      if constexpr (TRANSPOSE_B) {
        right.load_transposed(own_b, B_STRIDE);
      } else {
        right.load(own_b, B_STRIDE);
      }
      forge::mma(sum, left, right);
    }
    if (part > 1) {
      a_at += strides[forge::A_PART];
      b_at += strides[forge::B_PART];
    }
  }
  if (!has_elements) {
    return;
  }

  const int row = row0 + own_row;
  const int column = column0 + own_column;
  if constexpr (ACCUMULATE) {
    auto own_c = c + work.c + row * size_t(c_stride) + column;
    const bool is_one_row = c_stride == 0;
    forge::Tile<float, 8, OWN, forge::Role::Acc> added(thread_index_in_simdgroup);
#pragma clang loop unroll(full)
    for (short i = 0; i < OWN / 8; i++) {
      if (i == 0 || !is_one_row) {
        added.load(own_c + i * 8 * size_t(c_stride), c_stride, rows - row - i * 8, columns - column);
      }
#pragma clang loop unroll(full)
      for (short j = 0; j < OWN / 8; j++) {
        sum.fragment(i, j) += added.fragment(0, j);
      }
    }
  }
  device Y* own_y = y + work.y + size_t(row) * columns + column;
  if (rows - row >= OWN && columns - column >= OWN) {
    sum.store(own_y, columns);
  } else {
    sum.store(own_y, columns, rows - row, columns - column);
  }
}
