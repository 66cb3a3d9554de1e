// What a rank's call launches, and where ranks of one process on one device meet to be launched together.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/launch/backward.hpp"
#include "cuda/launch/forward.hpp"
#include "cuda/launch/roll.hpp"
#include "cuda/launch/runtime.hpp"

namespace weft {

// Made while the rank stages its inputs, before it meets the others.
struct RankCall {
  int32_t num_sms;  // most SMs that the rank may use
  PlanLaunch plan;
  ForwardParams forward;    // of a forward
  BackwardParams backward;  // of a backward
  Event staged;             // several ranks: the inputs lie in symmetric memory
};

// The first of the ranks launches for all of them, as its own call says (phases, probes), before any of them goes on.
struct Gathering {
  Roll<RankCall> roll;
  Stream stream;  // of the launches
  Event done;     // the last of them

  // That of the ranks whose first one has this control block; it lives as long as one of them holds it.
  static std::shared_ptr<Gathering> of(const ControlBlock* first);
};

}  // namespace weft
