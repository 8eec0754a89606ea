// <metal_math> and the floating-point part of <metal_common>: overloads for float, half and their vectors.
//
// metal:: has float and half, metal::fast and metal::precise have float alone: half and bfloat become float there,
// and bfloat becomes float everywhere, as no function takes it. half is computed in float and rounded once.
//
// Unqualified names are the precise functions: MLX compiles in Metal's "safe" mode, which promises special values,
// while the accuracy of unqualified functions stays Apple's choice. A kernel that needs one of the two names it.
#pragma once

#include "overloads.h"
#include "scalar_math.h"

namespace metal {
namespace precise {}
namespace fast {}
} // namespace metal

// The same name in metal (float and half), metal::precise and metal::fast (float).
#define EMU_MATH(OVERLOADS, name, call)                                  \
  namespace metal { OVERLOADS(float, name, float, emu::call) }           \
  namespace metal { OVERLOADS(half, name, half, emu::call) }             \
  namespace metal::precise { OVERLOADS(float, name, float, emu::call) }  \
  namespace metal::fast { OVERLOADS(float, name, float, emu_fast::call) }
#define EMU_MATH_1(name) EMU_MATH(EMU_OVERLOADS_1, name, name)
#define EMU_MATH_2(name) EMU_MATH(EMU_SAME_TYPE_2, name, name)
#define EMU_MATH_3(name) EMU_MATH(EMU_OVERLOADS_3, name, name)

EMU_MATH_1(acos)
EMU_MATH_1(acosh)
EMU_MATH_1(asin)
EMU_MATH_1(asinh)
EMU_MATH_1(atan)
EMU_MATH_1(atanh)
EMU_MATH_1(ceil)
EMU_MATH_1(cos)
EMU_MATH_1(cosh)
EMU_MATH_1(cospi)
EMU_MATH_1(exp)
EMU_MATH_1(exp10)
EMU_MATH_1(exp2)
EMU_MATH_1(fabs)
EMU_MATH(EMU_OVERLOADS_1, abs, fabs)
EMU_MATH_1(floor)
EMU_MATH_1(log)
EMU_MATH_1(log10)
EMU_MATH_1(log2)
EMU_MATH_1(rint)
EMU_MATH_1(round)
EMU_MATH_1(rsqrt)
EMU_MATH_1(saturate)
EMU_MATH_1(sign)
EMU_MATH_1(sin)
EMU_MATH_1(sinh)
EMU_MATH_1(sinpi)
EMU_MATH_1(sqrt)
EMU_MATH_1(tan)
EMU_MATH_1(tanh)
EMU_MATH_1(tanpi)
EMU_MATH_1(trunc)

EMU_MATH_2(atan2)
EMU_MATH_2(copysign)
EMU_MATH_2(divide)
EMU_MATH_2(fdim)
EMU_MATH_2(fmax)
EMU_MATH(EMU_SAME_TYPE_2, max, fmax)
EMU_MATH_2(fmin)
EMU_MATH(EMU_SAME_TYPE_2, min, fmin)
EMU_MATH_2(fmod)
EMU_MATH_2(pow)
EMU_MATH_2(powr)
EMU_MATH_2(step)

EMU_MATH_3(clamp)
EMU_MATH_3(fmax3)
EMU_MATH(EMU_OVERLOADS_3, max3, fmax3)
EMU_MATH_3(fmin3)
EMU_MATH(EMU_OVERLOADS_3, min3, fmin3)
EMU_MATH_3(fmedian3)
EMU_MATH(EMU_OVERLOADS_3, median3, fmedian3)
EMU_MATH_3(mix)
EMU_MATH_3(smoothstep)

// Functions that half computes in another way than in float and rounded.
namespace metal::emu {
EMU_FUNC half fract_half(half x) {
  // The greatest half below 1: a tiny negative number's fraction would round to 1.
  return x == x ? static_cast<half>(fmin(fract(static_cast<float>(x)), 0x1.ffcp-1f)) : x;
}
EMU_FUNC half fma_half(half x, half y, half z) {
  return as_type<half>(emu_fma_half(as_type<ushort>(x), as_type<ushort>(y), as_type<ushort>(z)));
}
EMU_FUNC half nextafter_half(half x, half y) {
  if (x != x || y != y) {
    return x + y;
  }
  if (x == y) {
    return y;
  }
  ushort bits = as_type<ushort>(x);
  if (x == 0) {
    return as_type<half>(static_cast<ushort>((as_type<ushort>(y) & 0x8000u) | 1u));
  }
  return as_type<half>(static_cast<ushort>(bits + ((x < y) == (x > 0) ? 1 : -1)));
}
// half with the second result of the float function, rounded too.
EMU_FUNC half modf_half(half x, thread half& whole) {
  float whole_part;
  half rest = static_cast<half>(modf(static_cast<float>(x), whole_part));
  whole = static_cast<half>(whole_part);
  return rest;
}
EMU_FUNC half sincos_half(half x, thread half& cosine) {
  cosine = static_cast<half>(cos(static_cast<float>(x)));
  return static_cast<half>(sin(static_cast<float>(x)));
}
EMU_FUNC half frexp_half(half x, thread int& exponent) {
  return static_cast<half>(frexp(static_cast<float>(x), exponent));
}
} // namespace metal::emu

#define EMU_MATH_APART(OVERLOADS, name)                                      \
  namespace metal { OVERLOADS(float, name, float, emu::name) }               \
  namespace metal { OVERLOADS(half, name, half, emu::name##_half) }          \
  namespace metal::precise { OVERLOADS(float, name, float, emu::name) }      \
  namespace metal::fast { OVERLOADS(float, name, float, emu_fast::name) }
EMU_MATH_APART(EMU_OVERLOADS_1, fract)
EMU_MATH_APART(EMU_OVERLOADS_3, fma)
EMU_MATH_APART(EMU_SAME_TYPE_2, nextafter)

#define EMU_OUT_SAME(R, name, T, call) EMU_OVERLOADS_OUT(name, T, T, call)
#define EMU_OUT_INT(R, name, T, call) EMU_OVERLOADS_OUT(name, T, int, call)
EMU_MATH_APART(EMU_OUT_SAME, modf)
EMU_MATH_APART(EMU_OUT_SAME, sincos)
EMU_MATH_APART(EMU_OUT_INT, frexp)

#define EMU_TO_INT(R, name, T, call) EMU_OVERLOADS_1(int, name, T, call)
#define EMU_WITH_INT(R, name, T, call) EMU_OVERLOADS_2(T, name, T, int, call)
EMU_MATH(EMU_TO_INT, ilogb, ilogb)
EMU_MATH(EMU_WITH_INT, ldexp, ldexp)
