// dw = dout, and 0 where the code of w was clipped: groups as in fake_quant_groups.metal.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "modes.h"

using namespace metal;

template <typename T, int MODE, int BITS, int GROUP>
[[kernel]] void clip_groups(
    const device T* w [[buffer(0)]],
    const device T* dout [[buffer(1)]],
    const constant ulong& size [[buffer(2)]],
    device T* dw [[buffer(3)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();
  typedef typename forge::GroupMode<T, MODE, BITS>::type Codec;

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = at < size ? N : 0;
  float x[N];
  float g[N];
  forge::load_floats(w + at, limit, x);
  forge::load_floats(dout + at, limit, g);
  typename Codec::Found found;
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    found.add(x[i]);
  }
  found.join_lanes(GROUP / N);
  const Codec codec(found);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    g[i] = codec.clips(x[i]) ? 0.0f : g[i];
  }
  forge::store_floats(dw + at, limit, g);
}
