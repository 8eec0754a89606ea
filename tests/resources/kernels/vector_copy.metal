// Copies `count` elements in pieces of N through float registers, from element `skip_in` of `source` to element
// `skip_out` of `target`, one piece a thread. `held` is [threads, N]: what the registers hold, also past the end.

#include <metal_stdlib>

#include "vector.h"

using namespace metal;

template <typename T, typename U, int N>
[[kernel]] void vector_copy(
    const device T* source [[buffer(0)]],
    const constant int& count [[buffer(1)]],
    const constant int& skip_in [[buffer(2)]],
    const constant int& skip_out [[buffer(3)]],
    device U* target [[buffer(4)]],
    device float* held [[buffer(5)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const int at = thread_position_in_grid.x * N;
  const int limit = clamp(count - at, 0, N);
  float values[N];
  forge::load_floats(source + skip_in + at, limit, values);
  forge::store_floats(target + skip_out + at, limit, values);
  for (int i = 0; i < N; i++) {
    held[at + i] = values[i];
  }
}
