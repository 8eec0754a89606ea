// Codes of some bits packed into words of 32, code after code from the lowest bit up, as mx.quantize lays them out.

#ifndef FORGE_QUANTIZE_PACKING_H
#define FORGE_QUANTIZE_PACKING_H

#include <metal_stdlib>

namespace forge {

// The fewest codes that fill whole words and whole lanes of N codes.
template <int BITS, int N>
struct Packing {
  enum {
    codes_of_words = BITS % 2 == 1 ? 32 : BITS == 6 ? 16 : 32 / BITS,
    codes = codes_of_words > N ? codes_of_words : N,
    lanes = codes / N,
    words = codes * BITS / 32
  };
};

// Writes codes[i], i < limit, of the element `at` and those that follow it. The lanes of a Packing hold neighbouring
// elements, the first of them in a lane that is a multiple of Packing::lanes, and end together with the data; of one
// lane's codes whole words do. The whole simdgroup takes part.
template <int BITS, int N>
METAL_FUNC void store_codes(
    device uint32_t* target, size_t at, int limit, ushort lane, const thread uint (&codes)[N]) {
  typedef Packing<BITS, N> Pack;
  ulong own = 0;
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    own |= ulong(codes[i]) << (i * BITS);
  }
  const int place = lane % Pack::lanes;
  target += (at - place * N) * BITS / 32;
#pragma clang loop unroll(full)
  for (int k = 0; k < Pack::words; k++) {
    const int ahead = 32 * k - place * N * BITS;
    uint word = 0;
    if (ahead >= 0 && ahead < 64) {
      word = own >> ahead;
    } else if (ahead < 0 && ahead > -32) {
      word = own << -ahead;
    }
    for (ushort step = 1; step < Pack::lanes; step *= 2) {
      word |= metal::simd_shuffle_xor(word, step);
    }
    const bool is_there = Pack::lanes == 1 ? 32 * k < limit * BITS : limit > 0;
    if (is_there && k % Pack::lanes == place) {
      target[k] = word;
    }
  }
}

}  // namespace forge

#endif
