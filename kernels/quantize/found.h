// What is found in a group, a row or a part of a matrix: its extremes, its largest magnitude, its sum of magnitudes.
// All of them keep NaN and infinity, which Metal's min and max would drop.

#ifndef FORGE_QUANTIZE_FOUND_H
#define FORGE_QUANTIZE_FOUND_H

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "numbers.h"

namespace forge {

// The smallest and the largest of some numbers, as integers in the same order: NaN lies outside of the infinities, and
// what the GPU's float unit takes for 0 stays as it is.
struct Extremes {
  int low;
  int high;

  METAL_FUNC Extremes() thread : low(INT_MAX), high(INT_MIN) {}

  // Of a float's bits and back.
  METAL_FUNC static int order(int bits) {
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }

  METAL_FUNC void add(float x) thread {
    const int place = order(as_type<int>(x));
    low = metal::min(low, place);
    high = metal::max(high, place);
  }

  METAL_FUNC void join_lanes(ushort lanes) thread {
    for (ushort step = 1; step < lanes; step *= 2) {
      low = metal::min(low, metal::simd_shuffle_xor(low, step));
      high = metal::max(high, metal::simd_shuffle_xor(high, step));
    }
  }

  METAL_FUNC float smallest() const thread {
    return as_type<float>(order(low));
  }

  METAL_FUNC float largest() const thread {
    return as_type<float>(order(high));
  }
};

// The larger of two magnitudes by their bits: of a NaN and a number the NaN.
struct MaxBits {
  METAL_FUNC static float identity() {
    return 0.0f;
  }

  METAL_FUNC static float join(float a, float b) {
    return as_type<float>(metal::max(as_type<uint>(a), as_type<uint>(b)));
  }

  METAL_FUNC static float over_simdgroup(float value) {
    return as_type<float>(metal::simd_max(as_type<uint>(value)));
  }
};

struct Largest {
  // Floats that `leave` writes.
  enum { size = 1 };
  float magnitude;

  METAL_FUNC Largest() thread : magnitude(0.0f) {}

  METAL_FUNC void add(float x) thread {
    magnitude = MaxBits::join(magnitude, as_type<float>(magnitude_bits(x)));
  }

  template <typename P>
  METAL_FUNC void join(P other) thread {
    magnitude = MaxBits::join(magnitude, other[0]);
  }

  template <typename P>
  METAL_FUNC void leave(P target) const thread {
    target[0] = magnitude;
  }

  METAL_FUNC void join_lanes(ushort lanes) thread {
    magnitude = over_lanes<MaxBits>(magnitude, lanes);
  }
};

// A sum and what the roundings of its additions lost, so that it is exact to a unit whatever the order.
struct ExactSum {
  float total;
  float lost;

  METAL_FUNC ExactSum() thread : total(0.0f), lost(0.0f) {}

  METAL_FUNC void add(float x, float x_lost) thread {
    const float before = total;
    total = before + x;
    const float part = total - before;
    const float error = (before - (total - part)) + (x - part);
    // In this order both of two lanes that join get the same bits.
    lost = (lost + x_lost) + error;
  }
};

// 2^64 and its inverse.
constant constexpr float HUGE_UNIT = 18446744073709551616.0f;
constant constexpr float HUGE_INVERSE = 1.0f / HUGE_UNIT;

// The sum of magnitudes. Those from 2^64 on are summed apart, in units of 2^64, so that no sum leaves float32.
struct Mean {
  enum { size = 4 };
  ExactSum usual;
  ExactSum huge;

  METAL_FUNC void add(float x) thread {
    const float magnitude = metal::fabs(x);
    const bool is_huge = magnitude >= HUGE_UNIT;
    usual.add(is_huge ? 0.0f : magnitude, 0.0f);
    huge.add(is_huge ? magnitude * HUGE_INVERSE : 0.0f, 0.0f);
  }

  template <typename P>
  METAL_FUNC void join(P other) thread {
    usual.add(other[0], other[1]);
    huge.add(other[2], other[3]);
  }

  template <typename P>
  METAL_FUNC void leave(P target) const thread {
    target[0] = usual.total;
    target[1] = usual.lost;
    target[2] = huge.total;
    target[3] = huge.lost;
  }

  METAL_FUNC void join_lanes(ushort lanes) thread {
    for (ushort step = 1; step < lanes; step *= 2) {
      usual.add(metal::simd_shuffle_xor(usual.total, step), metal::simd_shuffle_xor(usual.lost, step));
      huge.add(metal::simd_shuffle_xor(huge.total, step), metal::simd_shuffle_xor(huge.lost, step));
    }
  }

  METAL_FUNC float of(float count) const thread {
    const float small = usual.total + usual.lost;
    const float large = huge.total + huge.lost;
    return large == 0.0f ? divide(small, count) : divide(large + small * HUGE_INVERSE, count) * HUGE_UNIT;
  }
};

// Joins what the threads of a threadgroup of whole simdgroups have found; each gets the same bits. There is one barrier
// inside, none when one simdgroup is all. `scratch`, 32 times Found::size floats, may be used again only behind the
// next barrier: a loop takes two of them in turn.
template <typename Found>
METAL_FUNC void join_threadgroup(
    thread Found& found, threadgroup float* scratch, ushort lane, uint simdgroup, uint threads) {
  found.join_lanes(32);
  const uint simdgroups = threads / 32;
  if (simdgroups == 1) {
    return;
  }
  if (lane == 0) {
    found.leave(scratch + simdgroup * Found::size);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  found = Found();
  if (lane < simdgroups) {
    found.join(scratch + lane * Found::size);
  }
  found.join_lanes(32);
}

}  // namespace forge

#endif
