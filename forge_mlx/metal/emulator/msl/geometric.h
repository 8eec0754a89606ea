// <metal_geometric>, for vectors of float and half: sums in the order of the elements, in float, rounded once for
// half.
#pragma once

namespace metal {

namespace emu {

template <int N>
EMU_FUNC float dot(emu_vec<float, N> x, emu_vec<float, N> y) {
  float sum = x[0] * y[0];
  for (int i = 1; i < N; ++i) {
    sum += x[i] * y[i];
  }
  return sum;
}
template <int N>
EMU_FUNC float length(emu_vec<float, N> x) { return sqrt(dot(x, x)); }
template <int N>
EMU_FUNC float length_squared(emu_vec<float, N> x) { return dot(x, x); }
template <int N>
EMU_FUNC float distance(emu_vec<float, N> x, emu_vec<float, N> y) { return length(x - y); }
template <int N>
EMU_FUNC float distance_squared(emu_vec<float, N> x, emu_vec<float, N> y) { return dot(x - y, x - y); }
EMU_FUNC float3 cross(float3 x, float3 y) { return x.yzx * y.zxy - x.zxy * y.yzx; }
template <int N>
EMU_FUNC emu_vec<float, N> normalize(emu_vec<float, N> x) { return x * rsqrt(dot(x, x)); }
template <int N>
EMU_FUNC emu_vec<float, N> faceforward(emu_vec<float, N> n, emu_vec<float, N> i, emu_vec<float, N> reference) {
  return dot(reference, i) < 0 ? n : -n;
}
template <int N>
EMU_FUNC emu_vec<float, N> reflect(emu_vec<float, N> i, emu_vec<float, N> n) { return i - 2.0f * dot(n, i) * n; }
template <int N>
EMU_FUNC emu_vec<float, N> refract(emu_vec<float, N> i, emu_vec<float, N> n, float eta) {
  float cosine = dot(n, i);
  float k = 1.0f - eta * eta * (1.0f - cosine * cosine);
  return k < 0 ? emu_vec<float, N>(0.0f) : eta * i - (eta * cosine + sqrt(k)) * n;
}

// Arguments and results as they are, and with denormals flushed for metal::fast.
template <typename T>
EMU_FUNC T keep(T x) { return x; }

} // namespace emu

namespace emu_fast {

template <int N>
EMU_FUNC emu_vec<float, N> flush(emu_vec<float, N> x) {
  for (int i = 0; i < N; ++i) {
    x[i] = flush(x[i]);
  }
  return x;
}

} // namespace emu_fast

// A function of vectors of T, computed in float. FLUSH is emu::keep or emu_fast::flush.
#define EMU_WIDE(FLUSH, N, x) FLUSH(emu_convert<emu_vec<float, N>>(x))
#define EMU_VECTOR_1(FLUSH, T, N, name) \
  EMU_FUNC emu_vec<T, N> name(emu_vec<T, N> x) { \
    return emu_convert<emu_vec<T, N>>(FLUSH(emu::name(EMU_WIDE(FLUSH, N, x)))); \
  }
#define EMU_VECTOR_2(FLUSH, T, N, name)                                                                \
  EMU_FUNC emu_vec<T, N> name(emu_vec<T, N> x, emu_vec<T, N> y) {                                      \
    return emu_convert<emu_vec<T, N>>(FLUSH(emu::name(EMU_WIDE(FLUSH, N, x), EMU_WIDE(FLUSH, N, y)))); \
  }
#define EMU_VECTOR_3(FLUSH, T, N, name)                                                         \
  EMU_FUNC emu_vec<T, N> name(emu_vec<T, N> x, emu_vec<T, N> y, emu_vec<T, N> z) {              \
    return emu_convert<emu_vec<T, N>>(                                                          \
        FLUSH(emu::name(EMU_WIDE(FLUSH, N, x), EMU_WIDE(FLUSH, N, y), EMU_WIDE(FLUSH, N, z)))); \
  }
#define EMU_SCALAR_1(FLUSH, T, N, name) \
  EMU_FUNC T name(emu_vec<T, N> x) { return static_cast<T>(FLUSH(emu::name(EMU_WIDE(FLUSH, N, x)))); }
#define EMU_SCALAR_2(FLUSH, T, N, name)                                                    \
  EMU_FUNC T name(emu_vec<T, N> x, emu_vec<T, N> y) {                                      \
    return static_cast<T>(FLUSH(emu::name(EMU_WIDE(FLUSH, N, x), EMU_WIDE(FLUSH, N, y)))); \
  }
#define EMU_GEOMETRIC(FLUSH, T, N)                                                                                     \
  EMU_SCALAR_2(FLUSH, T, N, dot)                                                                                       \
  EMU_SCALAR_1(FLUSH, T, N, length)                                                                                    \
  EMU_SCALAR_1(FLUSH, T, N, length_squared)                                                                            \
  EMU_SCALAR_2(FLUSH, T, N, distance)                                                                                  \
  EMU_SCALAR_2(FLUSH, T, N, distance_squared)                                                                          \
  EMU_VECTOR_1(FLUSH, T, N, normalize)                                                                                 \
  EMU_VECTOR_3(FLUSH, T, N, faceforward)                                                                               \
  EMU_VECTOR_2(FLUSH, T, N, reflect)                                                                                   \
  EMU_FUNC emu_vec<T, N> refract(emu_vec<T, N> x, emu_vec<T, N> y, T eta) {                                            \
    float wide = static_cast<float>(eta);                                                                              \
    return emu_convert<emu_vec<T, N>>(FLUSH(emu::refract(EMU_WIDE(FLUSH, N, x), EMU_WIDE(FLUSH, N, y), FLUSH(wide)))); \
  }
#define EMU_GEOMETRIC_ALL(FLUSH, T) \
  EMU_GEOMETRIC(FLUSH, T, 2)        \
  EMU_GEOMETRIC(FLUSH, T, 3)        \
  EMU_GEOMETRIC(FLUSH, T, 4)        \
  EMU_VECTOR_2(FLUSH, T, 3, cross)

EMU_GEOMETRIC_ALL(emu::keep, float)
EMU_GEOMETRIC_ALL(emu::keep, half)
namespace precise {
EMU_GEOMETRIC_ALL(emu::keep, float)
}
namespace fast {
EMU_GEOMETRIC_ALL(emu_fast::flush, float)
}
#undef EMU_GEOMETRIC_ALL
#undef EMU_GEOMETRIC
#undef EMU_SCALAR_1
#undef EMU_SCALAR_2
#undef EMU_VECTOR_1
#undef EMU_VECTOR_2
#undef EMU_VECTOR_3
#undef EMU_WIDE

} // namespace metal
