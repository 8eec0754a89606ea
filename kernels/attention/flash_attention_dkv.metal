// dv = P^T dout and dk = scale dS^T q with P = e^(scores - lse) and dS = P (dout v^T - delta) slope, a block of keys a
// threadgroup, over all heads that share them and one block of queries after the other. P and dS are computed as their
// transposes, so that each is the left operand as it lies. A simdgroup keeps its keys and values, their sums and two
// tiles of scores in registers; queries and dout lie side by side in threadgroup memory.

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
[[kernel]] void flash_attention_dkv(
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
    const device int* q_ranges [[buffer(14)]],
    const constant float& scale [[buffer(15)]],
    const constant float& softcap [[buffer(16)]],
    const constant int& window [[buffer(17)]],
    device T* dk [[buffer(18)]],
    device T* dv [[buffer(19)]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {
  constexpr int THREADS = 32 * GROUPS * SPLIT;
  constexpr int OWN = GROUPS * ROWS;
  threadgroup uint4 q_block[forge::Block<T, STEP, D>::words];
  threadgroup uint4 dout_block[forge::Block<T, STEP, DV>::words];
  threadgroup float parts[SPLIT > 1 ? 2 * GROUPS * SPLIT * ROWS * STEP : 1];
  threadgroup float2 statistics[STEP];
  threadgroup int q_ids[SEGMENTS ? STEP : 1];
  threadgroup int k_ids[SEGMENTS ? OWN : 1];
  const threadgroup T* staged_q = reinterpret_cast<const threadgroup T*>(q_block);
  const threadgroup T* staged_dout = reinterpret_cast<const threadgroup T*>(dout_block);

  const ushort lane = thread_index_in_simdgroup;
  const ushort thread_index = thread_index_in_threadgroup;
  const int group = simdgroup_index_in_threadgroup / SPLIT;
  const int part = simdgroup_index_in_threadgroup % SPLIT;
  const int queries = q_shape[2];
  const int keys = k_shape[2];
  const int sharing = q_shape[1] / k_shape[1];
  const int kv_head = threadgroup_position_in_grid.y;
  const int batch = threadgroup_position_in_grid.z;
  // In causal order the first keys are seen the most: they begin.
  const int first_key = threadgroup_position_in_grid.x * OWN;
  const int own_key = first_key + group * ROWS;
  const int own_rows = keys - own_key;
  const forge::Range block_keys = {first_key, min(first_key + OWN, keys)};
  const forge::Range own_keys = {own_key, min(own_key + ROWS, keys)};
  const forge::Sight<CAUSAL, WINDOW> sight = {queries, keys, window};
  const forge::Scores<SOFTCAP> scores_of = {scale, softcap};
  const forge::Part<D, SPLIT> k_part(part);
  const forge::Part<DV, SPLIT> v_part(part);
  const device T* own_k = k + batch * k_strides[0] + kv_head * k_strides[1] + own_key * k_strides[2];
  const device T* own_v = v + batch * v_strides[0] + kv_head * v_strides[1] + own_key * v_strides[2];

  forge::Tile<T, ROWS, forge::Part<D, SPLIT>::width, forge::Role::A> left_k(lane);
  k_part.load(left_k, own_k, k_strides[2], k_strides[3], own_rows);
  forge::Tile<T, ROWS, forge::Part<DV, SPLIT>::width, forge::Role::A> left_v(lane);
  v_part.load(left_v, own_v, v_strides[2], v_strides[3], own_rows);
  forge::Tile<float, ROWS, forge::Part<D, SPLIT>::width, forge::Role::Acc> k_sums(lane);
  k_sums.fill(0.0f);
  forge::Tile<float, ROWS, forge::Part<DV, SPLIT>::width, forge::Role::Acc> v_sums(lane);
  v_sums.fill(0.0f);

  forge::Segments block_segments = {0, INT_MAX};
  forge::Segments own_segments = {0, INT_MAX};
  if constexpr (SEGMENTS) {
    const size_t at = size_t(batch) * keys + first_key;
    forge::stage_values<OWN, THREADS>(k_segments + at, keys - first_key, -1, k_ids, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    block_segments = forge::segments_of<OWN>(k_ids, lane);
    own_segments = forge::segments_of<ROWS>(k_ids + group * ROWS, lane);
  }

  const int blocks_of_queries = (queries + STEP - 1) / STEP;
  const forge::Range block_queries = sight.queries_seeing(block_keys);
  const forge::Range own_queries = sight.queries_seeing(own_keys);
  const forge::Range blocks = {block_queries.first / STEP, (block_queries.end + STEP - 1) / STEP};
  for (int chunk = blocks.first; chunk < blocks.end; chunk += 32) {
    uint visited = forge::bits_of(0, blocks.end - chunk);
    if constexpr (SEGMENTS) {
      const size_t at = size_t(batch) * blocks_of_queries * 2;
      visited = forge::blocks_holding(q_ranges + at, chunk, blocks, block_segments, lane);
    }
    // Every head has the same blocks: 32 of them are looked up once for all.
    for (int head = kv_head * sharing; head < (kv_head + 1) * sharing; head++) {
      const device T* head_q = q + batch * q_strides[0] + head * q_strides[1];
      const device T* head_dout = dout + batch * dout_strides[0] + head * dout_strides[1];
      const size_t plane = (size_t(batch) * q_shape[1] + head) * queries;
      for (uint to_visit = visited; to_visit != 0; to_visit &= to_visit - 1) {
        const int first_query = (chunk + ctz(to_visit)) * STEP;
        const int queries_left = queries - first_query;
        // The last queries have been read.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        forge::stage_rows<T, STEP, D, THREADS>(
            head_q + first_query * q_strides[2], q_strides[2], q_strides[3], queries_left, q_block, thread_index);
        forge::stage_rows<T, STEP, DV, THREADS>(
            head_dout + first_query * dout_strides[2],
            dout_strides[2],
            dout_strides[3],
            queries_left,
            dout_block,
            thread_index);
        const size_t first_row = plane + first_query;
        forge::stage_statistics<STEP, THREADS>(
            lse + first_row, delta + first_row, queries_left, statistics, thread_index);
        if constexpr (SEGMENTS) {
          const size_t at = size_t(batch) * queries + first_query;
          forge::stage_values<STEP, THREADS>(q_segments + at, queries_left, -1, q_ids, thread_index);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // A bit for each query of the block that sees any own key.
        uint seen = forge::bits_of(own_queries.first - first_query, min(own_queries.end - first_query, STEP));
        if constexpr (SEGMENTS) {
          seen &= forge::bits_where(lane < STEP && own_segments.holds(q_ids[lane % STEP]), lane);
        }
        seen = own_rows > 0 ? seen : 0;
        forge::Tile<float, ROWS, STEP, forge::Role::Acc> scores(lane);
        forge::Tile<float, ROWS, STEP, forge::Role::Acc> slopes(lane);
        scores.fill(0.0f);
        slopes.fill(0.0f);
#pragma clang loop unroll(full)
        for (short j = 0; j < STEP; j += 8) {
          if ((seen >> j & 0xFF) != 0) {
            k_part.template multiply_transposed<8>(scores, left_k, staged_q, j);
            v_part.template multiply_transposed<8>(slopes, left_v, staged_dout, j);
          }
        }
        forge::add_parts<SPLIT>(scores, slopes, parts, group, part);

        if (seen != 0) {
          const forge::Range whole = {first_query, first_query + STEP};
          // Behind the last query everything is 0, and adds nothing.
          const bool all_seen = !SEGMENTS && sight.sees_all(whole, own_keys);
#pragma clang loop unroll(full)
          for (short i = 0; i < ROWS / 8; i++) {
            const short own_row = group * ROWS + scores.row(i);
            const int key = first_key + own_row;
            const int id = SEGMENTS ? k_ids[own_row] : 0;
#pragma clang loop unroll(full)
            for (short j = 0; j < STEP / 8; j++) {
#pragma clang loop unroll(full)
              for (short e = 0; e < 2; e++) {
                const short column = scores.col(j, e);
                bool is_seen = all_seen | sight.sees(first_query + column, key);
                if constexpr (SEGMENTS) {
                  is_seen = is_seen & (id >= 0) & (id == q_ids[column]);
                }
                const float2 of_query = statistics[column];
                const float score = scores_of.of(scores.fragment(i, j)[e]);
                const float slope = (slopes.fragment(i, j)[e] - of_query[1]) * scores_of.slope(score);
                const float weight = forge::probability(score, of_query[0]);
                // Of what is not seen both factors may be anything.
                scores.fragment(i, j)[e] = select(0.0f, weight, is_seen);
                slopes.fragment(i, j)[e] = select(0.0f, weight * slope, is_seen);
              }
            }
          }
          const auto weights = forge::as_a<float>(scores);
          const auto left = forge::as_a<float>(slopes);
#pragma clang loop unroll(full)
          for (short j = 0; j < STEP; j += 8) {
            if ((seen >> j & 0xFF) != 0) {
              v_part.template multiply<8>(v_sums, weights, staged_dout, j);
              k_part.template multiply<8>(k_sums, left, staged_q, j);
            }
          }
        }
      }
    }
  }

#pragma clang loop unroll(full)
  for (short f = 0; f < ROWS / 8 * (forge::Part<D, SPLIT>::width / 8); f++) {
    k_sums.fragments[f] *= scale;
  }
  const size_t own_at = (size_t(batch) * k_shape[1] + kv_head) * keys + own_key;
  k_part.store(k_sums, dk + own_at * D, own_rows);
  v_part.store(v_sums, dv + own_at * DV, own_rows);
}
