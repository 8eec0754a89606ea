// Matrix tiles that one simdgroup holds in its registers.
//
// A tile of R x C elements is cut into 8x8 fragments, and each lane holds two elements of each fragment. Which two is
// the layout's secret: a kernel asks row(i) and col(j, e) and never computes with the lane's number, so that the same
// source runs where fragments lie otherwise. A and Acc share a layout and B has its own, so a computed tile can be
// used again only as a LEFT operand (as_a).
//
// FORGE_TILE_LAYOUT 1 is Apple's order. 2 is NVIDIA's, with the product written out in shuffles: slow, and there to
// catch a kernel that assumes Apple's order.

#ifndef FORGE_TILE_H
#define FORGE_TILE_H

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "reduce.h"

#ifndef FORGE_TILE_LAYOUT
#define FORGE_TILE_LAYOUT 1
#endif

namespace forge {

enum class Role { A, B, Acc };

// For this file alone.
namespace detail {

// The element type behind a pointer.
template <typename P>
struct Pointee;

template <typename T>
struct Pointee<device T*> {
  typedef T type;
};

template <typename T>
struct Pointee<threadgroup T*> {
  typedef T type;
};

// Where element e of a lane lies in an 8x8 fragment, and which two bits of the lane's number tell apart the lanes that
// share a row of A or Acc.
#if FORGE_TILE_LAYOUT == 2
template <Role ROLE>
METAL_FUNC short fragment_row(ushort lane, short e) {
  return ROLE == Role::B ? 2 * (lane % 4) + e : lane / 4;
}

template <Role ROLE>
METAL_FUNC short fragment_col(ushort lane, short e) {
  return ROLE == Role::B ? lane / 4 : 2 * (lane % 4) + e;
}

constant constexpr ushort ROW_BITS[2] = {1, 2};
#else
template <Role ROLE>
METAL_FUNC short fragment_row(ushort lane, short) {
  return ((lane / 4) & 4) + (lane / 2) % 4;
}

template <Role ROLE>
METAL_FUNC short fragment_col(ushort lane, short e) {
  return ((lane / 4) & 2) * 2 + (lane % 2) * 2 + e;
}

constant constexpr ushort ROW_BITS[2] = {1, 8};
#endif

// A value of each lane joined over the lanes that share a row of A or Acc; all of them get the result.
template <typename Op>
METAL_FUNC float join_row(float value) {
  value = Op::join(value, metal::simd_shuffle_xor(value, ROW_BITS[0]));
  return Op::join(value, metal::simd_shuffle_xor(value, ROW_BITS[1]));
}

}  // namespace detail

// R x C elements of type T, multiples of 8. Loops over fragments run over constants: a runtime index would move the
// array from registers to memory. The same holds for what a kernel passes to fragment().
template <typename T, int R, int C, Role ROLE>
struct Tile {
  static_assert(R % 8 == 0 && C % 8 == 0, "a tile consists of whole 8x8 fragments");
  static_assert(ROLE != Role::Acc || metal::is_same_v<T, float>, "accumulate in float");

  typedef metal::vec<T, 2> Fragment;

  Fragment fragments[(R / 8) * (C / 8)];
  ushort lane;

  // Elements start undefined. `index` is thread_index_in_simdgroup.
  METAL_FUNC Tile(ushort index) thread {
    lane = index;
  }

  // Row of this lane's elements in the i-th row of fragments.
  METAL_FUNC short row(short i) const thread {
    static_assert(ROLE != Role::B, "the two elements of a lane may lie in two rows of B: row(i, e)");
    return i * 8 + detail::fragment_row<ROLE>(lane, 0);
  }

  // Row of this lane's element e in the i-th row of fragments.
  METAL_FUNC short row(short i, short e) const thread {
    return i * 8 + detail::fragment_row<ROLE>(lane, e);
  }

  // Column of this lane's element e in the j-th column of fragments.
  METAL_FUNC short col(short j, short e) const thread {
    return j * 8 + detail::fragment_col<ROLE>(lane, e);
  }

  // This lane's elements [0] and [1] of fragment (i, j).
  METAL_FUNC thread Fragment& fragment(short i, short j) thread {
    return fragments[i * (C / 8) + j];
  }

