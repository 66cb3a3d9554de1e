// What a rank's call launches, and where ranks of one process on one device leave it for the one that launches for all.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "cuda/launch/backward.hpp"
#include "cuda/launch/forward.hpp"
#include "cuda/launch/runtime.hpp"

namespace weft {

// Made while the rank stages its inputs, before it meets the others.
struct RankCall {
  int32_t num_sms;  // most SMs that the rank may use
  PlanLaunch plan;
  ForwardParams forward;    // of a forward
  BackwardParams backward;  // of a backward
};

// Written by each rank's thread before the entry barrier, read behind it by that of the first rank, which answers for
// the launch before any rank goes on.
struct Gathering {
  struct Member {
    const RankCall* call;
    Event staged;  // the rank's inputs lie in symmetric memory
  };

  std::array<Member, kMaxCudaRanks> members;  // by rank of the group
  Stream stream;                              // of the launches
  Event done;                                 // the last of them

  // That of the ranks whose first one has this control block; it lives as long as one of them holds it.
  static std::shared_ptr<Gathering> of(const ControlBlock* first);
};

}  // namespace weft
