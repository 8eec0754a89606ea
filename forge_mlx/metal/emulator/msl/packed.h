// packed_float3 and its like: the elements of a vector one after the other, aligned as one element.
//
// A packed vector becomes a vector in every expression. Missing: swizzles of more than one element.
#pragma once

namespace metal {

// Copies, conversions from and to the vector, compound assignment and access by index, for an object in any address
// space. Constant memory is apart from the generic address space, so what reads it is there twice.
#define EMU_PACKED_MEMBERS(N, FROM_VECTOR, FROM_PACKED, ELEMENTS)                                             \
  emu_packed() = default;                                                                                     \
  emu_packed(const emu_packed&) = default;                                                                    \
  emu_packed& operator=(const emu_packed&) = default;                                                         \
  EMU_FUNC constexpr emu_packed(const constant emu_packed& v) : FROM_PACKED {}                                \
  EMU_FUNC void operator=(const constant emu_packed& v) { *this = emu_packed(v); }                            \
  EMU_FUNC void operator=(emu_vec<T, N> v) { *this = emu_packed(v); }                                             \
  EMU_FUNC constexpr emu_packed(emu_vec<T, N> v) : FROM_VECTOR {}                                                 \
  EMU_FUNC constexpr emu_packed(emu_vec<T, N> v) constant : FROM_VECTOR {}                                        \
  EMU_FUNC constexpr operator emu_vec<T, N>() const { return emu_vec<T, N>{ELEMENTS}; }                               \
  EMU_FUNC constexpr operator emu_vec<T, N>() const constant { return emu_vec<T, N>{ELEMENTS}; }                      \
  EMU_PACKED_ACCESS(thread)                                                                                   \
  EMU_PACKED_ACCESS(device)                                                                                   \
  EMU_PACKED_ACCESS(threadgroup)
#define EMU_PACKED_ACCESS(SPACE)                                                                              \
  EMU_FUNC SPACE T& operator[](int i) SPACE& { return (&x)[i]; }                                               \
  EMU_PACKED_ASSIGN(SPACE, +)                                                                                 \
  EMU_PACKED_ASSIGN(SPACE, -)                                                                                 \
  EMU_PACKED_ASSIGN(SPACE, *)                                                                                 \
  EMU_PACKED_ASSIGN(SPACE, /)
#define EMU_PACKED_ASSIGN(SPACE, OP)                                                                          \
  template <typename A>                                                                                       \
  EMU_FUNC SPACE emu_packed& operator OP##=(A a) SPACE {                                                      \
    *this = *this OP a;                                                                                       \
    return *this;                                                                                             \
  }

