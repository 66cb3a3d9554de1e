// The toy layers that explorer and mutation tests share: the smallest calls in which each flag, fence and bank matters.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "protocol/toy_layer.hpp"

namespace weft::explore {

// How much searching and walking: the one knob for builds that run several times slower.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int32_t kEffort = 1;
#else
inline constexpr int32_t kEffort = 8;
#endif
// Searches without a bound on preemptions fit the fast builds only.
inline constexpr int32_t kUnbounded = kEffort > 1 ? -1 : 1;

inline constexpr ToyCall kForwardCall{Direction::kForward, kForwardWork};
inline constexpr ToyCall kBackwardCall{Direction::kBackward, {true, true, true, true}};
// Frozen experts: nobody but down_dgrad reads dy before dx rows take its place.
inline constexpr ToyCall kInputGradientCall{Direction::kBackward, {true, true, false, false}};
inline constexpr ToyCall kRouterGradientCall{Direction::kBackward, {true, false, false, false}};
// Nothing goes home, so nothing but pulls_done says that a peer has read this rank's rows.
inline constexpr ToyCall kWeightGradientCall{Direction::kBackward, {false, false, true, true}};

// Every token of every rank takes these experts.
inline cases::Routing alike(int32_t num_experts, std::vector<int64_t> num_tokens, const std::vector<int32_t>& experts,
                            int32_t capacity_blocks = 1) {
  return cases::make_routing(
      {num_experts, static_cast<int32_t>(experts.size()), std::move(num_tokens), capacity_blocks},
      [&](int32_t, int64_t, std::vector<int32_t>& chosen) { chosen = experts; });
}

inline ToyCase one_launch(const ToyCall& call, const cases::Routing& routing) {
  ToyCase toy;
  toy.routings = {routing};
  toy.calls = {call};
  return toy;
}

// Two ranks, a token each, which both experts' ranks work on.
inline ToyCase one_pass(const ToyCall& call) { return one_launch(call, alike(2, {1, 1}, {0, 1})); }

inline ToyCase two_launches(const ToyCall& first, const ToyCall& second) {
  ToyCase toy = one_pass(first);
  toy.routings.push_back(toy.routings.front());
  toy.calls.push_back(second);
  return toy;
}

// Rank 0 has a block in each of three passes, rank 1 none: it takes part to sum its token.
inline ToyCase three_passes(const ToyCall& call) { return one_launch(call, alike(6, {1, 1}, {0, 1, 2})); }

inline ToyCase with_workers(ToyCase toy, int32_t comm_workers, int32_t matrix_workers) {
  toy.comm_workers = comm_workers;
  toy.matrix_workers = matrix_workers;
  return toy;
}
inline ToyCase with_row_copies(ToyCase toy) {
  toy.copies_rows = true;
  return toy;
}

}  // namespace weft::explore
