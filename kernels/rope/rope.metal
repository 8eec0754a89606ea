// Every pair (a, b) of x turned by its angle: y = (a cos - b sin, a sin + b cos); the gradient is the same with the
// sign of the angle changed. A thread owns one vector of pairs of one token and goes through some heads, so that the
// cosines and sines are computed once for all of these. x is read by its strides, y is written row by row.

#include <metal_stdlib>

#include "../_common/vector.h"

using namespace metal;

namespace forge {

// values[i] = source[i * step] for i < limit, and 0 from there on.
template <typename P, int N>
METAL_FUNC void load_with_step(P source, long step, int limit, thread float (&values)[N]) {
  if (step == 1) {
    load_floats(source, limit, values);
    return;
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    values[i] = i < limit ? static_cast<float>(source[i * step]) : 0.0f;
  }
}

// (a, b) turned by an angle.
METAL_FUNC void turn(thread float& a, thread float& b, float cosine, float sine) {
  const float turned = a * cosine - b * sine;
  b = a * sine + b * cosine;
  a = turned;
}

}  // namespace forge

template <typename T, bool TRADITIONAL>
[[kernel]] void rope(
    const device T* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const constant int64_t* x_strides [[buffer(2)]],
    const device int* positions [[buffer(3)]],
    const constant int* positions_shape [[buffer(4)]],
    const constant int64_t* positions_strides [[buffer(5)]],
    const device float* inverse [[buffer(6)]],
    const constant int* inverse_shape [[buffer(7)]],
    const constant int64_t* inverse_strides [[buffer(8)]],
    const constant float& scale [[buffer(9)]],
    const constant float& sign [[buffer(10)]],
    const constant int& heads_per_thread [[buffer(11)]],
    device T* y [[buffer(12)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]]) {
  constexpr int N = forge::vector_size<T>();
  threadgroup float scratch[64 * N];

  const int heads = x_shape[1];
  const int length = x_shape[2];
  const int size = x_shape[3];
  const int pairs = inverse_shape[1];
  const int each = heads_per_thread;
  const int blocks = (heads + each - 1) / each;
  const int of_batch = thread_position_in_grid.z / blocks;
  const int first_head = thread_position_in_grid.z % blocks * each;
  const int end_head = min(first_head + each, heads);
  const int token = thread_position_in_grid.y;
  const int pair = thread_position_in_grid.x * N;
  const int limit = clamp(pairs - pair, 0, N);

  // The inverse frequencies are read once a threadgroup.
  const int own = thread_position_in_threadgroup.x * N;
  if (thread_position_in_threadgroup.y == 0) {
    float values[N];
    forge::load_with_step(
        inverse + of_batch * inverse_strides[0] + pair * inverse_strides[1], inverse_strides[1], limit, values);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      scratch[own + i] = values[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const long step = x_strides[3];
  const long step_of_heads = x_strides[1];
  auto source = x + of_batch * x_strides[0] + first_head * step_of_heads + token * x_strides[2];
  device T* target = y + ((size_t(of_batch) * heads + first_head) * length + token) * size;
  const size_t next_head = size_t(length) * size;

  if (limit == 0) {
    // Behind the pairs: a vector that is only copied.
    const int column = 2 * pairs + (thread_position_in_grid.x - (pairs + N - 1) / N) * N;
    for (int head = first_head; head < end_head; head++) {
      float rest[N];
      forge::load_with_step(source + column * step, step, min(size - column, N), rest);
      forge::store_floats(target + column, min(size - column, N), rest);
      source += step_of_heads;
      target += next_head;
    }
    return;
  }

  const bool counted = positions_shape[1] != length;
  const int own_position = positions[of_batch * positions_strides[0] + (counted ? 0 : token * positions_strides[1])];
  const float position = float(own_position + (counted ? token : 0)) * scale;
  const float direction = sign;
  float cosine[N];
  float sine[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    // Not fast::, which is accurate within one turn only.
    sine[i] = direction * precise::sincos(position * scratch[own + i], cosine[i]);
  }

  for (int head = first_head; head < end_head; head++) {
    if constexpr (TRADITIONAL) {
      float both[2 * N];
      forge::load_with_step(source + 2 * pair * step, step, 2 * limit, both);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        forge::turn(both[2 * i], both[2 * i + 1], cosine[i], sine[i]);
      }
      forge::store_floats(target + 2 * pair, 2 * limit, both);
    } else {
      float a[N];
      float b[N];
      forge::load_with_step(source + pair * step, step, limit, a);
      forge::load_with_step(source + (pairs + pair) * step, step, limit, b);
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        forge::turn(a[i], b[i], cosine[i], sine[i]);
      }
      forge::store_floats(target + pair, limit, a);
      forge::store_floats(target + pairs + pair, limit, b);
    }
    source += step_of_heads;
    target += next_head;
  }
}
