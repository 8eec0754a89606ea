// dk = dS^T q and dv = P^T dout, summed over the heads of q that share a head of k, with P and dS as in
// flash_attention_dq_scalar.metal: without matrix products, a simdgroup a key. The lanes share the columns of a row, as
// flash_attention_forward_scalar.metal says.

#include <metal_stdlib>

#include "lane_row.h"
#include "scores.h"
#include "sight.h"

using namespace metal;

template <typename T, int D, int DV, bool CAUSAL, bool WINDOW, bool SOFTCAP, bool SEGMENTS>
[[kernel]] void flash_attention_dkv_scalar(
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
    device T* dk [[buffer(17)]],
    device T* dv [[buffer(18)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups_per_threadgroup [[simdgroups_per_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  const ushort lane = thread_index_in_simdgroup;
  const int queries = q_shape[2];
  const int keys = k_shape[2];
  const int key = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
  if (key >= keys) {
    return;
  }
  const int kv_head = threadgroup_position_in_grid.y;
  const int batch = threadgroup_position_in_grid.z;
  const int heads_of_group = q_shape[1] / k_shape[1];
  const forge::Sight<CAUSAL, WINDOW> sight = {queries, keys, window};
  const forge::Scores<SOFTCAP> scores_of = {scale, softcap};

  forge::LaneRow<D> own_k;
  own_k.load(k + batch * k_strides[0] + kv_head * k_strides[1] + key * k_strides[2], k_strides[3], lane);
  forge::LaneRow<DV> own_v;
  own_v.load(v + batch * v_strides[0] + kv_head * v_strides[1] + key * v_strides[2], v_strides[3], lane);
  forge::LaneRow<D> k_sums;
  k_sums.fill(0.0f);
  forge::LaneRow<DV> v_sums;
  v_sums.fill(0.0f);
  const int id = SEGMENTS ? k_segments[size_t(batch) * keys + key] : 0;
  const forge::Range seeing = sight.queries_seeing({key, key + 1});
  for (int head = kv_head * heads_of_group; head < (kv_head + 1) * heads_of_group; head++) {
    const size_t plane = (size_t(batch) * q_shape[1] + head) * queries;
    const device T* of_q = q + batch * q_strides[0] + head * q_strides[1];
    const device T* of_dout = dout + batch * dout_strides[0] + head * dout_strides[1];
    for (int first = seeing.first; first < seeing.end; first += 32) {
      uint seen = forge::bits_of(0, seeing.end - first);
      if constexpr (SEGMENTS) {
        const bool is_query = first + lane < seeing.end;
        const int query_id = is_query ? q_segments[size_t(batch) * queries + first + lane] : -1;
        seen = forge::bits_where(query_id >= 0 && query_id == id, lane);
      }
      for (; seen != 0; seen &= seen - 1) {
        const int other = first + int(ctz(seen));
        forge::LaneRow<D> query;
        query.load(of_q + other * q_strides[2], q_strides[3], lane);
        forge::LaneRow<DV> of_query;
        of_query.load(of_dout + other * dout_strides[2], dout_strides[3], lane);
        const float score = scores_of.of(own_k.dot(query));
        const float change = own_v.dot(of_query) - delta[plane + other];
        const float weight = forge::probability(score, lse[plane + other] * forge::LOG2_E);
        v_sums.add(weight, of_query);
        k_sums.add(weight * change * scores_of.slope(score) * scale, query);
      }
    }
  }
  const size_t own_row = (size_t(batch) * k_shape[1] + kv_head) * keys + key;
  k_sums.store(dk + own_row * D, lane);
  v_sums.store(dv + own_row * DV, lane);
}
