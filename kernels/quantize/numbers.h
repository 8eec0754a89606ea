// Numbers of few bits: the codes nearest to a float and what they stand for; halves go to the even code.

#ifndef FORGE_QUANTIZE_NUMBERS_H
#define FORGE_QUANTIZE_NUMBERS_H

#include <metal_stdlib>

// A product and the sum that follows it are two roundings here, as in the plain operations that read the codes again.
// Contracted to one they would be off in the last bit.
#pragma METAL fp contract(off)

namespace forge {

// a / b, correctly rounded: Metal's own division may be off by a unit, which moves a number across the middle between
// two codes.
METAL_FUNC float divide(float a, float b) {
  return metal::precise::divide(a, b);
}

METAL_FUNC uint magnitude_bits(float x) {
  return as_type<uint>(x) & 0x7fffffffu;
}

METAL_FUNC bool is_finite(float x) {
  return magnitude_bits(x) < 0x7f800000u;
}

template <typename T>
METAL_FUNC float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign bit.
struct E2M1 {
  enum { bits = 4 };

  // A negative number that rounds to 0 gets the code of 0.
  METAL_FUNC static uint code(float x) {
    const float size = metal::fabs(x);
    // From 2 and from 4 on the numbers lie twice as far apart; the codes count on.
    const float place = size < 2.0f ? metal::rint(2.0f * size)
        : size < 4.0f               ? metal::rint(size) + 2.0f
                                    : metal::min(metal::rint(0.5f * size) + 4.0f, 7.0f);
    return x < 0.0f && place > 0.0f ? uint(place) + 8 : uint(place);
  }

  METAL_FUNC static float value(uint code) {
    const uint place = code & 7;
    const float size = place < 4 ? 0.5f * place : as_type<float>((place << 22) + (126u << 23));
    return code & 8 ? -size : size;
  }

  // Whether the nearest would have no code: behind 6 would come 8.
  METAL_FUNC static bool is_beyond(float x) {
    return metal::fabs(x) >= 7.0f;
  }
};

// Three bits of mantissa, four of exponent, a sign that 0 has too; up to 448, without infinities.
struct E4M3 {
  enum { bits = 8 };

  METAL_FUNC static uint code(float x) {
    const uint size = magnitude_bits(x);
    const uint sign = (as_type<uint>(x) >> 31) << 7;
    // Below 2^-6 the steps are all 2^-9.
    if (size < 121u << 23) {
      return sign | uint(metal::rint(as_type<float>(size) * 512.0f));
    }
    const uint place = ((size + 0x7ffffu + ((size >> 20) & 1)) >> 20) - (120u << 3);
    return sign | metal::min(place, 126u);
  }

  METAL_FUNC static float value(uint code) {
    const uint place = code & 127;
    const float size = place < 8 ? float(place) * 0.001953125f : as_type<float>((place << 20) + (120u << 23));
    return code & 128 ? -size : size;
  }

  // Behind 448 would come 480; halfway 448 is the even one.
  METAL_FUNC static bool is_beyond(float x) {
    return metal::fabs(x) > 464.0f;
  }
};

// -LARGEST to LARGEST in steps of 1; a code is the number plus OFFSET.
template <int BITS, int LARGEST, int OFFSET>
struct Integer {
  enum { bits = BITS };

  METAL_FUNC static uint code(float x) {
    return uint(int(metal::clamp(metal::rint(x), float(-LARGEST), float(LARGEST))) + OFFSET);
  }

  METAL_FUNC static float value(uint code) {
    return float(int(code) - OFFSET);
  }

  METAL_FUNC static bool is_beyond(float x) {
    return metal::fabs(metal::rint(x)) > float(LARGEST);
  }
};

}  // namespace forge

#endif
