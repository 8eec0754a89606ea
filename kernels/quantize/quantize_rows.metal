// Codes and a scale for each row: rows as in fake_quant_rows.metal.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "packing.h"
#include "row.h"

using namespace metal;

template <typename T, int MODE>
[[kernel]] void quantize_rows(
    const device T* w [[buffer(0)]],
    const constant int* w_shape [[buffer(1)]],
    const constant int& width [[buffer(2)]],
    const constant int& rows_per_group [[buffer(3)]],
    device uint32_t* codes [[buffer(4)]],
    device float* scales [[buffer(5)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  constexpr int SCRATCH = 32 * forge::RowMode<MODE>::Found::size;
  typedef typename forge::RowMode<MODE>::type Codec;
  threadgroup float scratch[2 * SCRATCH];

  const int columns = w_shape[1];
  const int row_threads = width;
  const ushort lane = thread_index_in_simdgroup;
  const int threads = threads_per_threadgroup.x;
  const int own_row = thread_position_in_threadgroup.x / row_threads;
  const int rows_at_once = threads / row_threads;
  const int column = thread_position_in_threadgroup.x % row_threads * N;
  const size_t row0 = size_t(threadgroup_position_in_grid.x) * rows_per_group;
  const int count = min(size_t(rows_per_group), w_shape[0] - row0);

  for (int start = 0, turn = 0; start < count; start += rows_at_once, turn ^= 1) {
    const int row = start + own_row;
    const size_t at = (row0 + row) * columns + column;
    const int limit = row < count ? clamp(columns - column, 0, N) : 0;
    float x[N];
    forge::load_floats(w + at, limit, x);
    const Codec codec(forge::row_scale<MODE>(
        x, columns, row_threads, scratch + turn * SCRATCH, lane, simdgroup_index_in_threadgroup, threads));
    uint own[N];
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      own[i] = codec.code(x[i]);
    }
    forge::store_codes<Codec::bits>(codes, at, limit, lane, own);
    if (limit > 0 && column == 0) {
      scales[row0 + row] = codec.scale;
    }
  }
}
