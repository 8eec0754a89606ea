// <metal_quadgroup>: what four neighbouring lanes do together. The rules that they follow are in lanes.h.
#pragma once

#include "lanes.h"

namespace metal {

struct quad_vote {
  typedef unsigned vote_t;

  explicit constexpr quad_vote(vote_t votes = 0) : votes(votes & 15) {}
  explicit constexpr operator vote_t() const { return votes; }
  constexpr bool all() const { return votes == 15; }
  constexpr bool any() const { return votes != 0; }

 private:
  vote_t votes;
};

EMU_GROUP_FUNCTIONS(quad, emu_quadgroup)

} // namespace metal
