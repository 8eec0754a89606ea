// The mathematical functions of one float, which math.h makes into overloads.
//
// emu:: holds them with IEEE's special values and denormals; transcendental functions are computed in 64 bits by the
// C library and rounded, so that they are within 1 ulp (nearly always the nearest float) on every machine. emu_fast::
// are the same with arguments and results below FLT_MIN replaced by zeros of their sign, as flush-to-zero arithmetic
// does.
//
// Where MSL leaves freedom:
// - fast:: functions keep NaN and infinities where the formula does; an argument out of a fast function's range is
//   computed.
// - fast::fmin and its kin are x < y ? x : y: a NaN on the left is lost, one on the right is returned.
// - fract(infinity) is 0, ilogb(0) and ilogb(NaN) are INT_MIN, frexp of a value that is not finite returns it with
//   exponent 0.
// - fmod is exact whatever the ratio; a GPU's x - y * trunc(x / y) is not.
#pragma once

namespace metal {

// The language has no double; the library's functions take it.
typedef float emu_double __attribute__((mode(DF)));

#define EMU_TEXT_(x) #x
#define EMU_TEXT(x) EMU_TEXT_(x)
// Named otherwise than in C, so that no call in a kernel finds them.
#define EMU_LIBRARY(name) __asm__(EMU_TEXT(__USER_LABEL_PREFIX__) #name) __attribute__((const, nothrow))
extern "C" {
#define EMU_LIBRARY_1(name) emu_double emu_library_##name(emu_double) EMU_LIBRARY(name);
#define EMU_LIBRARY_2(name) emu_double emu_library_##name(emu_double, emu_double) EMU_LIBRARY(name);
EMU_LIBRARY_1(acos) EMU_LIBRARY_1(acosh) EMU_LIBRARY_1(asin) EMU_LIBRARY_1(asinh) EMU_LIBRARY_1(atan)
EMU_LIBRARY_1(atanh) EMU_LIBRARY_1(cos) EMU_LIBRARY_1(cosh) EMU_LIBRARY_1(exp) EMU_LIBRARY_1(exp2) EMU_LIBRARY_1(log)
EMU_LIBRARY_1(log10) EMU_LIBRARY_1(log2) EMU_LIBRARY_1(sin) EMU_LIBRARY_1(sinh) EMU_LIBRARY_1(tan) EMU_LIBRARY_1(tanh)
EMU_LIBRARY_2(atan2) EMU_LIBRARY_2(pow)
float emu_library_fmodf(float, float) EMU_LIBRARY(fmodf);
float emu_library_fmaf(float, float, float) EMU_LIBRARY(fmaf);
}

namespace emu {

EMU_FUNC uint bits(float x) { return __builtin_bit_cast(uint, x); }
EMU_FUNC float from_bits(uint x) { return __builtin_bit_cast(float, x); }
EMU_FUNC emu_double pi() { return __builtin_bit_cast(emu_double, 0x400921fb54442d18ul); }

#define EMU_BY_LIBRARY_1(name) \
  EMU_FUNC float name(float x) { return static_cast<float>(emu_library_##name(x)); }
#define EMU_BY_LIBRARY_2(name) \
  EMU_FUNC float name(float x, float y) { return static_cast<float>(emu_library_##name(x, y)); }
EMU_BY_LIBRARY_1(acos) EMU_BY_LIBRARY_1(acosh) EMU_BY_LIBRARY_1(asin) EMU_BY_LIBRARY_1(asinh) EMU_BY_LIBRARY_1(atan)
EMU_BY_LIBRARY_1(atanh) EMU_BY_LIBRARY_1(cos) EMU_BY_LIBRARY_1(cosh) EMU_BY_LIBRARY_1(exp) EMU_BY_LIBRARY_1(exp2)
EMU_BY_LIBRARY_1(log) EMU_BY_LIBRARY_1(log10) EMU_BY_LIBRARY_1(log2) EMU_BY_LIBRARY_1(sin) EMU_BY_LIBRARY_1(sinh)
EMU_BY_LIBRARY_1(tan) EMU_BY_LIBRARY_1(tanh) EMU_BY_LIBRARY_2(atan2) EMU_BY_LIBRARY_2(pow)

EMU_FUNC bool isnan(float x) { return x != x; }
EMU_FUNC bool isinf(float x) { return (bits(x) & 0x7fffffffu) == 0x7f800000u; }
EMU_FUNC bool isfinite(float x) { return (bits(x) & 0x7f800000u) != 0x7f800000u; }
EMU_FUNC bool isnormal(float x) { return isfinite(x) && (bits(x) & 0x7f800000u) != 0; }
EMU_FUNC bool signbit(float x) { return bits(x) >> 31; }
EMU_FUNC float fabs(float x) { return from_bits(bits(x) & 0x7fffffffu); }
EMU_FUNC float copysign(float x, float y) { return from_bits((bits(x) & 0x7fffffffu) | (bits(y) & 0x80000000u)); }

EMU_FUNC float ceil(float x) { return __builtin_ceilf(x); }
EMU_FUNC float floor(float x) { return __builtin_floorf(x); }
EMU_FUNC float trunc(float x) { return __builtin_truncf(x); }
EMU_FUNC float rint(float x) { return __builtin_rintf(x); }
EMU_FUNC float round(float x) {
  float whole = trunc(x);
  return fabs(x - whole) >= 0.5f ? whole + copysign(1.0f, x) : whole;
}
EMU_FUNC float sqrt(float x) { return __builtin_sqrtf(x); }
EMU_FUNC float rsqrt(float x) {
  return static_cast<float>(static_cast<emu_double>(1.0f) / __builtin_sqrt(static_cast<emu_double>(x)));
}
EMU_FUNC float exp10(float x) { return static_cast<float>(emu_library_pow(10.0f, x)); }
EMU_FUNC float divide(float x, float y) { return x / y; }
EMU_FUNC float fma(float x, float y, float z) { return emu_library_fmaf(x, y, z); }
EMU_FUNC float fmod(float x, float y) { return emu_library_fmodf(x, y); }
EMU_FUNC float fdim(float x, float y) { return x <= y ? 0.0f : x - y; }

// x without its whole turns, in [-1, 1]: exact.
EMU_FUNC float half_turns(float x) { return x - 2.0f * rint(0.5f * x); }
EMU_FUNC emu_double sin_half_turns(emu_double r) {
  // Mirrored at a quarter turn: the library's sine of a rounded pi would not be zero.
  emu_double a = r < 0 ? -r : r;
  emu_double sine = emu_library_sin(pi() * (a > 0.5f ? 1.0f - a : a));
  return r < 0 ? -sine : sine;
}
EMU_FUNC float sinpi(float x) {
  return x == 0 ? x : copysign(1.0f, x) * static_cast<float>(sin_half_turns(half_turns(fabs(x))));
}
EMU_FUNC float cospi(float x) {
  emu_double r = fabs(half_turns(x));
  return static_cast<float>(sin_half_turns(static_cast<emu_double>(0.5f) - r));
}
EMU_FUNC float tanpi(float x) {
  emu_double r = half_turns(x);
  emu_double cosine = sin_half_turns(static_cast<emu_double>(0.5f) - (r < 0 ? -r : r));
  return x == 0 ? x : static_cast<float>(sin_half_turns(r) / cosine);
}

EMU_FUNC float powr(float x, float y) {
  bool undefined = x < 0 || isnan(x) || isnan(y) || (x == 0 && y == 0) || (isinf(x) && y == 0) || (x == 1 && isinf(y));
  return undefined ? __builtin_nanf("") : pow(fabs(x), y);
}

EMU_FUNC float fmin(float x, float y) { return isnan(x) || y < x ? y : x; }
EMU_FUNC float fmax(float x, float y) { return isnan(x) || y > x ? y : x; }
EMU_FUNC float clamp(float x, float low, float high) { return fmin(fmax(x, low), high); }

EMU_FUNC float fract(float x) { return isinf(x) ? 0.0f : x == x ? fmin(x - floor(x), 0x1.fffffep-1f) : x; }
EMU_FUNC float modf(float x, thread float& whole) {
  whole = trunc(x);
  return copysign(isinf(x) ? 0.0f : x - whole, x);
}
EMU_FUNC float sincos(float x, thread float& cosine) {
  cosine = cos(x);
  return sin(x);
}
EMU_FUNC int ilogb(float x) {
  uint magnitude = bits(x) & 0x7fffffffu;
  if (magnitude == 0 || magnitude > 0x7f800000u) {
    return -2147483647 - 1;
  }
  if (magnitude == 0x7f800000u) {
    return 2147483647;
  }
  int exponent = magnitude >> 23;
  return exponent ? exponent - 127 : -118 - __builtin_clz(magnitude);
}
// Two multiplications by powers of two round once: the first is exact.
EMU_FUNC float ldexp(float x, int k) {
  k = k > 300 ? 300 : k < -300 ? -300 : k;
  emu_double scale = __builtin_bit_cast(emu_double, static_cast<ulong>(1023 + k) << 52);
  return static_cast<float>(x * scale);
}
EMU_FUNC float frexp(float x, thread int& exponent) {
  if (x == 0 || !isfinite(x)) {
    exponent = 0;
    return x;
  }
  exponent = ilogb(x) + 1;
  return ldexp(x, -exponent);
}
EMU_FUNC float nextafter(float x, float y) {
  if (isnan(x) || isnan(y)) {
    return x + y;
  }
  if (x == y) {
    return y;
  }
  if (x == 0) {
    return copysign(0x1.0p-149f, y);
  }
  return from_bits(bits(x) + ((x < y) == (x > 0) ? 1 : -1));
}

EMU_FUNC float fmin3(float x, float y, float z) { return fmin(x, fmin(y, z)); }
EMU_FUNC float fmax3(float x, float y, float z) { return fmax(x, fmax(y, z)); }
EMU_FUNC float fmedian3(float x, float y, float z) { return fmax(fmin(x, y), fmin(fmax(x, y), z)); }

EMU_FUNC float mix(float x, float y, float a) { return x + (y - x) * a; }
EMU_FUNC float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
EMU_FUNC float sign(float x) { return isnan(x) ? 0.0f : x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
EMU_FUNC float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
EMU_FUNC float smoothstep(float edge0, float edge1, float x) {
  float t = saturate((x - edge0) / (edge1 - edge0));
  return t * t * (3.0f - 2.0f * t);
}

} // namespace emu

namespace emu_fast {

EMU_FUNC float flush(float x) { return emu::fabs(x) < 0x1.0p-126f ? emu::copysign(0.0f, x) : x; }

#define EMU_FLUSHED_1(name) \
  EMU_FUNC float name(float x) { return flush(emu::name(flush(x))); }
#define EMU_FLUSHED_2(name) \
  EMU_FUNC float name(float x, float y) { return flush(emu::name(flush(x), flush(y))); }
EMU_FLUSHED_1(acos) EMU_FLUSHED_1(acosh) EMU_FLUSHED_1(asin) EMU_FLUSHED_1(asinh) EMU_FLUSHED_1(atan)
EMU_FLUSHED_1(atanh) EMU_FLUSHED_1(ceil) EMU_FLUSHED_1(cos) EMU_FLUSHED_1(cosh) EMU_FLUSHED_1(cospi)
EMU_FLUSHED_1(exp) EMU_FLUSHED_1(exp10) EMU_FLUSHED_1(exp2) EMU_FLUSHED_1(fabs) EMU_FLUSHED_1(floor)
EMU_FLUSHED_1(log) EMU_FLUSHED_1(log10) EMU_FLUSHED_1(log2) EMU_FLUSHED_1(rint) EMU_FLUSHED_1(round)
EMU_FLUSHED_1(rsqrt) EMU_FLUSHED_1(sign) EMU_FLUSHED_1(sin) EMU_FLUSHED_1(sinh) EMU_FLUSHED_1(sinpi)
EMU_FLUSHED_1(sqrt) EMU_FLUSHED_1(tan) EMU_FLUSHED_1(tanh) EMU_FLUSHED_1(tanpi) EMU_FLUSHED_1(trunc)
EMU_FLUSHED_2(atan2) EMU_FLUSHED_2(copysign) EMU_FLUSHED_2(divide) EMU_FLUSHED_2(fdim) EMU_FLUSHED_2(fmod)
EMU_FLUSHED_2(pow) EMU_FLUSHED_2(powr) EMU_FLUSHED_2(step)

// Without a fast form of their own in Metal.
using emu::fma;
using emu::frexp;
using emu::ilogb;
using emu::nextafter;

EMU_FUNC float ldexp(float x, int k) { return flush(emu::ldexp(flush(x), k)); }
EMU_FUNC float fract(float x) { return flush(flush(x) - emu::floor(flush(x))); }
EMU_FUNC float fmin(float x, float y) { return flush(flush(x) < flush(y) ? x : y); }
EMU_FUNC float fmax(float x, float y) { return flush(flush(x) > flush(y) ? x : y); }
EMU_FUNC float fmin3(float x, float y, float z) { return fmin(x, fmin(y, z)); }
EMU_FUNC float fmax3(float x, float y, float z) { return fmax(x, fmax(y, z)); }
EMU_FUNC float fmedian3(float x, float y, float z) { return fmax(fmin(x, y), fmin(fmax(x, y), z)); }
EMU_FUNC float clamp(float x, float low, float high) { return fmin(fmax(x, low), high); }
EMU_FUNC float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
EMU_FUNC float mix(float x, float y, float a) { return flush(emu::mix(flush(x), flush(y), flush(a))); }
EMU_FUNC float smoothstep(float edge0, float edge1, float x) {
  return flush(emu::smoothstep(flush(edge0), flush(edge1), flush(x)));
}
EMU_FUNC float modf(float x, thread float& whole) {
  float rest = emu::modf(flush(x), whole);
  return flush(rest);
}
EMU_FUNC float sincos(float x, thread float& cosine) {
  cosine = cos(x);
  return sin(x);
}

} // namespace emu_fast

} // namespace metal
