// <metal_relational>. Where a vector of bool is wanted, what a comparison of vectors gives is one.
#pragma once

#include "overloads.h"

namespace metal {

#define EMU_CLASSES(T)                              \
  EMU_OVERLOADS_1(bool, isfinite, T, emu::isfinite) \
  EMU_OVERLOADS_1(bool, isinf, T, emu::isinf)       \
  EMU_OVERLOADS_1(bool, isnan, T, emu::isnan)       \
  EMU_OVERLOADS_1(bool, signbit, T, emu::signbit)   \
  EMU_SAME_TYPE_2(bool, isordered, T, emu::isordered) \
  EMU_SAME_TYPE_2(bool, isunordered, T, emu::isunordered)

namespace emu {
EMU_FUNC bool isordered(float x, float y) { return x == x && y == y; }
EMU_FUNC bool isunordered(float x, float y) { return x != x || y != y; }
// float has room for what is no normal number in half.
EMU_FUNC bool isnormal_half(half x) { return isfinite(x) && fabs(x) >= 0x1.0p-14f; }
} // namespace emu

EMU_CLASSES(float)
EMU_CLASSES(half)
EMU_OVERLOADS_1(bool, isnormal, float, emu::isnormal)
EMU_OVERLOADS_1(bool, isnormal, half, emu::isnormal_half)
#undef EMU_CLASSES

EMU_FUNC bool any(bool2 x) { return x.x || x.y; }
EMU_FUNC bool any(bool3 x) { return x.x || x.y || x.z; }
EMU_FUNC bool any(bool4 x) { return x.x || x.y || x.z || x.w; }
EMU_FUNC bool all(bool2 x) { return x.x && x.y; }
EMU_FUNC bool all(bool3 x) { return x.x && x.y && x.z; }
EMU_FUNC bool all(bool4 x) { return x.x && x.y && x.z && x.w; }

// b where c is true, a elsewhere.
#define EMU_SELECT(T)                                                                                           \
  EMU_FUNC T select(T a, T b, bool c) { return c ? b : a; }                                                     \
  EMU_FUNC T##2 select(T##2 a, T##2 b, bool2 c) { return T##2{c.x ? b[0] : a[0], c.y ? b[1] : a[1]}; }          \
  EMU_FUNC T##3 select(T##3 a, T##3 b, bool3 c) {                                                               \
    return T##3{c.x ? b[0] : a[0], c.y ? b[1] : a[1], c.z ? b[2] : a[2]};                                       \
  }                                                                                                             \
  EMU_FUNC T##4 select(T##4 a, T##4 b, bool4 c) {                                                               \
    return T##4{c.x ? b[0] : a[0], c.y ? b[1] : a[1], c.z ? b[2] : a[2], c.w ? b[3] : a[3]};                    \
  }
EMU_SELECT(bool)
EMU_SELECT(char)
EMU_SELECT(uchar)
EMU_SELECT(short)
EMU_SELECT(ushort)
EMU_SELECT(int)
EMU_SELECT(uint)
EMU_SELECT(long)
EMU_SELECT(ulong)
EMU_SELECT(half)
EMU_SELECT(float)
#undef EMU_SELECT

} // namespace metal
