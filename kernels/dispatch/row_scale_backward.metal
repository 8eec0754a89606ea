// dx = dout * gates[:, expert], and dgates: the sum of dout * x over each token in the column of the expert, 0 in the
// others. Some lanes or a threadgroup share a token; each member writes every width-th gradient of its gates.

#include <metal_stdlib>

#include "token.h"

using namespace metal;

template <typename X, typename G, typename T, bool NARROW>
[[kernel]] void row_scale_backward(
    const device X* x [[buffer(0)]],
    const constant int* x_shape [[buffer(1)]],
    const device G* gates [[buffer(2)]],
    const constant int* gates_shape [[buffer(3)]],
    const device T* dout [[buffer(4)]],
    const constant int& expert [[buffer(5)]],
    const constant int& lanes_per_token [[buffer(6)]],
    device X* dx [[buffer(7)]],
    device G* dgates [[buffer(8)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 threads_per_threadgroup [[threads_per_threadgroup]]) {
  constexpr int N = 16 / (sizeof(X) < sizeof(T) ? sizeof(X) : sizeof(T));
  threadgroup float scratch[32];

  const int columns = x_shape[1];
  const int experts = gates_shape[1];
  const forge::WholeToken<N, NARROW> whole(
      x_shape[0],
      columns,
      lanes_per_token,
      thread_position_in_grid.x,
      threads_per_threadgroup.x,
      thread_index_in_simdgroup,
      simdgroup_index_in_threadgroup);
  const bool is_reader = whole.lanes.lane == whole.lanes.leader;
  const float own = is_reader ? whole.lanes.gate(gates, expert, experts) : 0.0f;
  const float gate = whole.lanes.of_slot(own, 0);

  float dot = 0.0f;
  for (int column = whole.member * N; column < columns; column += whole.width * N) {
    const size_t at = size_t(whole.lanes.token) * columns + column;
    const int limit = whole.limit(column);
    float values[N];
    float gradient[N];
    forge::load_floats(x + at, limit, values);
    forge::load_floats(dout + at, limit, gradient);
#pragma clang loop unroll(full)
    for (int i = 0; i < N; i++) {
      dot += values[i] * gradient[i];
      gradient[i] *= gate;
    }
    forge::store_floats(dx + at, limit, gradient);
  }
  dot = whole.sum(dot, scratch);
  for (int each = whole.member; each < (whole.lanes.is_token ? experts : 0); each += whole.width) {
    dgates[size_t(whole.lanes.token) * experts + each] = static_cast<G>(each == expert ? dot : 0.0f);
  }
}
