// The activations and their derivatives, of one number. A launch names its function by one of these constants.
//
// Where a factor has become 0 the other one is held at a finite number, so that infinities give the limit and not
// infinity times 0. NaN gives NaN: min, max and clamp would drop it.

#ifndef FORGE_ACTIVATIONS_FUNCTIONS_H
#define FORGE_ACTIVATIONS_FUNCTIONS_H

#include <metal_stdlib>

#include "../_common/erf.h"

namespace forge {

constant constexpr int SIGMOID = 0;
constant constexpr int SILU = 1;
constant constexpr int GELU = 2;
constant constexpr int GELU_TANH = 3;
constant constexpr int RELU2 = 4;
constant constexpr int SOFTCAP = 5;

// For this file alone.
namespace detail {

constant constexpr float SQRT_HALF = 0.707106781f;
constant constexpr float INVERSE_SQRT_TWO_PI = 0.398942280f;
// tanh(u) = 2 sigmoid(2 u) - 1, so that the tanh form of gelu is x sigmoid(2 u) with 2 u = x (LINEAR + CUBIC x^2).
constant constexpr float LINEAR = 1.59576912f;
constant constexpr float CUBIC = 0.0713548163f;
// exp(-|x|) of silu, and of gelu x Phi(x), is 0 in float32 from here on.
constant constexpr float SILU_END = 128.0f;
constant constexpr float GELU_END = 16.0f;

METAL_FUNC float at_least(float x, float least) {
  return x < least ? least : x;
}

METAL_FUNC float within(float x, float size) {
  return x > size ? size : at_least(x, -size);
}

// 1 / (1 + exp(-x)) and what is missing to 1, each as exact where it is small.
struct Sigmoid {
  float value;
  float rest;

  METAL_FUNC Sigmoid(float x) thread {
    const float e = metal::precise::exp(-metal::fabs(x));
    const float larger = 1.0f / (1.0f + e);
    const float smaller = e * larger;
    value = x < 0.0f ? smaller : larger;
    rest = x < 0.0f ? larger : smaller;
  }
};

// The share of a normal distribution below x.
METAL_FUNC float normal_below(float x) {
  return 0.5f * erfc(-x * SQRT_HALF);
}

METAL_FUNC Sigmoid gelu_gate(float x) {
  return Sigmoid(x * metal::fma(CUBIC * x, x, LINEAR));
}

}  // namespace detail

// The function of x. `cap` counts for SOFTCAP alone.
template <int FUNCTION>
METAL_FUNC float activation(float x, float cap) {
  if constexpr (FUNCTION == SIGMOID) {
    return detail::Sigmoid(x).value;
  } else if constexpr (FUNCTION == SILU) {
    return detail::at_least(x, -detail::SILU_END) * detail::Sigmoid(x).value;
  } else if constexpr (FUNCTION == GELU) {
    return detail::at_least(x, -detail::GELU_END) * detail::normal_below(x);
  } else if constexpr (FUNCTION == GELU_TANH) {
    const float gate = detail::gelu_gate(detail::within(x, detail::GELU_END)).value;
    return detail::at_least(x, -detail::GELU_END) * gate;
  } else if constexpr (FUNCTION == RELU2) {
    const float positive = detail::at_least(x, 0.0f);
    return positive * positive;
  } else {
    static_assert(FUNCTION == SOFTCAP, "no such activation");
    return cap * metal::precise::tanh(x / cap);
  }
}

// Its derivative at x.
template <int FUNCTION>
METAL_FUNC float activation_slope(float x, float cap) {
  if constexpr (FUNCTION == SIGMOID) {
    const detail::Sigmoid s(x);
    return s.value * s.rest;
  } else if constexpr (FUNCTION == SILU) {
    const detail::Sigmoid s(x);
    return s.value * metal::fma(detail::within(x, detail::SILU_END), s.rest, 1.0f);
  } else if constexpr (FUNCTION == GELU) {
    const float at = detail::within(x, detail::GELU_END);
    const float density = detail::INVERSE_SQRT_TWO_PI * metal::precise::exp(-0.5f * at * at);
    return metal::fma(at, density, detail::normal_below(at));
  } else if constexpr (FUNCTION == GELU_TANH) {
    const float at = detail::within(x, detail::GELU_END);
    const detail::Sigmoid s = detail::gelu_gate(at);
    const float slope = metal::fma(3.0f * detail::CUBIC * at, at, detail::LINEAR);
    return s.value * metal::fma(at * slope, s.rest, 1.0f);
  } else if constexpr (FUNCTION == RELU2) {
    return 2.0f * detail::at_least(x, 0.0f);
  } else {
    static_assert(FUNCTION == SOFTCAP, "no such activation");
    // 1 - tanh(u)^2, without the difference.
    const detail::Sigmoid s(2.0f * (x / cap));
    return 4.0f * s.value * s.rest;
  }
}

}  // namespace forge

#endif
