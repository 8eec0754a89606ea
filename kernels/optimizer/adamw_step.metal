// One step of AdamW on 16 bytes of the narrower of w and g a thread. Each array is read once and written once.
//
// kept = 1 - lr wd, rate = lr / (1 - b1^t) and scale = 1 / sqrt(1 - b2^t) are computed once for all elements; rest1 and
// rest2 are 1 - b1 and 1 - b2 as float64 has them. P is the dtype of what takes the update: w's own (T), or with MASTER that of a float32 copy, of which w is rounded.

#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

template <typename T, typename P, typename G, bool MASTER>
[[kernel]] void adamw_step(
    const device P* parameter [[buffer(0)]],
    const constant int* parameter_shape [[buffer(1)]],
    const device G* g [[buffer(2)]],
    const device float* m [[buffer(3)]],
    const device float* v [[buffer(4)]],
    const constant float& grad_scale [[buffer(5)]],
    const constant float& kept [[buffer(6)]],
    const constant float& rate [[buffer(7)]],
    const constant float& scale [[buffer(8)]],
    const constant float& beta1 [[buffer(9)]],
    const constant float& beta2 [[buffer(10)]],
    const constant float& rest1 [[buffer(11)]],
    const constant float& rest2 [[buffer(12)]],
    const constant float& eps [[buffer(13)]],
    device T* new_w [[buffer(14)]],
    device float* new_m [[buffer(15)]],
    device float* new_v [[buffer(16)]],
    device float* new_master [[buffer(17)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<metal::conditional_t<(sizeof(T) < sizeof(G)), T, G>>();
  const int size = parameter_shape[0];
  const uint first = thread_position_in_grid.x * N;
  if constexpr (!MASTER) {
    // An output that must not stay unwritten: one element.
    if (first == 0) {
      new_master[0] = 0.0f;
    }
  }
  if (first >= uint(size)) {
    return;
  }
  const int limit = min(size - int(first), N);

  float weight[N];
  float gradient[N];
  float mean[N];
  float square[N];
  forge::load_floats(parameter + first, limit, weight);
  forge::load_floats(g + first, limit, gradient);
  forge::load_floats(m + first, limit, mean);
  forge::load_floats(v + first, limit, square);

#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    const float scaled = gradient[i] * grad_scale;
    mean[i] = beta1 * mean[i] + rest1 * scaled;
    square[i] = beta2 * square[i] + rest2 * (scaled * scaled);
    weight[i] = weight[i] * kept - rate * mean[i] / (precise::sqrt(square[i]) * scale + eps);
  }

  forge::store_floats(new_w + first, limit, weight);
  forge::store_floats(new_m + first, limit, mean);
  forge::store_floats(new_v + first, limit, square);
  if constexpr (MASTER) {
    forge::store_floats(new_master + first, limit, weight);
  }
}
