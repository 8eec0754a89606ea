// numeric_limits, and the constants that Metal's headers define.
#pragma once

#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-SCHAR_MAX - 1)
#define UCHAR_MAX 255
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SHRT_MAX 32767
#define SHRT_MIN (-SHRT_MAX - 1)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-LONG_MAX - 1l)
#define ULONG_MAX 18446744073709551615ul
#define INT8_MAX SCHAR_MAX
#define INT8_MIN SCHAR_MIN
#define UINT8_MAX UCHAR_MAX
#define INT16_MAX SHRT_MAX
#define INT16_MIN SHRT_MIN
#define UINT16_MAX USHRT_MAX
#define INT32_MAX INT_MAX
#define INT32_MIN INT_MIN
#define UINT32_MAX UINT_MAX
#define INT64_MAX LONG_MAX
#define INT64_MIN LONG_MIN
#define UINT64_MAX ULONG_MAX
#define SIZE_MAX ULONG_MAX

#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_10_EXP 38
#define FLT_MAX_EXP 128
#define FLT_MIN_10_EXP (-37)
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1.0p-126f
#define FLT_EPSILON 0x1.0p-23f

#define HALF_DIG 2
#define HALF_MANT_DIG 11
#define HALF_MAX_10_EXP 4
#define HALF_MAX_EXP 16
#define HALF_MIN_10_EXP (-4)
#define HALF_MIN_EXP (-13)
#define HALF_RADIX 2
#define HALF_MAX 0x1.ffcp15h
#define HALF_MIN 0x1.0p-14h
#define HALF_EPSILON 0x1.0p-10h

#define MAXFLOAT FLT_MAX
#define HUGE_VALF __builtin_huge_valf()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXHALF HALF_MAX
#define HUGE_VALH (static_cast<half>(__builtin_inff()))
#define FP_ILOGB0 INT_MIN
#define FP_ILOGBNAN INT_MIN

#define M_E_F 2.71828182845904523536028747135266250f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LOG10E_F 0.434294481903251827651128918916605082f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_LN10_F 2.30258509299404568401799145468436421f
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_PI_2_F 1.57079632679489661923132169163975144f
#define M_PI_4_F 0.785398163397448309615660845819875721f
#define M_1_PI_F 0.318309886183790671537767526745028724f
#define M_2_PI_F 0.636619772367581343075535053490057448f
#define M_2_SQRTPI_F 1.12837916709551257389615890312154517f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_SQRT1_2_F 0.707106781186547524400844362104849039f
#define M_E_H 2.71828182845904523536028747135266250h
#define M_LOG2E_H 1.44269504088896340735992468100189214h
#define M_LOG10E_H 0.434294481903251827651128918916605082h
#define M_LN2_H 0.693147180559945309417232121458176568h
#define M_LN10_H 2.30258509299404568401799145468436421h
#define M_PI_H 3.14159265358979323846264338327950288h
#define M_PI_2_H 1.57079632679489661923132169163975144h
#define M_PI_4_H 0.785398163397448309615660845819875721h
#define M_1_PI_H 0.318309886183790671537767526745028724h
#define M_2_PI_H 0.636619772367581343075535053490057448h
#define M_2_SQRTPI_H 1.12837916709551257389615890312154517h
#define M_SQRT2_H 1.41421356237309504880168872420969808h
#define M_SQRT1_2_H 0.707106781186547524400844362104849039h

