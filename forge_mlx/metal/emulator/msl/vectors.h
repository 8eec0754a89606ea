// Vectors of two, three and four elements, their constructors and conversions.
//
// A vector is clang's ext_vector_type, so swizzles and operators are the compiler's own. Three things differ from
// Metal: a comparison gives a vector of -1 and 0, which the translation makes a vector of bool (comparisons.py);
// bool2, bool3 and bool4 are classes; constructors are calls of emu_make.
//
// A vector of three is stored and loaded as the four elements that it takes up: the last one counts as written and
// read with them. What that element holds is open in Metal, and a store may change it.
#pragma once

namespace metal {

// The vector types as a template's arguments are deduced from them, all but the vectors of bool.
template <typename T, int N>
using emu_vec = T __attribute__((ext_vector_type(N)));

#define EMU_NUMBERS(X) \
  X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong) X(half) X(bfloat) X(float)

#define EMU_NAME_VECTORS(T)                         \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
EMU_NUMBERS(EMU_NAME_VECTORS)
#undef EMU_NAME_VECTORS

template <int N>
struct emu_bool;
template <typename T, int N>
struct emu_vector {
  using type = emu_vec<T, N>;
};
template <int N>
struct emu_vector<bool, N> {
  using type = emu_bool<N>;
};
template <typename T, int N>
using vec = typename emu_vector<T, N>::type;

template <typename T, int N>
struct emu_packed;

// What a type is made of: `element`, and `size` (1 for a scalar, 0 for a class that is no vector).
template <typename T>
struct emu_shape {
  using element = T;
  static constexpr constant int size = is_scalar_v<T> ? 1 : 0;
  static constexpr constant bool is_vector = false;
};
template <typename T, int N>
struct emu_shape<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr constant int size = N;
  static constexpr constant bool is_vector = true;
};
template <int N>
struct emu_shape<emu_bool<N>> {
  using element = bool;
  static constexpr constant int size = N;
  static constexpr constant bool is_vector = true;
};
template <typename T, int N>
struct emu_shape<emu_packed<T, N>> {
  using element = T;
  static constexpr constant int size = N;
  static constexpr constant bool is_vector = true;
};

// Element i of a vector, or the scalar itself.
template <typename A>
EMU_FUNC constexpr auto emu_at(const A a, int i) {
  if constexpr (emu_shape<A>::is_vector) {
    return a[i];
  } else {
    return a;
  }
}

// One element's conversion. A float becomes an integer by truncation; beyond the integer's range it becomes the
// nearest value and NaN becomes 0 (MSL leaves that open; a flag of the compiler says it for the casts in a kernel
// too). half to bfloat and back goes through float, which holds both exactly.
template <typename E, typename A>
EMU_FUNC constexpr E emu_element(A a) {
  if constexpr ((__is_same(E, bfloat) && __is_same(A, half)) || (__is_same(E, half) && __is_same(A, bfloat))) {
    return static_cast<E>(static_cast<float>(a));
  } else {
    return static_cast<E>(a);
  }
}

