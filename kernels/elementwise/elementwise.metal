// x + y or, if PRODUCT, x * y: a thread takes 16 bytes of the narrower of both, and the same elements of the other.

#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename X, typename Y, typename T, bool PRODUCT>
[[kernel]] void elementwise(
    const device X* x [[buffer(0)]],
    const device Y* y [[buffer(1)]],
    const constant ulong& size [[buffer(2)]],
    device T* out [[buffer(3)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = 16 / (sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y));

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = min(size - at, size_t(N));

  float values[N];
  float others[N];
  forge::load_floats(x + at, limit, values);
  forge::load_floats(y + at, limit, others);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] = PRODUCT ? values[i] * others[i] : values[i] + others[i];
  }
  forge::store_floats(out + at, limit, values);
}
