// Phases: the kinds of tasks that a launch runs. The overlapped kernel runs them all at once; the phased path runs the
// same kernel once a phase, whose tasks then find the flags of the phases before them raised. A phase is a set of
// tickets, so that the roles select tasks where they claim them and the task bodies know nothing of it.
#pragma once

#include <array>
#include <cstdint>

#include "schedule/task_order.hpp"

namespace weft {

using PhaseMask = uint32_t;  // weft_phase of include/weft/debug.h
inline constexpr PhaseMask kPullPhase = 1;
inline constexpr PhaseMask kCombinePhase = 2;  // combines, sums of own tokens, and the wait for the peers' pulls
WEFT_HD constexpr PhaseMask matrix_phase(TaskKind kind) { return PhaseMask{4} << static_cast<int32_t>(kind); }
inline constexpr PhaseMask kAllPhases = (PhaseMask{4} << kNumTaskKinds) - 1;

// The phases of a direction, in an order in which each finds what it waits for; 0 where there is no further one.
inline constexpr int32_t kMaxPhases = 7;
constexpr std::array<PhaseMask, kMaxPhases> phases_of(Direction direction) {
  if (direction == Direction::kForward) {
    return {kPullPhase, matrix_phase(TaskKind::kGateUp), matrix_phase(TaskKind::kDown), kCombinePhase, 0, 0, 0};
  }
  return {kPullPhase,
          matrix_phase(TaskKind::kGateUp),
          matrix_phase(TaskKind::kDownDgrad),
          matrix_phase(TaskKind::kDownWgrad),
          matrix_phase(TaskKind::kGateUpDgrad),
          matrix_phase(TaskKind::kGateUpWgrad),
          kCombinePhase};
}

constexpr PhaseMask all_phases_of(Direction direction) {
  PhaseMask all = 0;
  for (const PhaseMask phase : phases_of(direction)) all |= phase;
  return all;
}

// What one launch of a call runs: of the passes that there are, those in [first_pass, end_pass).
struct LaunchRange {
  int32_t first_pass;
  int32_t end_pass;
  PhaseMask phases;
};
// each(range) for the launches of a call without its `skipped` phases. How many passes there are the host does not
// know; at most `max_passes`.
template <class Each>
void for_each_launch(Direction direction, bool one_by_one, PhaseMask skipped, int32_t max_passes, Each each) {
  if (!one_by_one) {
    if ((all_phases_of(direction) & ~skipped) != 0) each(LaunchRange{0, max_passes, kAllPhases & ~skipped});
    return;
  }
  for (int32_t pass = 0; pass < max_passes; ++pass) {
    for (const PhaseMask phase : phases_of(direction)) {
      if ((phase & ~skipped) != 0) each(LaunchRange{pass, pass + 1, phase});
    }
  }
}

struct TicketRange {
  int32_t begin;
  int32_t end;
};
// The communication tickets of the phases in `mask`: those of pulls come before those of combine.
WEFT_HD inline TicketRange comm_tickets(const CommOrder& order, PhaseMask mask) {
  const int32_t end_pulls = order.num_pull_tasks() + 1;  // with the note that they are done
  return {(mask & kPullPhase) != 0 ? 0 : end_pulls, (mask & kCombinePhase) != 0 ? order.num_tasks() : end_pulls};
}

}  // namespace weft
