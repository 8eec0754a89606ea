// The error function, which Metal's library lacks, and its complement: float32, off by a few units in the last place.

#ifndef FORGE_ERF_H
#define FORGE_ERF_H

#include <metal_stdlib>

namespace forge {

// For this file alone.
namespace detail {

// erf(x) for |x| <= 0.75: x + x P(x^2), so that the leading 1 costs no digits. The coefficients of both polynomials
// are least-maximum fits to values in float64, relative error 2e-9 here and 6e-9 below.
METAL_FUNC float erf_near_zero(float x) {
  const float square = x * x;
  float p = -0.000676109688f;
  p = metal::fma(p, square, 0.00511598168f);
  p = metal::fma(p, square, -0.0268354341f);
  p = metal::fma(p, square, 0.112833932f);
  p = metal::fma(p, square, -0.3761262f);
  p = metal::fma(p, square, 0.128379166f);
  return metal::fma(x, p, x);
}

// 1 - erf(x) for x >= 0.5: exp(-x^2) Q((x - 3) / (x + 3)) / (1 + 2 x), where Q stays between 1.1 and 1.3.
METAL_FUNC float erfc_tail(float x) {
  // From about 9.2 on the result is below the smallest normal float; infinity would make NaN of the quotient.
  const float at = x > 16.0f ? 16.0f : x;
  const float t = (at - 3.0f) / (at + 3.0f);
  float q = -0.000607172726f;
  q = metal::fma(q, t, 0.00176574348f);
  q = metal::fma(q, t, 0.00243485812f);
  q = metal::fma(q, t, -0.023718955f);
  q = metal::fma(q, t, 0.0683310479f);
  q = metal::fma(q, t, -0.119282544f);
  q = metal::fma(q, t, 0.129642859f);
  q = metal::fma(q, t, -0.0475617573f);
  q = metal::fma(q, t, -0.135621041f);
  q = metal::fma(q, t, 1.25300801f);
  // What rounding x^2 loses would be up to 40 units in the last place of its exponential.
  const float square = at * at;
  const float lost = metal::fma(at, at, -square);
  const float e = metal::precise::exp(-square);
  return metal::fma(-lost, e, e) * (q / metal::fma(2.0f, at, 1.0f));
}

}  // namespace detail

// 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x.
METAL_FUNC float erf(float x) {
  const float size = metal::fabs(x);
  return size <= 0.75f ? detail::erf_near_zero(x) : metal::copysign(1.0f - detail::erfc_tail(size), x);
}

// 1 - erf(x), as exact where it is small.
METAL_FUNC float erfc(float x) {
  const float size = metal::fabs(x);
  if (size <= 0.5f) {
    return 1.0f - detail::erf_near_zero(x);
  }
  const float tail = detail::erfc_tail(size);
  return x < 0.0f ? 2.0f - tail : tail;
}

}  // namespace forge

#endif
