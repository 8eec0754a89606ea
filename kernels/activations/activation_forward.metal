// y = f(x), one vector of 16 bytes a thread.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "functions.h"

using namespace metal;

template <typename T, int FUNCTION>
[[kernel]] void activation_forward(
    const device T* x [[buffer(0)]],
    const constant ulong& size [[buffer(1)]],
    const constant float& cap [[buffer(2)]],
    device T* y [[buffer(3)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = min(size - at, size_t(N));
  const float bound = cap;

  float values[N];
  forge::load_floats(x + at, limit, values);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] = forge::activation<FUNCTION>(values[i], bound);
  }
  forge::store_floats(y + at, limit, values);
}
