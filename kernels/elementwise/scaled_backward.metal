// dx = s * dout, and the sum of x * dout over the elements of each threadgroup, with one s for each batch of `size`
// elements. Each thread goes through vectors that lie one threadgroup's width apart; which ones follows from the sizes
// alone.

#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

using namespace metal;

template <typename X, typename T>
[[kernel]] void scaled_backward(
    const device X* x [[buffer(0)]],
    const device T* dout [[buffer(1)]],
    const device float* s [[buffer(2)]],
    const constant ulong& size [[buffer(3)]],
    const constant int& elements_per_group [[buffer(4)]],
    device X* dx [[buffer(5)]],
    device float* parts [[buffer(6)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = 16 / (sizeof(X) < sizeof(T) ? sizeof(X) : sizeof(T));
  threadgroup float scratch[32];

  const size_t before = size_t(threadgroup_position_in_grid.x) * elements_per_group;
  const size_t first = size_t(threadgroup_position_in_grid.y) * size + before;
  const int count = min(size - before, size_t(elements_per_group));
  const int step = threads_per_threadgroup.x * N;
  const float factor = s[threadgroup_position_in_grid.y];

  float sums[N];
#pragma clang loop unroll(full)
  for (int i = 0; i < N; i++) {
    sums[i] = 0.0f;
  }
  // Down from what is left: a place past the end might not fit an int.
  for (int left = count - int(thread_position_in_threadgroup.x) * N; left > 0; left -= step) {
    const size_t at = first + (count - left);
    const int limit = min(left, N);
    float values[N];
    float gradient[N];
    forge::load_floats(x + at, limit, values);
    forge::load_floats(dout + at, limit, gradient);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      sums[i] += values[i] * gradient[i];
      gradient[i] *= factor;
    }
    forge::store_floats(dx + at, limit, gradient);
  }
  float sum[1] = {sums[0]};
#pragma clang loop unroll(full)
  for (int i = 1; i < N; i++) {
    sum[0] += sums[i];
  }
  forge::over_threadgroup<forge::Sum>(
      sum, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, threads_per_threadgroup.x);
  if (thread_position_in_threadgroup.x == 0) {
    parts[size_t(threadgroup_position_in_grid.y) * threadgroups_per_grid.x + threadgroup_position_in_grid.x] = sum[0];
  }
}
