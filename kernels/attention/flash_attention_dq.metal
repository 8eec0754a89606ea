// dq = scale dS k with P = e^(scores - lse) and dS = P (dout v^T - delta) slope, a block of queries a threadgroup, one
// block of keys after the other. A simdgroup keeps its queries, their dout, their sums and two tiles of scores in
// registers; keys and values lie side by side in threadgroup memory.

#include <metal_stdlib>

#include "../_common/tile.h"
#include "part.h"
#include "scores.h"
#include "sight.h"
#include "stage.h"

using namespace metal;

template <
    typename T,
    int D,
    int DV,
    bool CAUSAL,
    bool WINDOW,
    bool SOFTCAP,
    bool SEGMENTS,
    int ROWS,
    int STEP,
    int SPLIT,
    int GROUPS>
[[kernel]] void flash_attention_dq(
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
    const device int* k_ranges [[buffer(14)]],
    const constant float& scale [[buffer(15)]],
    const constant float& softcap [[buffer(16)]],
    const constant int& window [[buffer(17)]],
    device T* dq [[buffer(18)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]]) {
  constexpr int THREADS = 32 * GROUPS * SPLIT;
  constexpr int OWN = GROUPS * ROWS;
  threadgroup uint4 k_block[forge::Block<T, STEP, D>::words];
  threadgroup uint4 v_block[forge::Block<T, STEP, DV>::words];
  threadgroup float parts[SPLIT > 1 ? 2 * GROUPS * SPLIT * ROWS * STEP : 1];
  threadgroup float2 statistics[OWN];
  threadgroup int q_ids[SEGMENTS ? OWN : 1];
  threadgroup int k_ids[SEGMENTS ? STEP : 1];
  const threadgroup T* staged_k = reinterpret_cast<const threadgroup T*>(k_block);
  const threadgroup T* staged_v = reinterpret_cast<const threadgroup T*>(v_block);

  const ushort lane = thread_index_in_simdgroup;
  const ushort thread_index = thread_index_in_threadgroup;
  const int group = simdgroup_index_in_threadgroup / SPLIT;
  const int part = simdgroup_index_in_threadgroup % SPLIT;
  const int queries = q_shape[2];
  const int keys = k_shape[2];
  const int head = threadgroup_position_in_grid.y;
  const int batch = threadgroup_position_in_grid.z;
  const int kv_head = head / (q_shape[1] / k_shape[1]);
  // In causal order the last queries see the most: they begin.
  const int first_query = (threadgroups_per_grid.x - 1 - threadgroup_position_in_grid.x) * OWN;
  const int own_query = first_query + group * ROWS;
  const int own_rows = queries - own_query;
  const size_t plane = (size_t(batch) * q_shape[1] + head) * queries;
  const forge::Range block_queries = {first_query, min(first_query + OWN, queries)};
  const forge::Range own_queries = {own_query, min(own_query + ROWS, queries)};
  const forge::Sight<CAUSAL, WINDOW> sight = {queries, keys, window};
  const forge::Scores<SOFTCAP> scores_of = {scale, softcap};
  const forge::Part<D, SPLIT> k_part(part);
  const forge::Part<DV, SPLIT> v_part(part);
  const device T* own_q = q + batch * q_strides[0] + head * q_strides[1] + own_query * q_strides[2];
  const device T* own_dout = dout + batch * dout_strides[0] + head * dout_strides[1] + own_query * dout_strides[2];
  const device T* own_k = k + batch * k_strides[0] + kv_head * k_strides[1];
  const device T* own_v = v + batch * v_strides[0] + kv_head * v_strides[1];

  forge::Tile<T, ROWS, forge::Part<D, SPLIT>::width, forge::Role::A> left_q(lane);
  k_part.load(left_q, own_q, q_strides[2], q_strides[3], own_rows);
  forge::Tile<T, ROWS, forge::Part<DV, SPLIT>::width, forge::Role::A> left_dout(lane);
  v_part.load(left_dout, own_dout, dout_strides[2], dout_strides[3], own_rows);
  forge::Tile<float, ROWS, forge::Part<D, SPLIT>::width, forge::Role::Acc> sums(lane);
  sums.fill(0.0f);

  const size_t first_row = plane + first_query;
  forge::stage_statistics<OWN, THREADS>(
      lse + first_row, delta + first_row, queries - first_query, statistics, thread_index);
  forge::Segments block_segments = {0, INT_MAX};
  forge::Segments own_segments = {0, INT_MAX};
  if constexpr (SEGMENTS) {
    const size_t at = size_t(batch) * queries + first_query;
    forge::stage_values<OWN, THREADS>(q_segments + at, queries - first_query, -1, q_ids, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    block_segments = forge::segments_of<OWN>(q_ids, lane);
    own_segments = forge::segments_of<ROWS>(q_ids + group * ROWS, lane);
  }

  const int blocks_of_keys = (keys + STEP - 1) / STEP;
  const forge::Range block_keys = sight.keys_seen(block_queries);
  const forge::Range own_keys = sight.keys_seen(own_queries);
  const forge::Range blocks = {block_keys.first / STEP, (block_keys.end + STEP - 1) / STEP};
  for (int chunk = blocks.first; chunk < blocks.end; chunk += 32) {
    uint visited = forge::bits_of(0, blocks.end - chunk);
    if constexpr (SEGMENTS) {
      const size_t at = size_t(batch) * blocks_of_keys * 2;
      visited = forge::blocks_holding(k_ranges + at, chunk, blocks, block_segments, lane);
    }
    while (visited != 0) {
      const int first_key = (chunk + ctz(visited)) * STEP;
      visited &= visited - 1;
      const int keys_left = keys - first_key;
      // The last keys have been read.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      forge::stage_rows<T, STEP, D, THREADS>(
          own_k + first_key * k_strides[2], k_strides[2], k_strides[3], keys_left, k_block, thread_index);
      forge::stage_rows<T, STEP, DV, THREADS>(
          own_v + first_key * v_strides[2], v_strides[2], v_strides[3], keys_left, v_block, thread_index);
      if constexpr (SEGMENTS) {
        const size_t at = size_t(batch) * keys + first_key;
        forge::stage_values<STEP, THREADS>(k_segments + at, keys_left, -1, k_ids, thread_index);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      // A bit for each key of the block that any own query sees.
      uint seen = forge::bits_of(own_keys.first - first_key, min(own_keys.end - first_key, STEP));
      if constexpr (SEGMENTS) {
        seen &= forge::bits_where(lane < STEP && own_segments.holds(k_ids[lane % STEP]), lane);
      }
      seen = own_rows > 0 ? seen : 0;
      forge::Tile<float, ROWS, STEP, forge::Role::Acc> scores(lane);
      forge::Tile<float, ROWS, STEP, forge::Role::Acc> slopes(lane);
      scores.fill(0.0f);
      slopes.fill(0.0f);
#pragma clang loop unroll(full)
      for (short j = 0; j < STEP; j += 8) {
        if ((seen >> j & 0xFF) != 0) {
          k_part.template multiply_transposed<8>(scores, left_q, staged_k, j);
          v_part.template multiply_transposed<8>(slopes, left_dout, staged_v, j);
        }
      }
      forge::add_parts<SPLIT>(scores, slopes, parts, group, part);

      if (seen != 0) {
        const forge::Range whole = {first_key, first_key + STEP};
        const bool all_seen = !SEGMENTS && keys_left >= STEP && sight.sees_all(own_queries, whole);
#pragma clang loop unroll(full)
        for (short i = 0; i < ROWS / 8; i++) {
          const short own_row = group * ROWS + scores.row(i);
          const int query = first_query + own_row;
          const int id = SEGMENTS ? q_ids[own_row] : 0;
          const float2 of_row = statistics[own_row];
#pragma clang loop unroll(full)
          for (short j = 0; j < STEP / 8; j++) {
#pragma clang loop unroll(full)
            for (short e = 0; e < 2; e++) {
              const short column = scores.col(j, e);
              bool is_seen = all_seen | ((column < keys_left) & sight.sees(query, first_key + column));
              if constexpr (SEGMENTS) {
                is_seen = is_seen & (id >= 0) & (id == k_ids[column]);
              }
              const float score = scores_of.of(scores.fragment(i, j)[e]);
              const float slope = (slopes.fragment(i, j)[e] - of_row[1]) * scores_of.slope(score);
              // Of what is not seen both factors may be anything.
              slopes.fragment(i, j)[e] = select(0.0f, forge::probability(score, of_row[0]) * slope, is_seen);
            }
          }
        }
        const auto left = forge::as_a<float>(slopes);
#pragma clang loop unroll(full)
        for (short j = 0; j < STEP; j += 8) {
          if ((seen >> j & 0xFF) != 0) {
            k_part.template multiply<8>(sums, left, staged_k, j);
          }
        }
      }
    }
  }

#pragma clang loop unroll(full)
  for (short f = 0; f < ROWS / 8 * (forge::Part<D, SPLIT>::width / 8); f++) {
    sums.fragments[f] *= scale;
  }
  k_part.store(sums, dq + (plane + own_query) * D, own_rows);
}
