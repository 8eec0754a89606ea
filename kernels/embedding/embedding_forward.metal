// rows[n] = weight[ids[n]], and zeros for an id out of range. Some lanes share a row and its id; each copies one vector.

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename T>
[[kernel]] void embedding_forward(
    const device T* weight [[buffer(0)]],
    const constant int* weight_shape [[buffer(1)]],
    const device int* ids [[buffer(2)]],
    const constant int* ids_shape [[buffer(3)]],
    const constant int& lanes_per_row [[buffer(4)]],
    device T* rows [[buffer(5)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const int columns = weight_shape[1];
  const int lanes = lanes_per_row;
  const int member = thread_position_in_grid.x % lanes;
  const int row = thread_position_in_grid.x / lanes;
  const int column = (thread_position_in_grid.y * lanes + member) * N;
  const bool is_row = row < ids_shape[0];

  const int read = is_row && member == 0 ? ids[row] : -1;
  const int id = simd_shuffle(read, ushort(thread_index_in_simdgroup - member));
  const bool is_known = id >= 0 && id < weight_shape[0];
  const int limit = is_row ? clamp(columns - column, 0, N) : 0;

  float values[N];
  forge::load_floats(weight + size_t(max(id, 0)) * columns + column, is_known ? limit : 0, values);
  forge::store_floats(rows + size_t(row) * columns + column, limit, values);
}
