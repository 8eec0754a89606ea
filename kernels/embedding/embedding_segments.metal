// Where the ids of each row of the table begin and end in their sorted order. Both outputs hold 0 before: a row that no
// id names has a segment of length 0.

#include <metal_stdlib>

using namespace metal;

[[kernel]] void embedding_segments(
    const device int* sorted_ids [[buffer(0)]],
    const constant int* sorted_ids_shape [[buffer(1)]],
    device int* first [[buffer(2)]],
    device int* end [[buffer(3)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const int at = thread_position_in_grid.x;
  const int id = sorted_ids[at];
  if (at == 0 && id >= 0) {
    first[id] = 0;
  }
  // A thread writes what ends behind its id, and what begins there: a larger id, so one in range.
  const bool is_last = at == sorted_ids_shape[0] - 1;
  const int next = is_last ? -1 : sorted_ids[at + 1];
  if (is_last || next != id) {
    if (id >= 0) {
      end[id] = at + 1;
    }
    if (!is_last) {
      first[next] = at + 1;
    }
  }
}
