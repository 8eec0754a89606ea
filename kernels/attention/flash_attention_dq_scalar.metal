// dq = dS k, where dS = P (dout v^T - delta) times the derivative of the scores by q k^T, and P = e^(scores - lse):
// without matrix products, a simdgroup a query. The lanes share the columns of a row, as
// flash_attention_forward_scalar.metal says.

#include <metal_stdlib>

#include "lane_row.h"
#include "scores.h"
#include "sight.h"

using namespace metal;

template <typename T, int D, int DV, bool CAUSAL, bool WINDOW, bool SOFTCAP, bool SEGMENTS>
[[kernel]] void flash_attention_dq_scalar(
    const device T* q [[buffer(0)]],
    const constant int* q_shape [[buffer(1)]],
    const constant int64_t* q_strides [[buffer(2)]],
    const device T* k [[buffer(3)]],
    const constant int* k_shape [[buffer(4)]],
    const constant int64_t* k_strides [[buffer(5)]],
    const device T* v [[buffer(6)]],
    const constant int64_t* v_strides [[buffer(7)]],
    const device T* dout [[buffer(8)]],
    const constant int64_t* dout_strides [[buffer(9)]],
    const device float* lse [[buffer(10)]],
    const device float* delta [[buffer(11)]],
    const device int* q_segments [[buffer(12)]],
    const device int* k_segments [[buffer(13)]],
    const constant float& scale [[buffer(14)]],
    const constant float& softcap [[buffer(15)]],
    const constant int& window [[buffer(16)]],
    device T* dq [[buffer(17)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  const ushort lane = thread_index_in_simdgroup;
  const int queries = q_shape[2];
  const int keys = k_shape[2];
  const int query = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
  if (query >= queries) {
    return;
  }
  const int head = threadgroup_position_in_grid.y;
  const int batch = threadgroup_position_in_grid.z;
  const int kv_head = head / (q_shape[1] / k_shape[1]);
  const size_t own_row = (size_t(batch) * q_shape[1] + head) * queries + query;
  const forge::Sight<CAUSAL, WINDOW> sight = {queries, keys, window};
  const forge::Scores<SOFTCAP> scores_of = {scale, softcap};
  const device T* own_k = k + batch * k_strides[0] + kv_head * k_strides[1];
  const device T* own_v = v + batch * v_strides[0] + kv_head * v_strides[1];

  forge::LaneRow<D> own_q;
  own_q.load(q + batch * q_strides[0] + head * q_strides[1] + query * q_strides[2], q_strides[3], lane);
  forge::LaneRow<DV> own_dout;
  own_dout.load(
      dout + batch * dout_strides[0] + head * dout_strides[1] + query * dout_strides[2], dout_strides[3], lane);
  forge::LaneRow<D> sums;
  sums.fill(0.0f);
  const float own_lse = lse[own_row] * forge::LOG2_E;
  const float own_delta = delta[own_row];
  const int id = SEGMENTS ? q_segments[size_t(batch) * queries + query] : 0;
  const forge::Range seen_keys = sight.keys_seen({query, query + 1});
  for (int first = seen_keys.first; first < seen_keys.end; first += 32) {
    uint seen = forge::bits_of(0, seen_keys.end - first);
    if constexpr (SEGMENTS) {
      const bool is_key = first + lane < seen_keys.end;
      const int key_id = is_key ? k_segments[size_t(batch) * keys + first + lane] : -1;
      seen = forge::bits_where(key_id >= 0 && key_id == id, lane);
    }
    for (; seen != 0; seen &= seen - 1) {
      const int other = first + int(ctz(seen));
      forge::LaneRow<D> key;
      key.load(own_k + other * k_strides[2], k_strides[3], lane);
      forge::LaneRow<DV> value;
      value.load(own_v + other * v_strides[2], v_strides[3], lane);
      const float score = scores_of.of(own_q.dot(key));
      const float change = own_dout.dot(value) - own_delta;
      sums.add(forge::probability(score, own_lse) * change * scores_of.slope(score) * scale, key);
    }
  }
  sums.store(dq + own_row * D, lane);
}
