// values = dequantized(quantized(w)) where a group of GROUP neighbours shares a scale. A thread has one vector of 16
// bytes, and the lanes of a group find its scale together: w is read once.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "modes.h"

using namespace metal;

template <typename T, int MODE, int BITS, int GROUP>
[[kernel]] void fake_quant_groups(
    const device T* w [[buffer(0)]],
    const constant ulong& size [[buffer(1)]],
    device T* values [[buffer(2)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();
  typedef typename forge::GroupMode<T, MODE, BITS>::type Codec;

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = at < size ? N : 0;
  float x[N];
  forge::load_floats(w + at, limit, x);
  typename Codec::Found found;
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    found.add(x[i]);
  }
  found.join_lanes(GROUP / N);
  const Codec codec(found);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    x[i] = codec.value(codec.code(x[i]));
  }
  forge::store_floats(values + at, limit, x);
}