  METAL_FUNC Fragment fragment(short i, short j) const thread {
    return fragments[i * (C / 8) + j];
  }

  METAL_FUNC void fill(T value) thread {
#pragma clang loop unroll(full)
    for (short f = 0; f < (R / 8) * (C / 8); f++) {
      fragments[f] = Fragment(value);
    }
  }

  // Element (r, c) from source[r * stride + c].
  template <typename P>
  METAL_FUNC void load(P source, int stride) thread {
    load_strided<false>(source, stride, 1, R, C);
  }

  // The same where r < rows and c < cols; elsewhere 0, and nothing is read.
  template <typename P>
  METAL_FUNC void load(P source, int stride, int rows, int cols) thread {
    load_strided<true>(source, stride, 1, rows, cols);
  }

  // Element (r, c) from source[r * down + c * across] where r < rows and c < cols; elsewhere 0, and nothing is read.
  template <typename P>
  METAL_FUNC void load(P source, int down, int across, int rows, int cols) thread {
    load_strided<true>(source, down, across, rows, cols);
  }

  // Element (r, c) from source[c * stride + r].
  template <typename P>
  METAL_FUNC void load_transposed(P source, int stride) thread {
    load_strided<false>(source, 1, stride, R, C);
  }

  // The same where r < rows and c < cols; elsewhere 0, and nothing is read.
  template <typename P>
  METAL_FUNC void load_transposed(P source, int stride, int rows, int cols) thread {
    load_strided<true>(source, 1, stride, rows, cols);
  }

  // Element (r, c) to target[r * stride + c], converted to the target's type.
  template <typename P>
  METAL_FUNC void store(P target, int stride) const thread {
    store_rows<false>(target, stride, R, C);
  }

  // The same where r < rows and c < cols; elsewhere nothing is written.
  template <typename P>
  METAL_FUNC void store(P target, int stride, int rows, int cols) const thread {
    store_rows<true>(target, stride, rows, cols);
  }

  // values[i]: the largest element of row(i), in every lane that holds a part of it. The whole simdgroup takes part.
  METAL_FUNC void row_max(thread float (&values)[R / 8]) const thread {
    reduce_rows<Max>(values);
  }

  // values[i]: the sum of row(i).
  METAL_FUNC void row_sum(thread float (&values)[R / 8]) const thread {
    reduce_rows<Sum>(values);
  }

 private:
  template <bool LIMITED, typename P>
  METAL_FUNC void load_strided(P source, int down, int across, int rows, int cols) thread {
#pragma clang loop unroll(full)
    for (short i = 0; i < R / 8; i++) {
#pragma clang loop unroll(full)
      for (short j = 0; j < C / 8; j++) {
#pragma clang loop unroll(full)
        for (short e = 0; e < 2; e++) {
          const bool inside = !LIMITED || (row(i, e) < rows && col(j, e) < cols);
          fragments[i * (C / 8) + j][e] = inside ? static_cast<T>(source[row(i, e) * down + col(j, e) * across]) : T(0);
        }
      }
    }
  }

  template <bool LIMITED, typename P>
  METAL_FUNC void store_rows(P target, int stride, int rows, int cols) const thread {
    typedef typename detail::Pointee<P>::type U;
#pragma clang loop unroll(full)
    for (short i = 0; i < R / 8; i++) {
#pragma clang loop unroll(full)
      for (short j = 0; j < C / 8; j++) {
#pragma clang loop unroll(full)
        for (short e = 0; e < 2; e++) {
          if (!LIMITED || (row(i, e) < rows && col(j, e) < cols)) {
            target[row(i, e) * stride + col(j, e)] = static_cast<U>(fragments[i * (C / 8) + j][e]);
          }
        }
      }
    }
  }

