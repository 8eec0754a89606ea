// delta = rowsum(dout * o) - dlse, some neighbouring lanes a row: what the gradient of a score takes from that of its
// probability. o is attention's result: with the name "out" MLX would take dout_shape for its shape too.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename T, int DV, int LANES>
[[kernel]] void flash_attention_delta(
    const device T* o [[buffer(0)]],
    const device T* dout [[buffer(1)]],
    const constant int* dout_shape [[buffer(2)]],
    const constant int64_t* dout_strides [[buffer(3)]],
    const device float* dlse [[buffer(4)]],
    device float* delta [[buffer(5)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  constexpr int N = forge::vector_size<T>();
  const int rows = dout_shape[2];
  const int row = thread_position_in_grid.x / LANES;
  const int first = thread_position_in_grid.x % LANES * N;
  const size_t own_row = (size_t(thread_position_in_grid.z) * dout_shape[1] + thread_position_in_grid.y) * rows + row;
  const long across = dout_strides[3];
  const device T* own_dout = dout + thread_position_in_grid.z * dout_strides[0] +
                             thread_position_in_grid.y * dout_strides[1] + row * dout_strides[2];

  float sum = 0.0f;
  for (int column = first; row < rows && column < DV; column += LANES * N) {
    float values[N];
    forge::load_floats(o + own_row * DV + column, N, values);
    float gradients[N];
    if (across == 1) {
      forge::load_floats(own_dout + column, N, gradients);
    } else {
#pragma clang loop unroll(full)
      for (int i = 0; i < N; i++) {
        gradients[i] = static_cast<float>(own_dout[(column + i) * across]);
      }
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sum += values[i] * gradients[i];
    }
  }
  sum = forge::over_lanes<forge::Sum>(sum, LANES);
  if (first == 0 && row < rows) {
    delta[own_row] = sum - dlse[own_row];
  }
}
