// dweight[v] = the sum of dy over the ids that are v, which lie together in the sorted order: row by row up to the first
// whole chunk and behind the last one, and between them the sums that embedding_chunks.metal has left. Some lanes share
// a row of the table; each has one vector of it, and writes it whether there is an id or not.

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

namespace forge {

template <int N>
METAL_FUNC void add(thread float (&total)[N], const thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    total[i] += values[i];
  }
}

}  // namespace forge

template <typename T>
[[kernel]] void embedding_backward(
    const device int* order [[buffer(0)]],
    const device int* first [[buffer(1)]],
    const constant int* first_shape [[buffer(2)]],
    const device int* end [[buffer(3)]],
    const device T* dy [[buffer(4)]],
    const constant int* dy_shape [[buffer(5)]],
    const device float* chunk_sums [[buffer(6)]],
    const constant int& chunk_size [[buffer(7)]],
    const constant int& lanes_per_row [[buffer(8)]],
    device T* dweight [[buffer(9)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const int columns = dy_shape[1];
  const int lanes = lanes_per_row;
  const int size = chunk_size;
  const int member = thread_position_in_grid.x % lanes;
  const int id = thread_position_in_grid.x / lanes;
  const int column = (thread_position_in_grid.y * lanes + member) * N;
  const bool is_row = id < first_shape[0];
  const int limit = is_row ? clamp(columns - column, 0, N) : 0;
  const ushort leader = thread_index_in_simdgroup - member;

  // Bounds are read once for all lanes of a row, which then know the same.
  const bool is_reader = is_row && member == 0;
  const int begin = simd_shuffle(is_reader ? first[id] : 0, leader);
  const int behind = simd_shuffle(is_reader ? end[id] : 0, leader);
  int first_chunk = (begin + size - 1) / size;
  int end_chunk = behind / size;
  if (first_chunk >= end_chunk) {
    // No whole chunk: every row is in front of it.
    first_chunk = end_chunk = 0;
  }
  const int in_front = first_chunk < end_chunk ? first_chunk * size - begin : behind - begin;
  const int count = first_chunk < end_chunk ? in_front + behind - end_chunk * size : in_front;

  float total[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    total[i] = 0.0f;
  }
  // As many rounds for all rows that share the simdgroup, so that lanes can exchange what they read.
  const int longest = simd_max(count);
  for (int start = 0; start < longest; start += lanes) {
    const int mine = start + member;
    const int at = mine < in_front ? begin + mine : end_chunk * size + mine - in_front;
    const int own = mine < count ? order[at] : 0;
    const int rounds = min(lanes, longest - start);
    for (int of_lane = 0; of_lane < rounds; of_lane++) {
      const int row = simd_shuffle(own, ushort(leader + of_lane));
      float values[N];
      forge::load_floats(dy + size_t(row) * columns + column, start + of_lane < count ? limit : 0, values);
      forge::add(total, values);
    }
  }
  for (int chunk = first_chunk; chunk < end_chunk; chunk++) {
    float values[N];
    forge::load_floats(chunk_sums + size_t(chunk) * columns + column, limit, values);
    forge::add(total, values);
  }
  forge::store_floats(dweight + size_t(id) * columns + column, limit, total);
}
