// The loss of one target and its derivatives, of what is known of the logits that it stands among.
//
// With z the logits (under a softcap c: c * tanh(logits / c)), L = logsumexp(z), t the target, ls the label smoothing
// and zl the z_loss: loss = L - (1 - ls) z[t] - ls mean(z) + zl L^2.

#ifndef FORGE_TOKEN_LOSS_H
#define FORGE_TOKEN_LOSS_H

#include <metal_stdlib>

#include "../_common/exp_sum.h"
#include "../_common/reduce.h"

namespace forge {

// Instead of a target: the row has no loss; there is no such token.
constant constexpr int IGNORED = -1;
constant constexpr int UNKNOWN = -2;

// CAP: whether there is a softcap. With its reciprocal.
template <bool CAP>
METAL_FUNC float capped(float logit, float cap, float inverse_cap) {
  if constexpr (CAP) {
    return cap * metal::precise::tanh(logit * inverse_cap);
  }
  return logit;
}

// What the loss needs of some logits of a row.
struct LogitSums {
  ExpSum exponentials;
  // Of z.
  float logits;
  // z of the target if it is among them, else 0.
  float target;

  METAL_FUNC LogitSums() thread : logits(0.0f), target(0.0f) {}

  // Takes in z[0] to z[limit - 1], of which z[target_index] is the target's if there is such an element. Overwrites z.
  template <int N>
  METAL_FUNC void add(thread float (&z)[N], int limit, int target_index) thread {
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      logits += i < limit ? z[i] : 0.0f;
    }
    if (target_index >= 0 && target_index < limit) {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        target = i == target_index ? z[i] : target;
      }
    }
    exponentials.add(z, limit);
  }

  // Joins `lanes` neighbouring lanes, a power of two; each gets the same. The whole simdgroup takes part.
  METAL_FUNC void join_lanes(ushort lanes) thread {
    exponentials.join_lanes(lanes);
    logits = over_lanes<Sum>(logits, lanes);
    target = over_lanes<Sum>(target, lanes);
  }

  // Joins a threadgroup of whole simdgroups; each thread gets the same. There is one barrier inside. `scratch`, 128
  // floats, may be used again only behind the next barrier: a loop takes two of them in turn.
  METAL_FUNC void join_threadgroup(threadgroup float* scratch, ushort lane, uint simdgroup, uint threads) thread {
    join_lanes(32);
    if (lane == 0) {
      exponentials.leave(scratch, simdgroup);
      scratch[64 + simdgroup] = logits;
      scratch[96 + simdgroup] = target;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const uint simdgroups = threads / 32;
    exponentials.take(scratch, lane, simdgroups);
    logits = over_lanes<Sum>(lane < simdgroups ? scratch[64 + lane] : 0.0f, 32);
    target = over_lanes<Sum>(lane < simdgroups ? scratch[96 + lane] : 0.0f, 32);
  }

  // L - largest.
  METAL_FUNC float spread() const thread {
    return metal::precise::log(exponentials.total);
  }

  // `code`: the target, or IGNORED, or UNKNOWN. `vocabulary`: how many logits these are.
  METAL_FUNC float loss(int code, int vocabulary, float smoothing, float z_loss) const thread {
    if (code == IGNORED) {
      return 0.0f;
    }
    if (code == UNKNOWN) {
      return NAN;
    }
    // The large numbers are subtracted first, so that a small loss beside them is not rounded away. Without smoothing
    // the mean must not count: it may be infinite.
    const float largest = exponentials.largest;
    float value = spread() + (1.0f - smoothing) * (largest - target);
    if (smoothing > 0.0f) {
      value += smoothing * (largest - logits / vocabulary);
    }
    const float l = largest + spread();
    return z_loss > 0.0f ? value + z_loss * l * l : value;
  }
};

// What the gradient of a row's logits is made of.
struct LogitGradient {
  // L = largest + spread, not added: beside a large one, a small spread would be rounded away.
  float largest;
  float spread;
  // dz[j] = e^(z[j] - L) of_sum - of_all - [j = target] of_target
  float of_sum;
  float of_all;
  float of_target;

  // `l_largest`, `l_spread`: of the row's LogitSums. `dloss`, `dspread`: the cotangents of loss and spread.
  METAL_FUNC LogitGradient(
      int code,
      int vocabulary,
      float l_largest,
      float l_spread,
      float dloss,
      float dspread,
      float smoothing,
      float z_loss) thread {
    const float d = code == UNKNOWN ? NAN : dloss;
    largest = l_largest;
    spread = l_spread;
    of_sum = d * (1.0f + 2.0f * z_loss * (largest + spread)) + dspread;
    of_all = d * smoothing / vocabulary;
    of_target = d * (1.0f - smoothing);
  }

  // The gradient of the logit that z was made of.
  template <bool CAP>
  METAL_FUNC float at(float z, bool is_target, float inverse_cap) const thread {
    const float p = metal::precise::exp((z - largest) - spread);
    const float dz = p * of_sum - of_all - (is_target ? of_target : 0.0f);
    if constexpr (CAP) {
      const float t = z * inverse_cap;
      return dz * (1.0f - t * t);
    }
    return dz;
  }
};

}  // namespace forge

#endif
