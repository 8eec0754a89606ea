// Codes, scales and biases of the mode affine: groups as in fake_quant_groups.metal, one scale and bias from the first
// lane of each.

#include <metal_stdlib>

#include "../_common/vector.h"
#include "modes.h"
#include "packing.h"

using namespace metal;

template <typename T, int BITS, int GROUP>
[[kernel]] void quantize_affine(
    const device T* w [[buffer(0)]],
    const constant ulong& size [[buffer(1)]],
    device uint32_t* codes [[buffer(2)]],
    device T* scales [[buffer(3)]],
    device T* biases [[buffer(4)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();

  const size_t at = size_t(thread_position_in_grid.x) * N;
  const int limit = at < size ? N : 0;
  float x[N];
  forge::load_floats(w + at, limit, x);
  forge::Extremes found;
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    found.add(x[i]);
  }
  found.join_lanes(GROUP / N);
  const forge::Affine<T, BITS> codec(found);
  uint own[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    own[i] = codec.code(x[i]);
  }
  forge::store_codes<BITS>(codes, at, limit, thread_index_in_simdgroup, own);
  if (limit > 0 && at % GROUP == 0) {
    scales[at / GROUP] = static_cast<T>(codec.scale);
    biases[at / GROUP] = static_cast<T>(codec.bias);
  }
}
