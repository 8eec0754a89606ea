// out = softmax(scores) v and lse = ln(sum of e^scores) without matrix products, a simdgroup a query: what the kernels
// with matrix products are checked against. A thread a query would need up to 512 floats of its own, four times the
// registers that an Apple GPU has for it; so the lanes share the columns of a row, and no lane has more than 8 of them.

#include <metal_stdlib>

#include "lane_row.h"
#include "scores.h"
#include "sight.h"

using namespace metal;

template <typename T, int D, int DV, bool CAUSAL, bool WINDOW, bool SOFTCAP, bool SEGMENTS, bool SINKS>
[[kernel]] void flash_attention_forward_scalar(
    const device T* q [[buffer(0)]],
    const constant int* q_shape [[buffer(1)]],
    const constant int64_t* q_strides [[buffer(2)]],
    const device T* k [[buffer(3)]],
    const constant int* k_shape [[buffer(4)]],
    const constant int64_t* k_strides [[buffer(5)]],
    const device T* v [[buffer(6)]],
    const constant int64_t* v_strides [[buffer(7)]],
    const device int* q_segments [[buffer(8)]],
    const device int* k_segments [[buffer(9)]],
    const device float* sinks [[buffer(10)]],
    const constant float& scale [[buffer(11)]],
    const constant float& softcap [[buffer(12)]],
    const constant int& window [[buffer(13)]],
    device T* out [[buffer(14)]],
    device float* lse [[buffer(15)]],
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
  const size_t plane = size_t(batch) * q_shape[1] + head;
  const forge::Sight<CAUSAL, WINDOW> sight = {queries, keys, window};
  const forge::Scores<SOFTCAP> scores_of = {scale, softcap};
  const device T* own_k = k + batch * k_strides[0] + kv_head * k_strides[1];
  const device T* own_v = v + batch * v_strides[0] + kv_head * v_strides[1];

  forge::LaneRow<D> own_q;
  own_q.load(q + batch * q_strides[0] + head * q_strides[1] + query * q_strides[2], q_strides[3], lane);
  forge::LaneRow<DV> sums;
  sums.fill(0.0f);
  // In units of log2. A finite number, so that no difference is NaN.
  float largest = -FLT_MAX;
  // Of the keys that this lane has had.
  float total = 0.0f;
  const int id = SEGMENTS ? q_segments[size_t(batch) * queries + query] : 0;
  const forge::Range seen_keys = sight.keys_seen({query, query + 1});
  // Each lane has the score of one of 32 keys.
  for (int first = seen_keys.first; first < seen_keys.end; first += 32) {
    uint seen = forge::bits_of(0, seen_keys.end - first);
    if constexpr (SEGMENTS) {
      const bool is_key = first + lane < seen_keys.end;
      const int key_id = is_key ? k_segments[size_t(batch) * keys + first + lane] : -1;
      seen = forge::bits_where(key_id >= 0 && key_id == id, lane);
    }
    float product = 0.0f;
    for (uint left = seen; left != 0; left &= left - 1) {
      const ushort other = ctz(left);
      forge::LaneRow<D> key;
      key.load(own_k + (first + other) * k_strides[2], k_strides[3], lane);
      const float of_key = own_q.dot(key);
      product = lane == other ? of_key : product;
    }
    const float score = (seen >> lane & 1) != 0 ? scores_of.of(product) : -INFINITY;
    const float now = max(largest, simd_max(score));
    const float factor = fast::exp2(largest - now);
    const float weight = forge::weight(score, now);
    largest = now;
    total = total * factor + weight;
    sums.multiply(factor);
    for (uint left = seen; left != 0; left &= left - 1) {
      const ushort other = ctz(left);
      forge::LaneRow<DV> value;
      value.load(own_v + (first + other) * v_strides[2], v_strides[3], lane);
      sums.add(simd_shuffle(weight, other), value);
    }
  }

  total = simd_sum(total);
  float factor = 1.0f;
  if constexpr (SINKS) {
    const float sink = sinks[plane] * forge::LOG2_E;
    const float with_sink = max(largest, sink);
    factor = fast::exp2(largest - with_sink);
    total = total * factor + fast::exp2(sink - with_sink);
    largest = with_sink;
  }
  // A row that sees nothing is 0; one with NaN is NaN.
  sums.multiply(total == 0.0f ? 0.0f : factor / total);
  const size_t own_row = plane * queries + query;
  sums.store(out + own_row * DV, lane);
  if (lane == 0) {
    lse[own_row] = total == 0.0f ? -INFINITY : largest * forge::LN_2 + precise::log(total);
  }
}
