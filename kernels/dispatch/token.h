// Where a thread stands among tokens [N, C], and what its token has once for each of k slots.

#ifndef FORGE_TOKEN_H
#define FORGE_TOKEN_H

#include <metal_simdgroup>
#include <metal_stdlib>

#include "../_common/reduce.h"
#include "../_common/vector.h"

namespace forge {

// Reads for the lanes of one simdgroup that share a token: what it has once, or once for each slot, one lane reads and
// hands on by shuffles. Whole simdgroups take part in all of it.
struct Lanes {
  bool is_token;
  int token;
  ushort lanes;
  ushort lane;
  ushort leader;

  METAL_FUNC Lanes(int tokens, int index, int lanes_per_token, uint lane_index) thread {
    token = index;
    is_token = index < tokens;
    lanes = lanes_per_token;
    lane = lane_index;
    leader = lane - lane % lanes;
  }

  // How many slots the lanes read at once, from `first` on.
  METAL_FUNC int rounds(int first, int slots) const thread {
    return metal::min(int(lanes), slots - first);
  }

  // Of [N, k], what the slot of this lane has; `none` if it has none.
  template <typename P>
  METAL_FUNC int own(P values, int first, int slots, int none) const thread {
    const int slot = first + (lane - leader);
    return is_token && slot < slots ? values[size_t(token) * slots + slot] : none;
  }

  // What lane number `slot` of the token has.
  template <typename V>
  METAL_FUNC V of_slot(V own, int slot) const thread {
    return metal::simd_shuffle(own, ushort(leader + slot));
  }

  // The gate of one expert, of [N, E]; 0 for an expert that is not there.
  template <typename P>
  METAL_FUNC float gate(P gates, int expert, int experts) const thread {
    const bool is_there = is_token && expert >= 0 && expert < experts;
    return is_there ? static_cast<float>(gates[size_t(token) * experts + expert]) : 0.0f;
  }
};

// One vector of M elements of a token. The grid's y counts parts of the token that its lanes have at once.
template <int M>
struct TokenPart {
  Lanes lanes;
  int column;
  int limit;

  METAL_FUNC TokenPart(int tokens, int columns, int lanes_per_token, metal::uint3 position, uint lane_index) thread
      : lanes(tokens, position.x / lanes_per_token, lanes_per_token, lane_index) {
    column = (position.y * lanes_per_token + position.x % lanes_per_token) * M;
    limit = lanes.is_token ? metal::clamp(columns - column, 0, M) : 0;
  }
};

// A token that some lanes (NARROW) or a threadgroup share, for sums over it: `width` members, each with a vector of M
// elements at once.
template <int M, bool NARROW>
struct WholeToken {
  Lanes lanes;
  int columns;
  int member;
  int width;
  ushort simdgroup;
  uint threads;

  // `lanes_per_token` counts if NARROW.
  METAL_FUNC WholeToken(
      int tokens,
      int columns_of_token,
      int lanes_per_token,
      uint position,
      uint threads_in_all,
      uint lane_index,
      uint simdgroup_index) thread
      : lanes(
            tokens,
            NARROW ? position / lanes_per_token : position / threads_in_all,
            NARROW ? lanes_per_token : 32,
            lane_index) {
    columns = columns_of_token;
    width = NARROW ? lanes_per_token : threads_in_all;
    member = position % width;
    simdgroup = simdgroup_index;
    threads = threads_in_all;
  }

  // How many elements there are of the vector at a column.
  METAL_FUNC int limit(int column) const thread {
    return lanes.is_token ? metal::clamp(columns - column, 0, M) : 0;
  }

  // Whether the member is the one that writes the gradient of an expert's gate.
  METAL_FUNC bool owns(int expert) const thread {
    return lanes.is_token && expert % width == member;
  }

  // A value summed over the token. `scratch` as over_threadgroup takes it; not used if NARROW.
  METAL_FUNC float sum(float value, threadgroup float* scratch) const thread {
    if constexpr (NARROW) {
      return over_lanes<Sum>(value, lanes.lanes);
    } else {
      float values[1] = {value};
      over_threadgroup<Sum>(values, scratch, lanes.lane, simdgroup, threads);
      return values[0];
    }
  }
};

}  // namespace forge

#endif
