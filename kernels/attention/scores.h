// What becomes of the products q k^T: scaled, capped, in units of log2, and away where nothing is seen.

#ifndef FORGE_ATTENTION_SCORES_H
#define FORGE_ATTENTION_SCORES_H

#include <metal_stdlib>

namespace forge {

constant constexpr float LOG2_E = 1.44269504088896340736f;
constant constexpr float LN_2 = 0.693147180559945309417f;

// Scores of products, in units of log2, so that exp2 gives their exponentials.
template <bool SOFTCAP>
struct Scores {
  float scale;
  float softcap;

  METAL_FUNC float of(float product) const thread {
    if constexpr (SOFTCAP) {
      return softcap * LOG2_E * metal::precise::tanh(product * (scale / softcap));
    } else {
      return product * (scale * LOG2_E);
    }
  }

  // The derivative of a score by its product over the scale: 1 - (score / softcap)^2.
  METAL_FUNC float slope(float score) const thread {
    if constexpr (SOFTCAP) {
      const float part = score / (softcap * LOG2_E);
      return 1.0f - part * part;
    } else {
      return 1.0f;
    }
  }
};

// exp2(score - largest), 0 for the score -INFINITY, which stands for what is not seen. `largest` is finite. It is a
// selection: a branch for each element would cost more than the exponential.
METAL_FUNC float weight(float score, float largest) {
  return metal::select(metal::fast::exp2(score - largest), 0.0f, score == -INFINITY);
}

// e^(score - lse), both in units of log2: at most 1, whatever rounding has done to large scores.
METAL_FUNC float probability(float score, float lse) {
  const float difference = score - lse;
  return metal::fast::exp2(metal::select(difference, 0.0f, difference > 0.0f));
}

}  // namespace forge

#endif