namespace metal {

template <typename T>
struct numeric_limits {
  static constexpr constant bool is_specialized = false;
};
template <typename T>
struct numeric_limits<const T> : numeric_limits<T> {};
template <typename T>
struct numeric_limits<thread T> : numeric_limits<T> {};

#define EMU_LIMIT(T, name, ...) \
  EMU_FUNC static constexpr T name() { return static_cast<T>(__VA_ARGS__); }

#define EMU_INTEGER_LIMITS(T, SIGNED, BITS, LEAST, GREATEST)       \
  template <>                                                      \
  struct numeric_limits<T> {                                       \
    static constexpr constant bool is_specialized = true;          \
    static constexpr constant bool is_signed = SIGNED;             \
    static constexpr constant bool is_integer = true;              \
    static constexpr constant bool is_exact = true;                \
    static constexpr constant bool has_infinity = false;           \
    static constexpr constant bool has_quiet_NaN = false;          \
    static constexpr constant int radix = 2;                       \
    static constexpr constant int digits = BITS;                   \
    static constexpr constant int digits10 = BITS * 301 / 1000;    \
    EMU_LIMIT(T, min, LEAST)                                       \
    EMU_LIMIT(T, lowest, LEAST)                                    \
    EMU_LIMIT(T, max, GREATEST)                                    \
    EMU_LIMIT(T, epsilon, 0)                                       \
    EMU_LIMIT(T, round_error, 0)                                   \
    EMU_LIMIT(T, infinity, 0)                                      \
    EMU_LIMIT(T, quiet_NaN, 0)                                     \
    EMU_LIMIT(T, signaling_NaN, 0)                                 \
    EMU_LIMIT(T, denorm_min, 0)                                    \
  };
EMU_INTEGER_LIMITS(bool, false, 1, false, true)
EMU_INTEGER_LIMITS(char, true, 7, CHAR_MIN, CHAR_MAX)
EMU_INTEGER_LIMITS(signed char, true, 7, SCHAR_MIN, SCHAR_MAX)
EMU_INTEGER_LIMITS(uchar, false, 8, 0, UCHAR_MAX)
EMU_INTEGER_LIMITS(short, true, 15, SHRT_MIN, SHRT_MAX)
EMU_INTEGER_LIMITS(ushort, false, 16, 0, USHRT_MAX)
EMU_INTEGER_LIMITS(int, true, 31, INT_MIN, INT_MAX)
EMU_INTEGER_LIMITS(uint, false, 32, 0, UINT_MAX)
EMU_INTEGER_LIMITS(long, true, 63, LONG_MIN, LONG_MAX)
EMU_INTEGER_LIMITS(ulong, false, 64, 0, ULONG_MAX)

// Values of each type: least positive normal number, greatest, epsilon, least positive number.
#define EMU_FLOAT_LIMITS(T, DIGITS, DIGITS10, MAX_DIGITS10, MIN_EXP, MIN_10, MAX_EXP, MAX_10, NORMAL, GREATEST, EPS, \
                         DENORMAL)                                 \
  template <>                                                      \
  struct numeric_limits<T> {                                       \
    static constexpr constant bool is_specialized = true;          \
    static constexpr constant bool is_signed = true;               \
    static constexpr constant bool is_integer = false;             \
    static constexpr constant bool is_exact = false;               \
    static constexpr constant bool has_infinity = true;            \
    static constexpr constant bool has_quiet_NaN = true;           \
    static constexpr constant int radix = 2;                       \
    static constexpr constant int digits = DIGITS;                 \
    static constexpr constant int digits10 = DIGITS10;             \
    static constexpr constant int max_digits10 = MAX_DIGITS10;     \
    static constexpr constant int min_exponent = MIN_EXP;          \
    static constexpr constant int min_exponent10 = MIN_10;         \
    static constexpr constant int max_exponent = MAX_EXP;          \
    static constexpr constant int max_exponent10 = MAX_10;         \
    EMU_LIMIT(T, min, NORMAL)                                      \
    EMU_LIMIT(T, lowest, -(GREATEST))                              \
    EMU_LIMIT(T, max, GREATEST)                                    \
    EMU_LIMIT(T, epsilon, EPS)                                     \
    EMU_LIMIT(T, round_error, 0.5f)                                \
    EMU_LIMIT(T, infinity, INFINITY)                               \
    EMU_LIMIT(T, quiet_NaN, NAN)                                   \
    EMU_LIMIT(T, signaling_NaN, __builtin_nansf(""))               \
    EMU_LIMIT(T, denorm_min, DENORMAL)                             \
  };
EMU_FLOAT_LIMITS(float, 24, 6, 9, -125, -37, 128, 38, FLT_MIN, FLT_MAX, FLT_EPSILON, 0x1.0p-149f)
EMU_FLOAT_LIMITS(half, 11, 3, 5, -13, -4, 16, 4, HALF_MIN, HALF_MAX, HALF_EPSILON, 0x1.0p-24f)
EMU_FLOAT_LIMITS(bfloat, 8, 2, 4, -125, -37, 128, 38, FLT_MIN, 0x1.fep127f, 0x1.0p-7f, 0x1.0p-133f)

#undef EMU_FLOAT_LIMITS
#undef EMU_INTEGER_LIMITS
#undef EMU_LIMIT

} // namespace metal
