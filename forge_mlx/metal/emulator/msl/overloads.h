// One function on scalars made into overloads for a scalar type and its vectors, by lanes.
#pragma once

// A function of one scalar type and its vectors, by lanes. `call` is the function of that scalar, R the result's
// type.
#define EMU_OVERLOADS_1(R, name, T, call)                                                                      \
  EMU_FUNC R name(T x) { return static_cast<R>(call(x)); }                                                     \
  EMU_FUNC R##2 name(T##2 x) { return R##2{name(x[0]), name(x[1])}; }                                          \
  EMU_FUNC R##3 name(T##3 x) { return R##3{name(x[0]), name(x[1]), name(x[2])}; }                              \
  EMU_FUNC R##4 name(T##4 x) { return R##4{name(x[0]), name(x[1]), name(x[2]), name(x[3])}; }
#define EMU_OVERLOADS_2(R, name, T, U, call)                                                                   \
  EMU_FUNC R name(T x, U y) { return static_cast<R>(call(x, y)); }                                             \
  EMU_FUNC R##2 name(T##2 x, U##2 y) { return R##2{name(x[0], y[0]), name(x[1], y[1])}; }                      \
  EMU_FUNC R##3 name(T##3 x, U##3 y) { return R##3{name(x[0], y[0]), name(x[1], y[1]), name(x[2], y[2])}; }    \
  EMU_FUNC R##4 name(T##4 x, U##4 y) {                                                                         \
    return R##4{name(x[0], y[0]), name(x[1], y[1]), name(x[2], y[2]), name(x[3], y[3])};                       \
  }
#define EMU_OVERLOADS_3(R, name, T, call)                                                                      \
  EMU_FUNC R name(T x, T y, T z) { return static_cast<R>(call(x, y, z)); }                                     \
  EMU_FUNC R##2 name(T##2 x, T##2 y, T##2 z) { return R##2{name(x[0], y[0], z[0]), name(x[1], y[1], z[1])}; }  \
  EMU_FUNC R##3 name(T##3 x, T##3 y, T##3 z) {                                                                 \
    return R##3{name(x[0], y[0], z[0]), name(x[1], y[1], z[1]), name(x[2], y[2], z[2])};                       \
  }                                                                                                            \
  EMU_FUNC R##4 name(T##4 x, T##4 y, T##4 z) {                                                                 \
    return R##4{name(x[0], y[0], z[0]), name(x[1], y[1], z[1]), name(x[2], y[2], z[2]), name(x[3], y[3], z[3])}; \
  }
// A function with a second result, written through a reference to thread memory.
#define EMU_OVERLOADS_OUT(name, T, U, call)                                                                    \
  EMU_FUNC T name(T x, thread U& out) { return call(x, out); }                                                 \
  EMU_FUNC T##2 name(T##2 x, thread U##2& out) {                                                               \
    U a, b;                                                                                                    \
    T##2 result = {name(x[0], a), name(x[1], b)};                                                              \
    out = U##2{a, b};                                                                                          \
    return result;                                                                                             \
  }                                                                                                            \
  EMU_FUNC T##3 name(T##3 x, thread U##3& out) {                                                               \
    U a, b, c;                                                                                                 \
    T##3 result = {name(x[0], a), name(x[1], b), name(x[2], c)};                                               \
    out = U##3{a, b, c};                                                                                       \
    return result;                                                                                             \
  }                                                                                                            \
  EMU_FUNC T##4 name(T##4 x, thread U##4& out) {                                                               \
    U a, b, c, d;                                                                                              \
    T##4 result = {name(x[0], a), name(x[1], b), name(x[2], c), name(x[3], d)};                                \
    out = U##4{a, b, c, d};                                                                                    \
    return result;                                                                                             \
  }
// The operands and the result of one type.
#define EMU_SAME_TYPE_2(R, name, T, call) EMU_OVERLOADS_2(R, name, T, T, call)
