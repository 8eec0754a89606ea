// How a row's best elements are found by the lanes that share it: by keys, whose order is that of the scores.

#ifndef FORGE_ROUTING_SELECTION_H
#define FORGE_ROUTING_SELECTION_H

#include <metal_simdgroup>
#include <metal_stdlib>

namespace forge {

// A number whose order is that of the scores: NaN above all, -0 as 0. Never 0, which stands for no element.
METAL_FUNC uint order_key(float score) {
  const uint bits = as_type<uint>(score);
  const uint magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return 0xffffffffu;
  }
  const bool is_negative = magnitude != 0 && bits >> 31 != 0;
  return is_negative ? ~bits : magnitude | 0x80000000u;
}

// An element of a row: the larger key is better, and of equal ones the lower index.
struct Best {
  uint key;
  int index;

  METAL_FUNC void join(uint other_key, int other_index) thread {
    if (other_key > key || (other_key == key && other_index < index)) {
      key = other_key;
      index = other_index;
    }
  }

  // Over the `lanes` lanes of each row, a power of two. The whole simdgroup takes part.
  METAL_FUNC void join_lanes(ushort lanes) thread {
    for (ushort step = 1; step < lanes; step *= 2) {
      const uint other_key = metal::simd_shuffle_xor(key, step);
      join(other_key, metal::simd_shuffle_xor(index, step));
    }
  }
};

}  // namespace forge

#endif
