// Normalisation by the root mean square: what rms_norm and add_rms_norm have in common.

#ifndef FORGE_RMS_H
#define FORGE_RMS_H

#include <metal_stdlib>

#include "short_rows.h"

namespace forge {

// values = values * r * weight with r = 1 / sqrt(mean(values^2) + eps) of the row; returns r. `scratch`: 32 floats, as
// over_threadgroup takes it.
template <bool WEIGHT, int N, bool NARROW>
METAL_FUNC float normalise_by_rms(
    const thread ShortRows<N, NARROW>& rows,
    thread float (&values)[N],
    const thread float (&weight)[N],
    float eps,
    threadgroup float* scratch) {
  float sum[1] = {0.0f};
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    sum[0] += values[i] * values[i];
  }
  rows.sum(sum, scratch);
  const float r = metal::precise::rsqrt(sum[0] / rows.columns + eps);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] *= r;
    if constexpr (WEIGHT) {
      values[i] *= weight[i];
    }
  }
  return r;
}

// values[i] = x[i] + residual[i], rounded to R, for i < limit, and 0 from there on.
template <typename R, int N, typename P, typename Q>
METAL_FUNC void load_sums(P x, Q residual, int limit, thread float (&values)[N]) {
  float others[N];
  load_floats(x, limit, values);
  load_floats(residual, limit, others);
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] = static_cast<float>(static_cast<R>(values[i] + others[i]));
  }
}

}  // namespace forge

#endif
