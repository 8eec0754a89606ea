// s * src or, if ADD, dst + s * src, with one s for each batch of `size` elements: a thread takes 16 bytes of the
// narrower of both. Without ADD dst is not read.

#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename D, typename S, typename T, bool ADD>
[[kernel]] void scaled(
    const device D* dst [[buffer(0)]],
    const device S* src [[buffer(1)]],
    const device float* s [[buffer(2)]],
    const constant ulong& size [[buffer(3)]],
    device T* out [[buffer(4)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = 16 / (sizeof(D) < sizeof(S) ? sizeof(D) : sizeof(S));

  const size_t before = size_t(thread_position_in_grid.x) * N;
  const size_t at = size_t(thread_position_in_grid.y) * size + before;
  const int limit = min(size - before, size_t(N));
  const float factor = s[thread_position_in_grid.y];

  float values[N];
  forge::load_floats(src + at, limit, values);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] *= factor;
  }
  if constexpr (ADD) {
    float others[N];
    forge::load_floats(dst + at, limit, others);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      values[i] += others[i];
    }
  }
  forge::store_floats(out + at, limit, values);
}