  template <typename Op>
  METAL_FUNC void reduce_rows(thread float (&values)[R / 8]) const thread {
    static_assert(ROLE != Role::B, "the lanes that share a column of B do not share its rows");
#pragma clang loop unroll(full)
    for (short i = 0; i < R / 8; i++) {
      float value = Op::join(float(fragment(i, 0)[0]), float(fragment(i, 0)[1]));
#pragma clang loop unroll(full)
      for (short j = 1; j < C / 8; j++) {
        value = Op::join(value, Op::join(float(fragment(i, j)[0]), float(fragment(i, j)[1])));
      }
      values[i] = detail::join_row<Op>(value);
    }
  }
};

// A computed tile as a left operand of type T. Every lane keeps its elements.
template <typename T, int R, int C>
METAL_FUNC Tile<T, R, C, Role::A> as_a(const thread Tile<float, R, C, Role::Acc>& computed) {
  Tile<T, R, C, Role::A> left(computed.lane);
#pragma clang loop unroll(full)
  for (short f = 0; f < (R / 8) * (C / 8); f++) {
    left.fragments[f][0] = static_cast<T>(computed.fragments[f][0]);
    left.fragments[f][1] = static_cast<T>(computed.fragments[f][1]);
  }
  return left;
}

namespace detail {

// The product of two fragments, added to `sum`.
template <typename TA, typename TB>
METAL_FUNC void multiply_accumulate(
    thread metal::vec<float, 2>& sum, metal::vec<TA, 2> a, metal::vec<TB, 2> b, ushort lane) {
#if FORGE_TILE_LAYOUT == 2
  const ushort row = lane / 4;
  const ushort col = 2 * (lane % 4);
#pragma clang loop unroll(full)
  for (ushort k = 0; k < 8; k++) {
    const float left = metal::simd_shuffle(float(a[k % 2]), ushort(row * 4 + k / 2));
    const float right = float(b[k % 2]);
    sum[0] += left * metal::simd_shuffle(right, ushort(col * 4 + k / 2));
    sum[1] += left * metal::simd_shuffle(right, ushort((col + 1) * 4 + k / 2));
  }
#else
  // Both operands in one type: that they may differ is not documented. 16 bits become 32 exactly.
  typedef metal::conditional_t<metal::is_same_v<TA, TB>, TA, float> T;
  metal::simdgroup_matrix<T, 8, 8> left;
  metal::simdgroup_matrix<T, 8, 8> right;
  metal::simdgroup_matrix<float, 8, 8> total;
#pragma clang loop unroll(full)
  for (short e = 0; e < 2; e++) {
    left.thread_elements()[e] = static_cast<T>(a[e]);
    right.thread_elements()[e] = static_cast<T>(b[e]);
    total.thread_elements()[e] = sum[e];
  }
  metal::simdgroup_multiply_accumulate(total, left, right, total);
  sum[0] = total.thread_elements()[0];
  sum[1] = total.thread_elements()[1];
#endif
}

}  // namespace detail

// The columns of sum from sum_column on += the columns of a from a_column on, times b: parts of whole tiles, so that b
// may be loaded in pieces. Both are constants and multiples of 8. The whole simdgroup takes part.
template <typename TA, typename TB, int R, int K, int C, int DEPTH, int COLUMNS>
METAL_FUNC void mma_part(
    thread Tile<float, R, COLUMNS, Role::Acc>& sum,
    short sum_column,
    const thread Tile<TA, R, DEPTH, Role::A>& a,
    short a_column,
    const thread Tile<TB, K, C, Role::B>& b) {
#pragma clang loop unroll(full)
  for (short k = 0; k < K / 8; k++) {
#pragma clang loop unroll(full)
    for (short i = 0; i < R / 8; i++) {
#pragma clang loop unroll(full)
      for (short j = 0; j < C / 8; j++) {
        detail::multiply_accumulate(
            sum.fragment(i, sum_column / 8 + j), a.fragment(i, a_column / 8 + k), b.fragment(k, j), sum.lane);
      }
    }
  }
}

// sum += a b. The whole simdgroup takes part.
template <typename TA, typename TB, int R, int K, int C>
METAL_FUNC void mma(
    thread Tile<float, R, C, Role::Acc>& sum,
    const thread Tile<TA, R, K, Role::A>& a,
    const thread Tile<TB, K, C, Role::B>& b) {
  mma_part(sum, 0, a, 0, b);
}

}  // namespace forge

#endif
