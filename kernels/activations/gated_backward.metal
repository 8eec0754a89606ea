// dgate = dy up f'(gate) and dup = dy f(gate), one vector of 16 bytes a thread; f and f' are made from the gate again.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "functions.h"

using namespace metal;

template <typename T, int FUNCTION>
[[kernel]] void gated_backward(
    const device T* gate [[buffer(0)]],
    const device T* up [[buffer(1)]],
    const device T* dy [[buffer(2)]],
    const constant ulong& size [[buffer(3)]],
    device T* dgate [[buffer(4)]],
    device T* dup [[buffer(5)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = min(size - at, size_t(N));

  float values[N];
  float factor[N];
  float gradient[N];
  forge::load_floats(gate + at, limit, values);
  forge::load_floats(up + at, limit, factor);
  forge::load_floats(dy + at, limit, gradient);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    const float of_gate = values[i];
    // The slope first: it makes small what the two others together could make too large.
    values[i] = gradient[i] * (factor[i] * forge::activation_slope<FUNCTION>(of_gate, 1.0f));
    factor[i] = gradient[i] * forge::activation<FUNCTION>(of_gate, 1.0f);
  }
  forge::store_floats(dgate + at, limit, values);
  forge::store_floats(dup + at, limit, factor);
}
