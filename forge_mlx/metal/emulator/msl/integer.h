// <metal_integer>: functions of every integer type but bool, and of its vectors. The operators are the compiler's: a
// shift looks at its count modulo the width, and the runtime stops a division by zero or of the least value by -1.
//
// A count of bits is of the argument's type; absdiff is unsigned. Of extract_bits and insert_bits, a range beyond the
// type is undefined in MSL: here bits that do not exist are zero when read and lost when written. mul24 and mad24
// look at the low 24 bits of their operands.
#pragma once

#include "overloads.h"

namespace metal {

namespace emu {

template <typename T>
using unsigned_of = __make_unsigned(T);
// Holds any product of two values of T, and one more such value.
template <typename T>
using wide_of = conditional_t<(sizeof(T) < 8), conditional_t<__is_signed(T), long, ulong>,
                              conditional_t<__is_signed(T), __int128, unsigned __int128>>;
template <typename T>
constexpr constant int width = 8 * sizeof(T);

template <typename T>
EMU_FUNC T saturated(wide_of<T> x) {
  wide_of<T> greatest = numeric_limits<T>::max(), least = numeric_limits<T>::min();
  return static_cast<T>(x < least ? least : x > greatest ? greatest : x);
}

template <typename T>
EMU_FUNC T min_int(T x, T y) { return y < x ? y : x; }
template <typename T>
EMU_FUNC T max_int(T x, T y) { return y > x ? y : x; }
template <typename T>
EMU_FUNC T min3_int(T x, T y, T z) { return min_int(x, min_int(y, z)); }
template <typename T>
EMU_FUNC T max3_int(T x, T y, T z) { return max_int(x, max_int(y, z)); }
template <typename T>
EMU_FUNC T median3_int(T x, T y, T z) { return max_int(min_int(x, y), min_int(max_int(x, y), z)); }
template <typename T>
EMU_FUNC T clamp_int(T x, T low, T high) { return min_int(max_int(x, low), high); }

template <typename T>
EMU_FUNC T abs_int(T x) {
  return x < 0 ? static_cast<T>(-static_cast<unsigned_of<T>>(x)) : x;
}
template <typename T>
EMU_FUNC unsigned_of<T> absdiff(T x, T y) {
  unsigned_of<T> a = x, b = y;
  return x > y ? a - b : b - a;
}
template <typename T>
EMU_FUNC T addsat(T x, T y) { return saturated<T>(static_cast<wide_of<T>>(x) + static_cast<wide_of<T>>(y)); }
template <typename T>
EMU_FUNC T subsat(T x, T y) {
  if constexpr (__is_unsigned(T)) {
    return x < y ? 0 : x - y;
  } else {
    return saturated<T>(static_cast<wide_of<T>>(x) - static_cast<wide_of<T>>(y));
  }
}
template <typename T>
EMU_FUNC T hadd(T x, T y) {
  return static_cast<T>((static_cast<wide_of<T>>(x) + static_cast<wide_of<T>>(y)) >> 1);
}
template <typename T>
EMU_FUNC T rhadd(T x, T y) {
  return static_cast<T>((static_cast<wide_of<T>>(x) + static_cast<wide_of<T>>(y) + 1) >> 1);
}
template <typename T>
EMU_FUNC T mulhi(T x, T y) {
  return static_cast<T>((static_cast<wide_of<T>>(x) * static_cast<wide_of<T>>(y)) >> width<T>);
}
template <typename T>
EMU_FUNC T madhi(T x, T y, T z) {
  return static_cast<T>(static_cast<unsigned_of<T>>(mulhi(x, y)) + static_cast<unsigned_of<T>>(z));
}
template <typename T>
EMU_FUNC T madsat(T x, T y, T z) {
  return saturated<T>(static_cast<wide_of<T>>(x) * static_cast<wide_of<T>>(y) + static_cast<wide_of<T>>(z));
}

template <typename T>
EMU_FUNC T low24(T x) { return static_cast<T>(static_cast<T>(static_cast<uint>(x) << 8) >> 8); }
template <typename T>
EMU_FUNC T mul24(T x, T y) { return static_cast<T>(static_cast<uint>(low24(x)) * static_cast<uint>(low24(y))); }
template <typename T>
EMU_FUNC T mad24(T x, T y, T z) { return static_cast<T>(static_cast<uint>(mul24(x, y)) + static_cast<uint>(z)); }

template <typename T>
EMU_FUNC T clz(T x) {
  ulong bits = static_cast<unsigned_of<T>>(x);
  return bits == 0 ? width<T> : __builtin_clzl(bits) - (64 - width<T>);
}
template <typename T>
EMU_FUNC T ctz(T x) {
  ulong bits = static_cast<unsigned_of<T>>(x);
  return bits == 0 ? width<T> : __builtin_ctzl(bits);
}
template <typename T>
EMU_FUNC T popcount(T x) { return __builtin_popcountl(static_cast<unsigned_of<T>>(x)); }
template <typename T>
EMU_FUNC T reverse_bits(T x) {
  return static_cast<T>(__builtin_bitreverse64(static_cast<unsigned_of<T>>(x)) >> (64 - width<T>));
}
template <typename T>
EMU_FUNC T rotate(T x, T count) {
  unsigned_of<T> bits = x;
  int left = count & (width<T> - 1);
  return static_cast<T>(bits << left | bits >> ((width<T> - left) & (width<T> - 1)));
}
// `bits` ones from bit `offset` on.
template <typename T>
EMU_FUNC unsigned_of<T> field(uint offset, uint bits) {
  ulong ones = bits >= 64 ? ~0ul : (1ul << bits) - 1;
  return static_cast<unsigned_of<T>>(offset >= 64 ? 0 : ones << offset);
}
template <typename T>
EMU_FUNC T extract_bits(T x, uint offset, uint bits) {
  ulong taken = offset >= 64 ? 0 : (static_cast<unsigned_of<T>>(x) & field<T>(offset, bits)) >> offset;
  bool negative = __is_signed(T) && bits > 0 && bits < 64 && (taken >> (bits - 1) & 1);
  return static_cast<T>(negative ? taken | ~0ul << bits : taken);
}
template <typename T>
EMU_FUNC T insert_bits(T base, T inserted, uint offset, uint bits) {
  unsigned_of<T> mask = field<T>(offset, bits);
  ulong moved = offset >= 64 ? 0 : static_cast<ulong>(static_cast<unsigned_of<T>>(inserted)) << offset;
  return static_cast<T>((static_cast<unsigned_of<T>>(base) & ~mask) | (static_cast<unsigned_of<T>>(moved) & mask));
}

} // namespace emu

#define EMU_INTEGERS(T, U)                                \
  EMU_OVERLOADS_1(T, abs, T, emu::abs_int)                \
  EMU_SAME_TYPE_2(U, absdiff, T, emu::absdiff)            \
  EMU_SAME_TYPE_2(T, addsat, T, emu::addsat)              \
  EMU_OVERLOADS_3(T, clamp, T, emu::clamp_int)            \
  EMU_OVERLOADS_1(T, clz, T, emu::clz)                    \
  EMU_OVERLOADS_1(T, ctz, T, emu::ctz)                    \
  EMU_SAME_TYPE_2(T, hadd, T, emu::hadd)                  \
  EMU_OVERLOADS_3(T, madhi, T, emu::madhi)                \
  EMU_OVERLOADS_3(T, madsat, T, emu::madsat)              \
  EMU_SAME_TYPE_2(T, max, T, emu::max_int)                \
  EMU_OVERLOADS_3(T, max3, T, emu::max3_int)              \
  EMU_OVERLOADS_3(T, median3, T, emu::median3_int)        \
  EMU_SAME_TYPE_2(T, min, T, emu::min_int)                \
  EMU_OVERLOADS_3(T, min3, T, emu::min3_int)              \
  EMU_SAME_TYPE_2(T, mulhi, T, emu::mulhi)                \
  EMU_OVERLOADS_1(T, popcount, T, emu::popcount)          \
  EMU_OVERLOADS_1(T, reverse_bits, T, emu::reverse_bits)  \
  EMU_SAME_TYPE_2(T, rhadd, T, emu::rhadd)                \
  EMU_SAME_TYPE_2(T, rotate, T, emu::rotate)              \
  EMU_SAME_TYPE_2(T, subsat, T, emu::subsat)              \
  EMU_BIT_FIELDS(T)

#define EMU_BIT_FIELDS(T)                                                                                          \
  EMU_FUNC T extract_bits(T x, uint offset, uint bits) { return emu::extract_bits(x, offset, bits); }              \
  EMU_FUNC T##2 extract_bits(T##2 x, uint offset, uint bits) {                                                     \
    return T##2{extract_bits(x[0], offset, bits), extract_bits(x[1], offset, bits)};                               \
  }                                                                                                                \
  EMU_FUNC T##3 extract_bits(T##3 x, uint offset, uint bits) {                                                     \
    return T##3{extract_bits(x[0], offset, bits), extract_bits(x[1], offset, bits), extract_bits(x[2], offset, bits)}; \
  }                                                                                                                \
  EMU_FUNC T##4 extract_bits(T##4 x, uint offset, uint bits) {                                                     \
    return T##4{extract_bits(x[0], offset, bits), extract_bits(x[1], offset, bits), extract_bits(x[2], offset, bits), \
                extract_bits(x[3], offset, bits)};                                                                 \
  }                                                                                                                \
  EMU_FUNC T insert_bits(T base, T inserted, uint offset, uint bits) {                                             \
    return emu::insert_bits(base, inserted, offset, bits);                                                         \
  }                                                                                                                \
  EMU_FUNC T##2 insert_bits(T##2 x, T##2 y, uint offset, uint bits) {                                              \
    return T##2{insert_bits(x[0], y[0], offset, bits), insert_bits(x[1], y[1], offset, bits)};                     \
  }                                                                                                                \
  EMU_FUNC T##3 insert_bits(T##3 x, T##3 y, uint offset, uint bits) {                                              \
    return T##3{insert_bits(x[0], y[0], offset, bits), insert_bits(x[1], y[1], offset, bits),                      \
                insert_bits(x[2], y[2], offset, bits)};                                                            \
  }                                                                                                                \
  EMU_FUNC T##4 insert_bits(T##4 x, T##4 y, uint offset, uint bits) {                                              \
    return T##4{insert_bits(x[0], y[0], offset, bits), insert_bits(x[1], y[1], offset, bits),                      \
                insert_bits(x[2], y[2], offset, bits), insert_bits(x[3], y[3], offset, bits)};                     \
  }

EMU_INTEGERS(char, uchar)
EMU_INTEGERS(uchar, uchar)
EMU_INTEGERS(short, ushort)
EMU_INTEGERS(ushort, ushort)
EMU_INTEGERS(int, uint)
EMU_INTEGERS(uint, uint)
EMU_INTEGERS(long, ulong)
EMU_INTEGERS(ulong, ulong)
#undef EMU_INTEGERS
#undef EMU_BIT_FIELDS

EMU_SAME_TYPE_2(int, mul24, int, emu::mul24)
EMU_SAME_TYPE_2(uint, mul24, uint, emu::mul24)
EMU_OVERLOADS_3(int, mad24, int, emu::mad24)
EMU_OVERLOADS_3(uint, mad24, uint, emu::mad24)

} // namespace metal
