// Which keys a query sees: causal order aligned at the last query and key, a window that ends at the query's own key,
// and segments. One formula for all kernels, of single pairs and of ranges of them.

#ifndef FORGE_ATTENTION_SIGHT_H
#define FORGE_ATTENTION_SIGHT_H

#include <metal_simdgroup>
#include <metal_stdlib>

namespace forge {

// A range of keys or of queries: first <= i < end.
struct Range {
  int first;
  int end;
};

// What hides keys by their place alone.
template <bool CAUSAL, bool WINDOW>
struct Sight {
  int queries;
  int keys;
  int window;

  // The last key that a query sees in causal order.
  METAL_FUNC int own_key(int query) const thread {
    return query + keys - queries;
  }

  METAL_FUNC bool sees(int query, int key) const thread {
    return (!CAUSAL | (key <= own_key(query))) & (!WINDOW | (key > own_key(query) - window));
  }

  // The keys that any query of a range sees.
  METAL_FUNC Range keys_seen(Range of) const thread {
    Range seen = {0, keys};
    if constexpr (CAUSAL) {
      seen.end = metal::min(keys, own_key(of.end - 1) + 1);
    }
    if constexpr (WINDOW) {
      seen.first = metal::max(0, own_key(of.first) - window + 1);
    }
    return seen;
  }

  // The queries that see any key of a range.
  METAL_FUNC Range queries_seeing(Range of) const thread {
    Range seeing = {0, queries};
    if constexpr (CAUSAL) {
      seeing.first = metal::max(0, of.first - keys + queries);
    }
    if constexpr (WINDOW) {
      seeing.end = metal::min(queries, of.end - 1 + window - keys + queries);
    }
    return seeing;
  }

  // Whether every query of one range sees every key of the other.
  METAL_FUNC bool sees_all(Range of, Range other) const thread {
    return (!CAUSAL || other.end - 1 <= own_key(of.first)) && (!WINDOW || other.first > own_key(of.end - 1) - window);
  }
};

// Bits first to end - 1 of 32, those outside of 0 to 31 left out.
METAL_FUNC uint bits_of(int first, int end) {
  const int low = metal::max(first, 0);
  const int high = metal::min(end, 32);
  return low < high ? (0xFFFFFFFFu >> (32 - (high - low))) << low : 0u;
}

// A bit for each lane of the simdgroup where `is_set`, the same in all lanes.
METAL_FUNC uint bits_where(bool is_set, ushort lane) {
  return metal::simd_or(is_set ? 1u << lane : 0u);
}

// The least and the largest id of some positions that are not padding; least > largest where all are.
struct Segments {
  int least;
  int largest;

  METAL_FUNC bool holds(int id) const thread {
    return id >= least && id <= largest;
  }
};

// Of SIZE ids in threadgroup memory. The whole simdgroup takes part.
template <int SIZE>
METAL_FUNC Segments segments_of(const threadgroup int* ids, ushort lane) {
  Segments found = {INT_MAX, -1};
  for (int at = lane; at < SIZE; at += 32) {
    const int id = ids[at];
    found.least = metal::min(found.least, id < 0 ? INT_MAX : id);
    found.largest = metal::max(found.largest, id);
  }
  found.least = metal::simd_min(found.least);
  found.largest = metal::simd_max(found.largest);
  return found;
}

// A bit for each of the 32 blocks from `first` on that lies in `blocks` and may hold an id of `own`: ranges[2 * b] and
// ranges[2 * b + 1] are the least and the largest id of block b. The whole simdgroup takes part.
template <typename P>
METAL_FUNC uint blocks_holding(P ranges, int first, Range blocks, Segments own, ushort lane) {
  const int block = first + lane;
  bool may_hold = false;
  if (block >= blocks.first && block < blocks.end) {
    may_hold = ranges[2 * block] <= own.largest && ranges[2 * block + 1] >= own.least;
  }
  return bits_where(may_hold, lane);
}

}  // namespace forge

#endif
