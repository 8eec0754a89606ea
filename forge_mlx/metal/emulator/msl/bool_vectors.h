// bool2, bool3 and bool4, which clang has no vectors of: classes with Metal's sizes.
//
// Clang's comparisons of vectors give vectors of -1 and 0 as wide as the compared type. The translation makes these
// vectors of bool where they arise (comparisons.py). Missing: swizzles of more than one element.
#pragma once

namespace metal {

// Copies, constructors for an object anywhere and for one in constant memory, then access by index.
#define EMU_BOOL_MEMBERS(N, PARAMETERS, EACH, SPLAT, FROM_MASK, FROM_BOOL)             \
  emu_bool() = default;                                                                \
  emu_bool(const emu_bool&) = default;                                                 \
  emu_bool& operator=(const emu_bool&) = default;                                      \
  EMU_FUNC constexpr emu_bool(const constant emu_bool& v) : FROM_BOOL {}               \
  EMU_FUNC void operator=(const constant emu_bool& v) { *this = emu_bool(v); }         \
  template <typename M, enable_if_t<is_integral_v<M>, int> = 0>                        \
  EMU_FUNC void operator=(emu_vec<M, N> mask) { *this = emu_bool(mask); }                  \
  EMU_FUNC constexpr explicit emu_bool(bool all) : SPLAT {}                            \
  EMU_FUNC constexpr explicit emu_bool(bool all) constant : SPLAT {}                   \
  EMU_FUNC constexpr emu_bool PARAMETERS : EACH {}                                     \
  EMU_FUNC constexpr emu_bool PARAMETERS constant : EACH {}                            \
  template <typename M, enable_if_t<is_integral_v<M>, int> = 0>                        \
  EMU_FUNC constexpr emu_bool(emu_vec<M, N> mask) : FROM_MASK {}                           \
  EMU_FUNC thread bool& operator[](int i) thread& { return (&x)[i]; }                   \
  EMU_FUNC device bool& operator[](int i) device& { return (&x)[i]; }                   \
  EMU_FUNC threadgroup bool& operator[](int i) threadgroup& { return (&x)[i]; }

template <>
struct __attribute__((aligned(2))) emu_bool<2> {
  union { bool x, r; };
  union { bool y, g; };
  EMU_BOOL_MEMBERS(2, (bool a0, bool a1), EMU_LIST(x(a0), y(a1)), EMU_LIST(x(all), y(all)),
                   EMU_LIST(x(mask[0] != 0), y(mask[1] != 0)), EMU_LIST(x(v.x), y(v.y)))
  EMU_FUNC constexpr bool operator[](int i) const& { return i == 0 ? x : y; }
  EMU_FUNC constexpr bool operator[](int i) const&& { return i == 0 ? x : y; }
  EMU_FUNC constexpr bool operator[](int i) const constant& { return i == 0 ? x : y; }
};
template <>
struct __attribute__((aligned(4))) emu_bool<3> {
  union { bool x, r; };
  union { bool y, g; };
  union { bool z, b; };
  EMU_BOOL_MEMBERS(3, (bool a0, bool a1, bool a2), EMU_LIST(x(a0), y(a1), z(a2)),
                   EMU_LIST(x(all), y(all), z(all)), EMU_LIST(x(mask[0] != 0), y(mask[1] != 0), z(mask[2] != 0)),
                   EMU_LIST(x(v.x), y(v.y), z(v.z)))
  EMU_FUNC constexpr bool operator[](int i) const& { return i == 0 ? x : i == 1 ? y : z; }
  EMU_FUNC constexpr bool operator[](int i) const&& { return i == 0 ? x : i == 1 ? y : z; }
  EMU_FUNC constexpr bool operator[](int i) const constant& { return i == 0 ? x : i == 1 ? y : z; }
};
template <>
struct __attribute__((aligned(4))) emu_bool<4> {
  union { bool x, r; };
  union { bool y, g; };
  union { bool z, b; };
  union { bool w, a; };
  EMU_BOOL_MEMBERS(4, (bool a0, bool a1, bool a2, bool a3), EMU_LIST(x(a0), y(a1), z(a2), w(a3)),
                   EMU_LIST(x(all), y(all), z(all), w(all)),
                   EMU_LIST(x(mask[0] != 0), y(mask[1] != 0), z(mask[2] != 0), w(mask[3] != 0)),
                   EMU_LIST(x(v.x), y(v.y), z(v.z), w(v.w)))
  EMU_FUNC constexpr bool operator[](int i) const& { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  EMU_FUNC constexpr bool operator[](int i) const&& { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  EMU_FUNC constexpr bool operator[](int i) const constant& { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};
#undef EMU_BOOL_MEMBERS

typedef emu_bool<2> bool2;
typedef emu_bool<3> bool3;
typedef emu_bool<4> bool4;

#define EMU_BOOL_OPERATOR(OP)                                                                                     \
  EMU_FUNC constexpr bool2 operator OP(bool2 a, bool2 b) { return bool2(a.x OP b.x, a.y OP b.y); }                \
  EMU_FUNC constexpr bool3 operator OP(bool3 a, bool3 b) { return bool3(a.x OP b.x, a.y OP b.y, a.z OP b.z); }    \
  EMU_FUNC constexpr bool4 operator OP(bool4 a, bool4 b) {                                                        \
    return bool4(a.x OP b.x, a.y OP b.y, a.z OP b.z, a.w OP b.w);                                                 \
  }                                                                                                               \
  template <int N>                                                                                                \
  EMU_FUNC constexpr emu_bool<N> operator OP(emu_bool<N> a, bool b) { return a OP emu_bool<N>(b); }               \
  template <int N>                                                                                                \
  EMU_FUNC constexpr emu_bool<N> operator OP(bool a, emu_bool<N> b) { return emu_bool<N>(a) OP b; }
EMU_BOOL_OPERATOR(&&)
EMU_BOOL_OPERATOR(||)
EMU_BOOL_OPERATOR(&)
EMU_BOOL_OPERATOR(|)
EMU_BOOL_OPERATOR(^)
EMU_BOOL_OPERATOR(==)
EMU_BOOL_OPERATOR(!=)
#undef EMU_BOOL_OPERATOR

#define EMU_BOOL_ASSIGN(OP, SPACE)                                              \
  template <int N>                                                              \
  EMU_FUNC SPACE emu_bool<N>& operator OP##=(SPACE emu_bool<N>& a, emu_bool<N> b) { \
    a = a OP b;                                                                 \
    return a;                                                                   \
  }                                                                             \
  template <int N>                                                              \
  EMU_FUNC SPACE emu_bool<N>& operator OP##=(SPACE emu_bool<N>& a, bool b) {    \
    a = a OP b;                                                                 \
    return a;                                                                   \
  }
#define EMU_BOOL_ASSIGNS(OP) EMU_BOOL_ASSIGN(OP, thread) EMU_BOOL_ASSIGN(OP, device) EMU_BOOL_ASSIGN(OP, threadgroup)
EMU_BOOL_ASSIGNS(&)
EMU_BOOL_ASSIGNS(|)
EMU_BOOL_ASSIGNS(^)
#undef EMU_BOOL_ASSIGNS
#undef EMU_BOOL_ASSIGN

EMU_FUNC constexpr bool2 operator!(bool2 a) { return bool2(!a.x, !a.y); }
EMU_FUNC constexpr bool3 operator!(bool3 a) { return bool3(!a.x, !a.y, !a.z); }
EMU_FUNC constexpr bool4 operator!(bool4 a) { return bool4(!a.x, !a.y, !a.z, !a.w); }

// What clang's comparison of vectors gives as the vector of bool that it is in Metal; anything else as it is. The
// translation writes a call of it around each comparison.
template <typename A>
EMU_FUNC constexpr A emu_truth(A a) {
  return a;
}
template <typename T, int N>
EMU_FUNC constexpr emu_bool<N> emu_truth(emu_vec<T, N> mask) {
  return mask;
}

// A bool that becomes every element of a vector, as 1 or 0: clang has -1 for it. Of the least rank, so that it becomes
// any element.
template <typename A>
EMU_FUNC constexpr auto emu_number(A a) {
  if constexpr (__is_same(A, bool)) {
    return static_cast<char>(a);
  } else {
    return a;
  }
}

// m ? a : b where m is a vector of bool, in each element. The translation writes it where ?: stands.
template <int N, typename A, typename B>
EMU_FUNC constexpr auto emu_choose(emu_bool<N> m, const A a, const B b) {
  using R = decltype(true ? A() : B());
  static_assert(emu_shape<R>::size == N, "the vectors have another number of elements than the condition");
  if constexpr (N == 2) {
    return emu_fill<R>(m.x ? emu_at(a, 0) : emu_at(b, 0), m.y ? emu_at(a, 1) : emu_at(b, 1));
  } else if constexpr (N == 3) {
    return emu_fill<R>(m.x ? emu_at(a, 0) : emu_at(b, 0), m.y ? emu_at(a, 1) : emu_at(b, 1),
                       m.z ? emu_at(a, 2) : emu_at(b, 2));
  } else {
    return emu_fill<R>(m.x ? emu_at(a, 0) : emu_at(b, 0), m.y ? emu_at(a, 1) : emu_at(b, 1),
                       m.z ? emu_at(a, 2) : emu_at(b, 2), m.w ? emu_at(a, 3) : emu_at(b, 3));
  }
}
// A scalar would have to leave one of the two without a value.
template <typename M, typename A, typename B>
EMU_FUNC constexpr A emu_choose(M, A, B) {
  static_assert(emu_shape<M>::size < 0, "?: chooses by a bool, or by a vector of bool in each use of the template");
}

} // namespace metal

using metal::emu_choose;
using metal::emu_number;
using metal::emu_truth;
