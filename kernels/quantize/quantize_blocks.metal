// Codes and scales of the modes whose scales are a byte: groups as in fake_quant_groups.metal, one scale from the first
// lane of each.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "modes.h"
#include "packing.h"

using namespace metal;

template <typename T, int MODE, int BITS, int GROUP>
[[kernel]] void quantize_blocks(
    const device T* w [[buffer(0)]],
    const constant ulong& size [[buffer(1)]],
    device uint32_t* codes [[buffer(2)]],
    device uint8_t* scales [[buffer(3)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();
  typedef typename forge::GroupMode<T, MODE, BITS>::type Codec;

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = at < size ? N : 0;
  float x[N];
  forge::load_floats(w + at, limit, x);
  forge::Largest found;
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    found.add(x[i]);
  }
  found.join_lanes(GROUP / N);
  const Codec codec(found);
  uint own[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    own[i] = codec.code(x[i]);
  }
  forge::store_codes<BITS>(codes, at, limit, thread_index_in_simdgroup, own);
  if (limit > 0 && at % GROUP == 0) {
    scales[at / GROUP] = codec.byte;
  }
}
