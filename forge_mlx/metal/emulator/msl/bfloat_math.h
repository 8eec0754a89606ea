// bfloat arguments. No function takes them: they become float, and so is the result, which does not become bfloat by
// itself.
//
// In Metal that is a promotion, better than any other conversion; clang ranks it with bfloat to int and float to
// bfloat, so a call with bfloat and float would be ambiguous. A template for exactly these arguments decides as Metal
// does, and a function that a source has for bfloat (MLX's header has) is preferred to it.
#pragma once

namespace metal {

template <typename... A>
constexpr constant bool emu_widens =
    ((__is_same(A, bfloat) || __is_same(A, float)) && ...) && (__is_same(A, bfloat) || ...);

#define EMU_WIDEN_1(name)                                                       \
  template <typename A, enable_if_t<emu_widens<A>, int> = 0>                    \
  EMU_FUNC float name(A x) {                                                    \
    return name(static_cast<float>(x));                                         \
  }
#define EMU_WIDEN_2(name)                                                       \
  template <typename A, typename B, enable_if_t<emu_widens<A, B>, int> = 0>     \
  EMU_FUNC float name(A x, B y) {                                               \
    return name(static_cast<float>(x), static_cast<float>(y));                  \
  }
#define EMU_WIDEN_3(name)                                                                   \
  template <typename A, typename B, typename C, enable_if_t<emu_widens<A, B, C>, int> = 0>  \
  EMU_FUNC float name(A x, B y, C z) {                                                      \
    return name(static_cast<float>(x), static_cast<float>(y), static_cast<float>(z));       \
  }
#define EMU_WIDEN_ALL                                                                                      \
  EMU_WIDEN_1(abs)                                                                                         \
  EMU_WIDEN_2(atan2) EMU_WIDEN_2(copysign) EMU_WIDEN_2(divide) EMU_WIDEN_2(fdim) EMU_WIDEN_2(fmax)         \
  EMU_WIDEN_2(fmin) EMU_WIDEN_2(fmod) EMU_WIDEN_2(max) EMU_WIDEN_2(min) EMU_WIDEN_2(nextafter)             \
  EMU_WIDEN_2(pow) EMU_WIDEN_2(powr) EMU_WIDEN_2(step)                                                     \
  EMU_WIDEN_3(clamp) EMU_WIDEN_3(fma) EMU_WIDEN_3(fmax3) EMU_WIDEN_3(fmedian3) EMU_WIDEN_3(fmin3)          \
  EMU_WIDEN_3(max3) EMU_WIDEN_3(median3) EMU_WIDEN_3(min3) EMU_WIDEN_3(mix) EMU_WIDEN_3(smoothstep)

EMU_WIDEN_ALL
namespace precise {
EMU_WIDEN_ALL
}
namespace fast {
EMU_WIDEN_ALL
}

template <typename A, typename B, enable_if_t<emu_widens<A, B>, int> = 0>
EMU_FUNC float select(A a, B b, bool c) {
  return c ? static_cast<float>(b) : static_cast<float>(a);
}

#undef EMU_WIDEN_ALL
#undef EMU_WIDEN_1
#undef EMU_WIDEN_2
#undef EMU_WIDEN_3

} // namespace metal
