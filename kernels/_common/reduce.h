// Sums and maxima over some lanes, a simdgroup or a threadgroup, always in the same order.

#ifndef FORGE_REDUCE_H
#define FORGE_REDUCE_H

#include <metal_simdgroup>
#include <metal_stdlib>

namespace forge {

struct Sum {
  METAL_FUNC static float identity() {
    return 0.0f;
  }

  METAL_FUNC static float join(float a, float b) {
    return a + b;
  }

  METAL_FUNC static float over_simdgroup(float value) {
    return metal::simd_sum(value);
  }
};

struct Max {
  METAL_FUNC static float identity() {
    return -INFINITY;
  }

  METAL_FUNC static float join(float a, float b) {
    return metal::max(a, b);
  }

  METAL_FUNC static float over_simdgroup(float value) {
    return metal::simd_max(value);
  }
};

// Joins lanes 0 to lanes - 1, the next `lanes` lanes, and so on; each gets the result of its own part, all of a part
// the same bits. `lanes`: a power of two, at most 32. The whole simdgroup takes part.
template <typename Op>
METAL_FUNC float over_lanes(float value, ushort lanes) {
  for (ushort step = 1; step < lanes; step *= 2) {
    value = Op::join(value, metal::simd_shuffle_xor(value, step));
  }
  return value;
}

// The value of the first lane of each part of `lanes` lanes, as over_lanes has them: what a row needs once, one lane
// reads. The whole simdgroup takes part.
template <typename T>
METAL_FUNC T from_first(T value, ushort lane, ushort lanes) {
  return metal::simd_shuffle(value, ushort(lane - lane % lanes));
}

// Joins each of N values over a threadgroup of any size; every thread gets the same bits. There is one barrier inside,
// none when one simdgroup is all. `scratch`, of 32 N floats, may be used again only behind the next barrier: a loop
// takes two of them in turn, so that the barrier of the next call lies between.
template <typename Op, int N>
METAL_FUNC void over_threadgroup(
    thread float (&values)[N], threadgroup float* scratch, uint lane, uint simdgroup, uint threads) {
#pragma clang loop unroll(full)
  for (int n = 0; n < N; n++) {
    values[n] = Op::over_simdgroup(values[n]);
  }
  const uint simdgroups = (threads + 31) / 32;
  if (simdgroups == 1) {
    return;
  }
  if (lane == 0) {
#pragma clang loop unroll(full)
    for (int n = 0; n < N; n++) {
      scratch[n * 32 + simdgroup] = values[n];
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (threads % 32 == 0) {
#pragma clang loop unroll(full)
    for (int n = 0; n < N; n++) {
      values[n] = Op::over_simdgroup(lane < simdgroups ? scratch[n * 32 + lane] : Op::identity());
    }
    return;
  }
  // The last simdgroup may have fewer lanes than there are values, and would join them in another order.
#pragma clang loop unroll(full)
  for (int n = 0; n < N; n++) {
    values[n] = scratch[n * 32];
    for (uint other = 1; other < simdgroups; other++) {
      values[n] = Op::join(values[n], scratch[n * 32 + other]);
    }
  }
}

}  // namespace forge

#endif
