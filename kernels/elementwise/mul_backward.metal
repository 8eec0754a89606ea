// dx = dout * y and dy = dout * x: a thread takes 16 bytes of the narrowest of the three.

#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename X, typename Y, typename T>
[[kernel]] void mul_backward(
    const device X* x [[buffer(0)]],
    const device Y* y [[buffer(1)]],
    const device T* dout [[buffer(2)]],
    const constant ulong& size [[buffer(3)]],
    device X* dx [[buffer(4)]],
    device Y* dy [[buffer(5)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  // dout has the wider dtype of the two, or a still wider one.
  constexpr int N = 16 / (sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y));

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = min(size - at, size_t(N));

  float values[N];
  float others[N];
  float gradient[N];
  forge::load_floats(x + at, limit, values);
  forge::load_floats(y + at, limit, others);
  forge::load_floats(dout + at, limit, gradient);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] *= gradient[i];
    others[i] *= gradient[i];
  }
  forge::store_floats(dx + at, limit, others);
  forge::store_floats(dy + at, limit, values);
}
