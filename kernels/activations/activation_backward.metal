// dx = dy f'(x), one vector of 16 bytes a thread; f' is made from x again.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "functions.h"

using namespace metal;

template <typename T, int FUNCTION>
[[kernel]] void activation_backward(
    const device T* x [[buffer(0)]],
    const device T* dy [[buffer(1)]],
    const constant ulong& size [[buffer(2)]],
    const constant float& cap [[buffer(3)]],
    device T* dx [[buffer(4)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = min(size - at, size_t(N));
  const float bound = cap;

  float values[N];
  float gradient[N];
  forge::load_floats(x + at, limit, values);
  forge::load_floats(dy + at, limit, gradient);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    gradient[i] *= forge::activation_slope<FUNCTION>(values[i], bound);
  }
  forge::store_floats(dx + at, limit, gradient);
}
