// A sum of exponentials over some numbers and the largest of them, from one reading: what softmax and logsumexp need.

#ifndef FORGE_EXP_SUM_H
#define FORGE_EXP_SUM_H

#include <metal_stdlib>

#include "reduce.h"

namespace forge {

// The largest begins at the least finite number: a larger one takes its place, and beside it numbers of -inf count as
// e^-inf = 0 from the first on, where beside -inf they would make NaN. Of -inf alone the sum is 0. A NaN or +inf among
// the numbers makes the sum NaN.
struct ExpSum {
  float largest;
  // Of e^(x - largest).
  float total;

  METAL_FUNC ExpSum() thread : largest(-FLT_MAX), total(0.0f) {}

  // Takes in x[i] for i < limit, and puts e^(x[i] - largest) in its place, elsewhere 0.
  template <int N>
  METAL_FUNC void add(thread float (&x)[N], int limit) thread {
    const float before = largest;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      largest = i < limit ? metal::max(largest, x[i]) : largest;
    }
    total *= metal::precise::exp(before - largest);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      x[i] = i < limit ? metal::precise::exp(x[i] - largest) : 0.0f;
      total += x[i];
    }
  }

  // Joins `lanes` neighbouring lanes, a power of two; each gets the same. The whole simdgroup takes part.
  METAL_FUNC void join_lanes(ushort lanes) thread {
    const float own = largest;
    largest = over_lanes<Max>(own, lanes);
    total = over_lanes<Sum>(total * metal::precise::exp(own - largest), lanes);
  }

  // Joins a threadgroup of whole simdgroups; each thread gets the same. There is one barrier inside. `scratch`, 64
  // floats, may be used again only behind the next barrier: a loop takes two of them in turn.
  METAL_FUNC void join_threadgroup(threadgroup float* scratch, ushort lane, uint simdgroup, uint threads) thread {
    join_lanes(32);
    if (lane == 0) {
      leave(scratch, simdgroup);
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    take(scratch, lane, threads / 32);
  }

  // What a simdgroup has found, for `take`.
  METAL_FUNC void leave(threadgroup float* scratch, uint simdgroup) const thread {
    scratch[simdgroup] = largest;
    scratch[32 + simdgroup] = total;
  }

  // Joins what `simdgroups` simdgroups have left.
  METAL_FUNC void take(const threadgroup float* scratch, ushort lane, uint simdgroups) thread {
    largest = lane < simdgroups ? scratch[lane] : -FLT_MAX;
    total = lane < simdgroups ? scratch[32 + lane] : 0.0f;
    join_lanes(32);
  }
};

}  // namespace forge

#endif
