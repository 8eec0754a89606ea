// What MLX's own Metal header takes from Apple's compiler: built-in functions and macros of Apple's headers, no part of
// MSL.
//
// With them the functions that MLX adds for bfloat are computed in float and rounded once. The text of MLX's header
// follows this one (preamble.py).
#pragma once

#include "simdgroup.h"

enum { __METAL_MAYBE_FAST_MATH__, __METAL_FAST_MATH__, __METAL_PRECISE_MATH__ };

#define EMU_BY_MODE(mode, name, ...) \
  ((mode) == __METAL_FAST_MATH__      ? metal::fast::name(__VA_ARGS__) \
   : (mode) == __METAL_PRECISE_MATH__ ? metal::precise::name(__VA_ARGS__) \
                                      : metal::name(__VA_ARGS__))
#define EMU_BUILTIN_1(name) \
  EMU_FUNC float __metal_##name(float x, int mode) { return EMU_BY_MODE(mode, name, x); }
#define EMU_BUILTIN_2(name) \
  EMU_FUNC float __metal_##name(float x, float y, int mode) { return EMU_BY_MODE(mode, name, x, y); }
#define EMU_BUILTIN_3(name) \
  EMU_FUNC float __metal_##name(float x, float y, float z, int mode) { return EMU_BY_MODE(mode, name, x, y, z); }

EMU_BUILTIN_1(acos)
EMU_BUILTIN_1(acosh)
EMU_BUILTIN_1(asin)
EMU_BUILTIN_1(asinh)
EMU_BUILTIN_1(atan)
EMU_BUILTIN_1(atanh)
EMU_BUILTIN_1(ceil)
EMU_BUILTIN_1(cos)
EMU_BUILTIN_1(cosh)
EMU_BUILTIN_1(cospi)
EMU_BUILTIN_1(exp)
EMU_BUILTIN_1(exp10)
EMU_BUILTIN_1(exp2)
EMU_BUILTIN_1(fabs)
EMU_BUILTIN_1(floor)
EMU_BUILTIN_1(fract)
EMU_BUILTIN_1(log)
EMU_BUILTIN_1(log10)
EMU_BUILTIN_1(log2)
EMU_BUILTIN_1(rint)
EMU_BUILTIN_1(round)
EMU_BUILTIN_1(rsqrt)
EMU_BUILTIN_1(sin)
EMU_BUILTIN_1(sinh)
EMU_BUILTIN_1(sinpi)
EMU_BUILTIN_1(sqrt)
EMU_BUILTIN_1(tan)
EMU_BUILTIN_1(tanh)
EMU_BUILTIN_1(tanpi)
EMU_BUILTIN_1(trunc)
EMU_BUILTIN_2(atan2)
EMU_BUILTIN_2(divide)
EMU_BUILTIN_2(fmax)
EMU_BUILTIN_2(fmin)
EMU_BUILTIN_2(fmod)
EMU_BUILTIN_2(pow)
EMU_BUILTIN_2(powr)
EMU_BUILTIN_3(fmax3)
EMU_BUILTIN_3(fmedian3)
EMU_BUILTIN_3(fmin3)

EMU_FUNC float __metal_ldexp(float x, int k, int mode) { return EMU_BY_MODE(mode, ldexp, x, k); }
EMU_FUNC float __metal_fma(float x, float y, float z) { return metal::fma(x, y, z); }
EMU_FUNC float __metal_frexp(float x, __private int* exponent) { return metal::frexp(x, *exponent); }
EMU_FUNC float __metal_nextafter(float x, float y) { return metal::nextafter(x, y); }

#undef EMU_BUILTIN_1
#undef EMU_BUILTIN_2
#undef EMU_BUILTIN_3
#undef EMU_BY_MODE

#define EMU_BUILTIN_REDUCTION(name) \
  EMU_FUNC float __metal_simd_##name(float data) { return metal::simd_##name(data); }

EMU_BUILTIN_REDUCTION(max)
EMU_BUILTIN_REDUCTION(min)
EMU_BUILTIN_REDUCTION(prefix_exclusive_product)
EMU_BUILTIN_REDUCTION(prefix_exclusive_sum)
EMU_BUILTIN_REDUCTION(prefix_inclusive_product)
EMU_BUILTIN_REDUCTION(prefix_inclusive_sum)
EMU_BUILTIN_REDUCTION(product)
EMU_BUILTIN_REDUCTION(sum)
#undef EMU_BUILTIN_REDUCTION

// MLX has simd_xor of a bfloat as an xor of floats: of their bits.
EMU_FUNC float __metal_simd_xor(float data) { return as_type<float>(metal::simd_xor(as_type<uint>(data))); }

// bfloats move as their 16 bits.
#define EMU_BUILTIN_MOVE(name) \
  EMU_FUNC ushort __metal_simd_##name(ushort data, ushort where) { return metal::simd_##name(data, where); }
#define EMU_BUILTIN_FILL(name) \
  EMU_FUNC ushort __metal_simd_##name(ushort data, ushort filling, ushort delta, ushort modulo) { \
    return metal::simd_##name(data, filling, delta, modulo); \
  }

EMU_BUILTIN_MOVE(broadcast)
EMU_BUILTIN_MOVE(shuffle)
EMU_BUILTIN_MOVE(shuffle_down)
EMU_BUILTIN_MOVE(shuffle_rotate_down)
EMU_BUILTIN_MOVE(shuffle_rotate_up)
EMU_BUILTIN_MOVE(shuffle_up)
EMU_BUILTIN_MOVE(shuffle_xor)
EMU_BUILTIN_FILL(shuffle_and_fill_down)
EMU_BUILTIN_FILL(shuffle_and_fill_up)
#undef EMU_BUILTIN_MOVE
#undef EMU_BUILTIN_FILL

EMU_FUNC constexpr ushort __metal_get_simdgroup_size(ushort) { return 32; }