// The vector T of these elements, each converted to T's element type.
template <typename T, typename... A>
EMU_FUNC constexpr T emu_fill(A... a) {
  return T{emu_element<typename emu_shape<T>::element>(a)...};
}
template <typename T, typename A>
EMU_FUNC constexpr T emu_convert(A a) {
  constexpr int n = emu_shape<T>::size;
  if constexpr (__is_same(T, A)) {
    return a;
  } else if constexpr (n == 2) {
    return emu_fill<T>(emu_at(a, 0), emu_at(a, 1));
  } else if constexpr (n == 3) {
    return emu_fill<T>(emu_at(a, 0), emu_at(a, 1), emu_at(a, 2));
  } else {
    return emu_fill<T>(emu_at(a, 0), emu_at(a, 1), emu_at(a, 2), emu_at(a, 3));
  }
}
template <typename T, typename A, typename B>
EMU_FUNC constexpr T emu_join(const A a, const B b) {
  constexpr int n = emu_shape<T>::size;
  constexpr int na = emu_shape<A>::size;
  if constexpr (n == 2) {
    return emu_fill<T>(a, b);
  } else if constexpr (n == 3 && na == 1) {
    return emu_fill<T>(a, b[0], b[1]);
  } else if constexpr (n == 3) {
    return emu_fill<T>(a[0], a[1], b);
  } else if constexpr (na == 1) {
    return emu_fill<T>(a, b[0], b[1], b[2]);
  } else if constexpr (na == 2) {
    return emu_fill<T>(a[0], a[1], b[0], b[1]);
  } else {
    return emu_fill<T>(a[0], a[1], a[2], b);
  }
}
template <typename T, typename A, typename B, typename C>
EMU_FUNC constexpr T emu_join(const A a, const B b, const C c) {
  if constexpr (emu_shape<T>::size == 3) {
    return emu_fill<T>(a, b, c);
  } else if constexpr (emu_shape<A>::size == 2) {
    return emu_fill<T>(a[0], a[1], b, c);
  } else if constexpr (emu_shape<B>::size == 2) {
    return emu_fill<T>(a, b[0], b[1], c);
  } else {
    return emu_fill<T>(a, b, c[0], c[1]);
  }
}
template <typename T, typename A, typename B, typename C, typename D>
EMU_FUNC constexpr T emu_join(A a, B b, C c, D d) {
  return emu_fill<T>(a, b, c, d);
}

// A vector's constructor: from nothing (zeros), a scalar (in every element), a vector of the same size (converted),
// or scalars and vectors that fill it exactly.
template <typename T, typename... A>
EMU_FUNC constexpr T emu_make_vector(A... a) {
  constexpr int n = emu_shape<T>::size;
  static_assert(((emu_shape<A>::size > 0) && ...), "a vector is made of scalars and vectors");
  constexpr int given = (0 + ... + emu_shape<A>::size);
  if constexpr (sizeof...(A) == 0) {
    return emu_convert<T>(typename emu_shape<T>::element(0));
  } else if constexpr (sizeof...(A) == 1) {
    static_assert(given == 1 || given == n, "the vector has another number of elements");
    return emu_convert<T>(a...);
  } else {
    static_assert(given == n, "the arguments do not fill the vector exactly");
    return emu_join<T>(a...);
  }
}

// T(a...), what a constructor or a functional cast means in Metal, for scalars, vectors, pointers and classes.
template <typename T, typename... A>
EMU_FUNC constexpr remove_cv_t<T> emu_make(A... a) {
  using R = remove_cv_t<T>;
  if constexpr (emu_shape<R>::is_vector) {
    return emu_make_vector<R>(a...);
  } else if constexpr (is_arithmetic_v<R> && sizeof...(A) == 1) {
    static_assert((!emu_shape<A>::is_vector && ...), "a vector does not convert to a scalar");
    return emu_element<R>(a...);
  } else {
    return R(a...);
  }
}

// static_cast<T>(a) as in Metal: between vectors it converts the values.
template <typename T, typename A>
EMU_FUNC constexpr remove_cv_t<T> emu_cast(A a) {
  static_assert(!is_reference_v<T>, "emu_cast does not give references");
  using R = remove_cv_t<T>;
  if constexpr (emu_shape<R>::is_vector || is_arithmetic_v<R>) {
    return emu_make<R>(a);
  } else {
    return static_cast<R>(a);
  }
}

// The bits of a value as another type of the same size.
template <typename T, typename A>
EMU_FUNC constexpr remove_cv_t<T> as_type(A a) {
  using R = remove_cv_t<T>;
  static_assert(sizeof(R) == sizeof(A), "as_type needs types of the same size");
  static_assert(!__is_same(R, bool) && !__is_same(A, bool), "as_type does not take bool");
  return __builtin_bit_cast(R, a);
}

} // namespace metal

using metal::as_type;
using metal::emu_cast;
using metal::emu_make;
