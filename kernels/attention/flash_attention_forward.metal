// out = softmax(scores) v and lse = ln(sum of e^scores), a block of queries a threadgroup, one block of keys after the
// other. A simdgroup keeps its queries, their sums and their scores in registers; keys and values take turns in one
// block of threadgroup memory.

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
    bool SINKS,
    int ROWS,
    int STEP,
    int SPLIT,
    int GROUPS>
[[kernel]] void flash_attention_forward(
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
    const device int* k_ranges [[buffer(10)]],
    const device float* sinks [[buffer(11)]],
    const constant float& scale [[buffer(12)]],
    const constant float& softcap [[buffer(13)]],
    const constant int& window [[buffer(14)]],
    device T* out [[buffer(15)]],
    device float* lse [[buffer(16)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]]) {
  constexpr int THREADS = 32 * GROUPS * SPLIT;
  constexpr int OWN = GROUPS * ROWS;
  constexpr int K_WORDS = forge::Block<T, STEP, D>::words;
  constexpr int V_WORDS = forge::Block<T, STEP, DV>::words;
  threadgroup uint4 block[K_WORDS > V_WORDS ? K_WORDS : V_WORDS];
  threadgroup float parts[SPLIT > 1 ? GROUPS * SPLIT * ROWS * STEP : 1];
  threadgroup int q_ids[SEGMENTS ? OWN : 1];
  threadgroup int k_ids[SEGMENTS ? STEP : 1];
  const threadgroup T* staged = reinterpret_cast<const threadgroup T*>(block);

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
  const forge::Range block_queries = {first_query, min(first_query + OWN, queries)};
  const forge::Range own_queries = {own_query, min(own_query + ROWS, queries)};
  const forge::Sight<CAUSAL, WINDOW> sight = {queries, keys, window};
  const forge::Scores<SOFTCAP> scores_of = {scale, softcap};
  const forge::Part<D, SPLIT> k_part(part);
  const forge::Part<DV, SPLIT> v_part(part);
  const device T* own_q = q + batch * q_strides[0] + head * q_strides[1] + own_query * q_strides[2];
  const device T* own_k = k + batch * k_strides[0] + kv_head * k_strides[1];
  const device T* own_v = v + batch * v_strides[0] + kv_head * v_strides[1];

  forge::Tile<T, ROWS, forge::Part<D, SPLIT>::width, forge::Role::A> left(lane);
  k_part.load(left, own_q, q_strides[2], q_strides[3], own_rows);
  forge::Tile<float, ROWS, forge::Part<DV, SPLIT>::width, forge::Role::Acc> sums(lane);
  sums.fill(0.0f);
  // In units of log2. A finite number, so that no difference is NaN.
  float largest[ROWS / 8];
  // Of this lane's columns.
  float total[ROWS / 8];
#pragma clang loop unroll(full)
  for (short i = 0; i < ROWS / 8; i++) {
    largest[i] = -FLT_MAX;
    total[i] = 0.0f;
  }

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
      // The last values have been read.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      forge::stage_rows<T, STEP, D, THREADS>(
          own_k + first_key * k_strides[2], k_strides[2], k_strides[3], keys_left, block, thread_index);
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
      scores.fill(0.0f);
#pragma clang loop unroll(full)
      for (short j = 0; j < STEP; j += 8) {
        if ((seen >> j & 0xFF) != 0) {
          k_part.template multiply_transposed<8>(scores, left, staged, j);
        }
      }
      forge::add_parts<SPLIT>(scores, parts, group, part);
      if constexpr (SPLIT == 1) {
        // The keys have been read.
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      forge::stage_rows<T, STEP, DV, THREADS>(
          own_v + first_key * v_strides[2], v_strides[2], v_strides[3], keys_left, block, thread_index);

      if (seen != 0) {
        const forge::Range whole = {first_key, first_key + STEP};
        const bool all_seen = !SEGMENTS && keys_left >= STEP && sight.sees_all(own_queries, whole);
#pragma clang loop unroll(full)
        for (short i = 0; i < ROWS / 8; i++) {
          const int query = own_query + scores.row(i);
#pragma clang loop unroll(full)
          for (short j = 0; j < STEP / 8; j++) {
#pragma clang loop unroll(full)
            for (short e = 0; e < 2; e++) {
              const short column = scores.col(j, e);
              bool is_seen = all_seen | ((column < keys_left) & sight.sees(query, first_key + column));
              if constexpr (SEGMENTS) {
                const int id = q_ids[group * ROWS + scores.row(i)];
                is_seen = is_seen & (id >= 0) & (id == k_ids[column]);
              }
              const float score = scores_of.of(scores.fragment(i, j)[e]);
              scores.fragment(i, j)[e] = select(-INFINITY, score, is_seen);
            }
          }
        }
        float now[ROWS / 8];
        scores.row_max(now);
#pragma clang loop unroll(full)
        for (short i = 0; i < ROWS / 8; i++) {
          now[i] = max(now[i], largest[i]);
          const float factor = fast::exp2(largest[i] - now[i]);
          largest[i] = now[i];
          total[i] *= factor;
#pragma clang loop unroll(full)
          for (short j = 0; j < STEP / 8; j++) {
#pragma clang loop unroll(full)
            for (short e = 0; e < 2; e++) {
              const float weight = forge::weight(scores.fragment(i, j)[e], now[i]);
              scores.fragment(i, j)[e] = weight;
              total[i] += weight;
            }
          }
#pragma clang loop unroll(full)
          for (short c = 0; c < forge::Part<DV, SPLIT>::width / 8; c++) {
            sums.fragment(i, c) *= factor;
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (seen != 0) {
        const auto weights = forge::as_a<float>(scores);
#pragma clang loop unroll(full)
        for (short j = 0; j < STEP; j += 8) {
          if ((seen >> j & 0xFF) != 0) {
            v_part.template multiply<8>(sums, weights, staged, j);
          }
        }
      }
    }
  }

  // Joins the lanes of a row.
  forge::Tile<float, ROWS, 8, forge::Role::Acc> totals(lane);
#pragma clang loop unroll(full)
  for (short i = 0; i < ROWS / 8; i++) {
    totals.fragment(i, 0) = float2(total[i], 0.0f);
  }
  totals.row_sum(total);
  if (own_rows <= 0) {
    return;
  }
  const size_t plane = size_t(batch) * q_shape[1] + head;
  const size_t own_row = plane * queries + own_query;
#pragma clang loop unroll(full)
  for (short i = 0; i < ROWS / 8; i++) {
    float factor = 1.0f;
    if constexpr (SINKS) {
      const float sink = sinks[plane] * forge::LOG2_E;
      const float with_sink = max(largest[i], sink);
      factor = fast::exp2(largest[i] - with_sink);
      total[i] = total[i] * factor + fast::exp2(sink - with_sink);
      largest[i] = with_sink;
    }
    // A row that sees nothing is 0; one with NaN is NaN.
    factor = total[i] == 0.0f ? 0.0f : factor / total[i];
#pragma clang loop unroll(full)
    for (short c = 0; c < forge::Part<DV, SPLIT>::width / 8; c++) {
      sums.fragment(i, c) *= factor;
    }
    if (part == 0 && sums.col(0, 0) == 0 && sums.row(i) < own_rows) {
      lse[own_row + sums.row(i)] =
          total[i] == 0.0f ? -INFINITY : largest[i] * forge::LN_2 + precise::log(total[i]);
    }
  }
  v_part.store(sums, out + own_row * DV, own_rows);
}