template <typename T>
struct emu_packed<T, 2> {
  union { T x, r; };
  union { T y, g; };
  EMU_PACKED_MEMBERS(2, EMU_LIST(x(v[0]), y(v[1])), EMU_LIST(x(v.x), y(v.y)), EMU_LIST(x, y))
  EMU_FUNC constexpr emu_packed(T a0, T a1) : x(a0), y(a1) {}
  EMU_FUNC constexpr emu_packed(T a0, T a1) constant : x(a0), y(a1) {}
  EMU_FUNC constexpr T operator[](int i) const& { return i == 0 ? x : y; }
  EMU_FUNC constexpr T operator[](int i) const&& { return i == 0 ? x : y; }
  EMU_FUNC constexpr T operator[](int i) const constant& { return i == 0 ? x : y; }
};
template <typename T>
struct emu_packed<T, 3> {
  union { T x, r; };
  union { T y, g; };
  union { T z, b; };
  EMU_PACKED_MEMBERS(3, EMU_LIST(x(v[0]), y(v[1]), z(v[2])), EMU_LIST(x(v.x), y(v.y), z(v.z)), EMU_LIST(x, y, z))
  EMU_FUNC constexpr emu_packed(T a0, T a1, T a2) : x(a0), y(a1), z(a2) {}
  EMU_FUNC constexpr emu_packed(T a0, T a1, T a2) constant : x(a0), y(a1), z(a2) {}
  EMU_FUNC constexpr T operator[](int i) const& { return i == 0 ? x : i == 1 ? y : z; }
  EMU_FUNC constexpr T operator[](int i) const&& { return i == 0 ? x : i == 1 ? y : z; }
  EMU_FUNC constexpr T operator[](int i) const constant& { return i == 0 ? x : i == 1 ? y : z; }
};
template <typename T>
struct emu_packed<T, 4> {
  union { T x, r; };
  union { T y, g; };
  union { T z, b; };
  union { T w, a; };
  EMU_PACKED_MEMBERS(4, EMU_LIST(x(v[0]), y(v[1]), z(v[2]), w(v[3])), EMU_LIST(x(v.x), y(v.y), z(v.z), w(v.w)),
                     EMU_LIST(x, y, z, w))
  EMU_FUNC constexpr emu_packed(T a0, T a1, T a2, T a3) : x(a0), y(a1), z(a2), w(a3) {}
  EMU_FUNC constexpr emu_packed(T a0, T a1, T a2, T a3) constant : x(a0), y(a1), z(a2), w(a3) {}
  EMU_FUNC constexpr T operator[](int i) const& { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  EMU_FUNC constexpr T operator[](int i) const&& { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
  EMU_FUNC constexpr T operator[](int i) const constant& { return i == 0 ? x : i == 1 ? y : i == 2 ? z : w; }
};
#undef EMU_PACKED_MEMBERS
#undef EMU_PACKED_ACCESS
#undef EMU_PACKED_ASSIGN

#define EMU_NAME_PACKED(T)              \
  typedef emu_packed<T, 2> packed_##T##2; \
  typedef emu_packed<T, 3> packed_##T##3; \
  typedef emu_packed<T, 4> packed_##T##4;
EMU_NUMBERS(EMU_NAME_PACKED)
#undef EMU_NAME_PACKED

// RESULT makes of a comparison's result the vector of bool that it is.
#define EMU_PACKED_OPERATOR(OP, RESULT)                                              \
  template <typename T, int N>                                                       \
  EMU_FUNC constexpr auto operator OP(emu_packed<T, N> a, emu_packed<T, N> b) {      \
    return RESULT(emu_vec<T, N>(a) OP emu_vec<T, N>(b));                             \
  }                                                                                  \
  template <typename T, int N>                                                       \
  EMU_FUNC constexpr auto operator OP(emu_packed<T, N> a, emu_vec<T, N> b) {         \
    return RESULT(emu_vec<T, N>(a) OP b);                                            \
  }                                                                                  \
  template <typename T, int N>                                                       \
  EMU_FUNC constexpr auto operator OP(emu_vec<T, N> a, emu_packed<T, N> b) {         \
    return RESULT(a OP emu_vec<T, N>(b));                                            \
  }                                                                                  \
  template <typename T, int N, typename S, enable_if_t<is_arithmetic_v<S>, int> = 0> \
  EMU_FUNC constexpr auto operator OP(emu_packed<T, N> a, S b) {                     \
    return RESULT(emu_vec<T, N>(a) OP emu_number(b));                                \
  }                                                                                  \
  template <typename T, int N, typename S, enable_if_t<is_arithmetic_v<S>, int> = 0> \
  EMU_FUNC constexpr auto operator OP(S a, emu_packed<T, N> b) {                     \
    return RESULT(emu_number(a) OP emu_vec<T, N>(b));                                \
  }
EMU_PACKED_OPERATOR(+, )
EMU_PACKED_OPERATOR(-, )
EMU_PACKED_OPERATOR(*, )
EMU_PACKED_OPERATOR(/, )
EMU_PACKED_OPERATOR(%, )
EMU_PACKED_OPERATOR(&, )
EMU_PACKED_OPERATOR(|, )
EMU_PACKED_OPERATOR(^, )
EMU_PACKED_OPERATOR(<<, )
EMU_PACKED_OPERATOR(>>, )
EMU_PACKED_OPERATOR(<, emu_truth)
EMU_PACKED_OPERATOR(>, emu_truth)
EMU_PACKED_OPERATOR(<=, emu_truth)
EMU_PACKED_OPERATOR(>=, emu_truth)
EMU_PACKED_OPERATOR(==, emu_truth)
EMU_PACKED_OPERATOR(!=, emu_truth)
#undef EMU_PACKED_OPERATOR

template <typename T, int N>
EMU_FUNC constexpr auto operator-(emu_packed<T, N> a) {
  return -emu_vec<T, N>(a);
}

} // namespace metal
