// The sum of dy over each chunk of the sorted order that holds one id only: the long segments, shared out over many
// threads. The other chunks get zeros, which nobody reads. Some lanes share a chunk; each has one vector of columns.

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void embedding_chunks(
    const device int* sorted_ids [[buffer(0)]],
    const device int* order [[buffer(1)]],
    const constant int* order_shape [[buffer(2)]],
    const device T* dy [[buffer(3)]],
    const constant int* dy_shape [[buffer(4)]],
    const constant int& chunk_size [[buffer(5)]],
    const constant int& lanes_per_row [[buffer(6)]],
    device float* sums [[buffer(7)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const int columns = dy_shape[1];
  const int lanes = lanes_per_row;
  const int size = chunk_size;
  const int member = thread_position_in_grid.x % lanes;
  const int chunk = thread_position_in_grid.x / lanes;
  const int column = (thread_position_in_grid.y * lanes + member) * N;
  const bool is_chunk = chunk < order_shape[0] / size;
  const int limit = is_chunk ? clamp(columns - column, 0, N) : 0;
  const ushort leader = thread_index_in_simdgroup - member;
  const int begin = chunk * size;

  bool is_whole = false;
  if (is_chunk && member == 0) {
    const int id = sorted_ids[begin];
    is_whole = id >= 0 && sorted_ids[begin + size - 1] == id;
  }
  is_whole = simd_shuffle(int(is_whole), leader) != 0;
  // As many rounds for all chunks that share the simdgroup, so that lanes can exchange what they read.
  const int rounds = simd_any(is_whole) ? size : 0;

  float total[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    total[i] = 0.0f;
  }
  for (int start = 0; start < rounds; start += lanes) {
    const int own = is_whole ? order[begin + start + member] : 0;
    for (int of_lane = 0; of_lane < lanes; of_lane++) {
      const int row = simd_shuffle(own, ushort(leader + of_lane));
      float values[N];
      forge::load_floats(dy + size_t(row) * columns + column, is_whole ? limit : 0, values);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        total[i] += values[i];
      }
    }
  }
  forge::store_floats(sums + size_t(chunk) * columns + column, limit, total);
}
