// One vector of a row in the backward pass of a norm: the part that is the same in all of them.

#ifndef FORGE_NORM_GRADIENT_H
#define FORGE_NORM_GRADIENT_H

#include <metal_stdlib>

namespace forge {

// n = (x - mean) * scale in place of x; then, with weights, dw += dy * n and g = dy * weight in place of dy.
template <bool WEIGHT, int N>
METAL_FUNC void begin_gradient(
    thread float (&n)[N],
    thread float (&g)[N],
    const thread float (&weight)[N],
    thread float (&dw)[N],
    float mean,
    float scale) {
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    n[i] = (n[i] - mean) * scale;
    if constexpr (WEIGHT) {
      dw[i] += g[i] * n[i];
      g[i] *= weight[i];
    }
  }
}

// n = scale * (g - a - n * c). Where all g are a this is 0: a product is taken from the difference, not the other way.
template <int N>
METAL_FUNC void end_gradient(thread float (&n)[N], const thread float (&g)[N], float scale, float a, float c) {
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    n[i] = scale * ((g[i] - a) - n[i] * c);
  }
}

// sum += the sum of a * b.
template <int N>
METAL_FUNC void add_products(thread float& sum, const thread float (&a)[N], const thread float (&b)[N]) {
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    sum += a[i] * b[i];
  }
}

template <int N>
METAL_FUNC void add(thread float (&sums)[N], const thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    sums[i] += values[i];
  }
}

template <int N>
METAL_FUNC void clear(thread float (&values)[N]) {
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] = 0.0f;
  }
}

}  // namespace forge

#endif
