// <metal_simdgroup_matrix>: 8x8 matrices held by the 32 lanes of a simdgroup together.
//
// Lane l holds elements (row, column) and (row, column + 1) with q = l / 4, row = (q & 4) + (l / 2) % 4 and
// column = (q & 2) * 2 + (l % 2) * 2. MSL leaves that open; kernels that use thread_elements() rely on it.
//
// Of d = a * b + c each element is c + a[0] * b[0] + a[1] * b[1] + ..., in float, from left to right, every product
// rounded, and the sum rounded once to the type of d. MSL leaves the order and the rounding open. The four types may
// differ, as Apple's header allows and the specification's table does not say.
#pragma once

#include "lanes.h"

namespace metal {

template <typename T> struct emu_matrix_element { static constexpr __constant bool valid = false; };
template <> struct emu_matrix_element<float> { static constexpr __constant bool valid = true; };
template <> struct emu_matrix_element<half> { static constexpr __constant bool valid = true; };
template <> struct emu_matrix_element<bfloat> { static constexpr __constant bool valid = true; };

template <typename T, int Cols, int Rows = Cols> struct simdgroup_matrix {
  static_assert(emu_matrix_element<T>::valid, "a simdgroup_matrix holds float, half or bfloat");
  static_assert(Cols == 8 && Rows == 8, "a simdgroup_matrix has 8 columns and 8 rows");
  typedef T storage_type __attribute__((ext_vector_type(2)));

  EMU_FUNC simdgroup_matrix() = default;
  // A diagonal matrix.
  EMU_FUNC explicit simdgroup_matrix(T dval);

  // The two elements that this lane holds.
  EMU_FUNC __private storage_type& thread_elements() __private { return elements; }
  EMU_FUNC const __private storage_type& thread_elements() const __private { return elements; }

 private:
  storage_type elements;
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

EMU_FUNC uint emu_matrix_row(uint lane) { return (lane >> 2 & 4) + (lane >> 1 & 3); }
EMU_FUNC uint emu_matrix_column(uint lane) { return (lane >> 2 & 2) * 2 + (lane & 1) * 2; }

// All lanes must be here.
EMU_FUNC void emu_matrix_together() {
  emu_exchange(EMU_MATRIX, nullptr, 0, nullptr);
}

template <typename T, int Cols, int Rows> EMU_FUNC simdgroup_matrix<T, Cols, Rows>::simdgroup_matrix(T dval) {
  // Each lane fills in its own: a declaration has no place at which convergence.py could say that lanes meet.
  uint lane = emu_lane(), row = emu_matrix_row(lane), column = emu_matrix_column(lane);
  elements[0] = row == column ? dval : T(0);
  elements[1] = row == column + 1 ? dval : T(0);
}

template <typename T, int Cols, int Rows = Cols>
EMU_FUNC simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  emu_matrix_together();
  simdgroup_matrix<T, Cols, Rows> filled;
  filled.thread_elements()[0] = value;
  filled.thread_elements()[1] = value;
  return filled;
}

// Where this lane's first element lies. The origin is a column and a row of the memory, whether transposed or not.
EMU_FUNC ulong emu_matrix_offset(ulong elements_per_row, ulong2 origin, bool transpose) {
  uint lane = emu_lane(), row = emu_matrix_row(lane), column = emu_matrix_column(lane);
  return (origin.y + (transpose ? column : row)) * elements_per_row + origin.x + (transpose ? row : column);
}

#define EMU_MATRIX_MEMORY(space) \
  template <typename T, int Cols, int Rows> \
  EMU_FUNC void simdgroup_load( \
      __private simdgroup_matrix<T, Cols, Rows>& d, const space T* src, ulong elements_per_row = Cols, \
      ulong2 matrix_origin = 0, bool transpose_matrix = false) { \
    emu_matrix_together(); \
    ulong offset = emu_matrix_offset(elements_per_row, matrix_origin, transpose_matrix); \
    d.thread_elements()[0] = src[offset]; \
    d.thread_elements()[1] = src[offset + (transpose_matrix ? elements_per_row : 1)]; \
  } \
  template <typename T, int Cols, int Rows> \
  EMU_FUNC void simdgroup_store( \
      simdgroup_matrix<T, Cols, Rows> a, space T* dst, ulong elements_per_row = Cols, ulong2 matrix_origin = 0, \
      bool transpose_matrix = false) { \
    emu_matrix_together(); \
    ulong offset = emu_matrix_offset(elements_per_row, matrix_origin, transpose_matrix); \
    dst[offset] = a.thread_elements()[0]; \
    dst[offset + (transpose_matrix ? elements_per_row : 1)] = a.thread_elements()[1]; \
  }
EMU_MATRIX_MEMORY(__global)
EMU_MATRIX_MEMORY(__local)
#undef EMU_MATRIX_MEMORY

struct emu_pair { float first, second; };

// The lane that holds an element.
EMU_FUNC uint emu_matrix_lane(uint row, uint column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1;
}
// This lane's two elements of a * b + c, out of every lane's two of a and two of b.
EMU_HELPER emu_pair emu_matrix_product(const __private float4* all, uint lane, emu_pair c) {
  uint row = emu_matrix_row(lane), column = emu_matrix_column(lane);
  for (uint k = 0; k < 8; k++) {
    float a = all[emu_matrix_lane(row, k)][k & 1];
    float4 b = all[emu_matrix_lane(k, column)];
    c.first += a * b[2];
    c.second += a * b[3];
  }
  return c;
}

template <typename R, typename T, typename U, typename V, int K, int Rows, int Cols>
EMU_FUNC void simdgroup_multiply_accumulate(
    __private simdgroup_matrix<R, Cols, Rows>& d, simdgroup_matrix<T, K, Rows> a, simdgroup_matrix<U, Cols, K> b,
    simdgroup_matrix<V, Cols, Rows> c) {
  float4 mine;
  mine.xy = __builtin_convertvector(a.thread_elements(), float2);
  mine.zw = __builtin_convertvector(b.thread_elements(), float2);
  float4 all[32];
  emu_exchange(EMU_MATRIX, &mine, sizeof(mine), all);
  emu_count_matrix();
  emu_pair sum = emu_matrix_product(all, emu_lane(), {float(c.thread_elements()[0]), float(c.thread_elements()[1])});
  d.thread_elements()[0] = R(sum.first);
  d.thread_elements()[1] = R(sum.second);
}

template <typename R, typename T, typename U, int K, int Rows, int Cols>
EMU_FUNC void simdgroup_multiply(
    __private simdgroup_matrix<R, Cols, Rows>& d, simdgroup_matrix<T, K, Rows> a, simdgroup_matrix<U, Cols, K> b) {
  simdgroup_matrix<float, Cols, Rows> zero;
  zero.thread_elements() = 0;
  simdgroup_multiply_accumulate(d, a, b, zero);
}

template <typename T, int K, int Rows, int Cols>
EMU_FUNC simdgroup_matrix<T, Cols, Rows> operator*(simdgroup_matrix<T, K, Rows> a, simdgroup_matrix<T, Cols, K> b) {
  simdgroup_matrix<T, Cols, Rows> product;
  simdgroup_multiply(product, a, b);
  return product;
}

} // namespace metal
