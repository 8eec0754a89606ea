// <metal_simdgroup>: what the 32 lanes of a simdgroup do together. The rules that they follow are in lanes.h.
#pragma once

#include "lanes.h"

namespace metal {

struct simd_vote {
  typedef ulong vote_t;

  explicit constexpr simd_vote(vote_t votes = 0) : votes(votes) {}
  explicit constexpr operator vote_t() const { return votes; }
  // Of 32 lanes: one that did not take part makes it false, unlike simd_all.
  constexpr bool all() const { return (votes & 0xffffffffu) == 0xffffffffu; }
  constexpr bool any() const { return (votes & 0xffffffffu) != 0; }

 private:
  vote_t votes;
};

EMU_GROUP_FUNCTIONS(simd, emu_simdgroup)

} // namespace metal
