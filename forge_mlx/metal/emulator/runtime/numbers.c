// Arithmetic of 16-bit floats that the processor does not have. All of it rounds to nearest even.
#include <string.h>

#include "state.h"

#pragma STDC FP_CONTRACT OFF

static uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static uint64_t bits_of_double(double value) {
  uint64_t bits;
  memcpy(&bits, &value, 8);
  return bits;
}

static double double_of_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}

static uint16_t bfloat_of_float(float value) {
  uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float float_of_bfloat(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

// A double as a float of 16 bits, with `mantissa` bits behind the point and exponents up to `top` and down to 1 - top.
static uint16_t narrow(double value, int mantissa, int top) {
  uint64_t bits = bits_of_double(value);
  uint16_t sign = (uint16_t)(bits >> 48 & 0x8000);
  uint16_t infinity = (uint16_t)((2 * top + 1) << mantissa);
  int exponent = (int)(bits >> 52 & 2047) - 1023;
  uint64_t digits = bits & 0xfffffffffffff;
  if (exponent == 1024 && digits) return (uint16_t)(sign | infinity | 1 << (mantissa - 1));
  if (exponent == 1024 || exponent > top) return sign | infinity;
  if (exponent < -top - mantissa) return sign;
  // Denormal results keep fewer digits.
  int drop = 52 - mantissa + (exponent < 1 - top ? 1 - top - exponent : 0);
  uint64_t whole = digits | 1ull << 52;
  uint64_t kept = whole >> drop, rest = whole & ((1ull << drop) - 1), half = 1ull << (drop - 1);
  kept += rest > half || (rest == half && (kept & 1));
  // Adding the exponent below the leading digit carries an overflow of the digits into it.
  uint64_t base = exponent < 1 - top ? 0 : (uint64_t)(exponent + top - 1) << mantissa;
  return (uint16_t)(sign | (base + kept));
}

static uint16_t half_of_double(double value) { return narrow(value, 10, 15); }
static uint16_t bfloat_of_double(double value) { return narrow(value, 7, 127); }

static double double_of_half(uint16_t bits) {
  uint64_t sign = (uint64_t)(bits & 0x8000) << 48;
  uint32_t exponent = bits >> 10 & 31, digits = bits & 1023;
  if (exponent == 31) return double_of_bits(sign | 0x7ffull << 52 | (uint64_t)digits << 42);
  // The digits as a whole number, times a power of two that is built from its bits: denormals have exponent 1 without the leading digit.
  double whole = exponent ? 1024 + digits : digits;
  double magnitude = whole * double_of_bits((uint64_t)((exponent ? exponent : 1) - 25 + 1023) << 52);
  return sign ? -magnitude : magnitude;
}

// a*b+c as a double whose last bit is set where digits were lost, so that a second rounding to fewer digits is right. a*b is exact here.
static double fma_to_odd(double a, double b, double c) {
  double product = a * b;
  double sum = product + c;
  if (!__builtin_isfinite(sum)) return sum;
  double part = sum - product;
  double lost = (product - (sum - part)) + (c - part);
  if (lost == 0) return sum;
  uint64_t bits = bits_of_double(sum);
  if (bits & 1) return sum;
  // Towards the side on which the lost digits lie.
  return double_of_bits((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

unsigned short emu_fma_half(unsigned short a, unsigned short b, unsigned short c) {
  return half_of_double(fma_to_odd(double_of_half(a), double_of_half(b), double_of_half(c)));
}

unsigned short emu_fma_bfloat(unsigned short a, unsigned short b, unsigned short c) {
  return bfloat_of_double(fma_to_odd(float_of_bfloat(a), float_of_bfloat(b), float_of_bfloat(c)));
}

// clang's own name for the conversion of float to bfloat, which x86-64 has no instruction for.
__bf16 __truncsfbf2(float value) {
  uint16_t bits = bfloat_of_float(value);
  __bf16 result;
  memcpy(&result, &bits, 2);
  return result;
}
