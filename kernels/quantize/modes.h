// The modes: what makes the scale of the numbers that share one, the code of a number and what a code stands for. A
// launch names its mode by one of these constants.
//
// A NaN or an infinity makes all of a group NaN: its codes are 0 and its scale is one that times 0 gives NaN.

#ifndef FORGE_QUANTIZE_MODES_H
#define FORGE_QUANTIZE_MODES_H

#include <metal_stdlib>

#include "found.h"
#include "numbers.h"

namespace forge {

constant constexpr int AFFINE = 0;
constant constexpr int MXFP4 = 1;
constant constexpr int MXFP8 = 2;
constant constexpr int NVFP4 = 3;
constant constexpr int INT8 = 4;
constant constexpr int INT4 = 5;
constant constexpr int TERNARY = 6;
constant constexpr int FP8_E4M3 = 7;

// value = round(round(code * scale) + bias), scale and bias rounded to T. The codes are made with both as they were in
// float32.
template <typename T, int BITS>
struct Affine {
  typedef Extremes Found;
  enum { bits = BITS };
  float scale;
  float bias;
  bool is_usable;

  METAL_FUNC Affine(Found found) thread : bias(0.0f) {
    const float low = found.smallest();
    const float high = found.largest();
    is_usable = is_finite(low) && is_finite(high);
    // The extreme that is further from 0 becomes a code exactly, and 0 too: the code 0 is the bias.
    const bool is_low = metal::fabs(low) > metal::fabs(high);
    const float edge = is_low ? low : high;
    const float step = metal::max(divide(high - low, float((1 << BITS) - 1)), 1e-7f);
    scale = is_low ? step : -step;
    const float count = metal::rint(divide(edge, scale));
    if (count != 0.0f) {
      scale = divide(edge, count);
      bias = edge;
    }
    scale = is_usable ? scale : NAN;
    bias = is_usable ? bias : NAN;
  }

  METAL_FUNC float steps(float x) const thread {
    return metal::rint(divide(x - bias, scale));
  }

  METAL_FUNC uint code(float x) const thread {
    return is_usable ? uint(metal::clamp(steps(x), 0.0f, float((1 << BITS) - 1))) : 0;
  }

  METAL_FUNC float value(uint code) const thread {
    return rounded<T>(float(code) * rounded<T>(scale)) + rounded<T>(bias);
  }

  METAL_FUNC bool clips(float x) const thread {
    const float place = steps(x);
    return is_usable && (place < 0.0f || place > float((1 << BITS) - 1));
  }
};

// Scales 2^(byte - 127), the smallest that keeps the largest magnitude within (1 + MANTISSA / 2^23) 2^EXPONENT, the
// largest number. All of it is done on bits, and so exact.
template <typename Number, int EXPONENT, uint MANTISSA>
struct Mx {
  typedef Largest Found;
  enum { bits = Number::bits };
  uint byte;

  METAL_FUNC Mx(Found found) thread {
    const uint largest = as_type<uint>(found.magnitude);
    const int least = int(largest >> 23) - EXPONENT + int((largest & 0x7fffffu) > MANTISSA);
    byte = largest == 0 ? 127 : largest < 0x7f800000u ? metal::max(least, 0) : 255;
  }

  METAL_FUNC uint code(float x) const thread {
    return byte == 255 ? 0 : Number::code(x * as_type<float>((254 - byte) << 23));
  }

  // 2^-127 is no exponent alone; the byte 255 is infinite.
  METAL_FUNC float value(uint code) const thread {
    return Number::value(code) * as_type<float>(byte == 0 ? 0x400000u : byte << 23);
  }
};

// e2m1 with scales that are e4m3 themselves, the nearest to largest / 6.
struct Nvfp4 {
  typedef Largest Found;
  enum { bits = 4 };
  uint byte;

  METAL_FUNC Nvfp4(Found found) thread {
    byte = is_finite(found.magnitude) ? E4M3::code(divide(found.magnitude, 6.0f)) : 127;
  }

  METAL_FUNC float scaled(float x) const thread {
    return byte == 0 || byte == 127 ? 0.0f : divide(x, E4M3::value(byte));
  }

  METAL_FUNC uint code(float x) const thread {
    return E2M1::code(scaled(x));
  }

  METAL_FUNC float value(uint code) const thread {
    return byte == 127 ? NAN : E2M1::value(code) * E4M3::value(byte);
  }

  METAL_FUNC bool clips(float x) const thread {
    return E2M1::is_beyond(scaled(x));
  }
};

// A float32 scale for a row or a matrix. NaN gives the code of 0, whose value times NaN is NaN.
template <typename Number>
struct Scaled {
  enum { bits = Number::bits };
  float scale;

  METAL_FUNC Scaled(float s) thread : scale(s) {}

  // As for an infinite scale where it is 0: e4m3 keeps the sign.
  METAL_FUNC float scaled(float x) const thread {
    return !is_finite(scale) ? 0.0f : scale == 0.0f ? metal::copysign(0.0f, x) : divide(x, scale);
  }

  METAL_FUNC uint code(float x) const thread {
    return Number::code(scaled(x));
  }

  METAL_FUNC float value(uint code) const thread {
    return Number::value(code) * scale;
  }

  METAL_FUNC bool clips(float x) const thread {
    return Number::is_beyond(scaled(x));
  }
};

METAL_FUNC float scale_or_nan(float scale) {
  return is_finite(scale) ? scale : NAN;
}

// By mode: `type` is one of the above.
template <typename T, int MODE, int BITS>
struct GroupMode;

template <typename T, int BITS>
struct GroupMode<T, AFFINE, BITS> {
  typedef Affine<T, BITS> type;
};

template <typename T, int BITS>
struct GroupMode<T, MXFP4, BITS> {
  typedef Mx<E2M1, 2, 0x400000u> type;
};

template <typename T, int BITS>
struct GroupMode<T, MXFP8, BITS> {
  typedef Mx<E4M3, 8, 0x600000u> type;
};

template <typename T, int BITS>
struct GroupMode<T, NVFP4, BITS> {
  typedef Nvfp4 type;
};

// What is Scaled, by what its scale follows from: the largest magnitude becomes LARGEST.
template <typename Number, int LARGEST>
struct ByLargest {
  typedef Scaled<Number> type;
  typedef Largest Found;

  METAL_FUNC static float scale(Found found, float) {
    return scale_or_nan(divide(found.magnitude, float(LARGEST)));
  }
};

// The scale is the mean of `count` magnitudes.
template <typename Number>
struct ByMean {
  typedef Scaled<Number> type;
  typedef Mean Found;

  METAL_FUNC static float scale(Found found, float count) {
    return scale_or_nan(found.of(count));
  }
};

template <int MODE>
struct RowMode;

template <>
struct RowMode<INT8> : ByLargest<Integer<8, 127, 128>, 127> {};

template <>
struct RowMode<INT4> : ByLargest<Integer<4, 7, 8>, 7> {};

template <>
struct RowMode<TERNARY> : ByMean<Integer<2, 1, 1>> {};

template <>
struct RowMode<FP8_E4M3> : ByLargest<E4M3, 448> {};

}  // namespace forge

#endif
